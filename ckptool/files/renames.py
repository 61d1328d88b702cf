"""Rename the files of a set together, and finish the renames of a killed write."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any

from ckptool.errors import CheckpointError, FileBusy, WriteDenied
from ckptool.files.journal import (
    LOCK,
    Journal,
    hold_edit_lock,
    lock_file,
    read_journal,
    remove_journal,
    unusable_error,
    write_journal,
)
from ckptool.files.system import allow_open_files, describe_process, sync_folder
from ckptool.files.temporary import temporary_name
from ckptool.words import shell

SET_KIND = "set"
"""The kind of the journal of a set."""


FINISHED = "finished an interrupted write: the index and its files are all new"
"""The message about an index with a journal that was carried out."""

PART = r"\.ckptool-[0-9a-f]{12}-[0-9]{5,}\.(?:part|whole)"
"""The pattern of a set's temporary names, after the name of the index."""


@dataclass(frozen=True, slots=True)
class PendingRename:
    """A finished file and its new name, both in the folder of the index."""

    temporary: str
    name: str
    inode: int
    size: int
    replaces: tuple[int, ...] | None
    """Inode, size and time of the file that is replaced."""

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], target: str) -> PendingRename:
        """Return the rename of one file in a journal.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: the facts do not describe a rename.
        """
        temporary, name, old = str(facts["temporary"]), str(facts["name"]), facts["replaces"]
        prefix = os.path.basename(temporary_name(target, ""))
        if not re.fullmatch(re.escape(prefix) + PART, temporary):
            raise ValueError("not a temporary file of this set")
        if os.path.basename(name) != name or name in ("", os.curdir, os.pardir) or "\0" in name:
            raise ValueError("file in another folder")
        replaces = None if old is None else tuple(map(int, old))  # None: it replaces no file
        return cls(temporary, name, int(facts["inode"]), int(facts["size"]), replaces)

    def is_done(self, folder: str) -> bool:
        """Return True if the new file has its final name."""
        return self._is_new(os.path.join(folder, self.name))

    def is_pending(self, folder: str) -> bool:
        """Return True if the new file has its temporary name; an old file must be unchanged."""
        is_temporary = self._is_new(os.path.join(folder, self.temporary))
        current_state = state_of(_try_lstat(os.path.join(folder, self.name)))
        return is_temporary and current_state in (None, self.replaces)

    def carry_out(self, folder: str) -> None:
        """Rename the new file to its final name, unless that is done."""
        if not self.is_done(folder):
            os.replace(os.path.join(folder, self.temporary), os.path.join(folder, self.name))

    def take_back(self, folder: str) -> None:
        """Rename the new file back to its temporary name, if it was renamed."""
        if self.is_done(folder):
            os.replace(os.path.join(folder, self.name), os.path.join(folder, self.temporary))

    def _is_new(self, path: str) -> bool:
        """Return True if the file at `path` is the new file."""
        status = _try_lstat(path)
        return status is not None and (status.st_ino, status.st_size) == (self.inode, self.size)


def rename_all(target: str, moves: Sequence[PendingRename]) -> None:
    """Rename all files or none; once the journal is written, also after a kill.

    Raises:
        FileBusy: another process is recovering the index, or editing one of the files.
        OSError: a system call fails.
    """
    folder = os.path.dirname(target)
    sync_folder(folder)  # the files must be on the disk before a journal that lists them
    with ExitStack() as stack:
        # A reader of the index must not take the journal for one that a kill left unfinished, and
        # no process may edit a file that is just being replaced.
        allow_open_files(len(moves))
        for move in moves:
            stack.enter_context(hold_edit_lock(os.path.join(folder, move.name)))
        try:
            write_journal(target, Journal(SET_KIND, {"files": [asdict(move) for move in moves]}))
            _carry_out_all(target, moves)
            with suppress(OSError):  # all renamed: the next reader of the index removes it
                remove_journal(target)
        except BaseException:
            _settle_renames(target, moves)
            raise


def finish_renames(target: str, journal: Journal) -> None:
    """Carry out the renames in the journal of `target`; the caller has the lock on the set.

    Raises:
        CorruptFile: it does not describe a set, or a file has changed; no file was touched.
        OSError: a rename fails.
    """
    folder, moves = os.path.dirname(target), _parse_moves(target, journal)
    for move in moves:
        if not move.is_done(folder) and not move.is_pending(folder):
            raise unusable_error(
                target,
                f"{move.name} was changed or removed after the write of this index and its "
                "files was interrupted; no file was touched",
            )
    _carry_out_all(target, moves)
    remove_journal(target)


def state_of(status: os.stat_result | None) -> tuple[int, ...] | None:
    """Return the inode, size and time of a file from its status; None if it does not exist."""
    return None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def _parse_moves(target: str, journal: Journal) -> list[PendingRename]:
    """Return the renames in a journal; refuse a journal of another kind."""
    try:
        if journal.kind != SET_KIND:
            raise ValueError("other kind")
        return [PendingRename.from_facts(facts, target) for facts in journal.facts["files"]]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise unusable_error(target) from error


def _carry_out_all(target: str, moves: Sequence[PendingRename]) -> None:
    """Carry out all renames that are not done, and sync the folder."""
    folder = os.path.dirname(target)
    for move in moves:
        move.carry_out(folder)
    sync_folder(folder)


def _settle_renames(target: str, moves: Sequence[PendingRename]) -> None:
    """After an interruption, undo all renames, or finish them if a replaced file is already gone.

    If that fails too, the journal stays for the next reader of the index.
    """
    folder = os.path.dirname(target)
    with suppress(OSError):
        if any(move.replaces is not None and move.is_done(folder) for move in moves):
            _carry_out_all(target, moves)
        else:
            for move in moves:
                move.take_back(folder)
        remove_journal(target)


def _try_lstat(path: str) -> os.stat_result | None:
    """Return the status of a file; None if it does not exist."""
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def recover_set(path: str | os.PathLike[str], journal: Journal) -> None:
    """Finish the write of a set that was interrupted between its renames.

    `journal` is the result of `read_journal` for the index at `path`; nothing is done if another
    process has recovered the set.

    Raises:
        FileBusy: another process is writing the set.
        CorruptFile: the journal does not describe a set, or a file has changed; no file was
            touched.
        WriteDenied: the files cannot be renamed.
    """
    path, target = os.fspath(path), os.path.realpath(path)
    try:
        with hold_set_lock(target, path):
            if read_journal(target) == journal:
                finish_renames(target, journal)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise WriteDenied(
            "the write of this index and its files was interrupted and cannot be finished "
            f"here ({error.strerror or error})",
            file=path,
            hint=f"run ckptool recover {shell(path)} as a user who can write to the folder",
        ) from error


def hold_set_lock(target: str, path: str) -> AbstractContextManager[bool]:
    """Lock the set; yield True if the system supports locks.

    It is a separate lock file, since the index may not exist yet, and is replaced.
    """
    return lock_file(
        temporary_name(target, LOCK),
        lambda pid: FileBusy(
            f"is being written with its files by {describe_process(pid)}",
            file=path,
            hint="try again when it has finished",
        ),
    )
