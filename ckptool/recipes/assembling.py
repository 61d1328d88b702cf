"""Assemble a tensor from parts of others; its elements are read on demand.

A part is a strided box of a source that becomes a strided box of the target. If it is contiguous in
both, it is a range of bytes. Otherwise the elements for a block of the target are gathered in the
order of the target, and moved to their places by slices with a step, which Python executes in C.
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


def merge_axes(axes: Sequence[BoxAxis]) -> tuple[BoxAxis, ...]:
    """Return the axes sorted by their steps in the target, with contiguous ones joined."""
    merged: list[BoxAxis] = []
    for axis in sorted(axes, key=lambda box_axis: -box_axis.place):
        if axis.size == 1:
            continue
        outer = merged[-1] if merged else None
        if outer and (outer.step, outer.place) == (axis.size * axis.step, axis.size * axis.place):
            merged[-1] = BoxAxis(outer.size * axis.size, axis.step, axis.place)
        else:
            merged.append(axis)
    return tuple(merged)


def check_movable(key: str, tensor: TensorRef, file: str) -> None:
    """Refuse a tensor without plain elements.

    Raises:
        NotRepresentable: if the tensor is packed, or of a kind without plain elements.
    """
    if not tensor.has_content or tensor.dtype in PACKED:
        text = f"{printable(key)!r} is a {tensor.dtype} {tensor.kind} tensor, without plain"
        raise NotRepresentable(f"{text} elements to rearrange", file=file or None)


def to_row_major(key: str, tensor: TensorRef, file: str) -> TensorRef:
    """Return the tensor over its elements in row-major order."""
    data = row_major_data(tensor, printable(key), file)
    return _with_data(tensor, key, tensor.sizes, data)


class LastBlock:
    """The block that was assembled last: one for all tensors of a checkpoint."""

    def __init__(self) -> None:
        """Start without a block."""
        self.of: object = None
        self.begin = 0
        self.data = bytearray()


def assemble_tensor(
    key: str,
    shape: tuple[int, ...],
    pieces: Sequence[Piece],
    members: Sequence[TensorRef],
    last: LastBlock,
    file: str,
) -> TensorRef:
    """Return the tensor that the pieces make, one piece from each member; gaps are zeros."""
    first = members[0]
    pairs = [(piece, member) for piece, member in zip(pieces, members, strict=True) if piece.numel]
    is_whole = sum(piece.numel for piece, _ in pairs) == prod(shape)
    if len(pairs) == 1 and is_whole and pairs[0][0].is_run and pairs[0][0].numel == first.numel:
        return _with_shape(first, shape)
    if is_whole and all(piece.is_run for piece, _ in pairs):
        pairs.sort(key=lambda pair: pair[0].place)
        data = join_ranges(
            [_run_bytes(*pair) for pair in pairs] or [_stored_bytes(first).slice(0, 0)]
        )
    else:
        assembly = _Assembly(pairs, first.itemsize, prod(shape), last)
        source = FilledSource(file, prod(shape) * first.itemsize, assembly.fill)
        source.made_of = [_stored_bytes(member) for _, member in pairs]
        source.rearranges = True
        data = ByteRange(source, 0, source.size)
    return _with_data(first, key, shape, data)


def _stored_bytes(tensor: TensorRef) -> ByteRange:
    """Return the bytes of the tensor's storage.

    Raises:
        NotRepresentable: if it has none.
    """
    if tensor.storage is None or tensor.storage.data is None:
        raise NotRepresentable(f"a {tensor.kind} tensor has no plain elements")
    return tensor.storage.data


def _with_data(tensor: TensorRef, key: str, shape: tuple[int, ...], data: ByteRange) -> TensorRef:
    """Return the tensor with another shape and other elements, in row-major order."""
    storage = Storage(key, data, data.length, tensor.device)
    return _with_shape(tensor, shape, offset=0, flags=(), storage=storage)


def _with_shape(tensor: TensorRef, shape: tuple[int, ...], **changes: Any) -> TensorRef:
    """Return the tensor with another shape in row-major order; `changes` are other fields."""
    return replace_elements(tensor, shape=shape, stride=row_major_strides(shape), **changes)


def _run_bytes(piece: Piece, tensor: TensorRef) -> ByteRange:
    """Return the bytes of a piece that is contiguous in its tensor."""
    size = tensor.itemsize
    return _stored_bytes(tensor).slice((tensor.offset + piece.start) * size, piece.numel * size)


class TensorMaker:
    """A maker of tensors over byte ranges of a checkpoint."""

    def __init__(self, file: str) -> None:
        """Start with no tensor; errors name `file`."""
        self._file, self._last = file, LastBlock()
        self.moved: set[int] = set()
        """The identities of tensors whose elements an equation takes."""
        self._arrays: set[int] = set()
        self._rows: dict[int, tuple[TensorRef, TensorRef]] = {}

    def prepare(self, key: str, tensor: TensorRef, *, in_rows: bool = False) -> TensorRef:
        """Return a tensor from which pieces can be taken; with `in_rows`, in row-major order."""
        self.moved.add(id(tensor))
        check_movable(key, tensor, self._file)
        if tensor.kind == "numpy":
            self._arrays.add(id(tensor))
        swapped = tensor.storage is not None and tensor.storage.byteorder == "big"
        if not (in_rows or tensor.flags or swapped):
            return tensor
        if id(tensor) not in self._rows:
            self._rows[id(tensor)] = tensor, to_row_major(key, tensor, self._file)
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
        return assemble_tensor(key, shape, pieces, members, self._last, self._file)

    def is_same(self, one: TensorRef, other: TensorRef) -> bool:
        """Return True if two tensors of one dtype and shape have the same elements."""
        from ckptool.tensors.bytewise import has_same_elements  # Imported here: it imports threads.

        return (one.place is not None and one.place == other.place) or has_same_elements(one, other)

    def report_changes(self) -> Iterator[Change]:
        """Yield a change for the numpy arrays that became tensors."""
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
        return self.place + _span(self.axes)


_Pair: TypeAlias = "tuple[Piece, TensorRef]"


class _Assembly:
    """The pieces of one tensor, from which any bytes can be read."""

    def __init__(self, pairs: Sequence[_Pair], itemsize: int, size: int, last: LastBlock) -> None:
        boxes = (
            _Box(_stored_bytes(member), member.offset + piece.start, piece.place, piece.axes)
            for piece, member in pairs
        )
        self._boxes = sorted(boxes, key=lambda box: box.place)
        self._itemsize, self._size, self._last = itemsize, size, last
        inner = [box.axes[-1] for box in self._boxes if box.axes]
        runs = (axis.size if axis[1:] == (1, 1) else 1 for axis in inner)
        self._is_short = min(runs, default=1) * itemsize < _LONG

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset`, from blocks of which the last one is kept."""
        size, last, done = self._itemsize, self._last, 0
        while done < len(buffer):
            start = offset + done - last.begin * size
            if last.of is not self or not 0 <= start < len(last.data):
                last.begin, start = divmod(offset + done, size)
                last.of, last.data = (
                    self,
                    self._assemble_block(last.begin, len(buffer) - done + start),
                )
            part = memoryview(last.data)[start : start + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            if start + len(part) == len(last.data):
                last.of, last.data = None, bytearray()

    def _assemble_block(self, begin: int, n_bytes: int) -> bytearray:
        """Return the bytes of one block that begins with element `begin`."""
        exact = min(-(-n_bytes // self._itemsize) * self._itemsize, BLOCK)
        max_bytes = _WIDE if self._is_short and n_bytes >= _WORTH else exact
        end = min(begin + max(max_bytes // self._itemsize, 1), self._size)
        block = bytearray((end - begin) * self._itemsize)
        for box in self._boxes:
            if box.place >= end:
                break
            if box.end > begin:
                for start, place, axes in _clip_box(box.axes, begin - box.place, end - box.place):
                    target_start = box.place + place - begin
                    _copy_box(
                        block, target_start, box.data, box.start + start, axes, self._itemsize
                    )
        return block


def _span(axes: Sequence[BoxAxis]) -> int:
    """Return the number of target elements from the first to the last of a box."""
    return 1 + sum((axis.size - 1) * axis.place for axis in axes)


def _clip_box(
    axes: tuple[BoxAxis, ...], low: int, high: int
) -> Iterator[tuple[int, int, tuple[BoxAxis, ...]]]:
    """Yield boxes of the elements with target positions from `low` to before `high`.

    Each with its start in the source and in the target. Positions in a box rise with its indices.
    """
    if not axes:
        if low <= 0 < high:
            yield 0, 0, ()
        return
    (size, step, place), inner = axes[0], axes[1:]
    extent = _span(inner)
    first = min(max(-(-low // place), 0), size)
    stop = max(min((high - extent) // place + 1, size), first)
    for index in dict.fromkeys((first - 1, stop)):
        if 0 <= index < size and not first <= index < stop:
            for start, inner_place, clipped in _clip_box(
                inner, low - index * place, high - index * place
            ):
                yield index * step + start, index * place + inner_place, clipped
    if stop > first:
        yield first * step, first * place, (BoxAxis(stop - first, step, place), *inner)


def _copy_box(
    target: bytearray,
    at: int,
    data: ByteRange,
    start: int,
    axes: tuple[BoxAxis, ...],
    itemsize: int,
) -> None:
    """Copy a box that begins at element `start` of `data` into the target from element `at` on."""
    last = axes[-1] if axes else BoxAxis(1, 1, 1)
    is_run = last[1:] == (1, 1)
    outer = axes[:-1] if is_run else axes
    run = last.size * itemsize if is_run else itemsize
    if run >= (_LONG if data.source.fd() is not None else _FAR) or not outer:
        read_into, view = data.source.read_into, memoryview(target)
        for index in product(*(range(axis.size) for axis in outer)):
            steps = list(zip(index, outer, strict=True))
            target_byte = (at + sum(i * axis.place for i, axis in steps)) * itemsize
            source_byte = (start + sum(i * axis.step for i, axis in steps)) * itemsize
            read_into(data.offset + source_byte, view[target_byte : target_byte + run])
        return
    for first, tile in _cut_tiles(axes, itemsize):
        source_start = start + sum(i * axis.step for i, axis in zip(first, axes, strict=True))
        target_start = at + sum(i * axis.place for i, axis in zip(first, axes, strict=True))
        _copy_tile(target, target_start, data, source_start, tile, itemsize)


def _slice_cost(axis: BoxAxis) -> float:
    """Return the relative cost of an element copied in slices along an axis.

    Close target positions are cheap because they stay in the cache.
    """
    return 64 / axis.size + min(axis.place, 64) / 32


def _cut_tiles(
    axes: tuple[BoxAxis, ...], itemsize: int
) -> Iterator[tuple[tuple[int, ...], tuple[BoxAxis, ...]]]:
    """Yield the first indices and the axes of tiles that fit into the processor's cache.

    A tile is long along the axis with the cheapest slices, and along those that are closest in the
    source, which are read at once.
    """
    best, room = min(axes, key=_slice_cost), max(_TILE // itemsize, 1)
    is_inner = best.step == min(axis.step for axis in axes)
    sizes = {best: min(best.size, room if is_inner else _ROWS)}
    room = max(room // sizes[best], 1)
    for axis in sorted(axes, key=lambda box_axis: box_axis.step):
        if axis is not best:
            sizes[axis] = min(axis.size, room)
            room = max(room // sizes[axis], 1)
    sizes[best] = min(best.size, sizes[best] * room)
    for first in product(*(range(0, axis.size, sizes[axis]) for axis in axes)):
        yield (
            first,
            tuple(
                BoxAxis(min(sizes[axis], axis.size - index), axis.step, axis.place)
                for index, axis in zip(first, axes, strict=True)
            ),
        )


def _copy_tile(
    target: bytearray, at: int, data: ByteRange, start: int, tile: Sequence[BoxAxis], itemsize: int
) -> None:
    """Read a tile in the order of the source, and copy its elements to their target positions.

    Elements of 2 bytes are copied as bytes: a bytearray is sliced faster than a view.
    """
    tile = sorted(tile, key=lambda axis: -axis.step)
    shape, stride = tuple(axis.size for axis in tile), tuple(axis.step for axis in tile)
    blocks = blocks_of(data, itemsize=itemsize, shape=shape, stride=stride, offset=start)
    tile_bytes = bytearray().join(blocks)
    unit = next(size for size in UNITS if itemsize % size == 0)
    parts = itemsize // unit
    source_units: bytearray | memoryview = tile_bytes
    target_units: bytearray | memoryview = target
    if unit > 1:
        source_units, target_units = (
            memoryview(data).cast(FORMATS[unit]) for data in (tile_bytes, target)
        )
    steps = (step * parts for step in row_major_strides(shape))
    axes = [BoxAxis(a.size, step, a.place * parts) for a, step in zip(tile, steps, strict=True)]
    axes = list(merge_axes([*axes, BoxAxis(parts, 1, 1)])) or [BoxAxis(1, 1, 1)]
    best = min(axes, key=_slice_cost)
    axes.remove(best)
    size, step, place = best
    source_span, target_span = (size - 1) * step + 1, (size - 1) * place + 1
    for source_start, target_start in _list_positions(axes, at * parts):
        target_units[target_start : target_start + target_span : place] = source_units[
            source_start : source_start + source_span : step
        ]


def _list_positions(axes: Sequence[BoxAxis], at: int) -> list[tuple[int, int]]:
    """Return the position in the source and in the target for each combination of indices."""
    positions = [(0, at)]
    for size, step, place in axes:
        positions = [
            (source_start + index * step, target_start + index * place)
            for source_start, target_start in positions
            for index in range(size)
        ]
    return positions
