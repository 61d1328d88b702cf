"""The folders that sharded checkpoints are: known, put in their place, mended after a kill.

Torch is not needed for it; what is in them is read and written by `sharded.py`.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import Any

from ckptool.files.system import check_space, sync_folder, worded

__all__ = [
    "VALUES",
    "begin",
    "give_up",
    "hidden",
    "is_sharded",
    "remove",
    "settle",
    "take_place",
]

VALUES = "run.pth"
"""What is written last: a folder without it is none."""
_HIDDEN = re.compile(r"\.(last|best|step-\d{8,})\.(new|old|gone)")


def is_sharded(path: Any) -> bool:
    """Whether it is such a folder, a damaged one as well."""
    if not isinstance(path, (str, os.PathLike)) or not os.path.isdir(path):
        return False
    return any(name == ".metadata" or name.endswith(".distcp") for name in os.listdir(path))


def begin(path: str, size: int) -> None:
    """Make the folder, hidden, that is to be `path`, and to hold `size` bytes.

    Raises:
        NoSpace: the disk cannot.
        WriteError: the system does not let us.
    """
    with worded(path):
        _settle(path)
        check_space(os.path.dirname(path) or ".", size)
        os.makedirs(hidden(path, "new"))


def give_up(path: str) -> None:
    """Remove what `begin` has made; what cannot be removed is by `settle`."""
    shutil.rmtree(hidden(path, "new"), ignore_errors=True)


def take_place(path: str) -> None:
    """Give the hidden folder, which is whole, the name `path`.

    Where one is replaced, a kill between two renames leaves both hidden; `settle` finishes.

    Raises:
        WriteError: the system does not let us.
    """
    old = hidden(path, "old")
    with worded(path):
        if os.path.isdir(path):
            os.rename(path, old)
        os.rename(hidden(path, "new"), path)
        sync_folder(os.path.dirname(path) or ".")
        shutil.rmtree(old, ignore_errors=True)


def remove(path: str) -> None:
    """Remove a folder: it has no name of a checkpoint's any more before anything of it goes.

    Raises:
        OSError: the system does not let us.
    """
    gone = hidden(path, "gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)


def settle(folder: str) -> None:
    """Finish what a kill has interrupted while checkpoints in `folder` were written.

    Raises:
        WriteError: the system does not let us.
    """
    with worded(folder):
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            found = _HIDDEN.fullmatch(entry)
            if found is not None:
                _settle(os.path.join(folder, found[1]))


def _settle(path: str) -> None:
    """Where the old one was out of the way and the new one not in its place: put that there."""
    new, old = hidden(path, "new"), hidden(path, "old")
    if os.path.isdir(old) and not os.path.exists(path):
        os.rename(new if os.path.exists(os.path.join(new, VALUES)) else old, path)
        sync_folder(os.path.dirname(path) or ".")
    for one in (new, old, hidden(path, "gone")):
        shutil.rmtree(one, ignore_errors=True)


def hidden(path: str, word: str) -> str:
    """Where a folder is before it has its name (`new`), once it is replaced (`old`) or `gone`."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{word}")
