"""`save` while something else is at work on the same files: whoever was there first wins."""

import os
import shutil

import pytest
import torch

from ckptool.errors import CheckpointWarning, UnreadableFile, WriteError
from ckptool.formats import open_checkpoint
from ckptool.writing import save

NEWER = b"what the trainer wrote meanwhile"


@pytest.fixture
def path(tmp_path):
    torch.save({"w": torch.arange(50_000.0)}, tmp_path / "model.pth")
    return tmp_path / "model.pth"


def meanwhile(act):
    """A progress that acts once, before the file is renamed."""
    left = [act]

    def progress(done, total):
        if left:
            left.pop()()

    return progress


def replace(path):
    (path.parent / "newer").write_bytes(NEWER)
    os.replace(path.parent / "newer", path)


def write_again(path):
    status = path.stat()
    with open(path, "r+b") as file:
        file.write(b"PK")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def append(path):
    with open(path, "ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("overwrite", [False, True])
def test_in_place_a_newer_file_of_the_same_name_stays(path, overwrite):
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(WriteError, match="the file was replaced during the edit; nothing"),
    ):
        save(
            checkpoint,
            path,
            in_place=True,
            rewrite=True,
            overwrite=overwrite,
            progress=meanwhile(lambda: replace(path)),
        )
    assert path.read_bytes() == NEWER
    assert os.listdir(path.parent) == [path.name]


def test_in_place_a_file_that_came_before_the_write_stays_too(path):
    with open_checkpoint(path) as checkpoint:
        replace(path)
        with pytest.raises(WriteError, match="the file was replaced"):
            save(checkpoint, path, in_place=True, overwrite=True)
    assert path.read_bytes() == NEWER


def test_in_place_a_file_that_is_removed_does_not_come_back(path):
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(
            WriteError, match="the file was removed during the edit; nothing was written"
        ),
    ):
        save(checkpoint, path, in_place=True, rewrite=True, progress=meanwhile(path.unlink))
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("change", [write_again, append])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_source_that_is_written_to_gives_no_file(path, change, in_place):
    target = path if in_place else path.parent / "out.pth"
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(UnreadableFile, match=r"model\.pth: changed while it was read"),
    ):
        save(
            checkpoint,
            target,
            in_place=in_place,
            rewrite=True,
            progress=meanwhile(lambda: change(path)),
        )
    assert os.listdir(path.parent) == [path.name]


def test_a_source_that_is_replaced_may_still_be_written_elsewhere(path):
    shutil.copy(path, path.parent / "copy.pth")
    with (
        open_checkpoint(path) as checkpoint,
        pytest.warns(CheckpointWarning, match=r"model\.pth: was replaced or removed"),
    ):
        save(checkpoint, path.parent / "out.pth", progress=meanwhile(lambda: replace(path)))
    found, wanted = (torch.load(path.parent / name) for name in ("out.pth", "copy.pth"))
    assert found["w"].equal(wanted["w"])
