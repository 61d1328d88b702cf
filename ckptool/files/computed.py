"""Bytes that no file holds: computed from others when they are read."""

from __future__ import annotations

from collections.abc import Callable

from ckptool.errors import TruncatedFile

__all__ = ["ComputedSource"]


class ComputedSource:
    """A source (`source.Source`) whose bytes are computed block by block, never kept."""

    def __init__(self, name: str, size: int, fill: Callable[[int, memoryview], None]) -> None:
        """Stand for `size` bytes; `fill(offset, buffer)` puts those from `offset` into `buffer`."""
        self._name = name
        self._size = size
        self._fill = fill

    @property
    def name(self) -> str:
        """The file that they are computed from."""
        return self._name

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`, or `TruncatedFile`."""
        self._check(offset, length)
        data = bytearray(length)
        self._fill(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, or `TruncatedFile`."""
        self._check(offset, len(buffer))
        self._fill(offset, buffer)

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self._size:
            raise TruncatedFile(
                f"{length:,} bytes are wanted at offset {offset:,} of {self._size:,} computed ones",
                file=self._name,
            )
