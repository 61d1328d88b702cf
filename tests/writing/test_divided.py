"""Shards that several processes write: what one of them sees of the others, and of a run before."""

import os
import shutil
from contextlib import contextmanager

import pytest
import torch

import ckptool
from ckptool.errors import TargetExists, UnreadableFile
from ckptool.files import atomic, renames
from ckptool.files.renames import PendingRename
from ckptool.formats import open_checkpoint
from ckptool.writing import divided, save

pytestmark = pytest.mark.filterwarnings("ignore::ckptool.errors.CheckpointWarning")


class Alone:
    """The first of some processes, of which the others do nothing."""

    rank = 0
    has_failed = False

    def __init__(self, seen_elsewhere=None):
        self.seen_elsewhere = seen_elsewhere

    @contextmanager
    def raise_on_all_ranks(self):
        yield

    def run_on_first(self, work):
        return work()

    def collect(self, own):
        return [own] if self.seen_elsewhere is None else [own, self.seen_elsewhere]


@pytest.fixture
def model(tmp_path):
    torch.save({f"l.{i}": torch.full((50, 40), float(i)) for i in range(8)}, tmp_path / "m.pth")
    return tmp_path / "m.pth"


def write(model, index, group):
    with open_checkpoint(str(model)) as checkpoint:
        return save(checkpoint, str(index), max_shard_size="10KB", group=group)


def interrupted(monkeypatch, after):
    """Raise when so many files are whole."""
    done, replace = [], os.replace

    def counted(source, target):
        replace(source, target)
        done.append(target)
        if len(done) == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(divided.os, "replace", counted)


def test_room_is_asked_for_what_is_not_whole_yet(model, tmp_path, monkeypatch):
    index = tmp_path / "out" / "m.safetensors.index.json"
    with monkeypatch.context() as patched:
        interrupted(patched, after=6)
        with pytest.raises(KeyboardInterrupt):
            write(model, index, Alone())
    asked = []
    monkeypatch.setattr(atomic, "check_space", lambda folder, size: asked.append(size))
    receipt = write(model, index, Alone())
    sizes = [size for _, size in receipt.files]
    assert asked == [sum(sizes[6:])]
    assert all(os.path.getsize(path) == size for path, size in receipt.files)


def test_the_same_write_finishes_renames_that_a_kill_cut_short(model, tmp_path, monkeypatch):
    index, carry_out, moved = (
        tmp_path / "out" / "m.safetensors.index.json",
        PendingRename.carry_out,
        [],
    )
    with monkeypatch.context() as patched:

        def killed(move, folder):
            if len(moved) == 3:
                raise KeyboardInterrupt
            moved.append(os.path.join(folder, move.name))
            carry_out(move, folder)

        patched.setattr(PendingRename, "carry_out", killed)
        patched.setattr(renames, "_settle_renames", lambda target, moves: None)
        with pytest.raises(KeyboardInterrupt):
            write(model, index, Alone())
    assert not index.exists()
    with pytest.raises(TargetExists, match="already exists"), open_checkpoint(model) as checkpoint:
        save(checkpoint, str(index), max_shard_size="10KB", group=Alone(), options="others")
    assert not index.exists()
    inodes = [os.stat(path).st_ino for path in moved]
    receipt = write(model, index, Alone())
    assert [os.stat(path).st_ino for path in moved] == inodes
    assert {path.name for path in index.parent.iterdir()} == {
        os.path.basename(path) for path, _ in receipt.files
    }
    assert ckptool.diff(model, index).identical


def test_an_unfinished_file_is_not_the_one_of_another_run(model, tmp_path, monkeypatch):
    index, names, replace = tmp_path / "out" / "m.safetensors.index.json", [], os.replace

    def noted(source, target):
        names.extend([source] if target.endswith(".whole") else [])
        replace(source, target)

    monkeypatch.setattr(divided.os, "replace", noted)
    for _ in range(2):
        write(model, index, Alone())
        shutil.rmtree(index.parent)
    assert len(names) == len(set(names)) > 8


def test_processes_that_read_other_files_are_refused(model, tmp_path):
    index = tmp_path / "out" / "m.safetensors.index.json"
    with pytest.raises(
        UnreadableFile, match="differs between processes: it was written again, or machines have"
    ):
        write(model, index, Alone(seen_elsewhere=["1 1"]))
    assert not index.parent.exists()
