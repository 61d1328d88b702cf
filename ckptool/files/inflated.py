"""Inflate the compressed records of a zip."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ckptool.errors import CorruptFile, LimitExceeded
from ckptool.files.source import BLOCK, ByteRange, Source

_SMALL = 128 << 10
"""Inflated bytes that are accepted at any ratio."""
_TABLE_BYTES = 4 << 10
"""Extra bytes that a deflated beginning may need for its tables."""


class InflatedSource(Source):
    """The inflated content of a deflated zip record, read in bounded blocks.

    Reading forwards costs one pass; reading backwards starts the record again.
    """

    def __init__(self, packed: ByteRange, size: int) -> None:
        """Read `packed` (raw deflate) as `size` bytes."""
        self._packed, self.made_of = packed, (packed,)
        self.name, self.size = packed.source.name, size
        self._inflater: zlib._Decompress | None = None  # tens of kilobytes, only while it is read
        self._blocks: Iterator[bytes] = iter(())
        """The packed bytes after `_pending`."""
        self._pending = b""
        """Packed bytes that were read but not inflated."""
        self._position = 0
        """The number of inflated bytes that were read."""
        self._has_clean_end: bool | None = None
        """None until the end was read; see `has_clean_end`."""

    @property
    def packed_size(self) -> int:
        """The stored size in bytes."""
        return self._packed.length

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, or raise an error.

        A read before the current position starts again at the beginning.
        """
        if not buffer:
            return
        if self._inflater is None or offset < self._position:
            self._start()
        while self._position < offset:
            self._inflate_next(min(BLOCK, offset - self._position))
        done = 0
        while done < len(buffer):
            part = self._inflate_next(min(BLOCK, len(buffer) - done))
            buffer[done : done + len(part)] = part
            done += len(part)

    def read_head(self, length: int) -> bytes:
        """Return up to `length` first bytes, inflated separately from other reads."""
        # Except for its tables, deflated content is not longer than the inflated bytes.
        packed = self._packed.read(0, min(self._packed.length, length + _TABLE_BYTES))
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, length)
        except zlib.error as error:
            raise self._damaged_error(error) from error

    def _start(self) -> None:
        """Start to inflate at the beginning of the record."""
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)  # negative: without a zlib header
        self._blocks = self._packed.iterate_blocks()
        self._pending = b""
        self._position = 0

    def _inflate_next(self, max_length: int) -> bytes:
        """Return 1 to `max_length` inflated bytes."""
        data = self._inflate(max_length)
        if not data:
            raise CorruptFile("a compressed record ends too early", file=self.name)
        self._position += len(data)
        if self._position == self.size:
            self._check_end()
        return data

    def _check_end(self) -> None:
        """Raise CorruptFile if the stream has more bytes; remember if its end mark is last."""
        inflater = self._inflater
        if self._inflate(1):
            raise CorruptFile(
                f"a compressed record inflates to more than the {self.size:,} bytes given in "
                "the zip directory",
                file=self.name,
            )
        if inflater is not None:
            has_more_data = bool(inflater.unused_data) or any(self._blocks)
            self._has_clean_end = inflater.eof and not has_more_data
        self._inflater = None

    def has_clean_end(self) -> bool:
        """Return False if the stream was read and has no end mark, or data after it.

        The inflated bytes are right in any case, and every reader accepts them.

        Raises:
            CorruptFile: an empty record inflates to some bytes.
        """
        if self.size == 0 and self._has_clean_end is None:  # an empty record is never read
            self._start()
            self._check_end()
        return self._has_clean_end is not False

    def _inflate(self, max_length: int) -> bytes:
        """Return up to `max_length` more bytes, none at the end of the stream."""
        inflater = self._inflater
        while inflater is not None and not inflater.eof:
            block = self._pending or next(self._blocks, b"")
            if not block:
                break
            try:
                data = inflater.decompress(block, max_length)
            except zlib.error as error:
                raise self._damaged_error(error) from error
            self._pending = inflater.unconsumed_tail
            if data:
                return data
        return b""

    def _damaged_error(self, error: zlib.error) -> CorruptFile:
        return CorruptFile(f"a compressed record is damaged ({error})", file=self.name)


def refuse_bomb(data: ByteRange, max_ratio: int) -> None:
    """Refuse a range of an inflated record that is more than `max_ratio` times the stored record.

    Ranges of up to 128 KiB, and those that are not inflated, are accepted.

    Raises:
        LimitExceeded: the range is longer.
    """
    source = data.source
    if not isinstance(source, InflatedSource) or data.length <= _SMALL:
        return
    if data.length > source.packed_size * max_ratio:
        raise LimitExceeded(
            f"a header of {source.packed_size:,} bytes inflates to {data.length:,}, more than "
            f"{max_ratio:,} times its size",
            file=source.name,
        )
