"""Write a folder so that it appears whole or not at all.

.NAME.new     is being written, and is complete once it has the file that is written last
.NAME.old     is being replaced
.NAME.gone    is being removed
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptool.errors import CheckpointError
from ckptool.files.system import check_space, sync_folder, worded

_HIDDEN = re.compile(r"\.(.+)\.(?:new|old|gone)", re.DOTALL)


@contextmanager
def atomic_folder(
    path: str,
    size: int,
    *,
    last: str,
    first: Callable[[Callable[[], None]], object] = lambda work: work(),
    own: int = 0,
) -> Iterator[str]:
    """Create a hidden folder to write into; it is renamed to `path` if the block succeeds.

    After an error the old folder is unchanged. A kill between the two renames of a replacement
    leaves no folder of this name: `recover_folders` finishes it.

    Args:
        path: The folder; an existing one is replaced.
        size: Its expected size in bytes.
        last: The file that is written last; without it, the folder is incomplete.
        first: Runs the part of rank 0 if several processes write into the folder: all processes
            enter the block and reach its end, or all raise an error.
        own: The rank of this process.

    Raises:
        NoSpace: the disk cannot hold it.
        WriteError: a system call fails.
    """
    new = _hidden(path, "new")
    first(lambda: _begin(path, new, size, last))
    try:
        yield new
    except CheckpointError:
        if own == 0:  # `recover_folders` removes the rest
            shutil.rmtree(new, ignore_errors=True)
        raise
    first(lambda: _take_place(path, new))


def remove_folder(path: str) -> None:
    """Remove a folder; rename it before its files are removed.

    Raises:
        OSError: a system call fails.
    """
    gone = _hidden(path, "gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)


def recover_folders(folder: str, names: re.Pattern[str], last: str) -> None:
    """Finish interrupted writes of folders with these names in `folder`.

    Raises:
        WriteError: a system call fails.
    """
    with worded(folder):
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            found = _HIDDEN.fullmatch(entry)
            if found is not None and names.fullmatch(found[1]):
                _settle(os.path.join(folder, found[1]), last)


def _begin(path: str, new: str, size: int, last: str) -> None:
    with worded(path):
        _settle(path, last)
        check_space(os.path.dirname(path) or ".", size)
        os.makedirs(new)


def _take_place(path: str, new: str) -> None:
    old = _hidden(path, "old")
    with worded(path):
        if os.path.isdir(path):
            os.rename(path, old)
        os.rename(new, path)
        sync_folder(os.path.dirname(path) or ".")
        shutil.rmtree(old, ignore_errors=True)


def _settle(path: str, last: str) -> None:
    """Give the name to the new folder, or back to the old one, if neither has it."""
    new, old = _hidden(path, "new"), _hidden(path, "old")
    if os.path.isdir(old) and not os.path.exists(path):
        os.rename(new if os.path.exists(os.path.join(new, last)) else old, path)
        sync_folder(os.path.dirname(path) or ".")
    for one in (new, old, _hidden(path, "gone")):
        shutil.rmtree(one, ignore_errors=True)


def _hidden(path: str, word: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{word}")
