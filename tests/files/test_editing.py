"""An edit in place is all there or not at all: ends of the process, losses of power, full disks."""

import errno
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from types import SimpleNamespace

import pytest

from ckptool.errors import (
    FileBusy,
    NoSpace,
    UnreadableFile,
    WriteDenied,
    WriteError,
)
from ckptool.files import FileSource, editing
from ckptool.files.editing import Patch, apply_patch
from ckptool.files.journal import Journal, open_locked, write_journal
from ckptool.files.local import open_source
from ckptool.files.temporary import journal_path
from tests.files.faults import KILL, POWER, crashes, needs_fork, raising

OLD = bytes(range(1, 251)) * 20
needs_posix = pytest.mark.skipif(os.name != "posix", reason="POSIX limits and signals")

PATCHES = [
    pytest.param(Patch(len(OLD), b"\0\1new tail" * 400), id="append"),
    pytest.param(Patch(len(OLD), b"\xff"), id="append-one"),
    pytest.param(Patch(0, b"new head\0\2" * 150), id="head"),
    pytest.param(Patch(0, OLD[::-1]), id="all"),
]


def edited(patch, old=OLD):
    return old[: patch.offset] + patch.data + old[patch.offset + len(patch.data) :]


@pytest.fixture
def path(memory_path):
    (memory_path / "files").mkdir()
    path = memory_path / "files" / "model.pth"
    path.write_bytes(OLD)
    return str(path)


def apply(path, patch):
    """What the library does: read first, then edit."""
    source = FileSource(path)
    apply_patch(source, patch)
    source.close()


def recovered(path):
    """The content of a file as the next one reads it, nothing being left beside it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = open_source(path)
    content = source.read(0, source.size)
    source.close()
    with open(path, "rb") as file:
        assert file.read() == content
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]
    return content


def rewritten(path):
    """A call that puts the old file back, alone in its folder."""

    def prepare():
        folder = os.path.dirname(path)
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        with open(path, "wb") as file:
            file.write(OLD)

    return prepare


@pytest.mark.parametrize("patch", PATCHES)
def test_an_edit(path, patch):
    inode = os.stat(path).st_ino
    apply(path, patch)
    assert recovered(path) == edited(patch)
    assert os.stat(path).st_ino == inode


def test_an_empty_file_and_nothing_to_do(path):
    apply(path, Patch(len(OLD), b""))
    assert recovered(path) == OLD
    open(path, "wb").close()
    apply(path, Patch(0, b"first"))
    assert recovered(path) == b"first"


@needs_posix
def test_a_link_is_followed(path, tmp_path):
    (tmp_path / "link.pth").symlink_to(path)
    apply(str(tmp_path / "link.pth"), Patch(len(OLD), b"tail"))
    assert (tmp_path / "link.pth").is_symlink()
    assert recovered(path) == OLD + b"tail"


@pytest.mark.parametrize("patch", [Patch(1, b"x"), Patch(len(OLD) + 1, b"x"), Patch(0, OLD + b"x")])
def test_a_patch_that_does_not_fit(path, patch):
    with pytest.raises(WriteError, match=r"cannot put .* bytes at .* of a file of 5,000 bytes"):
        apply(path, patch)
    assert recovered(path) == OLD


@needs_fork
@pytest.mark.parametrize("patch", PATCHES)
def test_a_process_that_ends_at_any_call_leaves_the_old_file_or_the_new_one(path, patch):
    seen = set()
    for crash in crashes(lambda: apply(path, patch), rewritten(path), (KILL, *POWER)):
        content = recovered(path)
        assert content in (OLD, edited(patch)), crash
        assert content == edited(patch) or not crash.completed, crash
        seen.add((crash.call, crash.half, crash.loss))
    assert {call for call, _, _ in seen} == {
        "open", "flock", "unlink", "chmod", "write", "fsync", "replace", ""
    }  # fmt: skip
    assert {("write", True, loss) for loss in (KILL, *POWER)} <= seen


@needs_fork
@pytest.mark.parametrize("patch", PATCHES)
@pytest.mark.parametrize(
    ("error", "after", "expected"),
    [
        (OSError(errno.ENOSPC, "full"), False, ["NoSpace", "WriteError"]),
        (KeyboardInterrupt(), True, ["KeyboardInterrupt"]),
        (SystemExit(143), True, ["SystemExit"]),
    ],
)
def test_an_error_at_any_call_takes_the_edit_back_at_once(path, patch, error, after, expected):
    for raised in raising(lambda: apply(path, patch), rewritten(path), error, after=after):
        with open(path, "rb") as file:
            content = file.read()
        left = os.listdir(os.path.dirname(path))
        if raised.error and not (after and raised.call in ("unlink", "fsync")):
            assert content == OLD, raised
        else:
            assert content in (OLD, edited(patch)), raised
        assert left == ["model.pth"] or (raised.call == "unlink" and not raised.error), raised
        assert raised.error in ("", *expected), raised
        assert recovered(path) == content, raised


@needs_fork
def test_where_it_cannot_be_taken_back_the_journal_stays(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(editing.Edit, "undo", refuse)
    monkeypatch.setattr(editing, "write_at", lambda fd, data, at: half(fd, data, at) or refuse())
    with pytest.raises(WriteError, match="Input/output error"):
        apply(path, Patch(len(OLD), b"tail" * 100))
    monkeypatch.undo()
    assert len(os.listdir(os.path.dirname(path))) == 2
    assert os.path.getsize(path) == len(OLD) + 200
    assert recovered(path) == OLD


def half(fd, data, position):
    os.pwrite(fd, data[: len(data) // 2], position)


CHILD = """
import os, sys
from ckptool.errors import *
from ckptool.files import FileSource
from ckptool.files.editing import Patch, apply_patch
path, offset, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
source = FileSource(path)
"""


def child(code, path, patch):
    """A process of its own that begins like `CHILD`, with pipes to speak to it."""
    arguments = [path, str(patch.offset), str(len(patch.data))]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + textwrap.dedent(code), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@needs_posix
@pytest.mark.parametrize("room", [10, len(OLD) + 100])
def test_a_disk_that_fills(path, room):
    """Nothing at all fits, or the journal does and a part of the edit."""
    code = f"""
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, resource.RLIM_INFINITY))
    try:
        apply_patch(source, Patch(offset, bytes(length)))
    except NoSpace as error:
        print(error)
    """
    patch = Patch(len(OLD), bytes(2000))
    out, err = child(code, path, patch).communicate()
    assert out == f"{path}: cannot be written (File too large)\n", err
    with open(path, "rb") as file:
        assert file.read() == OLD
    assert os.listdir(os.path.dirname(path)) == ["model.pth"]


def test_a_disk_that_is_too_full_from_the_beginning(path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3000))
    with pytest.raises(NoSpace, match="needs 4,000 bytes, but the disk has 3,000 free"):
        apply(path, Patch(len(OLD), bytes(2000)))
    assert recovered(path) == OLD


@needs_posix
def test_a_second_process_is_told_who_edits(path):
    editor = child(
        """
        from ckptool.files import editing
        def write_at(fd, data, position):
            print("editing", flush=True)
            input()
            os.pwrite(fd, data, position)
        editing.write_at = write_at
        apply_patch(source, Patch(offset, b"1" * length))
        """,
        path,
        Patch(len(OLD), bytes(100)),
    )
    assert editor.stdout.readline() == "editing\n"
    message = f"is being edited by process {editor.pid}"
    with pytest.raises(FileBusy, match=message) as caught:
        apply(path, Patch(len(OLD), b"2" * 100))
    assert caught.value.file == path
    assert isinstance(caught.value, BlockingIOError)
    with pytest.raises(FileBusy, match=message), open_locked(path):
        pass
    _, err = editor.communicate("\n")
    assert editor.returncode == 0, err
    assert recovered(path) == OLD + b"1" * 100


def test_a_file_that_was_written_to_since_it_was_read(path):
    source = FileSource(path)
    with open(path, "ab") as file:
        file.write(b"more")
    with pytest.raises(UnreadableFile, match="changed while it was read"):
        apply_patch(source, Patch(len(OLD), b"tail"))
    source.close()
    assert recovered(path) == OLD + b"more"


def test_a_file_that_was_replaced_since_it_was_read(path):
    source = FileSource(path)
    os.rename(path, path + ".old")
    with open(path, "wb") as file:
        file.write(OLD)
    with pytest.raises(
        WriteError, match="the file was replaced during the edit; nothing was written"
    ):
        apply_patch(source, Patch(len(OLD), b"tail"))
    source.close()
    os.unlink(path + ".old")
    assert recovered(path) == OLD


def test_an_edit_that_was_cut_short_since_it_was_read(path):
    source = FileSource(path)
    write_journal(path, Journal("edit", {}))
    with pytest.raises(WriteError, match="an in-place edit was interrupted") as caught:
        apply_patch(source, Patch(len(OLD), b"tail"))
    source.close()
    assert caught.value.hint == f"ckptool recover {path}"
    os.unlink(journal_path(path))
    assert recovered(path) == OLD


def test_a_file_that_refuses(path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda name, mode: mode != os.W_OK)
    with pytest.raises(WriteDenied, match="no write permission"):
        apply(path, Patch(len(OLD), b"tail"))
    monkeypatch.undo()
    assert recovered(path) == OLD


def test_a_folder_that_refuses_the_journal(path, monkeypatch):
    real = os.open

    def refuse(name, flags, *mode):
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return real(name, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    modified = os.stat(path).st_mtime_ns
    with pytest.raises(WriteDenied, match=r"model\.pth: cannot be written \(Permission denied\)"):
        apply(path, Patch(len(OLD), b"tail"))
    monkeypatch.undo()
    assert recovered(path) == OLD
    assert os.stat(path).st_mtime_ns == modified
