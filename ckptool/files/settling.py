"""The end of a write of several files that was cut short, and the lock of whoever writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckptool.errors import CheckpointError, FileBusy, WriteDenied
from ckptool.files.journal import Journal, read_journal
from ckptool.files.locking import leads_to
from ckptool.files.names import beside
from ckptool.files.refusals import who
from ckptool.files.renames import finish_renames
from ckptool.files.system import lock_holder, try_lock

__all__ = ["only_writer", "remove", "settle_set"]

_LOCK = ".ckptool-lock"
"""How the name of a set's lock ends, behind that of the index."""


def settle_set(path: str | os.PathLike[str], journal: Journal) -> None:
    """Finish the write of a set that was cut short when its files were being renamed.

    `journal` is what `read_journal` gave for the index at `path`; nothing is done where it has
    been settled by another process meanwhile.

    Raises:
        FileBusy: another process is writing the set, and alive.
        CorruptFile: the journal tells of no set, or a file has been changed since; no file was
            touched.
        WriteDenied: the system does not let us rename the files.
    """
    path, target = os.fspath(path), os.path.realpath(path)
    try:
        with only_writer(target, path):
            if read_journal(target) == journal:
                finish_renames(target, journal)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise WriteDenied(
            "the write of this index and its files was cut short, and the system does not let us "
            f"finish it ({error.strerror or error})",
            file=path,
            hint=f"ckptool recover {path}, as one who may write to the folder",
        ) from error


@contextmanager
def only_writer(target: str, path: str) -> Iterator[bool]:
    """A lock on the set: whether there is such a thing on this system.

    It is on a file of its own, since the index may not be there yet, and is another one afterwards.
    """
    name = beside(target, _LOCK)
    while True:
        fd, taken, ours = _open_lock(name), None, False
        try:
            taken = try_lock(fd)
            if taken is False:
                raise _busy(lock_holder(fd), path)
            ours = leads_to(name, fd)  # else it was removed before it was locked
            if ours:
                yield bool(taken)
                return
        finally:
            if ours and taken:  # while it is locked, so that it is nobody else's
                remove(name)
            os.close(fd)
            if ours and not taken:  # Windows removes no open file
                remove(name)


def _open_lock(name: str) -> int:
    flags = getattr(os, "O_NOFOLLOW", 0)
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except PermissionError:
        if not os.path.lexists(name):
            raise
        return os.open(name, os.O_RDONLY | flags)  # another user's


def _busy(pid: int | None, path: str) -> FileBusy:
    return FileBusy(
        f"is being written, with its files, by {who(pid)}",
        file=path,
        hint="try again when it has finished",
    )


def remove(path: str) -> None:
    """Remove a file, as far as the system lets us."""
    with suppress(OSError):
        os.unlink(path)
