"""Renames that give several files their names together, and the end of a killed write."""

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
    unusable,
    write_journal,
)
from ckptool.files.system import allow_open_files, sync_folder, who
from ckptool.files.temporary import temporary_name
from ckptool.words import shell

KIND = "set"
"""What the journal of a set is called."""


FINISHED = "finished an interrupted write: the index and its files are all new"
"""What to say of an index whose journal has been carried out."""

PART = r"\.ckptool-[0-9a-f]{12}-[0-9]{5,}\.(?:part|whole)"
"""How the temporary names of a set end, behind that of the index."""


@dataclass(frozen=True, slots=True)
class PendingRename:
    """A finished file that gets its name, both names in the folder of the index."""

    temporary: str
    name: str
    inode: int
    size: int
    replaces: tuple[int, ...] | None
    """Inode, size and time of the file that has the name before."""

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], target: str) -> PendingRename:
        """Return what a journal says of one file.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: it says nothing of that kind.
        """
        temporary, name, old = str(facts["temporary"]), str(facts["name"]), facts["replaces"]
        beginning = os.path.basename(temporary_name(target, ""))
        if not re.fullmatch(re.escape(beginning) + PART, temporary):
            raise ValueError("not a temporary file of this set")
        if os.path.basename(name) != name or name in ("", os.curdir, os.pardir) or "\0" in name:
            raise ValueError("file in another folder")
        replaces = None if old is None else tuple(map(int, old))
        return cls(temporary, name, int(facts["inode"]), int(facts["size"]), replaces)

    def is_done(self, folder: str) -> bool:
        """Return whether the new file has its name."""
        return self._is_new(os.path.join(folder, self.name))

    def is_pending(self, folder: str) -> bool:
        """Return whether the new file waits for its name, and nobody else has taken that."""
        now = state_of(_status(os.path.join(folder, self.name)))
        return self._is_new(os.path.join(folder, self.temporary)) and now in (None, self.replaces)

    def carry_out(self, folder: str) -> None:
        """Rename it, if that is not done yet."""
        if not self.is_done(folder):
            os.replace(os.path.join(folder, self.temporary), os.path.join(folder, self.name))

    def take_back(self, folder: str) -> None:
        """Rename it back, if it has been renamed."""
        if self.is_done(folder):
            os.replace(os.path.join(folder, self.name), os.path.join(folder, self.temporary))

    def _is_new(self, path: str) -> bool:
        status = _status(path)
        return status is not None and (status.st_ino, status.st_size) == (self.inode, self.size)


def rename_all(target: str, moves: Sequence[PendingRename]) -> None:
    """Give all files their names, or none; from the journal on, a kill changes nothing about that.

    Raises:
        FileBusy: another process is settling what happened to the index before, or editing one of
            the files.
        OSError: the system does not let us.
    """
    folder = os.path.dirname(target)
    sync_folder(folder)  # no journal without the files that it tells about
    with ExitStack() as stack:
        # Who opens the index must not take the journal for one that a kill left half written, and
        # nobody is to edit a file that is just being replaced.
        allow_open_files(len(moves))
        for move in moves:
            stack.enter_context(hold_edit_lock(os.path.join(folder, move.name)))
        try:
            write_journal(target, Journal(KIND, {"files": [asdict(move) for move in moves]}))
            _carry_out(target, moves)
            with suppress(OSError):  # all files are there: whoever opens the index removes it
                remove_journal(target)
        except BaseException:
            _end(target, moves)
            raise


def finish_renames(target: str, journal: Journal) -> None:
    """Carry out what the journal of `target` says, for one who has the lock on the set.

    Raises:
        CorruptFile: it tells of no set, or a file has been changed since; no file was touched.
        OSError: the system does not let us rename them.
    """
    folder, moves = os.path.dirname(target), _moves(target, journal)
    for move in moves:
        if not move.is_done(folder) and not move.is_pending(folder):
            raise unusable(
                target,
                f"{move.name} was changed or removed after the write of this index and its "
                "files was interrupted; no file was touched",
            )
    _carry_out(target, moves)
    remove_journal(target)


def state_of(status: os.stat_result | None) -> tuple[int, ...] | None:
    """Return what tells a file from others and from what it was before; None: there is none."""
    return None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def _moves(target: str, journal: Journal) -> list[PendingRename]:
    try:
        if journal.kind != KIND:
            raise ValueError("other kind")
        return [PendingRename.from_facts(facts, target) for facts in journal.facts["files"]]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise unusable(target) from error


def _carry_out(target: str, moves: Sequence[PendingRename]) -> None:
    folder = os.path.dirname(target)
    for move in moves:
        move.carry_out(folder)
    sync_folder(folder)


def _end(target: str, moves: Sequence[PendingRename]) -> None:
    """After an interruption: all is taken back, or all is done where an old file is gone already.

    Where the system refuses that too, the journal stays for who opens the index next.
    """
    folder = os.path.dirname(target)
    with suppress(OSError):
        if any(move.replaces is not None and move.is_done(folder) for move in moves):
            _carry_out(target, moves)
        else:
            for move in moves:
                move.take_back(folder)
        remove_journal(target)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def recover_set(path: str | os.PathLike[str], journal: Journal) -> None:
    """Finish the write of a set that was cut short when its files were being renamed.

    `journal` is what `read_journal` gave for the index at `path`; nothing is done where it has
    been recovered by another process meanwhile.

    Raises:
        FileBusy: another process is writing the set, and alive.
        CorruptFile: the journal tells of no set, or a file has been changed since; no file was
            touched.
        WriteDenied: the system does not let us rename the files.
    """
    path, target = os.fspath(path), os.path.realpath(path)
    try:
        with only_writer(target, path):
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


def only_writer(target: str, path: str) -> AbstractContextManager[bool]:
    """Hold a lock on the set; the block gets whether there is such a thing on this system.

    It is on a file of its own, since the index may not be there yet, and is another one afterwards.
    """
    return lock_file(
        temporary_name(target, LOCK),
        lambda pid: FileBusy(
            f"is being written with its files by {who(pid)}",
            file=path,
            hint="try again when it has finished",
        ),
    )
