"""Wherever the process ends, a set is the old or the new one once ckptool has opened its index."""

import errno
import os
import shutil
from functools import partial

import pytest

from ckptool.errors import FileMissing
from ckptool.files.local import open_source
from tests.files.faults import KILL, POWER, crashes, needs_fork, raising
from tests.files.sets import INDEX, content, lay, write

# Who finishes a write says so.
pytestmark = [needs_fork, pytest.mark.filterwarnings("ignore::ckptool.CheckpointWarning")]

OLD = {"model-1.bin": b"old one" * 200, "model-2.bin": b"old two", INDEX: b"old index"}
SAME = {"model-1.bin": b"new 1", "model-2.bin": b"new two" * 300, INDEX: b"new index"}
FEWER = {"model-1.bin": b"the only one", INDEX: b"fewer"}
MORE = {"model-1.bin": b"new 1", "model-3.bin": b"a new name", INDEX: b"more"}
LAST = {"model-1.bin": b"the next write", INDEX: b"at last"}


@pytest.fixture
def folder(memory_path, monkeypatch):
    """Where what is lost is played, too, so that no disk need be waited for."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return memory_path / "set"


def opened(folder):
    """The files of the folder once the index has been opened, none left of a set that is whole."""
    try:
        open_source(folder / INDEX).close()
    except FileMissing:
        assert not (folder / INDEX).exists()
    return {name: data for name, data in content(folder).items() if not name.startswith(".")}


def preparing(folder, before):
    def prepare():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        lay(folder, before)

    return prepare


def check_crashes(folder, before, new, losses):
    ends = set()
    write_set = partial(write, folder, new, overwrite=True)
    for crash in crashes(write_set, preparing(folder, before), losses):
        found = opened(folder)
        assert found in (before, before | new), crash
        assert found == before | new or not crash.completed, crash
        ends.add(found == before)
        write(folder, LAST, overwrite=True)
        assert content(folder) == found | LAST, crash
    assert ends == {True, False}


@pytest.mark.parametrize("new", [SAME, FEWER, MORE], ids=["same", "fewer", "more"])
def test_a_kill_while_a_set_takes_the_place_of_another(folder, new):
    check_crashes(folder, OLD, new, [KILL])


def test_a_kill_while_a_first_set_is_written(folder):
    check_crashes(folder, {}, SAME, [KILL])


@pytest.mark.parametrize(("before", "losses"), [(OLD, POWER), ({}, POWER[1:3])])
def test_a_loss_of_power(folder, before, losses):
    check_crashes(folder, before, MORE, losses)


FULL = OSError(errno.ENOSPC, "No space left on device")
LOCK, JOURNAL = f".{INDEX}.ckptool-lock", f".{INDEX}.ckptool-journal"
UNAVOIDABLE = {"open": {LOCK}, "flock": {LOCK}, "unlink": {LOCK, JOURNAL}}
"""What stays where this very call fails: an empty file, or one that the system does not remove."""


@pytest.mark.parametrize("before", [OLD, {}], ids=["old", "none"])
@pytest.mark.parametrize("after", [False, True], ids=["instead", "after"])
@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full", "interrupted"])
def test_an_error_at_any_call(folder, before, error, after):
    """The files are the old ones, or all of the new ones; nothing lies beside them."""
    for raised in raising(
        partial(write, folder, MORE, overwrite=True), preparing(folder, before), error, after=after
    ):
        found = content(folder)
        left = {name for name in found if name.startswith(".")}
        assert left <= UNAVOIDABLE.get(raised.call, set()), raised
        kept = {name: data for name, data in found.items() if name not in left}
        assert kept == before | MORE or (kept == before and raised.error), raised
        assert opened(folder) == kept, raised
        write(folder, LAST, overwrite=True)
        assert content(folder) == kept | LAST, raised
