"""The CRC-32 of a run of bytes that is read in parts, in whatever order."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from threading import Lock

from ckptool.files.source import BLOCK, ByteRange

__all__ = ["Checked", "combined"]

_POLYNOMIAL = 0xEDB88320
"""Of CRC-32, its bits reversed."""


class Checked:
    """A run of bytes whose CRC-32 is known, checked while it is read."""

    def __init__(
        self, data: ByteRange, crc32: int | None, refused: Callable[[], Exception]
    ) -> None:
        """Expect `crc32` (None: nothing is expected) of `data`; else raise what `refused` makes."""
        self._data = data
        self._refused = refused
        self._expected = crc32
        self._parts: dict[int, tuple[int, int]] = {}
        """By their first byte the length of each part that was met, and its CRC-32."""
        self._met = 0
        self._lock = Lock()

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to check."""
        return self._expected is None

    def met(self, start: int, length: int, crc32: int) -> None:
        """Take the CRC-32 of a part that was read; parts do not overlap.

        Raises what `refused` makes where all have been read and are not what they should be.
        """
        with self._lock:
            if self._expected is None or start in self._parts:
                return
            self._parts[start] = length, crc32
            self._met += length
            if self._met < self._data.length:
                return
            found = 0
            for _, (size, crc) in sorted(self._parts.items()):
                found = combined(found, crc, size)
            self._settle(found)

    def check(self) -> None:
        """Read all of it now, unless it was checked; raises as `met` does."""
        with self._lock:
            if self._expected is None:
                return
            found = 0
            buffer = memoryview(bytearray(min(BLOCK, self._data.length)))
            for start in range(0, self._data.length, BLOCK):
                part = buffer[: self._data.length - start]
                self._data.read_into(part, start)
                found = zlib.crc32(part, found)
            self._settle(found)

    def _settle(self, found: int) -> None:
        if found != self._expected:
            raise self._refused()
        self._expected = None
        self._parts.clear()


def combined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes on end, the second of `length` bytes."""
    if first == 0:
        return second
    return _product(_shift(length), first) ^ second


@lru_cache(maxsize=64)
def _shift(length: int) -> int:
    """What a CRC-32 is multiplied with where `length` bytes follow: x to the power of their bits.

    After `crc32_combine` of zlib 1.2.12.
    """
    power, square = 1 << 31, 1 << 23  # x**0, and x**8 for a byte
    while length:
        if length & 1:
            power = _product(power, square)
        square = _product(square, square)
        length >>= 1
    return power


def _product(one: int, other: int) -> int:
    """Two polynomials multiplied modulo that of CRC-32; the highest bit is the power 0."""
    product, bit = 0, 1 << 31
    while bit:
        if one & bit:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
        bit >>= 1
    return product
