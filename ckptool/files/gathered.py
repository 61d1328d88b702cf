"""The elements of a view as a run of bytes, read from where they lie apart."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ckptool.files.computed import ComputedSource
from ckptool.files.source import ByteRange
from ckptool.files.strided import row_major

__all__ = ["gathered"]


def gathered(
    data: ByteRange,
    *,
    itemsize: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> ByteRange:
    """The elements of a view of `data` in row-major order, gathered as they are read.

    `stride` and `offset` count elements of `itemsize` bytes; the view lies inside `data`. Reading
    on where the last read ended costs one pass, from elsewhere a start at the row there.
    """
    axes = list(zip(shape, stride, strict=True)) or [(1, 1)]
    rows = _Rows(data, itemsize, axes, offset)
    source = ComputedSource(data.source.name, rows.size, rows.read_into)
    return ByteRange(source, 0, rows.size)


class _Rows:
    """A view that is read from front to back, from any byte on."""

    def __init__(
        self, data: ByteRange, itemsize: int, axes: list[tuple[int, int]], offset: int
    ) -> None:
        self.size = prod(size for size, _ in axes) * itemsize
        self._data = data
        self._itemsize = itemsize
        self._axes = axes
        self._offset = offset
        self._blocks: Iterator[bytes] = iter(())
        self._pending = memoryview(b"")
        self._position = -1

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset` of the result."""
        if offset != self._position:
            self._seek(offset)
        done = 0
        while done < len(buffer):
            block = self._pending or memoryview(next(self._blocks))
            part = block[: len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            self._pending = block[len(part) :]
        self._position = offset + done
        if self._position == self.size:
            self._blocks, self._position = iter(()), -1  # which holds blocks until let go

    def _seek(self, offset: int) -> None:
        """Begin at the row of the outermost dimension in which `offset` lies."""
        (rows, step), *inner = self._axes
        row = prod(size for size, _ in inner) * self._itemsize
        skipped, within = divmod(offset, row)
        self._blocks = row_major(
            self._data,
            itemsize=self._itemsize,
            shape=(rows - skipped, *(size for size, _ in inner)),
            stride=tuple(step for _, step in self._axes),
            offset=self._offset + skipped * step,
        )
        self._pending = memoryview(b"")
        while within:
            block = memoryview(next(self._blocks))
            self._pending, within = block[within:], max(within - len(block), 0)
