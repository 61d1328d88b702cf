"""The pictures in docs/ show what their commands print."""

import struct

import pytest

from tests.pages import pictures
from tests.pages.prepared import prepare
from tests.sources import PROJECT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pictures")
    prepare(made)
    return made


@pytest.mark.parametrize("name", pictures.COMMANDS)
def test_a_picture_is_current(name, folder):
    lies = (PROJECT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    assert lies == pictures.picture(name, folder), "make docs draws it anew"


def test_the_page_is_drawn_as_wide_as_its_window(folder, tmp_path):
    made = pictures.looks(folder, tmp_path)
    if not made:
        pytest.skip("chromium is not installed")
    assert [_size(path) for path in made] == list(pictures.WINDOWS.values())
    assert all(len(set(path.read_bytes())) > 200 for path in made), "there is something on it"


@pytest.mark.parametrize("name", pictures.WINDOWS)
def test_a_picture_of_the_page_is_kept_and_small(name):
    path = PROJECT / "docs" / "pictures" / f"{name}.png"
    assert _size(path) == pictures.WINDOWS[name]
    assert path.stat().st_size < 150_000


def _size(path):
    """Width and height of a PNG, which stand at the front of its header."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:])


def test_no_other_picture_is_kept():
    kept = {path.stem for path in (PROJECT / "docs" / "pictures").iterdir()}
    assert kept == {*pictures.COMMANDS, *pictures.WINDOWS}
