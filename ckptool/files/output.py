"""A file that is being written from front to back: literals, kernel copies, streamed blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from ckptool.files.source import ByteRange

__all__ = ["Output"]


class Output(Protocol):
    """Where a `WritePlan` writes."""

    def tell(self) -> int:
        """Bytes written so far."""
        ...

    def write(self, data: bytes) -> None:
        """Write `data`."""
        ...

    def copy(self, data: ByteRange) -> None:
        """Copy a range, by the kernel where it lies in a file."""
        ...

    def copy_checked(self, data: ByteRange) -> int:
        """Copy a range and return its CRC-32."""
        ...

    def stream(self, blocks: Iterable[bytes]) -> int:
        """Write blocks as they come and return the CRC-32 of all."""
        ...


Progress = Callable[[int, int], None]
"""Told bytes done and bytes in all."""
