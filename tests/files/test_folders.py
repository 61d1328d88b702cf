"""Folders that appear whole or not at all: what an error or a kill leaves of them."""

import contextlib
import itertools
import os
import re
import shutil

import pytest

from ckptool.errors import NoSpace, WriteError
from ckptool.files.folders import open_atomic_folder, recover_folders, remove_folder

LAST = "run.pth"


def settle(path):
    recover_folders(str(path), re.compile(r"last|step-\d{8,}"), LAST)


def folder(path, *, whole=True, text="", exists=False):
    path.mkdir(exist_ok=exists)
    (path / "__0_0.distcp").write_text(text)
    if whole:
        (path / LAST).write_text(text)
    return path


def left(path):
    return {entry.name for entry in path.iterdir()}


def test_a_folder_that_was_being_written_is_removed(tmp_path):
    folder(tmp_path / "last", text="old")
    folder(tmp_path / ".last.new", whole=False)
    settle(tmp_path)
    assert left(tmp_path) == {"last"}
    assert (tmp_path / "last" / LAST).read_text() == "old"


@pytest.mark.parametrize(("whole", "text"), [(True, "new"), (False, "old")])
def test_a_folder_that_had_not_its_name_yet_gets_it(tmp_path, whole, text):
    folder(tmp_path / ".last.old", text="old")
    folder(tmp_path / ".last.new", whole=whole, text="new")
    settle(tmp_path)
    assert left(tmp_path) == {"last"}
    assert (tmp_path / "last" / LAST).read_text() == text


def test_an_old_folder_whose_name_is_taken_is_removed(tmp_path):
    folder(tmp_path / ".step-00000012.old", text="old")
    folder(tmp_path / "step-00000012", text="new")
    settle(tmp_path)
    assert left(tmp_path) == {"step-00000012"}


class Killed(BaseException):
    """Nothing catches it: what is left is what a kill leaves."""


def killed_at(count, monkeypatch):
    """Let `count` renames and removals happen, and half of the next one if it is of a folder."""
    done = itertools.count()
    rename, rmtree = os.rename, shutil.rmtree

    def renamed(one, other):
        if next(done) >= count:
            raise Killed
        rename(one, other)

    def removed(path, *, ignore_errors=False):
        if os.path.isdir(path) and next(done) >= count:
            os.unlink(min(os.scandir(path), key=lambda entry: entry.name))
            raise Killed
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(shutil, "rmtree", removed)


@pytest.mark.parametrize("count", range(5))
def test_a_kill_leaves_the_old_folder_or_the_new_one(tmp_path, monkeypatch, count):
    path = folder(tmp_path / "last", text="old")
    with monkeypatch.context() as patched:
        killed_at(count, patched)
        with contextlib.suppress(Killed):
            with open_atomic_folder(str(path), 1, last_file=LAST) as new:
                assert new == str(tmp_path / ".last.new")
                folder(tmp_path / ".last.new", text="new", exists=True)
            remove_folder(str(path))
    settle(tmp_path)
    texts = [one.read_text() for one in path.iterdir()] if path.exists() else []
    assert texts == [["old"] * 2, ["new"] * 2, ["new"] * 2, ["new"] * 2, []][count]
    assert left(tmp_path) == ({"last"} if texts else set())


def test_a_folder_that_the_disk_cannot_hold_is_not_begun(tmp_path):
    with (
        pytest.raises(NoSpace),
        open_atomic_folder(str(tmp_path / "last"), 1 << 60, last_file=LAST),
    ):
        pytest.fail("it was begun")
    assert left(tmp_path) == set()


def test_what_was_being_removed_goes(tmp_path):
    folder(tmp_path / ".step-00000012.gone", text="old")
    folder(tmp_path / "last", text="old")
    remove_folder(str(tmp_path / "last"))
    settle(tmp_path)
    assert left(tmp_path) == set()


def test_what_is_not_ours_stays(tmp_path):
    folder(tmp_path / ".mine.old")
    settle(tmp_path)
    settle(tmp_path / "nowhere")
    assert left(tmp_path) == {".mine.old"}


@pytest.mark.parametrize(("own", "stays"), [(0, {"last"}), (1, {"last", ".last.new"})])
def test_an_error_leaves_the_old_folder_and_the_first_rank_removes_the_new_one(
    tmp_path, own, stays
):
    folder(tmp_path / "last", text="old")
    with (
        pytest.raises(WriteError, match="stop"),
        open_atomic_folder(str(tmp_path / "last"), 1, last_file=LAST, rank=own),
    ):
        raise WriteError("stop")
    assert left(tmp_path) == stays
    assert (tmp_path / "last" / LAST).read_text() == "old"


def test_what_one_process_does_is_asked_of_the_first(tmp_path):
    asked = []
    path = tmp_path / "last"
    with open_atomic_folder(str(path), 1, last_file=LAST, run_first=asked.append):
        assert (len(asked), left(tmp_path)) == (1, set())
    assert (len(asked), left(tmp_path)) == (2, set())
    asked[0]()
    assert left(tmp_path) == {".last.new"}
    asked[1]()
    assert left(tmp_path) == {"last"}
