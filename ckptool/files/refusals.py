"""What the system refuses, in our words."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from ckptool.errors import CheckpointError, NoSpace, WriteDenied, WriteError

__all__ = ["check_space", "who", "worded"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def worded(path: str) -> Iterator[None]:
    """The system's refusals as our errors, about `path`.

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
                hint="the system limits how large a file may be: ulimit -f"
                if is_limit
                else "make room, or choose another disk",
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
            f"needs {size:,} bytes, and the disk has {free:,} free",
            hint="make room, or choose another disk",
        )


def who(pid: int | None) -> str:
    """Who holds a lock, in words: one of our own threads, or another process."""
    if not pid:
        return "another process"
    return f"process {pid}" + (", which is this one" if pid == os.getpid() else "")
