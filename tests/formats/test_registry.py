"""The registry: every entry is what it says, and only what may fit is imported."""

import subprocess
import sys

import pytest

import ckptool
from ckptool.formats import REGISTRY, WRITABLE, WritableFormat, writer


@pytest.mark.parametrize("entry", REGISTRY, ids=lambda entry: entry.name)
def test_an_entry_names_its_format_and_whether_it_can_be_written(entry):
    known = entry.load()
    assert known.name == entry.name
    assert isinstance(known, WritableFormat) is entry.writable


def test_the_writable_ones_are_found_by_name():
    assert [writer(name).name for name in WRITABLE] == list(WRITABLE)
    with pytest.raises(ckptool.UsageError, match="--format takes torch-zip, torch-legacy"):
        writer("pt2")


def test_a_torch_zip_imports_no_other_format(fixtures):
    code = (
        "import sys, ckptool; ckptool.open(sys.argv[1]).close();"
        "print(*[name for name in sys.modules if name.startswith('ckptool.formats.')])"
    )
    file = fixtures / "torch-2.13.0" / "dp.pth"
    run = subprocess.run([sys.executable, "-c", code, file], capture_output=True, check=True)
    loaded = {name.rpartition(".")[2] for name in run.stdout.decode().split()}
    others = {entry.module for entry in REGISTRY} - {"torch_zip"}
    assert not loaded & others
