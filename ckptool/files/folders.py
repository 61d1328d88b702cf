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
from ckptool.files.system import check_space, convert_os_errors, sync_folder

_HIDDEN = re.compile(r"\.(.+)\.(?:new|old|gone)", re.DOTALL)
"""The hidden names of a folder that is written, replaced or removed."""


@contextmanager
def open_atomic_folder(
    path: str,
    size: int,
    *,
    last_file: str,
    run_first: Callable[[Callable[[], None]], object] = lambda work: work(),
    rank: int = 0,
) -> Iterator[str]:
    """Create a hidden folder to write into; it is renamed to `path` if the block succeeds.

    After an error the old folder is unchanged. A kill between the two renames of a replacement
    leaves no folder of this name: `recover_folders` finishes it.

    Args:
        path: The folder; an existing one is replaced.
        size: Its expected size in bytes.
        last_file: The file that is written last; without it, the folder is incomplete.
        run_first: Runs the part of rank 0 if several processes write into the folder: all processes
            enter the block and reach its end, or all raise an error.
        rank: The rank of this process.

    Raises:
        NoSpace: the disk cannot hold it.
        WriteError: a system call fails.
    """
    new = _hidden_path(path, "new")
    run_first(lambda: _create_hidden(path, new, size, last_file))
    try:
        yield new
    except CheckpointError:
        if rank == 0:  # `recover_folders` removes the rest
            shutil.rmtree(new, ignore_errors=True)
        raise
    run_first(lambda: _swap_folders(path, new))


def remove_folder(path: str) -> None:
    """Remove a folder; it is renamed first, so that a kill does not leave some of its files.

    Raises:
        OSError: a system call fails.
    """
    hidden = _hidden_path(path, "gone")
    shutil.rmtree(hidden, ignore_errors=True)  # the rest of a removal that was killed
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def recover_folders(folder: str, names: re.Pattern[str], last_file: str) -> None:
    """Finish interrupted writes of folders with these names in `folder`.

    Raises:
        WriteError: a system call fails.
    """
    with convert_os_errors(folder):
        for entry in os.listdir(folder) if os.path.isdir(folder) else ():
            match = _HIDDEN.fullmatch(entry)
            name = match[1] if match is not None else None  # of the folder to write
            if name is not None and names.fullmatch(name):
                _recover_folder(os.path.join(folder, name), last_file)


def _create_hidden(path: str, new: str, size: int, last_file: str) -> None:
    """Finish an interrupted write of `path`, then create the hidden folder `new` for this one.

    It will have `size` bytes. A folder without `last_file` is incomplete.
    """
    with convert_os_errors(path):
        _recover_folder(path, last_file)
        check_space(os.path.dirname(path) or ".", size)
        os.makedirs(new)


def _swap_folders(path: str, new: str) -> None:
    """Rename the hidden folder to `path`, and remove the folder that was there."""
    old = _hidden_path(path, "old")
    with convert_os_errors(path):
        if os.path.isdir(path):
            os.rename(path, old)
        os.rename(new, path)
        sync_folder(os.path.dirname(path) or ".")
        shutil.rmtree(old, ignore_errors=True)


def _recover_folder(path: str, last_file: str) -> None:
    """Finish an interrupted replacement: rename the new folder if it is complete, or else the old.

    The hidden folders that remain are removed.
    """
    new, old = _hidden_path(path, "new"), _hidden_path(path, "old")
    if os.path.isdir(old) and not os.path.exists(path):  # killed between the two renames
        is_complete = os.path.exists(os.path.join(new, last_file))
        os.rename(new if is_complete else old, path)
        sync_folder(os.path.dirname(path) or ".")
    for leftover in (new, old, _hidden_path(path, "gone")):
        shutil.rmtree(leftover, ignore_errors=True)


def _hidden_path(path: str, state: str) -> str:
    """Return the hidden path of a folder in a state: `.NAME.new`, `.old` or `.gone`."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{state}")
