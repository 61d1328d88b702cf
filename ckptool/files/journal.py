"""The journal of an edit in place, and the locks of those who write."""

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
    hand_over,
    is_running,
    lock_holder,
    private,
    sync_folder,
    try_lock,
    who,
    worded,
    write_at,
)
from ckptool.files.temporary import UNFINISHED, journal_path
from ckptool.limits import DEFAULT_LIMITS
from ckptool.words import shell

VERSION = 1
_LINE_BYTES = 64 << 20
"""The most that the first line may take: a thousand times what a set of a thousand files needs."""
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Journal:
    """What is being done to a file: JSON facts, and bytes that belong to them."""

    kind: str
    facts: Mapping[str, Any]
    blobs: tuple[bytes, ...] = ()
    pid: int = field(default_factory=os.getpid)
    """The process that is doing it, or was."""
    boot: str = field(default_factory=boot_id)
    """The run of the system in which this process is, and device numbers mean something."""


def write_journal(target: str, journal: Journal) -> None:
    """Put the journal of `target` on the disk, in the place of any other.

    Raises:
        OSError: the folder or the disk refuses it; no part of a journal is left.
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
        with open(path + UNFINISHED, "xb", buffering=0, opener=private(0o600)) as file:
            _share(file.name, target)
            write_at(file.fileno(), content + hashlib.sha256(content).digest(), 0)
            os.fsync(file.fileno())
        os.replace(path + UNFINISHED, path)
    except BaseException:
        remove_unfinished(target)
        raise
    sync_folder(os.path.dirname(path))


def read_journal(target: str) -> Journal | None:
    """Return the journal of `target`; None where there is none.

    Raises:
        CorruptFile: it is damaged, or of a version that is not known here.
        FileDenied: the system does not let us read it.
        UnreadableFile: it is no regular file.
    """
    path = journal_path(target)
    if not os.path.lexists(path):
        return None
    source = FileSource(path)
    try:
        return _parse(source)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        text = (
            "the journal of an in-place edit cannot be used: it is damaged, or from another "
            "version of ckptool"
        )
        raise unusable(target, text, file=path) from error
    finally:
        source.close()


def refuse_cut_short(path: str) -> None:
    """Refuse to change a file while its journal is there: an edit was cut short just now.

    Raises:
        WriteError: there is a journal.
    """
    if os.path.lexists(journal_path(path)):
        hint = f"ckptool recover {shell(path)}"
        raise WriteError("an in-place edit was interrupted", file=path, hint=hint)


def remove_journal(target: str) -> None:
    """Remove the journal of `target`, for good; harmless where there is none.

    Raises:
        OSError: the folder refuses it.
    """
    path = journal_path(target)
    with suppress(FileNotFoundError):
        os.unlink(path)
        sync_folder(os.path.dirname(path))


def remove_unfinished(target: str) -> None:
    """Remove the beginning of a journal that a killed process left, as far as the system lets us.

    Only for one who holds the lock on `target`: it may be another's who is just writing it.
    """
    remove(journal_path(target) + UNFINISHED)


def _parse(source: FileSource) -> Journal:
    length = source.size - _DIGEST_BYTES
    if not 0 < length <= _LINE_BYTES + DEFAULT_LIMITS.max_pickle_bytes:
        raise ValueError("impossible length")
    digest = hashlib.sha256()
    for block in ByteRange(source, 0, length).reread():
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


def unusable(
    target: str,
    text: str = "the journal next to it was not written by this version of ckptool",
    *,
    file: str | None = None,
) -> CorruptFile:
    """Return the error for a journal of `target` that is not followed; `file`: what is at fault."""
    hint = f"ckptool recover --discard {shell(target)}"
    return CorruptFile(text, file=file or target, hint=hint)


def _share(path: str, target: str) -> None:
    """Let those read the journal who can read the target: they may have to recover it."""
    with suppress(FileNotFoundError):
        status = os.stat(target)
        hand_over(path, status)
        os.chmod(path, stat.S_IMODE(status.st_mode) & 0o666)


LOCK = ".ckptool-lock"
"""The lock file of a folder, and the ending of the lock file of an index."""
_ATTEMPTS = 3
"""How often a lock is asked for that somebody has, and nobody a moment later."""


@contextmanager
def exclusive(path: str | os.PathLike[str]) -> Iterator[int]:
    """Give the file at `path`, links resolved, open and locked against others that ask.

    The descriptor can be written to where the system lets us, else only read. The lock ends with
    the block, or with the process. A system or a file system without locks goes on without, unless
    the journal of a running process lies beside the file.

    Raises:
        FileBusy: another has the lock; the message names the process.
        FileMissing: there is no such file.
        FileDenied: the system does not even let us read it.
        UnreadableFile: any other refusal.
    """
    path = os.fspath(path)
    target = os.path.realpath(path)
    while True:
        fd = _open(target)
        try:
            _lock(fd, path)
            if leads_to(target, fd):  # else it was replaced before it was locked
                yield fd
                return
        finally:
            os.close(fd)


@contextmanager
def hold_edit_lock(path: str) -> Iterator[None]:
    """Nobody else edits a file that is about to be replaced: its journal would outlive it.

    Nothing is locked where there is no file, where we may not even read it, and where an open
    file cannot be replaced (Windows).

    Raises:
        FileBusy: another process is editing it, or about to replace it.
        WriteError: an edit of it was cut short, since it was recovered.
    """
    with ExitStack() as stack:
        if os.name == "posix":
            with suppress(FileMissing, FileDenied):
                stack.enter_context(exclusive(path))
                refuse_cut_short(path)
        yield


@contextmanager
def occupied(folder: str) -> Iterator[None]:
    """Give a folder, made if need be, and keep it from every other process that asks for it.

    That ends with the block, or with the process. A system or a file system without locks goes on
    without. A folder that was made for it goes again if nothing is in it at the end.

    Raises:
        FileBusy: another has it; the message names the process.
        WriteError: it cannot be made, or nothing can be written there.
    """
    made = missing_folders(folder)
    lock = lock_file(
        os.path.join(folder, LOCK),
        lambda pid: FileBusy(
            f"{folder} is in use by {who(pid)}",
            hint="choose another folder, or wait until it has finished",
        ),
    )
    with ExitStack() as stack:
        stack.callback(_remove_empty, made)
        with worded(folder):
            stack.enter_context(lock)
        yield


def _remove_empty(folders: list[str]) -> None:
    with suppress(OSError):  # something is in it
        for one in folders:
            os.rmdir(one)


def missing_folders(folder: str) -> list[str]:
    """Return the folders that would have to be made for this one, the innermost first."""
    missing = []
    while folder and not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    return missing


@contextmanager
def lock_file(path: str, busy: Callable[[int | None], FileBusy]) -> Iterator[bool]:
    """Make a file that is there to be locked, lock it, and remove it after the block.

    Yields:
        Whether the system, and the file system, has locks.

    Raises:
        FileBusy: another process has the lock; `busy` makes the error from its number.
    """
    while True:
        fd, taken, ours = _open_lock(path), None, False
        try:
            taken = try_lock(fd)
            if taken is False:
                raise busy(lock_holder(fd))
            ours = leads_to(path, fd)  # else it was removed before it was locked
            if ours:
                yield bool(taken)
                return
        finally:
            if ours and taken:  # while it is locked, so that it is nobody else's
                remove(path)
            os.close(fd)
            if ours and not taken:  # Windows removes no open file
                remove(path)


def _open_lock(path: str) -> int:
    flags = getattr(os, "O_NOFOLLOW", 0)
    while True:
        os.makedirs(os.path.dirname(path) or os.curdir, exist_ok=True)
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
        except FileNotFoundError:  # the folder was removed by whoever had made it
            continue
        except PermissionError:
            if not os.path.lexists(path):
                raise
            return os.open(path, os.O_RDONLY | flags)  # another user's


def remove(path: str) -> None:
    """Remove a file, as far as the system lets us."""
    with suppress(OSError):
        os.unlink(path)


def leads_to(path: str | os.PathLike[str], fd: int) -> bool:
    """Return whether the file at `path` is the open one."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:
        return False


def _open(path: str) -> int:
    """Return a descriptor to read and write, or to read where that is all that we may."""
    with suppress(OSError):
        return os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
    return open_descriptor(path)


def _lock(fd: int, path: str) -> None:
    for _ in range(_ATTEMPTS):
        taken = try_lock(fd)
        journal = None if taken else _journal(path)
        if taken or (taken is None and not _is_at_work(journal)):
            return
        pid = lock_holder(fd) or (journal.pid if journal else None)
        if pid:  # else it may have ended just now
            break
    raise FileBusy(
        f"is being edited by {who(pid)}",
        file=path,
        hint="try again when it has finished",
    )


def _journal(path: str) -> Journal | None:
    with suppress(CheckpointError):
        return read_journal(path)
    return None


def _is_at_work(journal: Journal | None) -> bool:
    """Return whether the process that wrote the journal still runs, as far as can be known here."""
    if journal is None or journal.pid == os.getpid() or journal.boot != boot_id():
        return False
    return is_running(journal.pid)
