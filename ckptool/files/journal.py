"""The journal of an in-place edit, and the locks of writers."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    FileBusy,
    FileDenied,
    FileMissing,
    WriteError,
)
from ckptool.files.source import ByteRange, FileSource, open_descriptor
from ckptool.files.system import (
    boot_id,
    convert_os_errors,
    describe_process,
    hand_over,
    is_running,
    lock_holder,
    make_opener,
    sync_folder,
    try_lock,
    write_at,
)
from ckptool.files.temporary import UNFINISHED, journal_path
from ckptool.limits import DEFAULT_LIMITS
from ckptool.words import shell

VERSION = 1
_LINE_BYTES = 64 << 20
"""The longest first line: a thousand times what a set of a thousand files needs."""
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Journal:
    """A pending operation on a file: JSON facts and their bytes."""

    kind: str
    facts: Mapping[str, Any]
    blobs: tuple[bytes, ...] = ()
    pid: int = field(default_factory=os.getpid)
    """The process of the operation."""
    boot: str = field(default_factory=boot_id)
    """The boot of the system, for which process and device numbers are valid."""


def write_journal(target: str, journal: Journal) -> None:
    """Write the journal of `target` to the disk, replacing any other.

    Raises:
        OSError: a system call fails; no part of a journal is left.
    """
    path = journal_path(target)
    line = {
        "ckptool-journal": VERSION,
        "kind": journal.kind,
        "pid": journal.pid,
        "boot": journal.boot,
        "facts": journal.facts,
        "blobs": [len(blob) for blob in journal.blobs],
    }
    content = b"".join((json.dumps(line).encode("ascii"), b"\n", *journal.blobs))
    remove_unfinished(target)
    try:
        opener = make_opener(is_private=True)
        with open(path + UNFINISHED, "xb", buffering=0, opener=opener) as file:
            _copy_access(target, file.name)
            write_at(file.fileno(), content + hashlib.sha256(content).digest(), 0)
            os.fsync(file.fileno())
        os.replace(path + UNFINISHED, path)
    except BaseException:
        remove_unfinished(target)
        raise
    sync_folder(os.path.dirname(path))


def read_journal(target: str) -> Journal | None:
    """Return the journal of `target`, or None if it has none.

    Raises:
        CorruptFile: it is damaged, or has an unknown version.
        FileDenied: no permission to read it.
        UnreadableFile: it is not a regular file.
    """
    path = journal_path(target)
    if not os.path.lexists(path):
        return None
    source = FileSource(path)
    try:
        return _parse_journal(source)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        text = (
            "the journal of an in-place edit cannot be used: it is damaged, or from another "
            "version of ckptool"
        )
        raise unusable_error(target, text, file=path) from error
    finally:
        source.close()


def refuse_interrupted(path: str) -> None:
    """Refuse to change a file that has a journal, because an edit was interrupted just now.

    Raises:
        WriteError: the file has a journal.
    """
    if os.path.lexists(journal_path(path)):
        hint = f"ckptool recover {shell(path)}"
        raise WriteError("an in-place edit was interrupted", file=path, hint=hint)


def remove_journal(target: str) -> None:
    """Remove the journal of `target`, if any, and sync the folder.

    Raises:
        OSError: a system call fails.
    """
    path = journal_path(target)
    with suppress(FileNotFoundError):
        os.unlink(path)
        sync_folder(os.path.dirname(path))


def remove_unfinished(target: str) -> None:
    """Try to remove an unfinished journal that a killed process left.

    Call it only with the lock on `target`: another process may be writing its journal.
    """
    remove(journal_path(target) + UNFINISHED)


def _parse_journal(source: FileSource) -> Journal:
    """Return the journal in a file: a line of JSON, the bytes, and the SHA-256 of both.

    Raises:
        ValueError, KeyError, TypeError, OverflowError, RecursionError: it is damaged or unknown.
    """
    length = source.size - _DIGEST_BYTES
    if not 0 < length <= _LINE_BYTES + DEFAULT_LIMITS.max_pickle_bytes:
        raise ValueError("impossible length")
    digest = hashlib.sha256()
    for block in ByteRange(source, 0, length).iterate_reused():
        digest.update(block)
    if digest.digest() != source.read(length, _DIGEST_BYTES):
        raise ValueError("checksum mismatch")
    head = source.read(0, min(length, _LINE_BYTES)).split(b"\n", 1)[0]
    line = json.loads(head)
    position, blobs = len(head) + 1, []
    for size in line["blobs"]:
        blobs.append(source.read(position, size))
        position += size
    if line["ckptool-journal"] != VERSION or position != length:
        raise ValueError("other version or length")
    return Journal(
        str(line["kind"]), dict(line["facts"]), tuple(blobs), int(line["pid"]), str(line["boot"])
    )


def unusable_error(
    target: str,
    text: str = "the journal next to it was not written by this version of ckptool",
    *,
    file: str | None = None,
) -> CorruptFile:
    """Return the error for an unusable journal of `target`; `file` is the file to report."""
    hint = f"ckptool recover --discard {shell(target)}"
    return CorruptFile(text, file=file or target, hint=hint)


def _copy_access(target: str, path: str) -> None:
    """Give the journal at `path` the owner and mode of `target`: its readers may recover it."""
    with suppress(FileNotFoundError):
        status = os.stat(target)
        hand_over(path, status)
        os.chmod(path, stat.S_IMODE(status.st_mode) & 0o666)  # no journal is executable


LOCK = ".ckptool-lock"
"""The lock file of a folder, and the extension of the lock file of an index."""
_ATTEMPTS = 3
"""Attempts to get a lock whose holder seems to have ended."""


@contextmanager
def open_locked(path: str | os.PathLike[str]) -> Iterator[int]:
    """Yield a descriptor of the file at `path` (links followed), locked against other writers.

    The descriptor is read-only without write permission. The lock ends with the block or with the
    process. Without system support for locks the file is not locked, and is refused only if a
    journal of a running process is next to it.

    Raises:
        FileBusy: another process has the lock; the message has its number.
        FileMissing: the file does not exist.
        FileDenied: no permission to read it.
        UnreadableFile: another system error.
    """
    path = os.fspath(path)
    target = os.path.realpath(path)
    while True:
        fd = _open_to_lock(target)
        try:
            _take_lock(fd, path)
            if is_path_of(target, fd):  # otherwise it was replaced before it was locked
                yield fd
                return
        finally:
            os.close(fd)


@contextmanager
def hold_edit_lock(path: str) -> Iterator[None]:
    """Keep other processes from editing a file that is about to be replaced.

    Their journal would outlive the file. Nothing is locked if there is no file, if it cannot be
    read, or if open files cannot be replaced (Windows).

    Raises:
        FileBusy: another process is editing it or about to replace it.
        WriteError: another edit was interrupted since the recovery.
    """
    with ExitStack() as stack:
        if os.name == "posix":
            with suppress(FileMissing, FileDenied):
                stack.enter_context(open_locked(path))
                refuse_interrupted(path)
        yield


@contextmanager
def hold_folder_lock(folder: str) -> Iterator[None]:
    """Yield a folder, created if needed, and lock it against other processes.

    The lock ends with the block or with the process; there is none without system support for
    locks. A folder that was created here is removed if it is empty at the end.

    Raises:
        FileBusy: another process has the lock; the message has its number.
        WriteError: it cannot be created or written.
    """
    created = find_missing_folders(folder)
    lock = lock_file(
        os.path.join(folder, LOCK),
        lambda pid: FileBusy(
            f"{folder} is in use by {describe_process(pid)}",
            hint="choose another folder, or wait until it has finished",
        ),
    )
    with ExitStack() as stack:
        stack.callback(_remove_empty, created)
        with convert_os_errors(folder):
            stack.enter_context(lock)
        yield


def _remove_empty(folders: list[str]) -> None:
    """Remove these folders, in their order (innermost first), until one is not empty."""
    with suppress(OSError):  # it is not empty
        for folder in folders:
            os.rmdir(folder)


def find_missing_folders(folder: str) -> list[str]:
    """Return the missing folders that lead to this one, innermost first."""
    missing = []
    while folder and not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


@contextmanager
def lock_file(path: str, busy_error: Callable[[int | None], FileBusy]) -> Iterator[bool]:
    """Create a lock file, lock it, and remove it after the block.

    It is removed while it is locked, so that no other process has locked it. Windows has no locks
    here, and removes only closed files.

    Yields:
        True if the system and the file system support locks.

    Raises:
        FileBusy: another process has the lock; `busy_error` makes the error from its number.
    """
    while True:
        fd = _open_lock_file(path)
        is_locked, is_ours = None, False
        try:
            is_locked = try_lock(fd)
            if is_locked is False:
                raise busy_error(lock_holder(fd))
            is_ours = is_path_of(path, fd)  # otherwise it was removed before it was locked
            if is_ours:
                yield bool(is_locked)
                return
        finally:
            if is_ours and is_locked:
                remove(path)
            os.close(fd)
            if is_ours and not is_locked:
                remove(path)


def _open_lock_file(path: str) -> int:
    """Return a descriptor of a lock file; create the file and its folder if needed."""
    flags = getattr(os, "O_NOFOLLOW", 0)
    while True:
        os.makedirs(os.path.dirname(path) or os.curdir, exist_ok=True)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
        except FileNotFoundError:  # its creator has removed the folder
            continue
        except PermissionError:
            if not os.path.lexists(path):
                raise
            return os.open(path, os.O_RDONLY | flags)  # it belongs to another user


def remove(path: str) -> None:
    """Try to remove a file."""
    with suppress(OSError):
        os.unlink(path)


def is_path_of(path: str | os.PathLike[str], fd: int) -> bool:
    """Return True if `path` leads to the open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def _open_to_lock(path: str) -> int:
    """Return a descriptor for reading and writing, or for reading only without write permission.

    Both can be locked.
    """
    with suppress(OSError):
        return os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    return open_descriptor(path)


def _take_lock(fd: int, path: str) -> None:
    """Lock the open file at `path`; refuse it if another process is editing it.

    Without system support for locks, the journal shows whether a process is editing it.

    Raises:
        FileBusy: another process has the lock, or a journal here.
    """
    for _ in range(_ATTEMPTS):
        is_locked = try_lock(fd)
        if is_locked:
            return
        journal = _try_read_journal(path)
        has_no_locks = is_locked is None
        if has_no_locks and not _is_writer_running(journal):
            return
        pid = lock_holder(fd) or (journal.pid if journal else None)
        if pid:  # otherwise it may have ended just now: try again
            break
    raise FileBusy(
        f"is being edited by {describe_process(pid)}",
        file=path,
        hint="try again when it has finished",
    )


def _try_read_journal(path: str) -> Journal | None:
    """Return the journal of a file; None if it has none or it is unusable."""
    with suppress(CheckpointError):
        return read_journal(path)
    return None


def _is_writer_running(journal: Journal | None) -> bool:
    """Return True if the process that wrote the journal is known to be running."""
    if journal is None or journal.pid == os.getpid() or journal.boot != boot_id():
        return False
    return is_running(journal.pid)
