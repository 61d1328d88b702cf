"""Folders of parts: what a kill leaves of them, and what is missing."""

import contextlib
import itertools
import os
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import ckptool
from ckptool.trainer import sharded
from ckptool.trainer.checkpoints import one_run_in, remove_checkpoint
from ckptool.trainer.sharded import begin, is_sharded, settle, take_place


def folder(path, *, whole=True, text="", exists=False):
    path.mkdir(exist_ok=exists)
    (path / "__0_0.distcp").write_text(text)
    if whole:
        (path / "run.pth").write_text(text)
    return path


def left(path):
    return {entry.name for entry in path.iterdir()}


def test_a_folder_that_was_being_written_is_removed(tmp_path):
    folder(tmp_path / "last", text="old")
    folder(tmp_path / ".last.new", whole=False)
    settle(str(tmp_path))
    assert left(tmp_path) == {"last"}
    assert (tmp_path / "last" / "run.pth").read_text() == "old"


@pytest.mark.parametrize(("whole", "text"), [(True, "new"), (False, "old")])
def test_a_folder_that_had_not_its_name_yet_gets_it(tmp_path, whole, text):
    folder(tmp_path / ".last.old", text="old")
    folder(tmp_path / ".last.new", whole=whole, text="new")
    settle(str(tmp_path))
    assert left(tmp_path) == {"last"}
    assert (tmp_path / "last" / "run.pth").read_text() == text


def test_a_run_finishes_what_a_kill_has_left_before_all_else(tmp_path):
    folder(tmp_path / ".last.old", text="old")
    with one_run_in(str(tmp_path)):
        assert (tmp_path / "last" / "run.pth").read_text() == "old"


def test_an_old_folder_whose_name_is_taken_is_removed(tmp_path):
    folder(tmp_path / ".step-00000012.old", text="old")
    folder(tmp_path / "step-00000012", text="new")
    settle(str(tmp_path))
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
            begin(str(path), 1)
            folder(tmp_path / ".last.new", text="new", exists=True)
            take_place(str(path))
            remove_checkpoint(str(path))
    settle(str(tmp_path))
    texts = [one.read_text() for one in path.iterdir()] if path.exists() else []
    assert texts == [["old"] * 2, ["new"] * 2, ["new"] * 2, ["new"] * 2, []][count]
    assert left(tmp_path) == ({"last"} if texts else set())


def test_a_folder_that_the_disk_cannot_hold_is_not_begun(tmp_path):
    with pytest.raises(ckptool.NoSpace):
        begin(str(tmp_path / "last"), 1 << 60)
    assert left(tmp_path) == set()


def test_what_was_being_removed_goes(tmp_path):
    folder(tmp_path / ".step-00000012.gone", text="old")
    folder(tmp_path / "last", text="old")
    remove_checkpoint(str(tmp_path / "last"))
    settle(str(tmp_path))
    assert left(tmp_path) == set()


def test_what_is_not_ours_stays(tmp_path):
    folder(tmp_path / ".mine.old")
    settle(str(tmp_path))
    settle(str(tmp_path / "nowhere"))
    assert left(tmp_path) == {".mine.old"}


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "last"
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save({"state_dict": {"weight": torch.ones(1000)}}, checkpoint_id=path)
    ckptool.save(path / "run.pth", step=3)
    return path


def test_a_whole_folder_has_no_damage(whole):
    assert is_sharded(whole)
    assert sharded.damage(str(whole)) is None


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("run.pth", "its run.pth, which is written last, is missing"),
        (".metadata", "its .metadata cannot be read"),
        ("__0_0.distcp", "its __0_0.distcp is missing"),
    ],
)
def test_a_file_that_is_missing_is_named(whole, name, told):
    (whole / name).unlink()
    assert told in sharded.damage(str(whole))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("run.pth", "run.pth"),
        (".metadata", "its .metadata cannot be read"),
        ("__0_0.distcp", "its __0_0.distcp ends after 2,000 of"),
    ],
)
def test_a_file_that_was_cut_is_named(whole, name, told):
    data = (whole / name).read_bytes()
    (whole / name).write_bytes(data[:2000] if len(data) > 2000 else data[:100])
    assert told in sharded.damage(str(whole))


class Stranger:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_an_index_that_names_anything_else_is_not_run(whole, tmp_path):
    (whole / ".metadata").write_bytes(pickle.dumps(Stranger(tmp_path / "made")))
    assert f"it names {os.mkdir.__module__}.mkdir" in sharded.damage(str(whole))
    assert not (tmp_path / "made").exists()


def test_another_folder_is_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert not is_sharded(tmp_path)
    assert not is_sharded({"weight": torch.ones(1)})
