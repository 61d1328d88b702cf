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
    """One dimension: its size, its step in the source and its step in the result, in elements."""

    size: int
    step: int
    place: int = 0


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
    # An item of another size, such as 16 bytes, becomes an axis of units.
    unit = next(size for size in UNITS if itemsize % size == 0)
    units_per_item = itemsize // unit
    shape, stride = (*shape, units_per_item), (*(step * units_per_item for step in stride), 1)
    offset, itemsize = offset * units_per_item, unit
    axes = _join_axes(shape, stride)
    if not axes or (len(axes) == 1 and axes[0].step == 1):
        run = data.slice(offset * itemsize, prod(shape) * itemsize)
        yield from run.iterate_blocks(max(block - block % 16, 16))
        return
    limit = max(block // itemsize, 1)
    first, last = _reach_of(axes)
    data.slice((offset + first) * itemsize, (last - first + 1) * itemsize)  # or it is truncated
    for start, box in _divide_into_boxes(axes, limit):
        yield from _iterate_box(data, itemsize, offset + start, box, limit)


def _iterate_box(
    data: ByteRange, itemsize: int, start: int, box: list[Axis], limit: int
) -> Iterator[bytes]:
    """Yield the elements of a box that begins at element `start` of `data`, in portions."""
    buffer = bytearray(prod(axis.size for axis in box) * itemsize)
    _fill_from_box(buffer, data, itemsize, start, box, limit)
    portion = max(limit // PORTIONS, 1) * itemsize
    for begin in range(0, len(buffer), portion):
        yield bytes(memoryview(buffer)[begin : begin + portion])


def _join_axes(shape: Sequence[int], stride: Sequence[int]) -> list[Axis]:
    """Return the dimensions of a view, without those of size 1, and with contiguous ones joined."""
    axes: list[Axis] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if axes and axes[-1].step == size * step:
            axes[-1] = Axis(axes[-1].size * size, step)
        else:
            axes.append(Axis(size, step))
    return axes


def _reach_of(axes: Sequence[Axis]) -> tuple[int, int]:
    """Return the lowest and the highest element that these axes reach, counted from the first."""
    low = sum((axis.size - 1) * axis.step for axis in axes if axis.step < 0)
    return low, low + _span_of(axes) - 1


def _divide_into_boxes(axes: list[Axis], limit: int) -> Iterator[tuple[int, list[Axis]]]:
    """Yield boxes of consecutive elements that cover the view, with their starts in the source.

    A box has some rows of one axis (`cut`), and all elements of the axes after it. It has at most
    `limit` elements, `WIDE` times as many if they are scattered.
    """
    cut, rows = _find_cut(axes, limit)
    if _span_of([axes[cut]._replace(size=rows), *axes[cut + 1 :]]) > 4 * limit:
        cut, rows = _find_cut(axes, limit * WIDE)
    result_steps = [prod(axis.size for axis in axes[index + 1 :]) for index in range(len(axes))]
    axes = [
        axis._replace(place=result_step)
        for axis, result_step in zip(axes, result_steps, strict=True)
    ]
    size, step, _ = axes[cut]
    for start in _iterate_starts(axes[:cut]):
        for row in range(0, size, rows):
            first_axis = axes[cut]._replace(size=min(rows, size - row))
            yield start + row * step, [first_axis, *axes[cut + 1 :]]


def _find_cut(axes: list[Axis], limit: int) -> tuple[int, int]:
    """Return the axis to cut along, and the number of its rows in a box of `limit` elements."""
    inner = 1
    for index in range(len(axes) - 1, 0, -1):
        if inner * axes[index].size > limit:
            return index, max(limit // inner, 1)
        inner *= axes[index].size
    return 0, min(max(limit // inner, 1), axes[0].size)


def _iterate_starts(axes: Sequence[Axis]) -> Iterator[int]:
    """Return the source position of each index of the outer axes, in order."""
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
    """The way to read a box: `run` at once, `rows` of them along `along` in a tile, `rest` in turn.

    Rows of the tile are `pitch` elements apart; if that is also the step in the file (`dense`), a
    tile is read at once.
    """

    run: list[Axis]
    along: Axis
    rows: int
    pitch: int
    dense: bool
    rest: list[Axis]


def _plan_tiling(axes: list[Axis], itemsize: int, tile: int) -> _Tiling:
    """Return a tiling of about `tile` elements; its run is contiguous, or almost, in the file.

    The axes with the smallest steps make the run. It ends before an axis that leaves a large gap,
    or with which it would be longer than a tile; a tile has as many rows along this axis as fit.
    """
    axes = sorted(axes, key=lambda axis: axis.step)
    run: list[Axis] = []
    while axes:
        span, axis = _span_of(run), axes.pop(0)
        if (axis.step - span) * itemsize > max(GAP, span * itemsize):
            pitch = span + PADDING // itemsize
            return _Tiling(run, axis, min(max(tile // pitch, 1), axis.size), pitch, False, axes)
        if _span_of([*run, axis]) > tile:
            rows = min(max((tile - span) // axis.step, 1), axis.size)
            return _Tiling(run, axis, rows, axis.step, True, axes)
        run.append(axis)
    return _Tiling(run, Axis(1, 0), 1, 0, True, [])


def _fill_from_box(
    target: bytearray, data: ByteRange, itemsize: int, start: int, box: list[Axis], limit: int
) -> None:
    """Put the elements of `box`, which begins at element `start` of `data`, into `target`.

    They are read in tiles of about a quarter of `limit` elements.
    """
    target_start, axes = 0, []
    for size, step, pitch in box:  # read the file forwards, whether a step is positive or negative
        from_end = size - 1 if step < 0 else 0
        start, target_start = start + from_end * step, target_start + from_end * pitch
        axes.append(Axis(size, abs(step), -pitch if from_end else pitch))
    tiling = _plan_tiling(axes, itemsize, max(limit // 4, 1))
    tile = bytearray((tiling.rows * tiling.pitch + _span_of(tiling.run)) * itemsize)
    cells, target_cells = _view_as_cells(tile, itemsize), _view_as_cells(target, itemsize)
    along = tiling.along
    for origin, target_origin in _list_corners(list(reversed(tiling.rest)), start, target_start):
        for row in range(0, along.size, tiling.rows):
            rows = min(tiling.rows, along.size - row)
            _read_tile(memoryview(tile), data, itemsize, origin + row * along.step, rows, tiling)
            _move_elements(
                target_cells,
                cells,
                [*tiling.run, Axis(rows, tiling.pitch, along.place)],
                target_origin + row * along.place,
            )


def _view_as_cells(buffer: bytearray, itemsize: int) -> Cells:
    """Return the buffer as a sequence of elements of `itemsize` bytes."""
    return buffer if itemsize == 1 else memoryview(buffer).cast(FORMATS[itemsize])


def _read_tile(
    tile: memoryview, data: ByteRange, itemsize: int, first: int, rows: int, tiling: _Tiling
) -> None:
    """Read `rows` runs into the tile, the first from element `first`."""
    base, size = data.offset + first * itemsize, _span_of(tiling.run) * itemsize
    if tiling.dense:
        data.source.read_into(base, tile[: (rows - 1) * tiling.pitch * itemsize + size])
        return
    read_into, pitch, step = (
        data.source.read_into,
        tiling.pitch * itemsize,
        tiling.along.step * itemsize,
    )
    for row in range(rows):
        read_into(base + row * step, tile[row * pitch : row * pitch + size])


def _list_corners(axes: list[Axis], start: int, target_start: int) -> list[tuple[int, int]]:
    """Return the positions of each index of `axes`, in the source and in the result."""
    corners = [(start, target_start)]
    for size, step, pitch in axes:
        corners = [
            (source_index + index * step, target_index + index * pitch)
            for source_index, target_index in corners
            for index in range(size)
        ]
    return corners


def _estimate_cost(axis: Axis) -> float:
    """Return the cost of moving an element along this axis; steps in the tile stay in the cache."""
    return CALL_COST / axis.size + (abs(axis.place) > 8) + (axis.step != 1) / 2


def _move_elements(target: Cells, cells: Cells, axes: list[Axis], target_start: int) -> None:
    """Move the elements of a tile from `cells` to `target`, by slices along the cheapest axis.

    `axes` have the step in the tile and the step in the target. A step of 0 repeats an element.
    """
    axes = [axis for axis in axes if axis.size > 1] or [Axis(1, 1, 1)]
    cheapest = min(axes, key=_estimate_cost)
    axes.remove(cheapest)
    size, step, pitch = cheapest
    itemsize = 1 if isinstance(cells, bytearray) else cells.itemsize
    for origin, target_origin in _list_corners(axes, 0, target_start):
        if step:
            moved = cells[origin : origin + (size - 1) * step + 1 : step]
        else:
            moved = _view_as_cells(bytearray(cells[origin : origin + 1]) * size, itemsize)
        stop = target_origin + size * pitch
        target[target_origin : stop if stop >= 0 else None : pitch] = moved


def swap_bytes(data: bytes, size: int) -> bytes:
    """Return `data` with each group of `size` bytes (1, 2, 4 or 8) reversed."""
    if size == 1:
        return data
    items = array(FORMATS[size], data)
    items.byteswap()
    return items.tobytes()


_FLIPPED = bytes(byte ^ 0x80 for byte in range(256))


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
        flipped[size - 1 :: size] = flipped[size - 1 :: size].translate(_FLIPPED)
    if "conj" in flags and is_complex:
        imaginary = slice(2 * size - 1, None, 2 * size)
        flipped[imaginary] = flipped[imaginary].translate(_FLIPPED)
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
    """Return one item for each dimension, with the ellipsis and missing items spelled out."""
    items = list(index) if isinstance(index, tuple) else [index]
    ellipses = [position for position, item in enumerate(items) if item is Ellipsis]
    if len(ellipses) > 1:
        raise UsageError("an index can have only one ellipsis ('...')")
    missing = dimensions - len(items) + len(ellipses)
    if missing < 0:
        raise UsageError(f"{len(items) - len(ellipses)} indices for {dimensions} dimensions")
    first_dots = ellipses[0] if ellipses else len(items)
    return [*items[:first_dots], *[slice(None)] * missing, *items[first_dots + 1 :]]


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
