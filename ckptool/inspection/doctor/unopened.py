"""Files that do not open: what they are instead, and what torch says of them."""

from __future__ import annotations

import os
import re
import zipfile

from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    FileMissing,
    NotACheckpoint,
    TruncatedFile,
    UnsupportedFormat,
)
from ckptool.inspection.doctor.complaint import Complaint

__all__ = ["is_finding", "unopened"]

_COMMAND = re.compile(
    r"(?:^|: )((?:git|dvc|mkdir|gzip|bzip2|xz|zstd|lz4|7z|unrar|python -m torch\S*) .+)$"
)
"""A hint that is a command, or ends with one, which gets the checkpoint itself."""


def is_finding(error: CheckpointError, path: str) -> bool:
    """Whether an error in opening a file is about its content.

    A file that is missing is none, a missing shard is one.
    """
    if isinstance(error, FileMissing):
        return os.path.lexists(path)
    return isinstance(error, (NotACheckpoint, UnsupportedFormat, CorruptFile))


def unopened(error: CheckpointError, path: str) -> Complaint:
    """The complaint about a file that does not open as a checkpoint."""
    kind, what = _kind(error), error.message.removeprefix(f"{path} is ")
    command = _COMMAND.search(error.hint or "")
    return Complaint(
        kind,
        "fails",
        what if what == error.message else f"it is {what}",
        (error.file,) if error.file and error.file != path else (),
        _why(error, path),
        (command[1],) if command else (),
        remedy="" if command else error.hint or "download, copy or save it again",
    )


def _kind(error: CheckpointError) -> str:
    if isinstance(error, TruncatedFile):
        return "truncated"
    if isinstance(error, FileMissing):
        return "missing-shard"
    if isinstance(error, CorruptFile):
        return "damaged"
    return "unsupported" if isinstance(error, UnsupportedFormat) else "not-a-checkpoint"


def _why(error: CheckpointError, path: str) -> str:
    if os.path.isdir(path):
        return "torch.load opens files only: IsADirectoryError: [Errno 21] Is a directory"
    if isinstance(error, FileMissing):
        return "what is in the missing file stays as the model was initialised, or loading fails"
    head = _head(path)
    if not head:
        return "torch.load raises an EOFError without a message (before 2.6: Ran out of input)"
    if head.startswith(b"PK\x03\x04"):
        kinds = NotACheckpoint, UnsupportedFormat, TruncatedFile
        if isinstance(error, kinds) and zipfile.is_zipfile(path):
            return (
                "torch.load says: PytorchStreamReader failed locating file data.pkl: file not "
                "found; of other zips: file in archive is not in a subdirectory, or: Expected "
                'hasRecord("version") to be true'
            )
        return (
            "torch.load says: PytorchStreamReader failed reading zip archive: failed finding "
            "central directory, or that it failed reading a record (2.13 of a file below 64 KiB: "
            "OSError: [Errno 22] Invalid argument)"
        )
    if head[:1] == b"\x80":
        return (
            "torch.load says: unexpected EOF, expected more bytes. The file might be corrupted; "
            "or it fails on the pickle, Weights only load failed"
        )
    return _operand(head[0])


def _operand(first: int) -> str:
    shown = f"'{chr(first)}'" if 32 < first < 127 else f"'\\x{first:02x}'"
    return (
        f"torch.load says: Weights only load failed. ... Unsupported operand {first}; before torch "
        f"2.6: invalid load key, {shown}. weights_only=False, which it proposes, never helps here"
    )


def _head(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(16)
    except OSError:
        return b""
