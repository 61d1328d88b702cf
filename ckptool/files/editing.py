"""A file changed where it lies: bytes put behind its end, or over its head."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Patch"]


@dataclass(frozen=True, slots=True)
class Patch:
    """Bytes that go into a file at `offset`: its length (they are appended), or 0 (its head)."""

    offset: int
    data: bytes
