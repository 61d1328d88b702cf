"""One thing that is wrong, and what helps: what checks of every kind return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["fails", "misleads", "note"]
"""`fails`: an exception somewhere on the way; `misleads`: wrong values without an exception;
`note`: it works, and this is worth knowing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a checkpoint."""

    kind: str
    """A word for programs: `checksum`, `wrappers`, ..."""
    text: str
    """A clause for people, without a full stop."""
    where: tuple[str, ...] = ()
    """Paths, keys, records or files; none: the file as a whole."""
    hint: str | None = None
    """What helps."""
    severity: Severity = "fails"
    """`fails`, `misleads` or `note`."""

    @property
    def place(self) -> str:
        """The record, tensor or shard; empty for the file as a whole."""
        return self.where[0] if self.where else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `ckptool.verify/1`."""
        return {"kind": self.kind, "place": self.place, "text": self.text, "hint": self.hint}
