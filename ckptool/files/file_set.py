"""Several files that appear together or not at all: shards and the index that names them.

Each is written beside its target under a temporary name; when all are on the disk, they are
renamed, the index last. What a kill leaves and who sets it right: see `files.renames`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ckptool.errors import UsageError, WriteError, warn
from ckptool.files.atomic import (
    FileOutput,
    Progress,
    folder_of,
    found_beside,
    private,
    refuse_target,
    seal,
)
from ckptool.files.beside import beside, journal_path
from ckptool.files.journal import read_journal, remove_unfinished
from ckptool.files.recovery import settle
from ckptool.files.renames import (
    FINISHED,
    PART,
    Move,
    finish_renames,
    only_writer,
    remove,
    rename_all,
    state_of,
)
from ckptool.files.system import check_space, reserve, worded

__all__ = ["FileSet", "atomic_set"]

_Path = TypeVar("_Path", str, os.PathLike[str])


@contextmanager
def atomic_set(
    index: str | os.PathLike[str],
    sizes: Mapping[_Path, int],
    *,
    overwrite: bool = False,
    mode: int | None = None,
    check: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> Iterator[FileSet]:
    """Outputs for files that appear together when the block ends well; see `atomic_output`.

    Whatever else happens leaves the old files, and nothing beside them; what a kill leaves, the
    next run that writes the same index removes. Files of an older set that are not among the new
    ones stay.

    Args:
        index: The last of the files, for which the others are there.
        sizes: The bytes of every file, in the order in which they are written.
        overwrite: Replace files that are there.
        mode: Permission bits of new files (None: what the umask leaves).
        check: Called when all is on the disk, before the first rename; what it raises leaves the
            old files.
        progress: Told bytes done and bytes of all files.

    Raises:
        UsageError: the files are not in one folder, two are the same, or the index is not the last.
        TargetExists: a file is there and not to be overwritten, or is a folder.
        FileBusy: another process is writing this set; the message names that one.
        NoSpace: the disk cannot hold all files.
        WriteDenied: the system does not let us write there.
        WriteError: another refusal of the system, more or fewer bytes than stated, or a file of
            the set that was not written.
        CorruptFile: an earlier write was cut short, and can be neither finished nor taken back.
    """
    path, target = os.fspath(index), os.path.realpath(index)
    parts = _parts(target, {os.fspath(one): size for one, size in sizes.items()}, mode)
    with worded(path), folder_of(target) as folder, only_writer(target, path) as alone:
        journal = read_journal(target)
        if journal is not None:
            finish_renames(target, journal)
            warn(f"{path}: {FINISHED}")
        for part in parts:
            part.old = refuse_target(part.path, overwrite=overwrite)
            if part.target != target:
                settle(part.target)
        if alone:
            _remove_debris(target)
        check_space(folder, sum(part.size for part in parts))
        with _cleared(target, parts):
            for part in parts:
                part.reserve()
            yield FileSet(parts, progress)
            for part in parts:
                part.check_finished(overwrite=overwrite)
            if check is not None:
                check()
            rename_all(target, [part.move() for part in parts])


class FileSet:
    """The files of a set while they are written, one after the other."""

    def __init__(self, parts: Sequence[_Part], progress: Progress | None) -> None:
        """Write the parts; `progress` is told of all of them."""
        self._parts = {part.path: part for part in parts}
        self._progress = progress
        self._size = sum(part.size for part in parts)
        self._done = 0

    @contextmanager
    def file(self, path: str | os.PathLike[str]) -> Iterator[FileOutput]:
        """The output for one of the files, which is on the disk when the block ends well.

        Raises:
            KeyError: it is none of the set.
            NoSpace: the disk is full.
            WriteError: more or fewer bytes came than were announced, or the system refuses it.
        """
        part = self._parts[os.fspath(path)]
        with worded(part.path), part.output(self._tell) as output:
            yield output
        self._done += part.size

    def _tell(self, done: int, _: int) -> None:
        if self._progress is not None:
            self._progress(self._done + done, self._size)


@dataclass(slots=True)
class _Part:
    """One file of a set while it is written."""

    path: str
    """As the caller names it."""
    target: str
    temporary: str
    size: int
    mode: int | None
    old: os.stat_result | None = None
    """The file that it replaces."""
    inode: int | None = None
    """Of the finished file."""

    def reserve(self) -> None:
        """Make the file, with all the space that it will take."""
        mode = self.mode if self.old is None else 0o600
        with (
            worded(self.path),
            open(self.temporary, "xb", buffering=0, opener=private(mode)) as file,
        ):
            reserve(file.fileno(), self.size)

    @contextmanager
    def output(self, progress: Progress) -> Iterator[FileOutput]:
        """Write it, to the disk when the block ends well."""
        with open(self.temporary, "r+b", buffering=0) as file:
            output = FileOutput(file.fileno(), self.size, progress, self.temporary)
            yield output
            seal(file, output, self.old, self.mode)
            self.inode = os.fstat(file.fileno()).st_ino

    def check_finished(self, *, overwrite: bool) -> None:
        """Refuse a file that did not come, and a target that appeared meanwhile."""
        if self.inode is None:
            raise WriteError("was announced and not written", file=self.path)
        self.old = refuse_target(self.path, overwrite=overwrite)

    def move(self) -> Move:
        """What is left to do for it."""
        names = os.path.basename(self.temporary), os.path.basename(self.target)
        return Move(*names, self.inode or 0, self.size, state_of(self.old))


@contextmanager
def _cleared(target: str, parts: Sequence[_Part]) -> Iterator[None]:
    """Where the block fails, no temporary file stays, unless a journal still needs it."""
    try:
        yield
    except BaseException:
        if not os.path.lexists(journal_path(target)):
            for part in parts:
                remove(part.temporary)
        raise


def _parts(target: str, sizes: Mapping[str, int], mode: int | None) -> list[_Part]:
    """The files, which lie in one folder, the index last."""
    token, parts = secrets.token_hex(6), []
    for number, (path, size) in enumerate(sizes.items(), 1):
        temporary = beside(target, f".ckptool-{token}-{number:05}.part")
        part = _Part(path, os.path.realpath(path), temporary, size, mode)
        if os.path.dirname(part.target) != os.path.dirname(target):
            raise UsageError(
                f"must be in the folder of the index, {os.path.dirname(target)}",
                file=path,
                hint="a link among the files may be what leads elsewhere",
            )
        parts.append(part)
    if len({part.target for part in parts}) != len(parts):
        raise UsageError("two files of the set are the same", file=target)
    if not parts or parts[-1].target != target:
        raise UsageError("must be the last file of its set", file=target)
    return parts


def _remove_debris(target: str) -> None:
    """Remove what killed runs left; the lock is ours and no journal needs it."""
    remove_unfinished(target)
    for found in found_beside(target, PART):
        remove(found)
