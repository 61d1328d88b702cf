"""Wherever the process ends, the target of a write is the old file or the new one, or not there."""

import errno
import os
import shutil
import stat
from functools import partial

import pytest

from ckptool.files.atomic import open_atomic_output
from ckptool.files.source import ByteRange, FileSource
from tests.files.faults import KILL, POWER, crashes, needs_fork, raising

pytestmark = needs_fork

OLD, NEW, LAST = b"the old content", b"something else" * 6000, b"the next write"
MODE = 0o640
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def folder(memory_path, monkeypatch):
    """Where what is lost is played, too, so that no disk need be waited for."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    (memory_path / "source").write_bytes(NEW)
    return memory_path / "target"


def write(path, content=NEW, **options):
    with open_atomic_output(path, len(content), overwrite=True, mode=MODE, **options) as output:
        output.write(content[:100])
        output.write(content[100:])


def copy(path, source):
    """Write by the kernel's copies."""
    opened = FileSource(source)
    with open_atomic_output(path, opened.size, overwrite=True, mode=MODE) as output:
        output.copy(ByteRange(opened, 0, opened.size))
    opened.close()


def preparing(folder, old):
    """A folder with the old file; without one, there is no folder."""

    def prepare():
        shutil.rmtree(folder, ignore_errors=True)
        if old is not None:
            folder.mkdir()
            (folder / "model.pth").write_bytes(old)
            (folder / "model.pth").chmod(MODE)

    return prepare


def found_at(path):
    """What is in a file; None where there is none."""
    if not path.exists():
        return None
    assert stat.S_IMODE(path.stat().st_mode) == MODE
    return path.read_bytes()


@pytest.mark.parametrize("old", [OLD, None], ids=["old", "none"])
@pytest.mark.parametrize("losses", [[KILL], POWER], ids=["kill", "power"])
@pytest.mark.parametrize("way", ["write", "copy"])
def test_the_end_at_any_call(folder, old, losses, way):
    path, ends = folder / "model.pth", set()
    action = (
        partial(write, path) if way == "write" else partial(copy, path, folder.parent / "source")
    )
    for crash in crashes(action, preparing(folder, old), losses):
        found = found_at(path)
        assert found in (old, NEW), crash
        assert found == NEW or not crash.completed, crash
        ends.add(found)
        write(path, LAST)
        assert found_at(path) == LAST, crash
        assert os.listdir(folder) == [path.name], crash
    assert ends == {old, NEW}


@pytest.mark.parametrize("old", [OLD, None], ids=["old", "none"])
@pytest.mark.parametrize("after", [False, True], ids=["instead", "after"])
@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full", "interrupted"])
def test_an_error_at_any_call(folder, old, error, after):
    """The file is the old one, or the new one; nothing lies beside it, and no folder is left."""
    path = folder / "model.pth"
    for raised in raising(partial(write, path), preparing(folder, old), error, after=after):
        found = found_at(path)
        assert found == NEW or (found == old and raised.error), raised
        there = os.listdir(folder) if folder.exists() else []
        assert there == ([] if found is None else [path.name]), raised
        assert found is not None or not folder.exists(), raised
