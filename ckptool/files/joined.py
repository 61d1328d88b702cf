"""Several runs of bytes read as one: the kept parts of a storage, one behind the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ckptool.errors import TruncatedFile
from ckptool.files.source import ByteRange

__all__ = ["JoinedSource", "joined"]


class JoinedSource:
    """A source (`source.Source`) whose bytes are those of `parts` in order; nothing is copied."""

    def __init__(self, parts: Sequence[ByteRange]) -> None:
        """Stand for the parts, of which there is at least one."""
        self._parts = tuple(parts)
        self._starts = list(accumulate((part.length for part in self._parts), initial=0))

    @property
    def name(self) -> str:
        """The file that the first part is in."""
        return self._parts[0].source.name

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self._starts[-1]

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`, or `TruncatedFile`."""
        self._check(offset, length)
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, or `TruncatedFile`."""
        self._check(offset, len(buffer))
        index, done = bisect_right(self._starts, offset) - 1, 0
        while done < len(buffer):
            part, begin = self._parts[index], offset + done - self._starts[index]
            count = min(part.length - begin, len(buffer) - done)
            part.read_into(buffer[done : done + count], begin)
            index, done = index + 1, done + count

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise TruncatedFile(
                f"{length:,} bytes are wanted at offset {offset:,} of {self.size:,} joined ones",
                file=self.name,
            )


def joined(parts: Sequence[ByteRange]) -> ByteRange:
    """The parts as one range: of their own source where they follow each other in it."""
    runs: list[ByteRange] = []
    for part in parts:
        last = runs[-1] if runs else None
        if last and last.source is part.source and last.offset + last.length == part.offset:
            runs[-1] = ByteRange(part.source, last.offset, last.length + part.length)
        else:
            runs.append(part)
    if len(runs) == 1:
        return runs[0]
    source = JoinedSource(runs)
    return ByteRange(source, 0, source.size)
