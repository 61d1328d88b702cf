"""What was written, or would be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ckptool.checkpoint import Change

__all__ = ["Receipt"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one write did."""

    path: str
    format: str
    size: int
    """Bytes of the file, of all files together where there are several."""
    tensors: int
    """Names of tensors in it, tied ones each."""
    left_out: tuple[str, ...] = ()
    """What the source has and the file has not, a phrase each."""
    notes: tuple[str, ...] = ()
    blockers: tuple[str, ...] = ()
    """Classes in it that keep `torch.load(weights_only=True)` from taking it."""
    dry_run: bool = False
    """Planned only: nothing was written."""
    written: int = 0
    """Bytes that went to the disk; less than `size` where the file was edited in place."""
    files: tuple[tuple[str, int], ...] = ()
    """Every file with its bytes, where there are several: the shards, then their index."""
    verified: bool = False
    """Read back and compared."""
    outcomes: tuple[Change, ...] = ()
    """What only the computation told: how many elements overflowed, lost precision, ..."""

    @property
    def edited(self) -> bool:
        """Whether the file was changed where it lies, not written anew."""
        return 0 < self.written < self.size

    def to_dict(self) -> dict[str, Any]:
        """Its fields by name, tuples as lists."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
