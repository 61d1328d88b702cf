"""The cookbook's errors are torch's, its commands print what stands there and write what loads."""

import doctest
import re
import sys

import pytest
import torch

import ckptool
from tests.pages import cookbook
from tests.pages.prepared import loads, prepare
from tests.sources import PROJECT

ENTRIES = cookbook.entries(cookbook.SOURCE.read_text(encoding="utf-8"))
LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture
def folder(tmp_path, monkeypatch):
    prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def those_with(language):
    return [pytest.param(one, id=one.title) for one in ENTRIES if one.fences(language)]


@pytest.mark.parametrize("entry", those_with("console"))
def test_the_commands_print_what_stands_there(entry, folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert cookbook.filled(entry, folder) == entry.text, "make docs writes it anew"
    for path in folder.rglob("*"):
        if path.is_file() and before.get(path) != path.stat().st_mtime_ns:
            assert path.suffix not in (".pth", ".pt", ".safetensors") or loads(path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", those_with("pycon"))
def test_python_says_what_stands_there(entry, folder, monkeypatch):
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    from net import Net

    names = {"torch": torch, "ckptool": ckptool, "Net": Net, "model": Net()}
    lines = "\n".join(entry.fences("pycon"))
    example = doctest.DocTestParser().get_doctest(lines, names, entry.title, "cookbook.md", 0)
    assert example.examples
    said = []
    failed = doctest.DocTestRunner(optionflags=LOOSE).run(example, out=said.append).failed
    assert not failed, "".join(said)
    monkeypatch.delitem(sys.modules, "net", raising=False)


def test_every_entry_has_something_that_runs():
    for entry in ENTRIES:
        if entry.text.startswith("### "):
            assert entry.fences("console") or entry.fences("pycon"), entry.title


def test_a_command_that_prints_something_else_is_seen(tmp_path):
    prepare(tmp_path)
    entry = next(one for one in ENTRIES if "$ ckptool info empty.pth" in one.text)
    changed = cookbook.Entry(entry.title, entry.text.replace("0 bytes", "some bytes"))
    assert cookbook.filled(changed, tmp_path) == entry.text != changed.text


def test_the_pains_of_the_readme_are_in_the_cookbook():
    """Whoever searches either page for what torch said finds the command."""
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    text = cookbook.SOURCE.read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `+\s?(\w.*?)\s?`", readme, re.MULTILINE)
    assert quoted
    for quote in quoted:
        words = re.split(r"\W+", quote)
        assert " ".join(words[:3]) in " ".join(re.split(r"\W+", text)), quote
