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


def late(name: str, size: int, find: Callable[[], tuple[ByteRange, int | None]]) -> ByteRange:
    """Return a range of `size` bytes; `find` returns it and its CRC-32 when it is first read.

    The CRC-32 (None: not known) is checked if the range is read from front to back.
    `name` is the file, for messages. `find` raises the errors of a damaged file.

    Raises:
        CorruptFile: raised when it is read, if the range has another length or other bytes.
    """
    found: tuple[ByteRange, int | None] | None = None
    read = crc = 0  # the bytes read so far, from the first, and their CRC-32

    def fill(offset: int, buffer: memoryview) -> None:
        nonlocal found, read, crc
        data, stated = found = found or find()
        if data.length != size:
            raise CorruptFile(f"has {data.length:,} bytes, expected {size:,}", file=name)
        data.read_into(buffer, offset)
        if offset not in (0, read):
            return
        crc = crc32(buffer, crc if offset else 0) if stated is not None else 0
        read = offset + len(buffer)
        if read < size:
            return
        found = None  # it may keep all of the inflated bytes in memory
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

    def found(self) -> ByteRange:
        """Return the elements."""
        return self.data() if callable(self.data) else self.data


def tiled(name: str, shape: tuple[int, ...], itemsize: int, tiles: Sequence[Tile]) -> ByteRange:
    """Return the elements of a tensor in row-major order, read from tiles that cover it.

    Nothing is cached: a read of some bytes reads the tiles that contain them. `name` is for
    messages.

    Raises:
        CorruptFile: a tile is outside the shape, two overlap, or some elements are in no tile.
    """
    tiles = [tile for tile in tiles if 0 not in tile.sizes]
    _check(shape, tiles)
    size = prod(shape) * itemsize
    if len(tiles) == 1:
        return tiles[0].found()

    @cache
    def runs() -> list[_Runs]:
        made = (_Runs(shape, itemsize, tile) for tile in tiles)
        return sorted(made, key=lambda one: one.first)

    def fill(offset: int, buffer: memoryview) -> None:
        for one in runs():
            if one.first >= offset + len(buffer):
                break
            if one.end > offset:
                one.read_into(offset, buffer)

    source = FilledSource(name, size, fill)
    source.made_of = [one.data for one in tiles if isinstance(one.data, ByteRange)]
    source.rearranges = True
    return ByteRange(source, 0, size)


class _Runs:
    """A tile as runs of bytes, each contiguous in the tile and in the whole tensor."""

    def __init__(self, shape: tuple[int, ...], itemsize: int, tile: Tile) -> None:
        steps = [prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
        split = [axis for axis, size in enumerate(shape) if tile.sizes[axis] != size]
        last = split[-1] if split else 0
        self._data = tile.found()
        self._length = prod(tile.sizes[last:]) * itemsize
        self._axes = list(zip(tile.sizes[:last], steps[:last], strict=True))
        self._count = prod(tile.sizes[:last])
        self.first = sum(at * step for at, step in zip(tile.offsets, steps, strict=True))
        self.end = self._start(self._count - 1) + self._length

    def _start(self, number: int) -> int:
        """Return where a run begins in the whole tensor."""
        start = self.first
        for size, step in reversed(self._axes):
            number, at = divmod(number, size)
            start += at * step
        return start

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Copy the tile's part of `buffer`, which begins at `offset` in the whole tensor."""
        stop = offset + len(buffer)
        count = range(self._count)
        number = bisect_right(count, offset - self._length, key=self._start)
        beyond = bisect_left(count, stop, key=self._start)
        if number >= beyond:
            return
        begin = max(offset - self._start(number), 0)
        end = min(stop - self._start(beyond - 1), self._length)
        if beyond - number == 1:
            at = self._start(number) + begin - offset
            place = buffer[at : at + end - begin]
            self._data.read_into(place, number * self._length + begin)
            return
        total = (beyond - number - 1) * self._length + end - begin
        raw = memoryview(bytearray(total))
        self._data.read_into(raw, number * self._length + begin)
        done = 0
        for one in range(number, beyond):
            low = begin if one == number else 0
            high = end if one == beyond - 1 else self._length
            at = self._start(one) + low - offset
            buffer[at : at + high - low] = raw[done : done + high - low]
            done += high - low


def _check(shape: tuple[int, ...], tiles: Sequence[Tile]) -> None:
    """Raise CorruptFile unless each element of the shape is in one tile."""
    for tile in tiles:
        axes = zip(tile.offsets, tile.sizes, shape, strict=True)
        if any(at < 0 or size < 0 or at + size > whole for at, size, whole in axes):
            raise CorruptFile(f"chunk {_words(tile)} is outside shape {list(shape)}")
    held = sum(prod(tile.sizes) for tile in tiles)
    active: list[Tile] = []
    starts = [len({tile.offsets[axis] for tile in tiles}) for axis in range(len(shape))]
    cut = starts.index(max(starts)) if starts else 0  # the axis with the fewest neighbors
    for tile in sorted(tiles, key=lambda one: one.offsets[cut : cut + 1]):
        active = [one for one in active if _touch(one, tile, cut)]
        for one in active:
            if all(_touch(one, tile, axis) for axis in range(len(shape))):
                raise CorruptFile(f"chunks {_words(one)} and {_words(tile)} overlap")
        active.append(tile)
    if held != prod(shape):
        missing = prod(shape) - held
        raise CorruptFile(f"{missing:,} of {prod(shape):,} elements are in no chunk")


def _touch(one: Tile, other: Tile, axis: int) -> bool:
    if not one.offsets:
        return True  # a scalar has one chunk
    low = max(one.offsets[axis], other.offsets[axis])
    return low < min(one.offsets[axis] + one.sizes[axis], other.offsets[axis] + other.sizes[axis])


def _words(tile: Tile) -> str:
    return f"at {list(tile.offsets)} of shape {list(tile.sizes)}"
