"""What was found of a checkpoint: problems, and what was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptool._lazy import Result
from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    FileMissing,
    LimitExceeded,
    NotACheckpoint,
    TruncatedFile,
    UnsupportedFormat,
)
from ckptool.formats.base import Problem

__all__ = ["NOT_ONE", "Verdict", "problem_of"]

NOT_ONE = "not-a-checkpoint"
"""The kind of problem of a file that is something else."""

_KINDS: dict[type[CheckpointError], str] = {
    TruncatedFile: "truncated",
    CorruptFile: "corrupt",
    LimitExceeded: "limit",
    NotACheckpoint: NOT_ONE,
}
"""The errors that are problems of a file, with the kind of each; the first that fits."""
_CONTRADICTIONS: dict[type[CheckpointError], str] = {
    FileMissing: "missing-shard",
    UnsupportedFormat: "corrupt",
}
"""Those that are where other facts say that the file should be there, and of another kind."""


@dataclass(frozen=True, slots=True, repr=False)
class Verdict(Result):
    """What was found of one checkpoint; `format` is empty where it could not be opened.

    `size` are bytes on disk, `records` those of an archive, `summed` those whose CRC-32 was
    computed and compared, `checked` the bytes compared with a CRC-32 or with a manifest.
    """

    file: str
    """As it was given."""
    format: str = ""
    problems: tuple[Problem, ...] = ()
    """What is wrong, in the order of the file; empty: nothing was found."""
    notes: tuple[str, ...] = ()
    """Sentences on what could not be checked, and what is worth knowing."""
    size: int = 0
    shards: int = 0
    """Files of tensors, where there are several."""
    records: int = 0
    summed: int = 0
    tensors: int = 0
    """Names of tensors, tied ones each."""
    content: int = 0
    """Bytes that the tensors' elements take, of ties once."""
    checked: int = 0
    values: bool = False
    """Whether the values were looked at."""
    manifest: bool = False
    """Whether a manifest was held against it."""

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return the file's entry of `ckptool.verify/1`."""
        return {
            "file": self.file,
            "format": self.format or None,
            "ok": self.ok,
            "problems": [problem.to_dict() for problem in self.problems],
            "notes": list(self.notes),
            "size": self.size,
            "shards": self.shards,
            "records": self.records,
            "records_checked": self.summed,
            "tensors": self.tensors,
            "bytes_checked": self.checked,
            "values": self.values,
            "manifest": self.manifest,
        }


def problem_of(error: CheckpointError, *, contradicted: bool = False) -> Problem | None:
    """Return an error as a problem of the file; None if it says nothing about the content.

    `contradicted`: an index, or the rest of the file, says that it should be readable.
    """
    kinds = {**_KINDS, **_CONTRADICTIONS} if contradicted else _KINDS
    kind = next((word for kind, word in kinds.items() if isinstance(error, kind)), None)
    if kind is None:
        return None
    text = error.message
    if error.file is not None and text.startswith(f"{error.file} is "):
        text = "it" + text.removeprefix(error.file)
    return Problem(kind, "", text, error.hint)
