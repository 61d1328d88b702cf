"""Ranges that are found when first read, and tensors that consist of tiles.

`torch.distributed.checkpoint` stores each chunk of a tensor as a file inside another file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import NamedTuple
from zlib import crc32

from ckptool.errors import CorruptFile
from ckptool.files.computed import FilledSource
from ckptool.files.source import ByteRange


def make_late_range(
    name: str, size: int, find: Callable[[], tuple[ByteRange, int | None]]
) -> ByteRange:
    """Return a range of `size` bytes that `find` locates, with its CRC-32, on the first read.

    The CRC-32 (None: not known) is checked if the range is read from front to back.
    `name` is the file, for messages. `find` raises the errors of a damaged file.

    Raises:
        CorruptFile: raised when it is read, if the range has another length or other bytes.
    """
    located: tuple[ByteRange, int | None] | None = None
    read = crc = 0  # the bytes read so far, from the first, and their CRC-32

    def fill(offset: int, buffer: memoryview) -> None:
        """Write the bytes from `offset` into `buffer`; check the CRC-32 after the last one."""
        nonlocal located, read, crc
        data, stated = located = located or find()
        if data.length != size:
            raise CorruptFile(f"has {data.length:,} bytes, expected {size:,}", file=name)
        data.read_into(buffer, offset)
        if offset not in (0, read):
            return  # not the next bytes: the CRC-32 cannot be continued
        crc = crc32(buffer, crc if offset else 0) if stated is not None else 0
        read = offset + len(buffer)
        if read < size:
            return
        located = None  # it may keep all of the inflated bytes in memory
        if stated is not None and crc != stated:
            raise CorruptFile(
                f"a chunk is damaged: CRC-32 is {crc:08x}, expected {stated:08x}",
                file=name,
                hint="copy the folder again, or run ckptool verify to list the damaged files",
            )

    return ByteRange(FilledSource(name, size, fill), 0, size)


class Tile(NamedTuple):
    """A box of a tensor: its offset and size along each axis, and its elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: ByteRange | Callable[[], ByteRange]
    """In row-major order; a function is called when they are first read."""

    def get_range(self) -> ByteRange:
        """Return the range of the elements."""
        return self.data() if callable(self.data) else self.data


def join_tiles(
    name: str, shape: tuple[int, ...], itemsize: int, tiles: Sequence[Tile]
) -> ByteRange:
    """Return the elements of a tensor in row-major order, read from tiles that cover it.

    Nothing is cached: a read of some bytes reads the tiles that contain them. `name` is for
    messages.

    Raises:
        CorruptFile: a tile is outside the shape, two overlap, or some elements are in no tile.
    """
    tiles = [tile for tile in tiles if 0 not in tile.sizes]
    _check_tiles(shape, tiles)
    size = prod(shape) * itemsize
    if len(tiles) == 1:
        return tiles[0].get_range()

    @cache
    def sort_runs() -> list[_Runs]:
        """Return the tiles as runs, in the order of their first byte."""
        unsorted = (_Runs(shape, itemsize, tile) for tile in tiles)
        return sorted(unsorted, key=lambda run: run.first)

    def fill(offset: int, buffer: memoryview) -> None:
        """Write the bytes from `offset` into `buffer`, from all tiles that have some of them."""
        for run in sort_runs():
            if run.first >= offset + len(buffer):
                break
            if run.end > offset:
                run.read_into(offset, buffer)

    source = FilledSource(name, size, fill)
    source.made_of = [tile.data for tile in tiles if isinstance(tile.data, ByteRange)]
    source.rearranges = True
    return ByteRange(source, 0, size)


class _Runs:
    """A tile as runs of bytes, each contiguous in the tile and in the whole tensor."""

    def __init__(self, shape: tuple[int, ...], itemsize: int, tile: Tile) -> None:
        """Divide a tile into runs: the axes from the last one that is split are contiguous."""
        steps = [prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
        split_axes = [axis for axis, size in enumerate(shape) if tile.sizes[axis] != size]
        last = split_axes[-1] if split_axes else 0
        self._data = tile.get_range()
        self._length = prod(tile.sizes[last:]) * itemsize
        """The bytes of a run."""
        self._axes = list(zip(tile.sizes[:last], steps[:last], strict=True))
        """The size of each outer axis, and its step in the whole tensor in bytes."""
        self._count = prod(tile.sizes[:last])
        """The number of runs."""
        self.first = sum(start * step for start, step in zip(tile.offsets, steps, strict=True))
        self.end = self._start(self._count - 1) + self._length

    def _start(self, number: int) -> int:
        """Return the first byte of a run in the whole tensor."""
        start = self.first
        for size, step in reversed(self._axes):
            number, index = divmod(number, size)
            start += index * step
        return start

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Copy the tile's part of `buffer`, which begins at `offset` in the whole tensor.

        All runs that it needs, from `number` to before `beyond`, are read at once.
        """
        stop = offset + len(buffer)
        count = range(self._count)
        # From the first run that ends after `offset`, to the first that begins at `stop` or later.
        number = bisect_right(count, offset - self._length, key=self._start)
        beyond = bisect_left(count, stop, key=self._start)
        if number >= beyond:
            return
        begin = max(offset - self._start(number), 0)
        end = min(stop - self._start(beyond - 1), self._length)
        if beyond - number == 1:
            position = self._start(number) + begin - offset
            target = buffer[position : position + end - begin]
            self._data.read_into(target, number * self._length + begin)
            return
        total = (beyond - number - 1) * self._length + end - begin
        run_bytes = memoryview(bytearray(total))
        self._data.read_into(run_bytes, number * self._length + begin)
        done = 0
        for run in range(number, beyond):
            low = begin if run == number else 0
            high = end if run == beyond - 1 else self._length
            position = self._start(run) + low - offset
            buffer[position : position + high - low] = run_bytes[done : done + high - low]
            done += high - low


def _check_tiles(shape: tuple[int, ...], tiles: Sequence[Tile]) -> None:
    """Raise CorruptFile unless each element of the shape is in one tile.

    The tiles are sorted along one axis, and each is compared only with those that it may overlap.
    """
    for tile in tiles:
        axes = zip(tile.offsets, tile.sizes, shape, strict=True)
        if any(
            start < 0 or size < 0 or start + size > axis_size for start, size, axis_size in axes
        ):
            raise CorruptFile(f"chunk {_describe_tile(tile)} is outside shape {list(shape)}")
    covered = sum(prod(tile.sizes) for tile in tiles)
    active: list[Tile] = []
    starts = [len({tile.offsets[axis] for tile in tiles}) for axis in range(len(shape))]
    sort_axis = starts.index(max(starts)) if starts else 0  # the axis with the fewest neighbors
    for tile in sorted(tiles, key=lambda other: other.offsets[sort_axis : sort_axis + 1]):
        active = [other for other in active if _overlap_along(other, tile, sort_axis)]
        for other in active:
            if all(_overlap_along(other, tile, axis) for axis in range(len(shape))):
                raise CorruptFile(
                    f"chunks {_describe_tile(other)} and {_describe_tile(tile)} overlap"
                )
        active.append(tile)
    if covered != prod(shape):
        missing = prod(shape) - covered
        raise CorruptFile(f"{missing:,} of {prod(shape):,} elements are in no chunk")


def _overlap_along(tile: Tile, other: Tile, axis: int) -> bool:
    """Return True if two tiles overlap along an axis."""
    if not tile.offsets:
        return True  # a scalar has one chunk
    low = max(tile.offsets[axis], other.offsets[axis])
    return low < min(tile.offsets[axis] + tile.sizes[axis], other.offsets[axis] + other.sizes[axis])


def _describe_tile(tile: Tile) -> str:
    """Return words for a tile: its offsets and sizes."""
    return f"at {list(tile.offsets)} of shape {list(tile.sizes)}"
