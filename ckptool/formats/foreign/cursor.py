"""Values of a file from front to back, a window of bytes at a time."""

from __future__ import annotations

import struct
from typing import Any

from ckptool.errors import CorruptFile, LimitExceeded
from ckptool.files import Source
from ckptool.formats.base import check_limit
from ckptool.limits import Limits

_WINDOW = 64 << 10


class Cursor:
    """A place in a source, which moves behind what is taken."""

    def __init__(self, source: Source, limits: Limits, *, is_header: bool) -> None:
        """Begin at the first byte; a header is no longer than `limits` allow, nor is one value."""
        self.source, self.limits, self.position = source, limits, 0
        self._left = limits.max_records
        self._end = limits.max_header_bytes if is_header else source.size
        self._window, self._start = b"", 0

    def count(self, cost: int) -> None:
        """Count a value, which costs so much next to an entry of a zip directory.

        Raises:
            LimitExceeded: there are too many values.
        """
        self._left -= cost
        if self._left < 0:
            raise LimitExceeded("has too many values")

    def skip(self, length: int) -> int:
        """Pass over bytes, and return where they begin.

        Raises:
            CorruptFile: the file ends before them.
            LimitExceeded: the header is too long.
        """
        begin = self.position
        self.position += length
        if self.position > self.source.size:
            what = f"the file ends within a value at {begin:,}"
            raise CorruptFile(what)
        check_limit("the header has", self.position, "bytes", self._end)
        return begin

    def take(self, length: int) -> bytes:
        """Return the next bytes.

        Raises:
            CorruptFile: the file ends before them.
            LimitExceeded: they are too many.
        """
        begin = self.skip(length) - self._start
        check_limit("a value has", length, "bytes", self.limits.max_header_bytes)
        if not 0 <= begin <= begin + length <= len(self._window):
            self._start, begin = begin + self._start, 0
            size = max(length, min(_WINDOW, self.source.size - self._start))
            self._window = self.source.read(self._start, size)
        return self._window[begin : begin + length]

    def numbers(self, layout: str) -> tuple[Any, ...]:
        """Return the numbers of a layout of `struct`."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))
