"""A file changed where it lies: bytes put behind its end, or over its head.

A journal is on the disk before the first byte. It says what the file was and what it is to become,
so that an edit that was cut short can be told from a file that has nothing to do with it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from ckptool.errors import CheckpointError, CorruptFile, WriteDenied, WriteError
from ckptool.files.journal import (
    Journal,
    exclusive,
    leads_to,
    refuse_cut_short,
    remove_journal,
    unusable,
    write_journal,
)
from ckptool.files.source import Source, read_at
from ckptool.files.system import boot_id, check_space, worded, write_at
from ckptool.words import shell

KIND = "edit"
"""What the journal of an edit is called."""

SECTOR = 512
"""A disk writes so many bytes, aligned in the file, or none of them."""

_NUMBERS = ("device", "inode", "size", "offset")
"""The facts of a journal besides the hash."""

_TAIL = 64 << 10
"""Bytes at the end of the old file by which it is known again."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Bytes that go into a file at `offset`: its length (they are appended), or 0 (its head)."""

    offset: int
    data: bytes


class EditState(Enum):
    """How far an edit went."""

    OLD = "the file is unchanged"
    CUT = "the file has part of the edit"
    NEW = "the file has the whole edit"


@dataclass(frozen=True, slots=True)
class Edit:
    """A patch to a certain file: what is known of that file, the bytes before and after."""

    device: int
    inode: int
    size: int
    """Bytes of the file before the edit."""
    tail: str
    """SHA-256 of the last bytes before the edit, as far as it leaves them alone."""
    offset: int
    old: bytes
    """What lay in the place of `new`; empty where that was behind the end."""
    new: bytes
    pid: int = field(default_factory=os.getpid)
    """The process that edits, or did."""
    boot: str = field(default_factory=boot_id)
    """The run of the system in which it does: then device numbers and processes are the same."""

    @classmethod
    def of(cls, fd: int, patch: Patch) -> Edit:
        """Return the edit that brings `patch` into the open file.

        Raises:
            WriteError: the patch begins neither at the end of the file nor at its beginning, or is
                longer than what it is to replace.
        """
        status = os.fstat(fd)
        size = status.st_size
        if patch.offset != size and (patch.offset or len(patch.data) > size):
            raise WriteError(
                f"cannot put {len(patch.data):,} bytes at {patch.offset:,} of a file of "
                f"{size:,} bytes"
            )
        old = read_at(fd, patch.offset, min(len(patch.data), size - patch.offset))
        tail = _tail(fd, size, patch.offset, len(old))
        return cls(status.st_dev, status.st_ino, size, tail, patch.offset, old, patch.data)

    @classmethod
    def from_journal(cls, journal: Journal, path: str) -> Edit:
        """Return the edit that a journal tells of.

        Raises:
            CorruptFile: it tells of none.
        """
        try:
            numbers = [int(journal.facts[key]) for key in _NUMBERS]
            device, inode, size, offset = numbers
            old, new = journal.blobs
            tail = str(journal.facts["tail"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise unusable(path) from error
        fits = offset in (0, size) and len(old) == min(len(new), size - offset)
        if journal.kind != KIND or not fits:
            raise unusable(path)
        return cls(device, inode, size, tail, offset, old, new, journal.pid, journal.boot)

    @property
    def new_size(self) -> int:
        """Bytes of the file after the edit."""
        return max(self.size, self.offset + len(self.new))

    def to_journal(self) -> Journal:
        """Return what must be on the disk before the edit begins."""
        facts = {key: getattr(self, key) for key in (*_NUMBERS, "tail")}
        return Journal(KIND, facts, (self.old, self.new), self.pid, self.boot)

    def state(self, fd: int, path: str, *, moved: bool = False) -> EditState:
        """Return how far this edit went in the open file, which is at `path`.

        `moved` allows it to be a copy of the file that was edited, if its content is what the edit
        left.

        Raises:
            CorruptFile: the file is another one, or something else has been done to it.
        """
        if not moved and not self._is_of(os.fstat(fd)):
            raise self._stranger(fd, path)
        status = os.fstat(fd)
        if not self.size <= status.st_size <= self.new_size:
            raise _foreign(path, f"size is {status.st_size:,}, expected {self.size:,}")
        if _tail(fd, self.size, self.offset, len(self.old)) != self.tail:
            raise _foreign(path, f"the bytes before {self.size:,} differ")
        found = read_at(fd, self.offset, min(len(self.new), status.st_size - self.offset))
        if found == self.old and status.st_size == self.size:
            return EditState.OLD
        if found == self.new and status.st_size == self.new_size:
            return EditState.NEW
        self._check_sectors(found, path)
        return EditState.CUT

    def _stranger(self, fd: int, path: str) -> CorruptFile:
        """Return the error for a file that is not the one that was edited: a copy of it, say."""
        with suppress(CorruptFile):
            if self.state(fd, path, moved=True) is EditState.CUT:
                return _moved(path)
        return _foreign(path, "the file was replaced")

    def _is_of(self, status: os.stat_result) -> bool:
        """Return whether it is the file that was edited."""
        # The system may number its devices otherwise after a restart.
        moved = self.boot == boot_id() and status.st_dev != self.device
        return status.st_ino == self.inode and not moved

    def apply(self, fd: int) -> None:
        """Put the new bytes in and wait until they are on the disk."""
        write_at(fd, self.new, self.offset)
        os.fsync(fd)

    def undo(self, fd: int) -> None:
        """Put the old bytes back and wait until that is on the disk."""
        if os.fstat(fd).st_size != self.size:
            os.ftruncate(fd, self.size)
        write_at(fd, self.old, self.offset)
        os.fsync(fd)

    def _check_sectors(self, found: bytes, path: str) -> None:
        """Refuse what neither a kill nor a loss of power can make of the old and the new bytes.

        A sector is new, or still old (zeros, behind the old end); in one of them at most, the
        write broke off.
        """
        before = self.old.ljust(len(self.new), b"\0")
        start, torn = 0, 0
        while start < len(found):
            stop = min(start + SECTOR - (self.offset + start) % SECTOR, len(found))
            piece, old, new = (part[start:stop] for part in (found, before, self.new))
            if piece not in (old, new):
                torn += 1
                if torn > 1 or not _broke_off(piece, old, new):
                    at = self.offset + start
                    raise _foreign(
                        path, f"the bytes at {at:,} are neither the old nor the new ones"
                    )
            start = stop


def _broke_off(piece: bytes, old: bytes, new: bytes) -> bool:
    """Return whether `piece` begins as `new` and goes on as `old`."""
    begun = next((i for i, (a, b) in enumerate(zip(piece, new, strict=True)) if a != b), len(piece))
    return piece[begun:] == old[begun:]


def apply_patch(
    source: Source,
    patch: Patch,
    *,
    path: str | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Edit the file that `source` has read; whatever goes wrong leaves it as it was.

    After a kill, the next one who opens the file (`recovery.open_source`) sets it right.

    Args:
        source: Still open. What it has read of tensors stays true.
        patch: What to put in, and where.
        path: Where the file is, if not at `source.name`; links are resolved.
        check: Called when the edit is on the disk; what it raises takes the edit back.

    Raises:
        FileBusy: another process is editing it; the message names that one.
        UnreadableFile: it has been written to since it was read.
        NoSpace: the disk cannot hold the result.
        WriteDenied: the system does not let us write to the file, or a journal beside it.
        WriteError: another file is at its place, or another refusal of the system.
    """
    path = path or source.name
    with worded(path), exclusive(path) as fd:
        _check_target(source, path, fd)
        edit = Edit.of(fd, patch)
        growth = edit.new_size - edit.size
        folder = os.path.dirname(os.path.realpath(path))
        check_space(folder, growth + len(edit.old) + len(edit.new))
        try:
            write_journal(path, edit.to_journal())
            edit.apply(fd)
            if check is not None:
                check()
        except BaseException:
            _take_back(edit, path, fd)
            raise
        source.take_as_it_is()
        with suppress(OSError):  # all of the edit is there: whoever opens the file removes it
            remove_journal(path)


def _check_target(source: Source, path: str, fd: int) -> None:
    """Refuse to edit a file that is not, or not any more, the one that was read."""
    if not os.access(path, os.W_OK):
        raise WriteDenied(
            "no write permission", hint="write the result to another file with -o FILE"
        )
    if not leads_to(path, source.fd() or -1):
        raise WriteError(
            "the file was replaced during the edit; nothing was written",
            hint="write the result to another file with -o FILE",
        )
    source.check_unchanged()
    refuse_cut_short(path)


def _take_back(edit: Edit, path: str, fd: int) -> None:
    """Undo what was done; where the system refuses that too, the journal stays for a recovery."""
    with suppress(OSError, CheckpointError):
        if edit.state(fd, path) is not EditState.OLD:
            edit.undo(fd)
        remove_journal(path)


def _tail(fd: int, size: int, offset: int, length: int) -> str:
    """Hash of the last bytes before `size` that are not among the `length` ones from `offset`."""
    first = max(size - _TAIL, 0 if offset == size else offset + length)
    return hashlib.sha256(read_at(fd, first, max(size - first, 0))).hexdigest()


def _moved(path: str) -> CorruptFile:
    return CorruptFile(
        "an in-place edit was interrupted, and the file was then copied or moved; nothing "
        "was changed",
        file=path,
        hint=f"roll back this copy: ckptool recover --force {shell(path)}",
    )


def _foreign(path: str, why: str) -> CorruptFile:
    return CorruptFile(
        f"the journal next to it belongs to other content ({why}); nothing was changed",
        file=path,
        hint=f"keep the file as it is: ckptool recover --discard {shell(path)}",
    )
