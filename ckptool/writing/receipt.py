"""What was written, or would be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Change

__all__ = ["Receipt"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one write did."""

    path: str
    """The file; of a checkpoint in shards, the index."""
    format: str
    """As `Checkpoint.format`."""
    size: int
    """Bytes of the file, of all files together where there are several."""
    tensors: int
    """Names of tensors in it, tied ones each."""
    source: str = ""
    """The file that it was made from, the first where there are several."""
    changes: tuple[Change, ...] = ()
    """What was done to the content, but for what was left out."""
    outcomes: tuple[Change, ...] = ()
    """What only the computation told: how many elements overflowed, lost precision, ..."""
    left_out: tuple[str, ...] = ()
    """What the source has and the file has not, a phrase each."""
    notes: tuple[str, ...] = ()
    """Sentences worth telling the user."""
    blockers: tuple[str, ...] = ()
    """Classes in it that keep `torch.load(weights_only=True)` from taking it."""
    written: int = 0
    """Bytes that went to the disk; less than `size` where the file was edited in place."""
    files: tuple[tuple[str, int], ...] = ()
    """Every file with its bytes, where there are several: the shards, then their index."""
    verified: bool = False
    """Read back and compared."""
    dry_run: bool = False
    """Planned only: nothing was written."""

    @property
    def edited(self) -> bool:
        """Whether the file was changed where it lies, not written anew."""
        return 0 < self.written < self.size

    def to_dict(self) -> dict[str, Any]:
        """The document `ckptool.receipt/1`."""
        return {
            "schema": "ckptool.receipt/1",
            "source": self.source,
            "file": self.path,
            "format": self.format,
            "size": self.size,
            "tensors": self.tensors,
            "written": self.written,
            "files": [{"file": path, "size": length} for path, length in self.files],
            "verified": self.verified,
            "dry_run": self.dry_run,
            "changes": _documents(self.changes),
            "outcomes": _documents(self.outcomes),
            "left_out": list(self.left_out),
            "notes": list(self.notes),
            "weights_only_blockers": list(self.blockers),
        }


def _documents(changes: Iterable[Change]) -> list[dict[str, Any]]:
    return [{"kind": change.kind, "text": change.text, "count": change.count} for change in changes]
