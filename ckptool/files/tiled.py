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
    """Return a range of `size` bytes that is located on the first read.

    `find` then returns it with its CRC-32 (None: not known), or raises the errors of a damaged
    file. The CRC-32 is checked if the range is read from front to back. `name` is the file, for
    messages.

    Raises:
        CorruptFile: raised when it is read, if the range has another length or other bytes.
    """
    located: tuple[ByteRange, int | None] | None = None
    checked_length = crc = 0  # the bytes read so far, from the first, and their CRC-32

    def fill(offset: int, buffer: memoryview) -> None:
        """Write the bytes from `offset` into `buffer`; check the CRC-32 after the last one."""
        nonlocal located, checked_length, crc
        if located is None:
            located = find()
        data, stated_crc = located
        if data.length != size:
            raise CorruptFile(f"has {data.length:,} bytes, expected {size:,}", file=name)
        data.read_into(buffer, offset)
        if offset not in (0, checked_length):
            return  # not the next bytes: the CRC-32 cannot be continued
        if stated_crc is not None:
            crc = crc32(buffer, crc if offset else 0)
        checked_length = offset + len(buffer)
        if checked_length < size:
            return
        located = None  # it may keep all of the inflated bytes in memory
        if stated_crc is not None and crc != stated_crc:
            raise CorruptFile(
                f"a chunk is damaged: CRC-32 is {crc:08x}, expected {stated_crc:08x}",
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
    if len(tiles) == 1:  # it is the whole tensor
        return tiles[0].get_range()

    @cache
    def sort_runs() -> list[_Runs]:
        """Return the runs of each tile, the tiles in the order of their first byte."""
        unsorted = (_Runs(shape, itemsize, tile) for tile in tiles)
        return sorted(unsorted, key=lambda runs: runs.start)

    def fill(offset: int, buffer: memoryview) -> None:
        """Write the bytes from `offset` into `buffer`, from all tiles that have some of them."""
        for runs in sort_runs():
            if runs.start >= offset + len(buffer):
                break
            if runs.end > offset:
                runs.read_into(offset, buffer)

    source = FilledSource(name, size, fill)
    # So that the checksums of the files with the tiles are verified.
    source.made_of = [tile.data for tile in tiles if isinstance(tile.data, ByteRange)]
    source.rearranges = True
    return ByteRange(source, 0, size)


class _Runs:
    """A tile as runs of bytes, each contiguous in the tile and in the whole tensor."""

    def __init__(self, shape: tuple[int, ...], itemsize: int, tile: Tile) -> None:
        """Divide a tile into runs. A run has the last axis that is split, and all axes after it.

        A tile of shape [2, 3, 4] in a tensor of shape [9, 6, 4] has 2 runs of 3 * 4 elements.
        """
        steps = [prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape))]
        split_axes = [axis for axis, size in enumerate(shape) if tile.sizes[axis] != size]
        run_axis = split_axes[-1] if split_axes else 0
        self._data = tile.get_range()
        self._run_bytes = prod(tile.sizes[run_axis:]) * itemsize
        """The bytes of a run."""
        self._outer_axes = list(zip(tile.sizes[:run_axis], steps[:run_axis], strict=True))
        """The size of each axis before those of a run, and its step in the tensor in bytes."""
        self._count = prod(tile.sizes[:run_axis])
        """The number of runs."""
        self.start = sum(start * step for start, step in zip(tile.offsets, steps, strict=True))
        """The first byte of the tile in the whole tensor."""
        self.end = self._find_start(self._count - 1) + self._run_bytes
        """The byte after its last one."""

    def _find_start(self, number: int) -> int:
        """Return the first byte of run `number` in the whole tensor."""
        start = self.start
        for size, step in reversed(self._outer_axes):  # runs are in row-major order
            number, index = divmod(number, size)
            start += index * step
        return start

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Copy the tile's part of `buffer`, which begins at `offset` in the whole tensor.

        All runs that it needs, from `first` to `last`, are read at once.
        """
        stop = offset + len(buffer)
        runs = range(self._count)
        # The first run that ends after `offset`, and the last one that begins before `stop`.
        first = bisect_right(runs, offset - self._run_bytes, key=self._find_start)
        last = bisect_left(runs, stop, key=self._find_start) - 1
        if first > last:
            return
        start_in_first = max(offset - self._find_start(first), 0)
        stop_in_last = min(stop - self._find_start(last), self._run_bytes)
        tile_offset = first * self._run_bytes + start_in_first
        if first == last:
            position = self._find_start(first) + start_in_first - offset
            target = buffer[position : position + stop_in_last - start_in_first]
            self._data.read_into(target, tile_offset)
            return
        length = last * self._run_bytes + stop_in_last - tile_offset
        tile_bytes = memoryview(bytearray(length))
        self._data.read_into(tile_bytes, tile_offset)
        done = 0
        for run in range(first, last + 1):
            low = start_in_first if run == first else 0
            high = stop_in_last if run == last else self._run_bytes
            position = self._find_start(run) + low - offset
            buffer[position : position + high - low] = tile_bytes[done : done + high - low]
            done += high - low


def _check_tiles(shape: tuple[int, ...], tiles: Sequence[Tile]) -> None:
    """Raise CorruptFile unless each element of the shape is in one tile.

    The tiles are sorted along one axis, and each is compared only with the active ones: those
    before it that it may overlap.
    """
    for tile in tiles:
        axes = zip(tile.offsets, tile.sizes, shape, strict=True)
        if any(
            start < 0 or size < 0 or start + size > axis_size for start, size, axis_size in axes
        ):
            raise CorruptFile(f"chunk {_describe_tile(tile)} is outside shape {list(shape)}")
    # Most different offsets: the axis along which a tile overlaps the fewest others.
    offset_counts = [len({tile.offsets[axis] for tile in tiles}) for axis in range(len(shape))]
    sort_axis = offset_counts.index(max(offset_counts)) if shape else 0
    active: list[Tile] = []
    # A slice, since the tiles of a scalar have no offsets; `_overlap_along` allows that, too.
    for tile in sorted(tiles, key=lambda other: other.offsets[sort_axis : sort_axis + 1]):
        active = [other for other in active if _overlap_along(other, tile, sort_axis)]
        for other in active:
            if all(_overlap_along(other, tile, axis) for axis in range(len(shape))):
                raise CorruptFile(
                    f"chunks {_describe_tile(other)} and {_describe_tile(tile)} overlap"
                )
        active.append(tile)
    covered = sum(prod(tile.sizes) for tile in tiles)
    if covered != prod(shape):
        missing = prod(shape) - covered
        raise CorruptFile(f"{missing:,} of {prod(shape):,} elements are in no chunk")


def _overlap_along(tile: Tile, other: Tile, axis: int) -> bool:
    """Return True if two tiles overlap along an axis; those of a scalar always do."""
    if not tile.offsets:
        return True
    end = tile.offsets[axis] + tile.sizes[axis]
    other_end = other.offsets[axis] + other.sizes[axis]
    return max(tile.offsets[axis], other.offsets[axis]) < min(end, other_end)


def _describe_tile(tile: Tile) -> str:
    """Return words for a tile: its offsets and sizes."""
    return f"at {list(tile.offsets)} of shape {list(tile.sizes)}"
