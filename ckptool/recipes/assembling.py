"""The elements of a tensor that is made of parts of others, read when they are asked for.

A part is a strided box of a source that becomes a strided box of the target. One that lies in one
piece in both is a range of bytes. Of another one, what a block of the target needs is gathered in
the order of the target, and moved to its places by slices with a step, which Python executes in C.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeAlias

from ckptool.core.checkpoint import Change
from ckptool.core.model import Storage, TensorRef, replace_elements, row_major_strides
from ckptool.dtypes import PACKED
from ckptool.errors import NotRepresentable
from ckptool.files import ByteRange
from ckptool.files.computed import FilledSource, join_ranges
from ckptool.files.source import BLOCK
from ckptool.files.strided import FORMATS, UNITS, iterate_row_major as blocks_of
from ckptool.formats.distributed.placements import row_major_data
from ckptool.words import counted, printable

_WIDE, _WORTH = 4 * BLOCK, 256 << 10
"""Bytes that are put together at once where runs are short, so that reads of a source get longer;
and from how many on that is done: who wants fewer takes a sample."""
_TILE, _ROWS = 512 << 10, 512
"""Bytes of a tile, and its most elements along the axis of a slice."""
_LONG, _FAR = 4096, 64 << 10
"""Bytes of a run that is read right to its place: of a file, of what opens one for each read."""


class BoxAxis(NamedTuple):
    """An axis of a box: its size, and its steps in the source and in the target, in elements."""

    size: int
    step: int
    place: int


class Piece(NamedTuple):
    """A box of one member's elements, and where it goes."""

    key: int
    """Which key of the rule has the member."""
    member: tuple[int, ...]
    """Its number in each variable that only the source has."""
    start: int
    """The first element in the source, counted from the start of the member."""
    place: int
    """The first element in the target."""
    axes: tuple[BoxAxis, ...]
    """The slowest of the target first; those that run on in both are joined."""

    @property
    def is_run(self) -> bool:
        """Whether it lies in one piece in both."""
        return not self.axes or (len(self.axes) == 1 and self.axes[0][1:] == (1, 1))

    @property
    def numel(self) -> int:
        """Its elements."""
        return prod(axis.size for axis in self.axes)


def ordered(axes: Sequence[BoxAxis]) -> tuple[BoxAxis, ...]:
    """Return axes by their steps in the target, those that run on in both joined."""
    made: list[BoxAxis] = []
    for axis in sorted(axes, key=lambda one: -one.place):
        if axis.size == 1:
            continue
        last = made[-1] if made else None
        if last and (last.step, last.place) == (axis.size * axis.step, axis.size * axis.place):
            made[-1] = BoxAxis(last.size * axis.size, axis.step, axis.place)
        else:
            made.append(axis)
    return tuple(made)


def check_movable(key: str, tensor: TensorRef, file: str) -> None:
    """Refuse a tensor without plain elements.

    Raises:
        NotRepresentable: naming it.
    """
    if not tensor.has_content or tensor.dtype in PACKED:
        text = f"{printable(key)!r} is a {tensor.dtype} {tensor.kind} tensor, without plain"
        raise NotRepresentable(f"{text} elements to rearrange", file=file or None)


def row_major(key: str, tensor: TensorRef, file: str) -> TensorRef:
    """Return a tensor over its elements in row-major order."""
    data = row_major_data(tensor, printable(key), file)
    return _over(tensor, key, tensor.sizes, data)


class LastBlock:
    """What has been put together last: one block for all tensors of a checkpoint."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self.of: object = None
        self.begin = 0
        self.data = bytearray()


def assembled(
    key: str,
    shape: tuple[int, ...],
    pieces: Sequence[Piece],
    members: Sequence[TensorRef],
    last: LastBlock,
    file: str,
) -> TensorRef:
    """Return the tensor that pieces of members, one for each, make; what is in no piece is zero."""
    first = members[0]
    pairs = [(one, of) for one, of in zip(pieces, members, strict=True) if one.numel]
    is_whole = sum(one.numel for one, _ in pairs) == prod(shape)
    if len(pairs) == 1 and is_whole and pairs[0][0].is_run and pairs[0][0].numel == first.numel:
        return _reshaped(first, shape)
    if is_whole and all(one.is_run for one, _ in pairs):
        pairs.sort(key=lambda pair: pair[0].place)
        data = join_ranges([_run(*pair) for pair in pairs] or [_stored(first).slice(0, 0)])
    else:
        work = _Assembly(pairs, first.itemsize, prod(shape), last)
        source = FilledSource(file, prod(shape) * first.itemsize, work.fill)
        source.made_of = [_stored(of) for _, of in pairs]
        source.rearranges = True
        data = ByteRange(source, 0, source.size)
    return _over(first, key, shape, data)


def _stored(tensor: TensorRef) -> ByteRange:
    if tensor.storage is None or tensor.storage.data is None:
        raise NotRepresentable(f"a {tensor.kind} tensor has no plain elements")
    return tensor.storage.data


def _over(tensor: TensorRef, key: str, shape: tuple[int, ...], data: ByteRange) -> TensorRef:
    """Return the tensor with another shape and elements, in row-major order."""
    storage = Storage(key, data, data.length, tensor.device)
    return _reshaped(tensor, shape, offset=0, flags=(), storage=storage)


def _reshaped(tensor: TensorRef, shape: tuple[int, ...], **place: Any) -> TensorRef:
    return replace_elements(tensor, shape=shape, stride=row_major_strides(shape), **place)


def _run(piece: Piece, tensor: TensorRef) -> ByteRange:
    size = tensor.itemsize
    return _stored(tensor).slice((tensor.offset + piece.start) * size, piece.numel * size)


class TensorMaker:
    """A maker of tensors over byte ranges of a checkpoint's."""

    def __init__(self, file: str) -> None:
        """Start with no tensor; `file` is named in errors."""
        self._file, self._last = file, LastBlock()
        self.moved: set[int] = set()
        """The identities of tensors whose elements an equation takes."""
        self._arrays: set[int] = set()
        self._rows: dict[int, tuple[TensorRef, TensorRef]] = {}

    def prepare(self, key: str, tensor: TensorRef, *, in_rows: bool = False) -> TensorRef:
        """Return a tensor that pieces can be taken of; `in_rows`: over its elements in a row."""
        self.moved.add(id(tensor))
        check_movable(key, tensor, self._file)
        if tensor.kind == "numpy":
            self._arrays.add(id(tensor))
        swapped = tensor.storage is not None and tensor.storage.byteorder == "big"
        if not (in_rows or tensor.flags or swapped):
            return tensor
        if id(tensor) not in self._rows:
            self._rows[id(tensor)] = tensor, row_major(key, tensor, self._file)
        return self._rows[id(tensor)][1]

    def make(
        self,
        key: str,
        shape: tuple[int, ...],
        pieces: Sequence[Piece],
        members: Sequence[TensorRef],
        place: Any,
    ) -> TensorRef:
        """Return the tensor that pieces of some members make, one piece of each."""
        return assembled(key, shape, pieces, members, self._last, self._file)

    def is_same(self, one: TensorRef, other: TensorRef) -> bool:
        """Return whether two tensors of one dtype and shape have the same elements."""
        from ckptool.tensors.bytewise import has_same_elements  # which brings threads

        return (one.place is not None and one.place == other.place) or has_same_elements(one, other)

    def changes(self) -> Iterator[Change]:
        """Yield a change about arrays that became tensors."""
        if self._arrays:
            text = f"converted {counted(len(self._arrays), 'numpy array')} to tensors"
            yield Change("array", text, len(self._arrays))


class _Box(NamedTuple):
    data: ByteRange
    start: int
    place: int
    axes: tuple[BoxAxis, ...]

    @property
    def end(self) -> int:
        return self.place + _extent(self.axes)


_Pair: TypeAlias = "tuple[Piece, TensorRef]"


class _Assembly:
    """The pieces of one tensor, of which any bytes can be read."""

    def __init__(self, pairs: Sequence[_Pair], itemsize: int, size: int, last: LastBlock) -> None:
        boxes = (_Box(_stored(of), of.offset + one.start, one.place, one.axes) for one, of in pairs)
        self._boxes = sorted(boxes, key=lambda box: box.place)
        self._itemsize, self._size, self._last = itemsize, size, last
        inner = [box.axes[-1] for box in self._boxes if box.axes]
        runs = (axis.size if axis[1:] == (1, 1) else 1 for axis in inner)
        self._is_short = min(runs, default=1) * itemsize < _LONG

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset`; what is read next is put together with it."""
        size, last, done = self._itemsize, self._last, 0
        while done < len(buffer):
            start = offset + done - last.begin * size
            if last.of is not self or not 0 <= start < len(last.data):
                last.begin, start = divmod(offset + done, size)
                last.of, last.data = self, self._block(last.begin, len(buffer) - done + start)
            part = memoryview(last.data)[start : start + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            if start + len(part) == len(last.data):
                last.of, last.data = None, bytearray()

    def _block(self, begin: int, wanted: int) -> bytearray:
        """Return the bytes of elements from `begin` on, as many as are put together at once."""
        exact = min(-(-wanted // self._itemsize) * self._itemsize, BLOCK)
        most = _WIDE if self._is_short and wanted >= _WORTH else exact
        end = min(begin + max(most // self._itemsize, 1), self._size)
        made = bytearray((end - begin) * self._itemsize)
        for box in self._boxes:
            if box.place >= end:
                break
            if box.end > begin:
                for start, place, axes in _within(box.axes, begin - box.place, end - box.place):
                    at = box.place + place - begin
                    _move(made, at, box.data, box.start + start, axes, self._itemsize)
        return made


def _extent(axes: Sequence[BoxAxis]) -> int:
    """Count the elements of the target from the first to the last of a box."""
    return 1 + sum((axis.size - 1) * axis.place for axis in axes)


def _within(
    axes: tuple[BoxAxis, ...], low: int, high: int
) -> Iterator[tuple[int, int, tuple[BoxAxis, ...]]]:
    """Yield boxes of the elements whose places are from `low` to before `high`.

    Each with its start in the source and in the target. Places of a box rise with its indices.
    """
    if not axes:
        if low <= 0 < high:
            yield 0, 0, ()
        return
    (size, step, place), inner = axes[0], axes[1:]
    extent = _extent(inner)
    first = min(max(-(-low // place), 0), size)
    stop = max(min((high - extent) // place + 1, size), first)
    for index in dict.fromkeys((first - 1, stop)):
        if 0 <= index < size and not first <= index < stop:
            for start, at, part in _within(inner, low - index * place, high - index * place):
                yield index * step + start, index * place + at, part
    if stop > first:
        yield first * step, first * place, (BoxAxis(stop - first, step, place), *inner)


def _move(
    target: bytearray,
    at: int,
    data: ByteRange,
    start: int,
    axes: tuple[BoxAxis, ...],
    itemsize: int,
) -> None:
    """Put a box, which begins at element `start` of `data`, to its places from `at` on."""
    last = axes[-1] if axes else BoxAxis(1, 1, 1)
    is_run = last[1:] == (1, 1)
    outer = axes[:-1] if is_run else axes
    run = last.size * itemsize if is_run else itemsize
    if run >= (_LONG if data.source.fd() is not None else _FAR) or not outer:
        into, view = data.source.read_into, memoryview(target)
        for index in product(*(range(axis.size) for axis in outer)):
            moved = list(zip(index, outer, strict=True))
            goal = (at + sum(i * axis.place for i, axis in moved)) * itemsize
            origin = (start + sum(i * axis.step for i, axis in moved)) * itemsize
            into(data.offset + origin, view[goal : goal + run])
        return
    for first, tile in _tiles(axes, itemsize):
        here = start + sum(i * axis.step for i, axis in zip(first, axes, strict=True))
        there = at + sum(i * axis.place for i, axis in zip(first, axes, strict=True))
        _move_tile(target, there, data, here, tile, itemsize)


def _cost(axis: BoxAxis) -> float:
    """Return what an element costs in slices along an axis; close places stay in the cache."""
    return 64 / axis.size + min(axis.place, 64) / 32


def _tiles(
    axes: tuple[BoxAxis, ...], itemsize: int
) -> Iterator[tuple[tuple[int, ...], tuple[BoxAxis, ...]]]:
    """Cut a box into tiles that stay in the processor's cache; each with its first indices.

    A tile is long along the axis that is best to move along, and along those that are closest in
    the source, which are read at once.
    """
    best, room = min(axes, key=_cost), max(_TILE // itemsize, 1)
    is_inner = best.step == min(axis.step for axis in axes)
    sizes = {best: min(best.size, room if is_inner else _ROWS)}
    room = max(room // sizes[best], 1)
    for axis in sorted(axes, key=lambda one: one.step):
        if axis is not best:
            sizes[axis] = min(axis.size, room)
            room = max(room // sizes[axis], 1)
    sizes[best] = min(best.size, sizes[best] * room)
    for first in product(*(range(0, axis.size, sizes[axis]) for axis in axes)):
        yield (
            first,
            tuple(
                BoxAxis(min(sizes[axis], axis.size - at), axis.step, axis.place)
                for at, axis in zip(first, axes, strict=True)
            ),
        )


def _move_tile(
    target: bytearray, at: int, data: ByteRange, start: int, tile: Sequence[BoxAxis], itemsize: int
) -> None:
    """Read a tile in the order of the source, and put its elements to their places.

    Numbers of 2 bytes go byte by byte: a bytearray is sliced faster than a view.
    """
    tile = sorted(tile, key=lambda axis: -axis.step)
    shape, stride = tuple(axis.size for axis in tile), tuple(axis.step for axis in tile)
    blocks = blocks_of(data, itemsize=itemsize, shape=shape, stride=stride, offset=start)
    found = bytearray().join(blocks)
    unit = next(size for size in UNITS if itemsize % size == 0)
    parts = itemsize // unit
    source: bytearray | memoryview = found
    cells: bytearray | memoryview = target
    if unit > 1:
        source, cells = (memoryview(one).cast(FORMATS[unit]) for one in (found, target))
    steps = (step * parts for step in row_major_strides(shape))
    axes = [BoxAxis(a.size, step, a.place * parts) for a, step in zip(tile, steps, strict=True)]
    axes = list(ordered([*axes, BoxAxis(parts, 1, 1)])) or [BoxAxis(1, 1, 1)]
    best = min(axes, key=_cost)
    axes.remove(best)
    size, step, place = best
    read, put = (size - 1) * step + 1, (size - 1) * place + 1
    for origin, goal in _corners(axes, at * parts):
        cells[goal : goal + put : place] = source[origin : origin + read : step]


def _corners(axes: Sequence[BoxAxis], at: int) -> list[tuple[int, int]]:
    """Return where each index of some axes leads, in the source and in the target."""
    corners = [(0, at)]
    for size, step, place in axes:
        corners = [
            (origin + index * step, goal + index * place)
            for origin, goal in corners
            for index in range(size)
        ]
    return corners
