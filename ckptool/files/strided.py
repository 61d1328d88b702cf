"""Read a strided tensor as row-major bytes, without torch or numpy, in bounded memory.

A view is cut into boxes that fit a buffer. Elements of a box that are close together in the file
are read at once, several of these runs into one tile, and moved to their places by slices with a
step, which Python executes in C.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

from ckptool.errors import OutOfRange, UsageError
from ckptool.files.source import BLOCK, ByteRange
from ckptool.words import a_class

FORMATS: dict[int, Literal["H", "I", "Q"]] = {2: "H", 4: "I", 8: "Q"}
UNITS = (8, 4, 1)
"""Sizes of units that are moved at once. Pairs are not: slicing bytes is ten times as fast."""
Cells = bytearray | memoryview
GAP = 4096
"""Gaps up to this size are read as well, since that is cheaper than a second call."""
WIDE = 4
"""Blocks in a box with scattered content: a wider box has longer runs."""
PORTIONS = 4
"""Portions in which a block is passed on: each is copied more than once on its way."""
PADDING = 64
"""Bytes between the runs of a tile, so that a power of two does not hit one cache set."""
CALL_COST = 64
"""The cost of a slice, in elements that are moved one by one."""


class Axis(NamedTuple):
    """One dimension: its size, and its steps in the source and in the target, in elements."""

    size: int
    step: int
    target_step: int = 0


def iterate_row_major(
    data: ByteRange,
    *,
    itemsize: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    block: int = BLOCK,
) -> Iterator[bytes]:
    """Yield the elements of a view of `data` in row-major order, about `block` bytes at a time.

    `stride` and `offset` count elements of `itemsize` bytes; the view is inside `data`. At most
    about six blocks are in memory, however far apart the elements are.
    """
    if 0 in shape:
        return
    # An item of another size becomes a last axis of units: 16 bytes are two units of 8.
    unit = next(size for size in UNITS if itemsize % size == 0)
    units_per_item = itemsize // unit
    shape = (*shape, units_per_item)
    stride = (*(step * units_per_item for step in stride), 1)
    offset, itemsize = offset * units_per_item, unit
    axes = _join_axes(shape, stride)
    is_contiguous = not axes or (len(axes) == 1 and axes[0].step == 1)
    if is_contiguous:
        run = data.slice(offset * itemsize, prod(shape) * itemsize)
        yield from run.iterate_blocks(max(block - block % 16, 16))  # whole items of up to 16 bytes
        return
    limit = max(block // itemsize, 1)
    lowest, highest = _find_reach(axes)
    # Raise TruncatedFile if the view leaves `data`: tiles are read without this check.
    data.slice((offset + lowest) * itemsize, (highest - lowest + 1) * itemsize)
    for start, box in _divide_into_boxes(axes, limit):
        yield from _iterate_box(data, itemsize, offset + start, box, limit)


def _iterate_box(
    data: ByteRange, itemsize: int, start: int, box: list[Axis], limit: int
) -> Iterator[bytes]:
    """Yield the elements of a box that begins at element `start` of `data`, in portions.

    `limit` is the usual number of elements in a box, which has PORTIONS portions.
    """
    buffer = bytearray(prod(axis.size for axis in box) * itemsize)
    _fill_from_box(buffer, data, itemsize, start, box, limit)
    portion = max(limit // PORTIONS, 1) * itemsize
    for begin in range(0, len(buffer), portion):
        yield bytes(memoryview(buffer)[begin : begin + portion])


def _join_axes(shape: Sequence[int], stride: Sequence[int]) -> list[Axis]:
    """Return the dimensions of a view, without those of size 1, and with contiguous ones joined.

    A contiguous view, or one of a single element, has at most one axis.
    """
    axes: list[Axis] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if axes and axes[-1].step == size * step:
            axes[-1] = Axis(axes[-1].size * size, step)
        else:
            axes.append(Axis(size, step))
    return axes


def _find_reach(axes: Sequence[Axis]) -> tuple[int, int]:
    """Return the positions of the lowest and the highest element, relative to the first one."""
    lowest = sum((axis.size - 1) * axis.step for axis in axes if axis.step < 0)
    return lowest, lowest + _span_of(axes) - 1


def _divide_into_boxes(axes: list[Axis], limit: int) -> Iterator[tuple[int, list[Axis]]]:
    """Yield boxes of consecutive elements that cover the view, with their starts in the source.

    A box has some rows of one axis, the cut axis, and all elements of the axes after it. It has at
    most `limit` elements, `WIDE` times as many if they are scattered. The target of its axes is the
    box in row-major order.
    """
    cut, rows = _find_cut(axes, limit)
    first_box = [axes[cut]._replace(size=rows), *axes[cut + 1 :]]
    is_scattered = _span_of(first_box) > 4 * limit  # elements from the first to the last
    if is_scattered:
        cut, rows = _find_cut(axes, WIDE * limit)
    cut_axis, *inner_axes = [
        axes[index]._replace(target_step=prod(inner.size for inner in axes[index + 1 :]))
        for index in range(cut, len(axes))
    ]
    for start in _iterate_starts(axes[:cut]):
        for row in range(0, cut_axis.size, rows):
            rows_of_box = cut_axis._replace(size=min(rows, cut_axis.size - row))
            yield start + row * cut_axis.step, [rows_of_box, *inner_axes]


def _find_cut(axes: list[Axis], limit: int) -> tuple[int, int]:
    """Return the axis to cut along, and the number of its rows in a box of `limit` elements.

    It is the innermost axis that does not fit into the box completely, or else the first one.
    """
    row_size = 1  # elements of a row, never more than `limit`
    for index in range(len(axes) - 1, 0, -1):
        if row_size * axes[index].size > limit:
            return index, limit // row_size
        row_size *= axes[index].size
    return 0, min(limit // row_size, axes[0].size)


def _iterate_starts(axes: Sequence[Axis]) -> Iterator[int]:
    """Yield the source position of each index of these axes, in row-major order."""
    if not axes:
        yield 0
        return
    for index in range(axes[0].size):
        for start in _iterate_starts(axes[1:]):
            yield index * axes[0].step + start


def _span_of(axes: Sequence[Axis]) -> int:
    """Return the number of source elements from the first to the last that these axes reach."""
    return 1 + sum((axis.size - 1) * abs(axis.step) for axis in axes)


class _Tiling(NamedTuple):
    """The way to read a box in tiles. A row of a tile is one run of elements in the file."""

    run: list[Axis]
    """The axes of a row."""
    row_axis: Axis
    """The axis along which the rows of a tile follow each other."""
    rows: int
    """The number of rows in a tile."""
    pitch: int
    """Elements from the start of a row to the next one, in the tile."""
    is_dense: bool
    """True if the rows have the same pitch in the file, so that a tile is read at once."""
    outer_axes: list[Axis]
    """The other axes, the smallest step first: each of their indices has its own tiles."""


def _plan_tiling(axes: list[Axis], itemsize: int, tile_size: int) -> _Tiling:
    """Return a tiling with about `tile_size` elements, for axes with steps of 0 or more.

    The axes with the smallest steps make the run. It ends before an axis that leaves a large gap,
    or with which it would be longer than a tile; a tile has as many rows along this axis as fit.
    """
    axes = sorted(axes, key=lambda axis: axis.step)
    run: list[Axis] = []
    while axes:
        axis = axes.pop(0)
        span = _span_of(run)
        gap = axis.step - span
        if gap * itemsize > max(GAP, span * itemsize):
            pitch = span + PADDING // itemsize
            rows = min(max(tile_size // pitch, 1), axis.size)
            return _Tiling(run, axis, rows, pitch, is_dense=False, outer_axes=axes)
        if _span_of([*run, axis]) > tile_size:
            rows = min(max((tile_size - span) // axis.step, 1), axis.size)
            return _Tiling(run, axis, rows, axis.step, is_dense=True, outer_axes=axes)
        run.append(axis)
    single_row = Axis(1, 0)
    return _Tiling(run, single_row, 1, 0, is_dense=True, outer_axes=[])


def _fill_from_box(
    target: bytearray, data: ByteRange, itemsize: int, start: int, box: list[Axis], limit: int
) -> None:
    """Put the elements of `box`, which begins at element `start` of `data`, into `target`.

    They are read in tiles of about a quarter of `limit` elements, forwards in the file: an axis
    with a negative step begins at its last element, and is put into the target backwards.
    """
    target_start, forward_axes = 0, []
    for axis in box:
        if axis.step >= 0:
            forward_axes.append(axis)
            continue
        start += (axis.size - 1) * axis.step
        target_start += (axis.size - 1) * axis.target_step
        forward_axes.append(Axis(axis.size, -axis.step, -axis.target_step))
    tiling = _plan_tiling(forward_axes, itemsize, max(limit // 4, 1))
    tile = bytearray((tiling.rows * tiling.pitch + _span_of(tiling.run)) * itemsize)
    tile_cells, target_cells = _view_as_cells(tile, itemsize), _view_as_cells(target, itemsize)
    row_axis = tiling.row_axis
    positions = _list_positions(tiling.outer_axes[::-1], start, target_start)
    for first, target_first in positions:  # of each group of rows, in `data` and in `target`
        for row in range(0, row_axis.size, tiling.rows):
            rows = min(tiling.rows, row_axis.size - row)  # the last tile may have fewer
            tile_start = first + row * row_axis.step
            _read_tile(memoryview(tile), data, itemsize, tile_start, rows, tiling)
            tile_axes = [*tiling.run, Axis(rows, tiling.pitch, row_axis.target_step)]
            tile_target = target_first + row * row_axis.target_step
            _move_elements(target_cells, tile_cells, tile_axes, tile_target)


def _view_as_cells(buffer: bytearray, itemsize: int) -> Cells:
    """Return the buffer as a sequence with an item for each element of `itemsize` bytes."""
    return buffer if itemsize == 1 else memoryview(buffer).cast(FORMATS[itemsize])


def _read_tile(
    tile: memoryview, data: ByteRange, itemsize: int, first: int, rows: int, tiling: _Tiling
) -> None:
    """Read `rows` rows, gaps in them included, into the tile, from element `first` of `data` on."""
    base = data.offset + first * itemsize
    row_bytes = _span_of(tiling.run) * itemsize
    pitch, step = tiling.pitch * itemsize, tiling.row_axis.step * itemsize
    read_into = data.source.read_into
    if tiling.is_dense:
        read_into(base, tile[: (rows - 1) * pitch + row_bytes])
        return
    for row in range(rows):
        read_into(base + row * step, tile[row * pitch : row * pitch + row_bytes])


def _list_positions(axes: list[Axis], start: int, target_start: int) -> list[tuple[int, int]]:
    """Return (position in the source, position in the target) for each index of `axes`."""
    positions = [(start, target_start)]
    for size, step, target_step in axes:
        positions = [
            (position + index * step, target_position + index * target_step)
            for position, target_position in positions
            for index in range(size)
        ]
    return positions


def _estimate_cost(axis: Axis) -> float:
    """Return the cost of moving an element by a slice along this axis.

    A step beyond a cache line in the target costs most; the tile is in the processor's cache.
    """
    is_far_in_target = abs(axis.target_step) > 8  # elements, of at most 8 bytes
    has_gaps_in_tile = axis.step != 1
    return CALL_COST / axis.size + is_far_in_target + has_gaps_in_tile / 2


def _move_elements(
    target_cells: Cells, tile_cells: Cells, axes: list[Axis], target_start: int
) -> None:
    """Move the elements of a tile to the target, by slices along the cheapest axis.

    `axes` have the step in the tile and the step in the target. A step of 0 repeats an element.
    """
    single_element = Axis(1, 1, 1)
    axes = [axis for axis in axes if axis.size > 1] or [single_element]
    cheapest = min(axes, key=_estimate_cost)
    axes.remove(cheapest)
    size, step, target_step = cheapest
    itemsize = 1 if isinstance(tile_cells, bytearray) else tile_cells.itemsize
    for first, target_first in _list_positions(axes, 0, target_start):
        if step:
            moved = tile_cells[first : first + (size - 1) * step + 1 : step]
        else:
            moved = _view_as_cells(bytearray(tile_cells[first : first + 1]) * size, itemsize)
        stop = target_first + size * target_step
        # Backwards to the first element: a negative stop would count from the end.
        target_cells[target_first : stop if stop >= 0 else None : target_step] = moved


def swap_bytes(data: bytes, size: int) -> bytes:
    """Return `data` with each group of `size` bytes (1, 2, 4 or 8) reversed."""
    if size == 1:
        return data
    items = array(FORMATS[size], data)
    items.byteswap()
    return items.tobytes()


_WITH_FLIPPED_SIGN = bytes(byte ^ 0x80 for byte in range(256))
"""For each last byte of a little-endian float, the one with the other sign."""


def swap_blocks(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Yield the blocks in the other byte order; an incomplete element at the end is unchanged."""
    for block in blocks:
        complete = len(block) - len(block) % size
        yield swap_bytes(block[:complete], size) + block[complete:]


def flip_signs(data: bytes, size: int, is_complex: bool, flags: tuple[str, ...]) -> bytes:
    """Apply torch's lazy `conj` and `neg` bits to little-endian floats of `size` bytes.

    `size` is the size of one component of a complex number; `data` has complete numbers. `neg`
    flips every sign, `conj` those of the imaginary parts.
    """
    flipped = bytearray(data)
    if "neg" in flags:
        every = slice(size - 1, None, size)
        flipped[every] = flipped[every].translate(_WITH_FLIPPED_SIGN)
    if "conj" in flags and is_complex:
        imaginary = slice(2 * size - 1, None, 2 * size)
        flipped[imaginary] = flipped[imaginary].translate(_WITH_FLIPPED_SIGN)
    return bytes(flipped)


def narrow(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, index: Any
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape, stride and offset of `view[index]` for integers, slices and `...`.

    Raises:
        UsageError: an index is out of range (`OutOfRange`), unsupported, or one too many.
    """
    sizes: list[int] = []
    steps: list[int] = []
    items = _complete_index(index, len(shape))
    for axis, (item, size, step) in enumerate(zip(items, shape, stride, strict=True)):
        selection = _select_along(item, size, axis)
        if isinstance(selection, range):
            offset += selection.start * step
            sizes.append(len(selection))
            steps.append(step * selection.step)
        else:
            offset += selection * step
    return tuple(sizes), tuple(steps), offset


def _complete_index(index: Any, dimensions: int) -> list[Any]:
    """Return one item for each dimension: a full slice for those of `...` and for missing ones."""
    items = list(index) if isinstance(index, tuple) else [index]
    ellipses = [position for position, item in enumerate(items) if item is Ellipsis]
    if len(ellipses) > 1:
        raise UsageError("an index can have only one ellipsis ('...')")
    missing = dimensions - len(items) + len(ellipses)
    if missing < 0:
        raise UsageError(f"{len(items) - len(ellipses)} indices for {dimensions} dimensions")
    full_slices = [slice(None)] * missing
    if not ellipses:
        return items + full_slices
    position = ellipses[0]
    return [*items[:position], *full_slices, *items[position + 1 :]]


def _select_along(item: Any, size: int, axis: int) -> int | range:
    """Return the position or range that an index or slice selects in a dimension."""
    try:
        if isinstance(item, bool):
            raise TypeError("use integers, slices and '...'")
        selection: int | range = range(size)[item]
    except IndexError as error:
        raise OutOfRange(
            f"index {item} is out of range for dimension {axis} of size {size}"
        ) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"cannot slice or index by {a_class(item)}: {error}") from error
    if isinstance(selection, range) and selection.step < 1:
        raise UsageError(f"cannot slice by {item}: the step must be positive")
    return selection
