"""What a system may be told about a file, each call left out where the system does not have it."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from io import FileIO

if sys.platform != "win32":
    import fcntl

__all__ = [
    "announce_read",
    "close_to_rename",
    "hand_over",
    "lock",
    "remove_unlocked",
    "reserve",
    "start_writeback",
    "sync_folder",
]

_UNABLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF})


def announce_read(fd: int) -> None:
    """Say that a file will be read from front to back."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Begin to write dirty pages to the disk, and go on meanwhile.

    What is written early is not waited for at the end. Linux begins when it is told that the
    pages are not needed, and drops those that are clean.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def reserve(fd: int, size: int) -> None:
    """Take the space for `size` bytes, so that a full disk is found before a byte is written.

    Raises:
        OSError: there is no such space.
    """
    if not size or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _UNABLE:
            raise


def lock(fd: int) -> None:
    """Hold a lock on an open file until it is closed, by a kill too; some systems have none."""
    if sys.platform != "win32":
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)


def remove_unlocked(path: str) -> None:
    """Remove a file that no process has locked; where that cannot be known, it stays."""
    if sys.platform != "win32":
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(fd)


def hand_over(path: str, old: os.stat_result) -> None:
    """Give a file the owner and the group of another, as far as we may: root may all of it."""
    if sys.platform != "win32":
        new = os.stat(path)
        if new.st_gid != old.st_gid:
            with suppress(OSError):
                os.chown(path, -1, old.st_gid)
        if new.st_uid != old.st_uid:
            with suppress(OSError):
                os.chown(path, old.st_uid, -1)


def close_to_rename(file: FileIO) -> None:
    """Close a file where an open one cannot be renamed; elsewhere it keeps its lock."""
    if sys.platform == "win32":
        file.close()


def sync_folder(path: str) -> None:
    """Make a rename in a folder last; Windows can open no folder, and needs not."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNABLE:  # some network file systems
            raise
    finally:
        os.close(fd)
