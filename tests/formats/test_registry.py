"""The registry: every entry is what it says, and only what may fit is imported."""

import os
import re
import shutil
import subprocess
import sys

import pytest

import ckptool
from ckptool.formats import (
    REGISTRY,
    WRITABLE,
    WritableFormat,
    load_format,
    load_writable_format,
    open_checkpoint,
    opening,
    shard_format_of,
)
from tests.sources import PROJECT


def test_an_entry_names_its_format_and_whether_it_can_be_written():
    for entry in REGISTRY:
        known = entry.load()
        assert known.name == entry.name
        assert isinstance(known, WritableFormat) is (entry.writable and not entry.shard)
        assert bool(known.shard_ending) is bool(entry.shard)


def test_the_writable_ones_are_found_by_name():
    single = [shard_format_of(name) or name for name in WRITABLE]
    assert [load_writable_format(name).name for name in single] == single
    with pytest.raises(
        ckptool.UsageError,
        match="'pt2' cannot be written; use --format with torch-zip, safetensors,",
    ):
        load_writable_format("pt2")


def test_a_tree_in_memory_has_a_format_that_is_of_no_file():
    assert load_format("memory").name == "memory"
    assert not load_format("memory").by_torch
    assert shard_format_of("memory") == ""


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


@pytest.fixture
def changing(fixtures, tmp_path, monkeypatch):
    """A file that is written to while it is read, so many times; the reads that there were."""
    path = shutil.copy(fixtures / "torch-2.13.0" / "dp.pth", tmp_path / "model.pth")

    def change(times, *, error=None):
        reads = []
        read = opening._read_recognized

        def changed(probe):
            reads.append(probe)
            found = read(probe)
            if len(reads) <= times:
                os.utime(path, ns=(0, len(reads)))
                if error:
                    raise error
            return found

        monkeypatch.setattr(opening, "_read_recognized", changed)
        return path, reads

    return change


@pytest.mark.parametrize("error", [None, ckptool.CorruptFile("half old, half new")])
def test_a_file_that_changes_while_it_is_read_is_read_again(changing, error):
    path, reads = changing(2, error=error)
    open_checkpoint(path).close()
    assert len(reads) == 3
    assert all(probe.source._fd < 0 for probe in reads)


@pytest.mark.parametrize("error", [None, ckptool.CorruptFile("half old, half new")])
def test_a_file_that_never_stays_as_it_is(changing, error):
    path, _ = changing(9, error=error)
    with pytest.raises(ckptool.UnreadableFile, match=r"model\.pth: changed each time it was read"):
        open_checkpoint(path)


def test_every_format_but_megatron_keeps_the_contract():
    """Megatron's folders are a dict of ranks, which no command reads as one model."""
    texts = [path.read_text() for path in (PROJECT / "tests/formats").rglob("test_*.py")]
    pattern = re.compile(r'^class \w+\(FormatContract\):\n    name = "(.+)"', re.MULTILINE)
    names = [name for text in texts for name in pattern.findall(text)]
    assert sorted(names) == sorted({entry.name for entry in REGISTRY} - {"megatron"} | {"tiles"})
