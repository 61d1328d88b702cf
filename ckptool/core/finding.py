"""A finding: the result of every kind of check, a problem with its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["fails", "misleads", "note"]
"""`fails`: causes an exception; `misleads`: causes wrong values without an exception; `note`: it
works, and this is worth knowing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a checkpoint."""

    kind: str
    """A word for programs: `checksum`, `wrappers`, ..."""
    text: str
    """A sentence for people, without a full stop."""
    where: tuple[str, ...] = ()
    """The paths, keys, records or files concerned. Empty: the file as a whole."""
    hint: str | None = None
    """How to fix it."""
    severity: Severity = "fails"
    """`fails`, `misleads` or `note`."""

    @property
    def place(self) -> str:
        """The record, tensor or shard. Empty: the file as a whole."""
        return self.where[0] if self.where else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `ckptool.verify/1`."""
        return {"kind": self.kind, "place": self.place, "text": self.text, "hint": self.hint}
