"""Read the values of a file in order, one window of bytes at a time."""

from __future__ import annotations

import struct
from typing import Any

from ckptool.errors import CorruptFile, LimitExceeded
from ckptool.files import Source
from ckptool.formats.base import check_limit
from ckptool.limits import Limits

_WINDOW = 64 << 10


class Cursor:
    """A position in a source, which advances with each read."""

    def __init__(self, source: Source, limits: Limits, *, is_header: bool) -> None:
        """Start at the first byte.

        `limits` bounds the number and the size of the values, and with `is_header` also the bytes
        up to the last one.
        """
        self.source, self.limits, self.position = source, limits, 0
        self._cost_left = limits.max_records
        """The cost that further values may have; see `charge`."""
        self._max_position = limits.max_header_bytes if is_header else source.size
        self._window, self._window_start = b"", 0
        """The bytes that were read last, in larger blocks than single values, and their offset."""

    def charge(self, cost: int) -> None:
        """Count a value like `cost` entries of a zip directory, whose number is limited.

        Raises:
            LimitExceeded: if there are too many values.
        """
        self._cost_left -= cost
        if self._cost_left < 0:
            raise LimitExceeded("has too many values")

    def skip(self, length: int) -> int:
        """Skip bytes, and return their offset.

        Raises:
            CorruptFile: if the file ends too early.
            LimitExceeded: if the header is too long.
        """
        begin = self.position
        self.position += length
        if self.position > self.source.size:
            message = f"the file ends within a value at {begin:,}"
            raise CorruptFile(message)
        check_limit("the header has", self.position, "bytes", self._max_position)
        return begin

    def read_bytes(self, length: int) -> bytes:
        """Return the next bytes.

        Raises:
            CorruptFile: if the file ends too early.
            LimitExceeded: if there are too many.
        """
        offset = self.skip(length)
        check_limit("a value has", length, "bytes", self.limits.max_header_bytes)
        begin = offset - self._window_start
        if not 0 <= begin <= begin + length <= len(self._window):
            size = max(length, min(_WINDOW, self.source.size - offset))
            self._window, self._window_start = self.source.read(offset, size), offset
            begin = 0
        return self._window[begin : begin + length]

    def read_numbers(self, layout: str) -> tuple[Any, ...]:
        """Return the numbers in a `struct` layout."""
        return struct.unpack(layout, self.read_bytes(struct.calcsize(layout)))
