"""What was written, or would be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Receipt"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one write did."""

    path: str
    format: str
    size: int
    """Bytes of the file."""
    tensors: int
    """Names of tensors in it, tied ones each."""
    left_out: tuple[str, ...] = ()
    """What the source has and the file has not, a phrase each."""
    notes: tuple[str, ...] = ()
    blockers: tuple[str, ...] = ()
    """Classes in it that keep `torch.load(weights_only=True)` from taking it."""
    dry_run: bool = False
    """Planned only: nothing was written."""

    def to_dict(self) -> dict[str, Any]:
        """Its fields by name, tuples as lists."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
