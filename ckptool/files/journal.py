"""The note beside a file that says what is being done to it, so that a kill can be undone.

One line of JSON (version, kind, process, boot, facts, lengths of the blobs), the blobs, and the
SHA-256 of all of that. It is synced before the first byte of what it tells about, and appears whole
or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ckptool.errors import CorruptFile
from ckptool.files.copying import write_at
from ckptool.files.names import UNFINISHED, journal_path
from ckptool.files.source import BLOCK, FileSource
from ckptool.files.system import boot_id, hand_over, sync_folder
from ckptool.limits import DEFAULT_LIMITS

__all__ = [
    "Journal",
    "read_journal",
    "remove_journal",
    "remove_unfinished",
    "write_journal",
]

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
        with open(path + UNFINISHED, "xb", buffering=0, opener=_private) as file:
            _share(file.name, target)
            write_at(file.fileno(), content + hashlib.sha256(content).digest(), 0)
            os.fsync(file.fileno())
        os.replace(path + UNFINISHED, path)
    except BaseException:
        remove_unfinished(target)
        raise
    sync_folder(os.path.dirname(path))


def read_journal(target: str) -> Journal | None:
    """The journal of `target`; None where there is none.

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
        return _parse(source, target)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, CorruptFile):
            raise
        raise _damaged(source, target, "its first line is none of ours") from error
    finally:
        source.close()


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
    with suppress(OSError):
        os.unlink(journal_path(target) + UNFINISHED)


def _parse(source: FileSource, target: str) -> Journal:
    length = source.size - _DIGEST_BYTES
    if not 0 < length <= _LINE_BYTES + DEFAULT_LIMITS.max_pickle_bytes:
        raise _damaged(source, target, f"it has {source.size:,} bytes")
    digest = hashlib.sha256()
    for start in range(0, length, BLOCK):
        digest.update(source.read(start, min(BLOCK, length - start)))
    if digest.digest() != source.read(length, _DIGEST_BYTES):
        raise _damaged(source, target, "its checksum does not fit")
    head = source.read(0, min(length, _LINE_BYTES)).split(b"\n", 1)[0]
    line = json.loads(head)
    if line["ckptool-journal"] != VERSION:
        raise _damaged(source, target, "it is of another version of ckptool")
    position, blobs = len(head) + 1, []
    for size in line["blobs"]:
        blobs.append(source.read(position, size))
        position += size
    if position != length:
        raise _damaged(source, target, "its length is not the one that it states")
    return Journal(
        str(line["kind"]), dict(line["facts"]), tuple(blobs), int(line["pid"]), str(line["boot"])
    )


def _damaged(source: FileSource, target: str, why: str) -> CorruptFile:
    return CorruptFile(
        f"the journal of an edit cannot be used: {why}",
        file=source.path,
        hint=f"ckptool recover --discard {target}",
    )


def _private(path: str, flags: int) -> int:
    """Open a file for us alone until it has the permissions of the target."""
    return os.open(path, flags, 0o600)


def _share(path: str, target: str) -> None:
    """Let those read the journal who can read the target: they may have to recover it."""
    with suppress(FileNotFoundError):
        status = os.stat(target)
        hand_over(path, status)
        os.chmod(path, stat.S_IMODE(status.st_mode) & 0o666)
