"""Recover from an interrupted edit, when the file is opened next or with `recover`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from time import sleep
from typing import Any, TypeVar

from ckptool._lazy import Result
from ckptool.errors import FileBusy, FileMissing, UsageError, WriteError, warn
from ckptool.files.editing import EDIT_KIND, Edit, EditState
from ckptool.files.journal import open_locked, read_journal, remove_journal, remove_unfinished
from ckptool.files.renames import FINISHED, recover_set
from ckptool.files.source import FileSource
from ckptool.files.system import convert_os_errors
from ckptool.files.temporary import has_journal
from ckptool.words import shell

_Got = TypeVar("_Got")

_PAUSES = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.4)
"""Seconds between two attempts to get the lock: an edit takes less than their sum."""


@dataclass(frozen=True, slots=True, repr=False)
class Recovery(Result):
    """The result of `recover`."""

    path: str
    """The edited file."""
    action: str
    """`nothing` (no journal), `rolled-back` (the file is as before the edit), `completed` (all of
    the edit is in it), `discarded` (the journal is gone, the file untouched)."""
    text: str
    """The same as a clause without a full stop."""

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.recover/1`."""
        return {
            "schema": "ckptool.recover/1",
            "file": self.path,
            "action": self.action,
            "text": self.text,
        }


def open_recovered(path: str) -> FileSource:
    """Recover a file that has a journal, and open it for reading; warn with the outcome.

    If its folder cannot be written, the file reads as before an edit that is not complete.

    Raises:
        FileMissing, FileBusy, CorruptFile, UnreadableFile: as `open_source`.
    """
    if _finish_set(path):
        warn(f"{path}: {FINISHED}")
        return FileSource(path)
    with _lock_patiently(path) as fd:
        edit = _read_edit(path)
        if edit is None:
            return FileSource(path)
        state = edit.state(fd, path)
        try:
            _check_access(path)
            _settle_edit(edit, state, fd)
        except OSError:  # no write permission, for example
            if state is not EditState.INTERRUPTED:  # the content is right; the journal stays
                return FileSource(path)
            warn(f"{path}: reading its {_describe_old(edit)}, which cannot be restored here")
            return FileSource(path, size=edit.size, head=edit.old)
        with suppress(OSError):  # the next reader finds the edit settled, and removes it
            remove_journal(path)
        _, text = _describe_outcome(edit, state)
        warn(f"{path}: {text}")
        return FileSource(path)


def recover_before_writing(path: str | os.PathLike[str]) -> None:
    """Recover a file that is about to be replaced.

    Raises:
        FileBusy: another process is editing it.
        CorruptFile: its journal is damaged or belongs to other content; nothing was changed.
        WriteError: the file of the journal is missing.
    """
    path = os.fspath(path)
    if not has_journal(path):
        return
    try:
        recovery = recover(path)
    except FileMissing as error:
        remove_unfinished(path)  # the file was not changed yet by this edit
        if not has_journal(path):
            return
        raise WriteError(
            "an edit was interrupted, and the edited file is gone",
            file=path,
            hint=f"ckptool recover --discard {shell(path)}",
        ) from error
    if recovery.action != "nothing":
        warn(f"{recovery.path}: {recovery.text}")


def recover(
    path: str | os.PathLike[str], *, discard: bool = False, force: bool = False
) -> Recovery:
    """Finish or roll back an interrupted edit of a file, and return the result.

    Args:
        path: The file.
        discard: Only remove the journal of the edit; do not change the file.
        force: Accept a file that was copied or moved with its journal, as the edit left it.

    Raises:
        FileMissing: the file does not exist.
        FileBusy: another process is editing the file; the message has its number.
        CorruptFile: the journal is damaged, or belongs to other content; nothing was changed.
        WriteDenied, WriteError: writing fails.
    """
    path = os.fspath(path)
    nothing = Recovery(path, "nothing", "nothing to recover")
    with convert_os_errors(path):
        if discard and force:
            raise UsageError("discard and force cannot be combined", hint="choose one of them")
        if not discard and _finish_set(path):  # `path` is the index of a set of files
            return Recovery(path, "completed", FINISHED)
        file_exists = os.path.exists(path)
        if not (discard or file_exists):
            raise FileMissing("no such file", file=path)
        if not has_journal(path):
            return nothing
        # -1: a missing file has no lock, and only its journal can be discarded.
        with _lock_patiently(path) if file_exists else nullcontext(-1) as fd:
            if discard:
                remove_unfinished(path)
                remove_journal(path)
                text = "removed the journal of an interrupted edit; the file is unchanged"
                return Recovery(path, "discarded", text)
            edit = _read_edit(path)
            if edit is None:  # the journal was unfinished: the file was not changed yet
                return nothing
            state = edit.state(fd, path, is_moved=force)
            _check_access(path)
            _settle_edit(edit, state, fd)
            remove_journal(path)
        return Recovery(path, *_describe_outcome(edit, state))


def _settle_edit(edit: Edit, state: EditState, fd: int) -> None:
    """Undo an incomplete edit; sync a complete one before the journal is removed."""
    if state is EditState.INTERRUPTED:
        edit.undo(fd)
    else:
        os.fsync(fd)


def _read_edit(path: str) -> Edit | None:
    """Return the edit in the journal of a locked file, or None; remove an unfinished journal."""
    remove_unfinished(path)
    journal = read_journal(path)
    return None if journal is None else Edit.from_journal(journal, path)


def _describe_outcome(edit: Edit, state: EditState) -> tuple[str, str]:
    """Return the action and the text of the `Recovery` from an edit in this state."""
    if state is EditState.NEW:
        return "completed", f"kept the interrupted edit of process {edit.pid}, which was complete"
    return "rolled-back", f"rolled back to its {_describe_old(edit)}"


def _describe_old(edit: Edit) -> str:
    """Return words for the content before an edit."""
    return f"{edit.size:,} bytes from before the interrupted edit of process {edit.pid}"


def _finish_set(path: str) -> bool:
    """Finish the write of the set with the index `path`, if its journal describes one.

    Return False if it has no journal, or that of an edit.
    """
    journal = read_journal(path)
    if journal is None or journal.kind == EDIT_KIND:
        return False
    _retry_while_busy(lambda: recover_set(path, journal))
    return True


@contextmanager
def _lock_patiently(path: str) -> Iterator[int]:
    """Yield a descriptor of the file, locked for the block; wait for other processes."""
    with ExitStack() as stack:
        yield _retry_while_busy(lambda: stack.enter_context(open_locked(path)))


def _retry_while_busy(attempt: Callable[[], _Got]) -> _Got:
    """Return the result of `attempt`; wait for the edit of another process."""
    for pause in _PAUSES:
        try:
            return attempt()
        except FileBusy:
            sleep(pause)
    return attempt()


def _check_access(path: str) -> None:
    """Refuse a recovery that could not be finished, for example in a read-only folder."""
    folder = os.path.dirname(os.path.realpath(path))
    if not (os.access(path, os.W_OK) and os.access(folder, os.W_OK)):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
