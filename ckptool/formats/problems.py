"""What is wrong with a file, and what is worth a word though it is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptool.files import ByteRange

__all__ = ["Checksum", "Findings", "Problem"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    `kind` is a word for programs, `place` the record, tensor or shard (empty: the file as a
    whole), `text` a clause for people without a full stop, `hint` the step that helps.
    """

    kind: str
    place: str
    text: str
    hint: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As `ckptool.verify/1` has it."""
        return {"kind": self.kind, "place": self.place, "text": self.text, "hint": self.hint}


@dataclass(frozen=True, slots=True)
class Checksum:
    """Bytes, and the CRC-32 that the file states of them."""

    place: str
    data: ByteRange
    crc32: int


@dataclass(frozen=True, slots=True)
class Findings:
    """What a look at the structure of a file gave, and what remains to be computed."""

    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    checksums: tuple[Checksum, ...] = ()
    records: int = 0
    """Records of an archive."""

    def __add__(self, other: Findings) -> Findings:
        """Both together."""
        return Findings(
            self.problems + other.problems,
            self.notes + other.notes,
            self.checksums + other.checksums,
            self.records + other.records,
        )
