"""What lies beside a target while it is written: names, folders, permissions, remains."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO

from ckptool.files.names import beside
from ckptool.files.output import FileOutput
from ckptool.files.system import hand_over, sync_folder

__all__ = ["folder_of", "found_beside", "private", "seal"]


def found_beside(target: str, ending: str) -> list[str]:
    """The files beside `target` of the name that `beside` gives with an ending of this pattern."""
    folder, beginning = os.path.split(beside(target, ""))
    pattern = re.compile(re.escape(beginning) + ending)
    found: list[str] = []
    with suppress(OSError):  # a folder that we may write to, and not list
        found = [name for name in os.listdir(folder) if pattern.fullmatch(name)]
    return [os.path.join(folder, name) for name in found]


@contextmanager
def folder_of(target: str) -> Iterator[str]:
    """The target's folder, made if need be; what was made goes again where the block fails."""
    folder = os.path.dirname(target)
    missing = []
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        for made in missing:
            sync_folder(os.path.dirname(made))
        yield os.path.dirname(target)
    except BaseException:
        with suppress(OSError):
            for made in missing:
                os.rmdir(made)
        raise


def private(mode: int | None) -> Callable[[str, int], int]:
    """An opener of a file for us alone while it is written, where its mode is set at the end."""
    return lambda path, flags: os.open(path, flags, 0o666 if mode is None else 0o600)


def seal(file: FileIO, output: FileOutput, old: os.stat_result | None, mode: int | None) -> None:
    """Put a file on the disk, with owner, group and mode of the one that it will replace.

    `mode` is that of a file that replaces none (None: as it was made).

    Raises:
        WriteError: fewer bytes came than were announced.
        OSError: the system refuses it.
    """
    output.finish()
    if old is not None:
        hand_over(file.name, old)
        mode = stat.S_IMODE(old.st_mode)
    if mode is not None:  # last: a change of the owner takes bits away
        os.chmod(file.name, mode)
    os.fsync(file.fileno())
