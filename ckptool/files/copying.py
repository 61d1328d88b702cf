"""Bytes from file to file by the kernel, never through Python where the system can do without.

`os.copy_file_range` (Linux), else `os.sendfile` (Linux), else reads and writes (everywhere).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from ckptool.files.source import BLOCK, FileSource

__all__ = ["copy_bytes", "write_at"]

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


def copy_bytes(source: FileSource, offset: int, target: int, position: int, length: int) -> None:
    """Copy `length` bytes of `source` at `offset` to descriptor `target` at `position`.

    A call that refuses, or that moves nothing, is not tried again; plain reads have the last word.

    Raises:
        TruncatedFile: the source ends before.
        UnreadableFile: the source cannot be read.
        OSError: the target cannot be written.
    """
    ways = list(KERNEL_WAYS) if offset >= source.overlaid else []
    done = 0
    while done < length:
        places = offset + done, target, position + done
        if not ways:
            data = source.read(offset + done, min(BLOCK, length - done))
            write_at(target, data, position + done)
            done += len(data)
            continue
        moved = _attempt(ways[0], source.fileno(), *places, min(MOST, length - done))
        if moved == 0:
            ways.pop(0)
        done += moved


def _attempt(way: _Way, source: int, offset: int, target: int, position: int, length: int) -> int:
    """Bytes moved; 0 where the call is refused."""
    try:
        return way(source, offset, target, position, length)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return 0


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
