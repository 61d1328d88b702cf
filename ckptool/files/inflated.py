"""Bytes that a file holds deflated: a compressed record of a zip."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ckptool.errors import CorruptFile, LimitExceeded, TruncatedFile
from ckptool.files.source import BLOCK, ByteRange

__all__ = ["InflatedSource", "refuse_bomb"]

_SMALL = 128 << 10
_PREAMBLE = 4 << 10
"""Stored bytes by which a deflated beginning may be longer than what it inflates to: its tables."""


class InflatedSource:
    """A deflated zip record, read as what it inflates to, in bounded blocks.

    Reading forwards costs one pass; reading backwards starts the record again.
    """

    def __init__(self, packed: ByteRange, size: int) -> None:
        """Read `packed` (raw deflate) as `size` bytes."""
        self._packed = packed
        self._size = size
        self._inflater: zlib._Decompress | None = None  # tens of kilobytes, only while it is read
        self._blocks: Iterator[bytes] = iter(())
        self._pending = b""
        self._position = 0
        self._ends_well: bool | None = None

    @property
    def name(self) -> str:
        """The file that the record is in."""
        return self._packed.source.name

    @property
    def size(self) -> int:
        """Bytes when inflated, as the zip directory states them."""
        return self._size

    @property
    def packed_size(self) -> int:
        """Bytes as they are stored."""
        return self._packed.length

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`, or an error."""
        if offset < 0 or length < 0 or offset + length > self._size:
            raise TruncatedFile(
                f"{length:,} bytes are wanted at offset {offset:,} of a compressed record "
                f"of {self._size:,}",
                file=self.name,
            )
        if length == 0:
            return b""
        if self._inflater is None or offset < self._position:
            self._start()
        while self._position < offset:
            self._take(min(BLOCK, offset - self._position))
        parts = []
        while length:
            part = self._take(min(BLOCK, length))
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def head(self, length: int) -> bytes:
        """Up to `length` first bytes; nothing is kept for the next read.

        Raises:
            CorruptFile: they cannot be inflated.
        """
        packed = self._packed.read(0, min(self._packed.length, length + _PREAMBLE))
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(packed, length)
        except zlib.error as error:
            raise self._damaged(error) from error

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, or an error."""
        for start in range(0, len(buffer), BLOCK):
            stop = min(start + BLOCK, len(buffer))
            buffer[start:stop] = self.read(offset + start, stop - start)

    def _start(self) -> None:
        self._inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        self._blocks = self._packed.blocks()
        self._pending = b""
        self._position = 0

    def _take(self, most: int) -> bytes:
        """Between 1 and `most` inflated bytes."""
        data = self._inflate(most)
        if not data:
            raise CorruptFile("a compressed record ends too early", file=self.name)
        self._position += len(data)
        if self._position == self._size:
            self._finish()
        return data

    def _finish(self) -> None:
        """See whether the stream ends with the last byte that it should have."""
        inflater = self._inflater
        if self._inflate(1):
            raise CorruptFile(
                f"a compressed record inflates to more than the {self._size:,} bytes "
                "that the zip directory states",
                file=self.name,
            )
        if inflater is not None:
            self._ends_well = inflater.eof and not (inflater.unused_data or any(self._blocks))
        self._inflater = None

    def ends_well(self) -> bool:
        """Whether the stream has its end mark and nothing behind it, as far as it was read.

        What it inflates to is right all the same, and every reader takes it.

        Raises:
            CorruptFile: nothing is to be inflated, and something is.
        """
        if self._size == 0 and self._ends_well is None:
            self._start()
            self._finish()
        return self._ends_well is not False

    def _inflate(self, most: int) -> bytes:
        """Up to `most` more bytes, none at the end of the stream."""
        inflater = self._inflater
        while inflater is not None and not inflater.eof:
            block = self._pending or next(self._blocks, b"")
            if not block:
                break
            try:
                data = inflater.decompress(block, most)
            except zlib.error as error:
                raise self._damaged(error) from error
            self._pending = inflater.unconsumed_tail
            if data:
                return data
        return b""

    def _damaged(self, error: zlib.error) -> CorruptFile:
        return CorruptFile(f"a compressed record is damaged ({error})", file=self.name)


def refuse_bomb(data: ByteRange, most: int) -> None:
    """Refuse what inflates to more than `most` times what is stored, beyond 128 KiB.

    Raises:
        LimitExceeded: it does.
    """
    source = data.source
    if not isinstance(source, InflatedSource) or data.length <= _SMALL:
        return
    if data.length > source.packed_size * most:
        raise LimitExceeded(
            f"a header of {source.packed_size:,} bytes inflates to {data.length:,}, "
            f"more than {most:,} times as much",
            file=source.name,
        )
