"""The pictures in docs/ show what their commands print."""

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


def test_no_other_picture_is_kept():
    kept = {path.stem for path in (PROJECT / "docs" / "pictures").iterdir()}
    assert kept == set(pictures.COMMANDS)
