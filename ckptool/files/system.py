"""Functions that depend on the operating system, with fallbacks: locks, syncs, kernel copies."""

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

_DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED_ERRORS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def convert_os_errors(path: str) -> Iterator[None]:
    """Convert system errors in a block to our errors about `path`.

    Raises:
        NoSpace: the disk is full.
        WriteDenied: no permission to write there.
        WriteError: another system error.
    """
    try:
        yield
    except CheckpointError as error:
        if isinstance(error, WriteError) and error.file is None:
            error.file = path
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _DISK_FULL_ERRORS:
            is_limit = error.errno == errno.EFBIG
            raise NoSpace(
                f"cannot be written ({reason})",
                file=path,
                hint="raise the file size limit: ulimit -f"
                if is_limit
                else "free some space, or choose another disk",
            ) from error
        if error.errno in _DENIED_ERRORS:
            raise WriteDenied(
                f"cannot be written ({reason})", file=path, hint="choose another folder"
            ) from error
        raise WriteError(f"cannot be written ({reason})", file=path) from error


def check_space(folder: str, size: int) -> None:
    """Check that the disk has room for `size` more bytes in `folder`.

    Raises:
        NoSpace: it does not.
    """
    free = shutil.disk_usage(folder).free
    if size > free:
        raise NoSpace(
            f"needs {size:,} bytes, but the disk has {free:,} free",
            hint="free some space, or choose another disk",
        )


def describe_process(pid: int | None) -> str:
    """Describe the holder of a lock: one of our own threads, or another process."""
    if not pid:
        return "another process"
    return f"process {pid}" + (" (this one)" if pid == os.getpid() else "")


if sys.platform != "win32":
    import fcntl
    import resource


_UNSUPPORTED_ERRORS = frozenset(
    {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EBADF}
)


def _count_open_files() -> int:
    """Return the number of open files: the lowest free descriptor, or the limit if none is free.

    On Windows, 0 if none is free.
    """
    try:
        lowest_free = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if sys.platform != "win32" else 0
    os.close(lowest_free)
    return lowest_free


_SPARE_FILES = 64
"""Files that may be opened in addition to the requested ones."""


def allow_open_files(extra: int) -> int:
    """Raise this process's limit of open files for `extra` more files, up to the hard limit.

    Return the number of files that would be open then.

    Many systems start with a soft limit of 256 or 1,024, for programs that use `select`.
    """
    count = _count_open_files() + extra + _SPARE_FILES
    if sys.platform != "win32":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if soft != resource.RLIM_INFINITY and soft < limit:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return count


def announce_read(fd: int) -> None:
    """Advise the kernel that a file will be read from front to back."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # only advice
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Start to write dirty pages to the disk in the background.

    It shortens the final sync. Linux starts when it is advised that the pages are not needed, and
    drops the clean ones.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # only advice
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def reserve(fd: int, size: int) -> None:
    """Reserve space for `size` bytes, so that a full disk is found before a byte is written.

    Does nothing if the system or the file system cannot reserve space.

    Raises:
        OSError: the disk does not have this space.
    """
    if not size or not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in _UNSUPPORTED_ERRORS:
            raise


def lock(fd: int) -> None:
    """Lock an open file until it is closed or the process ends; some systems have no locks."""
    if sys.platform != "win32":
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)


def try_lock(fd: int) -> bool | None:
    """Try to lock an open file; False: another process has the lock, None: no locks."""
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
    """Return the process that has the lock on an open file, if the system reports it (Linux)."""
    status = os.fstat(fd)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    with suppress(OSError, ValueError), open("/proc/locks", encoding="ascii") as lines:
        # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:131 0 EOF
        for words in map(str.split, lines):
            if words[3:4] == ["WRITE"] and words[5] == device and int(words[4]) > 0:
                return int(words[4])
    return None


def is_running(pid: int) -> bool:
    """Return True if the process is running; False if that cannot be checked safely."""
    if sys.platform == "win32":  # `os.kill` would end the process
        return False
    try:
        os.kill(pid, 0)  # only checks the process
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def boot_id() -> str:
    """Return an identifier of this boot of the system (Linux), or an empty text."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
    return ""


def remove_unlocked(path: str) -> int | None:
    """Remove a file that no process has locked; keep it if the system has no locks.

    Return the process that has locked it (0: an unknown one); None if none has, or that is unknown.
    """
    if sys.platform != "win32":
        mode = os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY
        with suppress(OSError):
            # Without waiting for the other end of a pipe.
            fd = os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                got_lock = try_lock(fd)  # None if the system has no locks
                if got_lock:
                    os.unlink(path)
                if got_lock is False:
                    return lock_holder(fd) or 0
            finally:
                os.close(fd)
    return None


def make_opener(*, is_private: bool) -> Callable[[str, int], int]:
    """Return an opener for `open` that creates a file with the mode of the umask, or a private one.

    A private file can only be accessed by its owner, until it gets another mode.
    """
    return lambda path, flags: os.open(path, flags, 0o600 if is_private else 0o666)


def hand_over(path: str, old: os.stat_result) -> None:
    """Try to give a file the owner and the group of another; only root can always do it."""
    if sys.platform != "win32":
        new = os.stat(path)
        if new.st_gid != old.st_gid:
            with suppress(OSError):  # on its own: it may succeed where the owner cannot change
                os.chown(path, -1, old.st_gid)
        if new.st_uid != old.st_uid:
            with suppress(OSError):
                os.chown(path, old.st_uid, -1)


def close_to_rename(file: FileIO) -> None:
    """Close a file if the system cannot rename open files; elsewhere it keeps its lock."""
    if sys.platform == "win32":
        file.close()


def sync_folder(path: str) -> None:
    """Sync a folder, so that a rename is durable; Windows does not need it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED_ERRORS:  # some network file systems
            raise
    finally:
        os.close(fd)


MAX_COPIED_BYTES = 1 << 30
"""Bytes per call: the kernel moves at most 2 GiB."""

_NO_KERNEL_COPY_ERRORS = frozenset(
    {
        errno.EXDEV,  # two file systems, Linux before 5.3
        errno.EINVAL,  # a file system without support
        errno.ENOSYS,  # a kernel without support
        errno.EOPNOTSUPP,
        errno.ENOTSUP,
        errno.ENOTSOCK,  # sendfile on macOS
        errno.EPERM,  # a sandbox that forbids the call
        errno.EBADF,  # a descriptor that the call does not support
        errno.EIO,  # some network file systems; a plain read checks whether it is true
    }
)

_KernelCopy = Callable[[int, int, int, int, int], int]
"""Copies from (descriptor, offset) to (descriptor, position) up to so many bytes; returns them."""

_CLONE_RANGE = 0x4020940D
"""`FICLONERANGE` (linux/fs.h): fails if blocks cannot be shared, and never copies."""


def try_sharing_blocks(run: ByteRange, target: int) -> bool:
    """Try to share one block of a range's file with an empty file; return True if it works.

    If it does, `copy_bytes` can share the others, too. Only Linux has this call.
    """
    source = run.source.fd()
    if source is None or not sys.platform.startswith("linux"):
        return False
    first_block = run.offset + -run.offset % SHARED
    try:
        fcntl.ioctl(target, _CLONE_RANGE, struct.pack("qQQQ", source, first_block, SHARED, 0))
    except OSError:
        return False
    return True


def copy_bytes(source: Source, offset: int, target: int, position: int, length: int) -> None:
    """Copy `length` bytes of `source` at `offset` to descriptor `target` at `position`.

    A kernel copy that fails or moves nothing is not repeated: the next call of `KERNEL_COPIES` is
    tried, at last plain reads. These also copy the bytes up to the first block that the two files
    can share.

    Raises:
        TruncatedFile: the source ends before.
        UnreadableFile: the source cannot be read.
        OSError: the target cannot be written.
    """
    fd = source.fd()
    # The kernel would copy the bytes of the file, not the overlaid ones.
    calls = list(KERNEL_COPIES) if offset >= source.overlaid else []
    # The file system shares blocks only if a range begins at a block in both files.
    can_share = (offset - position) % SHARED == 0
    done = 0
    while done < length:
        read_position, write_position = offset + done, position + done
        bytes_to_block = -read_position % SHARED if can_share else 0
        if fd is None or not calls or bytes_to_block:
            data = source.read(read_position, min(bytes_to_block or BLOCK, length - done))
            write_at(target, data, write_position)
            done += len(data)
            continue
        try:
            count = min(MAX_COPIED_BYTES, length - done)
            copied = calls[0](fd, read_position, target, write_position, count)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY_ERRORS:
                raise
            copied = 0
        if copied == 0:
            calls.pop(0)
        done += copied


def _copy_by_range(source: int, offset: int, target: int, position: int, length: int) -> int:
    """Copy bytes with `copy_file_range`; return the number of bytes copied."""
    return os.copy_file_range(source, target, length, offset, position)


def _copy_by_sendfile(source: int, offset: int, target: int, position: int, length: int) -> int:
    """Copy bytes with `sendfile`; return the number of bytes copied."""
    os.lseek(target, position, os.SEEK_SET)
    return os.sendfile(target, source, offset, length)


KERNEL_COPIES: tuple[_KernelCopy, ...] = tuple(
    copy
    for call, copy in (("copy_file_range", _copy_by_range), ("sendfile", _copy_by_sendfile))
    if hasattr(os, call)
)
"""The available system calls, the best first."""


def write_at(fd: int, data: bytes | bytearray | memoryview, position: int) -> None:
    """Write all of `data` at `position`, in several calls if needed."""
    remaining = memoryview(data)
    os.lseek(fd, position, os.SEEK_SET)
    while remaining:
        remaining = remaining[os.write(fd, remaining) :]
