"""A folder that appears whole or not at all.

.NAME.new     is being written, and is whole once it has the file that is written last
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
    """Make a hidden folder to write into, which gets the name `path` when the block ends well.

    An error leaves the folder that has the name now. A kill between the two renames of a folder
    that is replaced leaves none: `recover_folders` finishes.

    Args:
        path: The folder; one that is there is replaced.
        size: Bytes that it is to hold.
        last: The file in it that is written last; without it, it is not whole.
        first: Calls what rank 0 does, where several processes write into the folder: each of them
            comes here, and to the end of the block, or an error is raised in all of them.
        own: The rank of this process.

    Raises:
        NoSpace: the disk cannot hold it.
        WriteError: the system does not let us.
    """
    new = _hidden(path, "new")
    first(lambda: _begin(path, new, size, last))
    try:
        yield new
    except CheckpointError:
        if own == 0:  # what cannot be removed is by `recover_folders`
            shutil.rmtree(new, ignore_errors=True)
        raise
    first(lambda: _take_place(path, new))


def remove_folder(path: str) -> None:
    """Remove a folder, which loses its name before anything of it goes.

    Raises:
        OSError: the system does not let us.
    """
    gone = _hidden(path, "gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)


def recover_folders(folder: str, names: re.Pattern[str], last: str) -> None:
    """Finish what a kill interrupted while folders of these names were written in `folder`.

    Raises:
        WriteError: the system does not let us.
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
