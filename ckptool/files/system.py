"""What depends on the operating system, each with a fallback: locks, syncs, kernel copies."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO

from ckptool.errors import CheckpointError, NoSpace, WriteDenied, WriteError
from ckptool.files.source import BLOCK, SHARED, ByteRange, Source

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def worded(path: str) -> Iterator[None]:
    """Raise the system's refusals as our errors, about `path`.

    Raises:
        NoSpace: the disk is full.
        WriteDenied: the system does not let us write there.
        WriteError: another refusal.
    """
    try:
        yield
    except CheckpointError as error:
        if isinstance(error, WriteError) and error.file is None:
            error.file = path
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            is_limit = error.errno == errno.EFBIG
            raise NoSpace(
                f"cannot be written ({reason})",
                file=path,
                hint="raise the file size limit: ulimit -f"
                if is_limit
                else "free some space, or choose another disk",
            ) from error
        if error.errno in _DENIED:
            raise WriteDenied(
                f"cannot be written ({reason})", file=path, hint="choose another folder"
            ) from error
        raise WriteError(f"cannot be written ({reason})", file=path) from error


def check_space(folder: str, size: int) -> None:
    """Refuse what the disk cannot hold: `size` more bytes in `folder`.

    Raises:
        NoSpace: it cannot.
    """
    free = shutil.disk_usage(folder).free
    if size > free:
        raise NoSpace(
            f"needs {size:,} bytes, but the disk has {free:,} free",
            hint="free some space, or choose another disk",
        )


def who(pid: int | None) -> str:
    """Who holds a lock, in words: one of our own threads, or another process."""
    if not pid:
        return "another process"
    return f"process {pid}" + (" (this one)" if pid == os.getpid() else "")


if sys.platform != "win32":
    import fcntl
    import resource


_UNABLE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF})


def _open_files() -> int:
    """Return how many files are open, by the lowest descriptor that is free."""
    try:
        lowest_free = os.open(os.devnull, os.O_RDONLY)
    except OSError:  # there are as many as the system allows
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if sys.platform != "win32" else 0
    os.close(lowest_free)
    return lowest_free


_SPARE = 64
"""Files that may be opened beside those that are asked for."""


def allow_open_files(more: int) -> int:
    """Let this process open so many files more, as far as the system allows it without more ado.

    Return how many it would have open then.

    Many systems begin with 256 or 1,024 for programs that cannot count further, and let others
    ask for more.
    """
    count = _open_files() + more + _SPARE
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return count


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
    """Return the process that has the lock on an open file, where the system tells (Linux)."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError, ValueError), open("/proc/locks", encoding="ascii") as lines:
        # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:131 0 EOF
        for words in map(str.split, lines):
            if words[3:4] == ["WRITE"] and words[5] == device and int(words[4]) > 0:
                return int(words[4])
    return None


def is_running(pid: int) -> bool:
    """Return whether there is such a process; where that cannot be asked without harm, no."""
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
    """Return what tells one run of the system from the next (Linux); empty if it does not say."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


def remove_unlocked(path: str) -> int | None:
    """Remove a file that no process has locked; where that cannot be known, it stays.

    Return the process that has a lock on it; 0: the system does not tell which, None: nobody.
    """
    if sys.platform != "win32":
        mode = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
        with suppress(OSError):
            fd = os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                is_free = try_lock(fd)
                if is_free:
                    os.unlink(path)
                return lock_holder(fd) or 0 if is_free is False else None
            finally:
                os.close(fd)
    return None


def private(mode: int | None) -> Callable[[str, int], int]:
    """Return an opener of a file that is ours alone until it gets `mode` (None: by the umask)."""
    return lambda path, flags: os.open(path, flags, 0o666 if mode is None else 0o600)


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


MOST = 1 << 30
"""Bytes asked of one call: the kernel moves at most 2 GiB."""

_REFUSALS = frozenset(
    {
        errno.EXDEV,  # two file systems, Linux before 5.3
        errno.EINVAL,  # a file system that cannot
        errno.ENOSYS,  # a kernel that cannot
        errno.EOPNOTSUPP,
        errno.ENOTSUP,
        errno.ENOTSOCK,  # sendfile on macOS
        errno.EPERM,  # a sandbox that forbids the call
        errno.EBADF,  # a descriptor of a kind that the call does not take
        errno.EIO,  # some network file systems; the plain read tells whether it is true
    }
)

_Way = Callable[[int, int, int, int, int], int]


_CLONE = 0x4020940D
"""`FICLONERANGE` (linux/fs.h): refused where no blocks can be shared, and never a copy."""


def shares_blocks(run: ByteRange, target: int) -> bool:
    """Return whether an empty file can share blocks with the file of a run; it gets the first one.

    Only Linux has the call; macOS shares whole files.
    """
    source = run.source.fd()
    if source is None or not sys.platform.startswith("linux"):
        return False
    block = -(-run.offset // SHARED) * SHARED
    try:
        fcntl.ioctl(target, _CLONE, struct.pack("qQQQ", source, block, SHARED, 0))
    except OSError:
        return False
    return True


def copy_bytes(source: Source, offset: int, target: int, position: int, length: int) -> None:
    """Copy `length` bytes of `source` at `offset` to descriptor `target` at `position`.

    A call that refuses, or that moves nothing, is not tried again; plain reads have the last word.

    Raises:
        TruncatedFile: the source ends before.
        UnreadableFile: the source cannot be read.
        OSError: the target cannot be written.
    """
    fd = source.fd()
    ways = list(KERNEL_WAYS) if offset >= source.overlaid else []
    done = 0
    while done < length:
        places = offset + done, target, position + done
        # Whole blocks are shared, where a range begins with one.
        to_block = -places[0] % SHARED if (offset - position) % SHARED == 0 else 0
        if fd is None or not ways or to_block:
            data = source.read(places[0], min(to_block or BLOCK, length - done))
            write_at(target, data, places[2])
            done += len(data)
            continue
        try:
            moved = ways[0](fd, *places, min(MOST, length - done))
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            moved = 0
        if moved == 0:
            ways.pop(0)
        done += moved


def _by_range(source: int, offset: int, target: int, position: int, length: int) -> int:
    return os.copy_file_range(source, target, length, offset, position)


def _by_sendfile(source: int, offset: int, target: int, position: int, length: int) -> int:
    os.lseek(target, position, os.SEEK_SET)
    return os.sendfile(target, source, offset, length)


KERNEL_WAYS: tuple[_Way, ...] = tuple(
    way
    for call, way in (("copy_file_range", _by_range), ("sendfile", _by_sendfile))
    if hasattr(os, call)
)
"""The calls that this system has, the best first."""


def write_at(fd: int, data: bytes | bytearray | memoryview, position: int) -> None:
    """Write all of `data` at `position`, however many calls it takes."""
    left = memoryview(data)
    os.lseek(fd, position, os.SEEK_SET)
    while left:
        left = left[os.write(fd, left) :]
