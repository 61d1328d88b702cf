"""One process at a time changes a file: an advisory lock on the file itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from ckptool.errors import CheckpointError, FileBusy, FileDenied, FileMissing, WriteError
from ckptool.files.journal import Journal, read_journal
from ckptool.files.names import journal_path
from ckptool.files.refusals import who, worded
from ckptool.files.source import open_descriptor
from ckptool.files.system import boot_id, is_running, lock_holder, try_lock

__all__ = ["exclusive", "leads_to", "occupied", "undisturbed"]

_OCCUPIED = ".ckptool-lock"
"""The file in a folder that whoever has the folder has a lock on."""
_ATTEMPTS = 3
"""How often a lock is asked for that somebody has, and nobody a moment later."""


@contextmanager
def exclusive(path: str | os.PathLike[str]) -> Iterator[int]:
    """The file at `path`, links resolved, open and locked against every other process that asks.

    The descriptor can be written to where the system lets us, else only read. The lock ends with
    the block, or with the process. A system or a file system without locks goes on without, unless
    the journal of a running process lies beside the file.

    Raises:
        FileBusy: another has the lock; the message names the process.
        FileMissing: there is no such file.
        FileDenied: the system does not even let us read it.
        UnreadableFile: any other refusal.
    """
    path = os.fspath(path)
    target = os.path.realpath(path)
    while True:
        fd = _open(target)
        try:
            _lock(fd, path)
            if leads_to(target, fd):  # else it was replaced before it was locked
                yield fd
                return
        finally:
            os.close(fd)


@contextmanager
def undisturbed(path: str) -> Iterator[None]:
    """Nobody else edits a file that is about to be replaced: its journal would outlive it.

    Nothing is locked where there is no file, where we may not even read it, and where an open
    file cannot be replaced (Windows).

    Raises:
        FileBusy: another process is editing it, or about to replace it.
        WriteError: an edit of it was cut short, since it was settled.
    """
    with ExitStack() as stack:
        if os.name == "posix":
            with suppress(FileMissing, FileDenied):
                stack.enter_context(exclusive(path))
                if os.path.lexists(journal_path(path)):
                    raise WriteError(
                        "an edit of it was cut short", file=path, hint=f"ckptool recover {path}"
                    )
        yield


@contextmanager
def occupied(folder: str) -> Iterator[None]:
    """A folder, made where it is not there, kept from every other process that asks for it.

    That ends with the block, or with the process. A system or a file system without locks goes on
    without. A folder that was made for it goes again if nothing is in it at the end.

    Raises:
        FileBusy: another has it; the message names the process.
        WriteError: it cannot be made, or nothing can be written there.
    """
    path = os.path.join(folder, _OCCUPIED)
    made = _missing(folder)
    try:
        fd = _taken(path)
        try:
            yield
        finally:
            with suppress(OSError):
                os.unlink(path)  # while it is locked: whoever waits for it sees that it is gone
            os.close(fd)
    finally:
        with suppress(OSError):  # something is in it
            for one in made:
                os.rmdir(one)


def _missing(folder: str) -> list[str]:
    """The folders that would have to be made for this one, the innermost first."""
    missing = []
    while folder and not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


def _taken(path: str) -> int:
    """A file of no content that is ours, open and locked."""
    folder = os.path.dirname(path)
    while True:
        with worded(folder):
            os.makedirs(folder, exist_ok=True)
            with suppress(FileNotFoundError):  # the folder was removed by whoever had made it
                fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
                if try_lock(fd) is False:
                    pid = lock_holder(fd)
                    os.close(fd)
                    raise FileBusy(
                        f"{folder} is in use by {who(pid)}",
                        hint="another folder, or wait until it has ended",
                    )
                if leads_to(path, fd):  # else it was removed before it was locked
                    return fd
                os.close(fd)


def leads_to(path: str | os.PathLike[str], fd: int) -> bool:
    """Whether the file at `path` is the open one."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def _open(path: str) -> int:
    """A descriptor to read and write, or to read where that is all that we may."""
    with suppress(OSError):
        return os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    return open_descriptor(path)


def _lock(fd: int, path: str) -> None:
    for _ in range(_ATTEMPTS):
        taken = try_lock(fd)
        journal = None if taken else _journal(path)
        if taken or (taken is None and not _is_at_work(journal)):
            return
        pid = lock_holder(fd) or (journal.pid if journal else None)
        if pid:  # else it may have ended just now
            break
    raise FileBusy(
        f"is being edited by {who(pid)}",
        file=path,
        hint="try again when it has finished",
    )


def _journal(path: str) -> Journal | None:
    with suppress(CheckpointError):
        return read_journal(path)
    return None


def _is_at_work(journal: Journal | None) -> bool:
    """Whether the process that wrote the journal is there still, as far as this machine knows."""
    if journal is None or journal.pid == os.getpid() or journal.boot != boot_id():
        return False
    return is_running(journal.pid)
