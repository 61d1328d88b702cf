"""What a system may be told about a file, each call left out where the system does not have it."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from io import FileIO

if sys.platform != "win32":
    import fcntl
    import resource

__all__ = [
    "allow_open_files",
    "announce_read",
    "boot_id",
    "close_to_rename",
    "hand_over",
    "holder_of",
    "is_running",
    "lock",
    "lock_holder",
    "remove_unlocked",
    "reserve",
    "start_writeback",
    "sync_folder",
    "try_lock",
]

_UNABLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF})


def allow_open_files(count: int) -> None:
    """Let this process have `count` files open, as far as the system allows it without more ado.

    Many systems begin with 256 or 1,024 for programs that cannot count further, and let others
    ask for more.
    """
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def announce_read(fd: int) -> None:
    """Say that a file will be read from front to back."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # advice
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Begin to write dirty pages to the disk, and go on meanwhile.

    What is written early is not waited for at the end. Linux begins when it is told that the
    pages are not needed, and drops those that are clean.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # advice
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


def try_lock(fd: int) -> bool | None:
    """Take the lock on an open file, not waiting for it; False: somebody has it, None: no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def lock_holder(fd: int) -> int | None:
    """The process that has the lock on an open file, where the system tells (Linux)."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError, ValueError), open("/proc/locks", encoding="ascii") as lines:
        # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:131 0 EOF
        for words in map(str.split, lines):
            if words[3:4] == ["WRITE"] and words[5] == device and int(words[4]) > 0:
                return int(words[4])
    return None


def holder_of(path: str) -> int | None:
    """The process that has a lock on a file; 0: one that the system does not tell, None: nobody."""
    if sys.platform == "win32":
        return None
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if try_lock(fd) is False:
                return lock_holder(fd) or 0
        finally:
            os.close(fd)
    return None


def is_running(pid: int) -> bool:
    """Whether there is such a process; where that cannot be asked without harm, no."""
    if sys.platform == "win32":
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def boot_id() -> str:
    """What tells one run of the system from the next (Linux); empty where it does not say."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


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
