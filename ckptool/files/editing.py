"""Edit a file in place: append bytes, or overwrite its beginning.

A journal is on the disk before the first byte is written. It records the file before and after the
edit, so that an interrupted edit can be distinguished from an unrelated file.
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
    is_path_of,
    open_locked,
    refuse_interrupted,
    remove_journal,
    unusable_error,
    write_journal,
)
from ckptool.files.source import Source, read_at
from ckptool.files.system import boot_id, check_space, convert_os_errors, write_at
from ckptool.words import shell

EDIT_KIND = "edit"
"""The kind of the journal of an edit."""

SECTOR = 512
"""Bytes, aligned in the file, that a disk writes completely or not at all."""

_NUMBER_FACTS = ("device", "inode", "size", "offset")
"""The facts of a journal except the hash."""

_HASHED_BYTES = 64 << 10
"""Bytes at the end of the old file that identify it."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Bytes to write at `offset`: the length of the file (append), or 0 (overwrite)."""

    offset: int
    data: bytes


class EditState(Enum):
    """The progress of an edit."""

    OLD = "the file is unchanged"
    INTERRUPTED = "the file has part of the edit"
    NEW = "the file has the whole edit"


@dataclass(frozen=True, slots=True)
class Edit:
    """A patch of one file: the identity of the file, and the bytes before and after."""

    device: int
    inode: int
    size: int
    """Size of the file before the edit."""
    tail: str
    """SHA-256 of the last bytes before the edit that the edit does not change."""
    offset: int
    old: bytes
    """The bytes that `new` replaces; empty if it is appended."""
    new: bytes
    pid: int = field(default_factory=os.getpid)
    """The process of the edit."""
    boot: str = field(default_factory=boot_id)
    """The boot of the system, for which device and process numbers are valid."""

    @classmethod
    def from_patch(cls, fd: int, patch: Patch) -> Edit:
        """Return the edit that applies `patch` to the open file.

        Raises:
            WriteError: the patch begins neither at the end of the file nor at its beginning, or is
                longer than the bytes that it replaces.
        """
        status = os.fstat(fd)
        size = status.st_size
        appends = patch.offset == size
        overwrites_start = patch.offset == 0 and len(patch.data) <= size
        if not (appends or overwrites_start):
            raise WriteError(
                f"cannot put {len(patch.data):,} bytes at {patch.offset:,} of a file of "
                f"{size:,} bytes"
            )
        old = read_at(fd, patch.offset, min(len(patch.data), size - patch.offset))
        kept_hash = _hash_tail(fd, size, patch.offset, len(old))
        return cls(status.st_dev, status.st_ino, size, kept_hash, patch.offset, old, patch.data)

    @classmethod
    def from_journal(cls, journal: Journal, path: str) -> Edit:
        """Return the edit that a journal describes.

        Raises:
            CorruptFile: it does not describe an edit.
        """
        try:
            numbers = [int(journal.facts[key]) for key in _NUMBER_FACTS]
            device, inode, size, offset = numbers
            old, new = journal.blobs
            tail = str(journal.facts["tail"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise unusable_error(path) from error
        # An edit appends, or overwrites the beginning: `old` has the bytes that it overwrites.
        is_patch = offset in (0, size) and len(old) == min(len(new), size - offset)
        if journal.kind != EDIT_KIND or not is_patch:
            raise unusable_error(path)
        return cls(device, inode, size, tail, offset, old, new, journal.pid, journal.boot)

    @property
    def new_size(self) -> int:
        """Size of the file after the edit."""
        return max(self.size, self.offset + len(self.new))

    def to_journal(self) -> Journal:
        """Return the journal, which must be on the disk before the edit begins."""
        facts = {key: getattr(self, key) for key in (*_NUMBER_FACTS, "tail")}
        return Journal(EDIT_KIND, facts, (self.old, self.new), self.pid, self.boot)

    def state(self, fd: int, path: str, *, is_moved: bool = False) -> EditState:
        """Return the progress of this edit in the open file, which is at `path`.

        `is_moved` also accepts a copy of the edited file, with the content that the edit left. The
        bytes before the edit, hashed, and its size identify the content.

        Raises:
            CorruptFile: it is another file, or it was changed in another way.
        """
        if not is_moved and not self._is_same_file(os.fstat(fd)):
            raise self._other_file_error(fd, path)
        status = os.fstat(fd)
        if not self.size <= status.st_size <= self.new_size:
            raise _other_content_error(path, f"size is {status.st_size:,}, expected {self.size:,}")
        if _hash_tail(fd, self.size, self.offset, len(self.old)) != self.tail:
            raise _other_content_error(path, f"the bytes before {self.size:,} differ")
        # The bytes that the edit may have written so far.
        content = read_at(fd, self.offset, min(len(self.new), status.st_size - self.offset))
        if content == self.old and status.st_size == self.size:
            return EditState.OLD
        if content == self.new and status.st_size == self.new_size:
            return EditState.NEW
        self._check_sectors(content, path)  # raises CorruptFile if the edit cannot leave it so
        return EditState.INTERRUPTED

    def _other_file_error(self, fd: int, path: str) -> CorruptFile:
        """Return the error for a file other than the edited one: a copy of it, or another."""
        with suppress(CorruptFile):
            if self.state(fd, path, is_moved=True) is EditState.INTERRUPTED:
                return _moved_error(path)
        return _other_content_error(path, "the file was replaced")

    def _is_same_file(self, status: os.stat_result) -> bool:
        """Return True if the open file is the edited file."""
        # Device numbers may change with a restart.
        is_other_device = self.boot == boot_id() and status.st_dev != self.device
        return status.st_ino == self.inode and not is_other_device

    def apply(self, fd: int) -> None:
        """Write the new bytes and wait until they are on the disk."""
        write_at(fd, self.new, self.offset)
        os.fsync(fd)

    def undo(self, fd: int) -> None:
        """Restore the old bytes and wait until they are on the disk."""
        if os.fstat(fd).st_size != self.size:
            os.ftruncate(fd, self.size)
        write_at(fd, self.old, self.offset)
        os.fsync(fd)

    def _check_sectors(self, content: bytes, path: str) -> None:
        """Refuse content that neither a kill nor a power loss can leave.

        A sector is new, or still old (zeros after the old end); the write stopped within at most
        one of them, which is torn.
        """
        padded_old = self.old.ljust(len(self.new), b"\0")
        start, torn_count = 0, 0
        while start < len(content):
            # The first part may begin within a sector of the file.
            stop = min(start + SECTOR - (self.offset + start) % SECTOR, len(content))
            sector, old, new = content[start:stop], padded_old[start:stop], self.new[start:stop]
            if sector not in (old, new):
                torn_count += 1
                if torn_count > 1 or not _is_torn(sector, old, new):
                    position = self.offset + start
                    raise _other_content_error(
                        path, f"the bytes at {position:,} are neither the old nor the new ones"
                    )
            start = stop


def _is_torn(sector: bytes, old: bytes, new: bytes) -> bool:
    """Return True if a sector begins as `new` and continues as `old`."""
    first_difference = next(
        (i for i, (a, b) in enumerate(zip(sector, new, strict=True)) if a != b), len(sector)
    )
    return sector[first_difference:] == old[first_difference:]


def apply_patch(
    source: Source,
    patch: Patch,
    *,
    path: str | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Edit the file of `source` in place; an error leaves the file unchanged.

    After a kill, the next reader of the file (`local.open_source`) recovers it.

    Args:
        source: The open file. Tensor ranges that it has read stay valid.
        patch: The bytes to write, and where.
        path: The path of the file, if it is not `source.name`; links are followed.
        check: Called when the edit is on the disk; if it raises, the edit is undone.

    Raises:
        FileBusy: another process is editing it; the message has its number.
        UnreadableFile: it has changed since it was read.
        NoSpace: the disk cannot hold the result.
        WriteDenied: no permission to write the file, or the journal next to it.
        WriteError: the file was replaced, or another system error.
    """
    path = path or source.name
    with convert_os_errors(path), open_locked(path) as fd:
        _check_target(source, path)
        edit = Edit.from_patch(fd, patch)
        growth = edit.new_size - edit.size
        folder = os.path.dirname(os.path.realpath(path))
        journal_size = len(edit.old) + len(edit.new)
        check_space(folder, growth + journal_size)
        try:
            write_journal(path, edit.to_journal())
            edit.apply(fd)
            if check is not None:
                check()
        except BaseException:
            _undo_edit(edit, path, fd)
            raise
        source.accept_current_state()
        with suppress(OSError):  # the edit is complete: the next reader removes the journal
            remove_journal(path)


def _check_target(source: Source, path: str) -> None:
    """Refuse to edit a file that is no longer the one that was read."""
    if not os.access(path, os.W_OK):
        raise WriteDenied(
            "no write permission", hint="write the result to another file with -o FILE"
        )
    fd_of_source = source.fd()
    if fd_of_source is None or not is_path_of(path, fd_of_source):
        raise WriteError(
            "the file was replaced during the edit; nothing was written",
            hint="write the result to another file with -o FILE",
        )
    source.check_unchanged()
    refuse_interrupted(path)


def _undo_edit(edit: Edit, path: str, fd: int) -> None:
    """Undo the edit; if that fails too, the journal stays for a recovery."""
    with suppress(OSError, CheckpointError):
        if edit.state(fd, path) is not EditState.OLD:
            edit.undo(fd)
        remove_journal(path)


def _hash_tail(fd: int, size: int, offset: int, length: int) -> str:
    """Return the SHA-256 of the last bytes that an edit keeps of a file of `size` bytes.

    The edit appends bytes (`offset` is `size`), or replaces `length` bytes at `offset`, which is 0.
    """
    first_kept = 0 if offset == size else offset + length
    first = max(size - _HASHED_BYTES, first_kept)
    return hashlib.sha256(read_at(fd, first, size - first)).hexdigest()


def _moved_error(path: str) -> CorruptFile:
    """Return the error for a copy of a file with an interrupted edit."""
    return CorruptFile(
        "an in-place edit was interrupted, and the file was then copied or moved; nothing "
        "was changed",
        file=path,
        hint=f"roll back this copy: ckptool recover --force {shell(path)}",
    )


def _other_content_error(path: str, difference: str) -> CorruptFile:
    """Return the error for a journal that belongs to other content than the file has."""
    return CorruptFile(
        f"the journal next to it belongs to other content ({difference}); nothing was changed",
        file=path,
        hint=f"keep the file as it is: ckptool recover --discard {shell(path)}",
    )
