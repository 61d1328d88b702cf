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

_MAX_BLOCK_BYTES = 4 * BLOCK
"""Bytes that are assembled at once if runs are short, so that reads of a source get longer."""
_MIN_WIDE_READ_BYTES = 256 << 10
"""The smallest request for which more is assembled: a smaller one only takes a sample."""
_TILE_BYTES = 512 << 10
_MAX_TILE_ROWS = 512
"""The most elements of a tile along the axis of a slice."""
_MIN_RUN_BYTES = 4096
"""The shortest run that is read directly from a file into the target."""
_MIN_REMOTE_RUN_BYTES = 64 << 10
"""The same for a source without a file descriptor, where each read costs more."""


class BoxAxis(NamedTuple):
    """An axis of a box: its size, and its steps in the source and in the target, in elements."""

    size: int
    source_step: int
    target_step: int

    @property
    def is_run(self) -> bool:
        """True if the elements along the axis are contiguous in the source and in the target."""
        return self.source_step == self.target_step == 1


class Piece(NamedTuple):
    """A box of one member's elements, and its place in the target."""

    key_index: int
    """The index of the member's key among the keys on the left of the rule."""
    member: tuple[int, ...]
    """The member's number in each variable that only the source has."""
    source_start: int
    """The first element in the source, counted from the start of the member."""
    target_start: int
    """The first element in the target."""
    axes: tuple[BoxAxis, ...]
    """The axis with the largest step in the target first; merged by `merge_axes`."""

    @property
    def is_run(self) -> bool:
        """True if the elements are contiguous in the source and in the target."""
        return not self.axes or (len(self.axes) == 1 and self.axes[0].is_run)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(axis.size for axis in self.axes)


def merge_axes(axes: Sequence[BoxAxis]) -> tuple[BoxAxis, ...]:
    """Return the axes sorted by their steps in the target, with contiguous ones joined."""
    merged: list[BoxAxis] = []
    for axis in sorted(axes, key=lambda box_axis: -box_axis.target_step):
        if axis.size == 1:
            continue
        outer = merged[-1] if merged else None
        if outer and (outer.source_step, outer.target_step) == (
            axis.size * axis.source_step,
            axis.size * axis.target_step,
        ):
            merged[-1] = BoxAxis(outer.size * axis.size, axis.source_step, axis.target_step)
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


class BlockCache:
    """The block that was assembled last: one for all tensors of a checkpoint."""

    def __init__(self) -> None:
        """Start without a block."""
        self.owner: object = None
        """The assembly with this block, or None without a block."""
        self.first_element = 0
        """The position of the block in the target."""
        self.data = bytearray()


def assemble_tensor(
    key: str,
    shape: tuple[int, ...],
    pieces: Sequence[Piece],
    members: Sequence[TensorRef],
    block_cache: BlockCache,
    file: str,
) -> TensorRef:
    """Return the tensor that the pieces make, one piece from each member; gaps are zeros.

    If possible it refers to the bytes of the members: as another shape of the same storage, or
    joined. Otherwise the elements are rearranged when they are read, block by block.
    """
    first = members[0]
    pairs = [(piece, member) for piece, member in zip(pieces, members, strict=True) if piece.numel]
    # Pieces do not overlap, so gaps show in the count. A run is in order in both tensors.
    is_complete = sum(piece.numel for piece, _ in pairs) == prod(shape)
    has_only_runs = is_complete and all(piece.is_run for piece, _ in pairs)
    if has_only_runs and len(pairs) == 1 and pairs[0][0].numel == first.numel:
        return _with_shape(first, shape)
    if has_only_runs:
        pairs.sort(key=lambda pair: pair[0].target_start)
        runs = [_run_bytes(piece, member) for piece, member in pairs]
        data = join_ranges(runs or [_stored_bytes(first).slice(0, 0)])  # without elements: no bytes
    else:
        assembly = _Assembly(pairs, first.itemsize, prod(shape), block_cache)
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
    return _stored_bytes(tensor).slice(
        (tensor.offset + piece.source_start) * size, piece.numel * size
    )


class TensorMaker:
    """A maker of tensors over byte ranges of a checkpoint."""

    def __init__(self, file: str) -> None:
        """Start with no tensor; errors name `file`."""
        self._file, self._block_cache = file, BlockCache()
        self.moved: set[int] = set()
        """The identities of tensors whose elements an equation takes."""
        self._numpy_ids: set[int] = set()
        """The identities of the moved tensors that are numpy arrays."""
        self._row_major_by_id: dict[int, tuple[TensorRef, TensorRef]] = {}
        """By identity, a tensor and the one with its elements in row-major order."""

    def prepare(self, key: str, tensor: TensorRef, *, in_rows: bool = False) -> TensorRef:
        """Return a tensor from which pieces can be taken; with `in_rows`, in row-major order.

        A tensor of a big-endian file, or one with a conjugate or negative bit, is always converted
        to its elements in row-major order. The tensor is recorded as moved.
        """
        self.moved.add(id(tensor))
        check_movable(key, tensor, self._file)
        if tensor.kind == "numpy":
            self._numpy_ids.add(id(tensor))
        is_big_endian = tensor.storage is not None and tensor.storage.byteorder == "big"
        if not (in_rows or tensor.flags or is_big_endian):
            return tensor
        if id(tensor) not in self._row_major_by_id:
            self._row_major_by_id[id(tensor)] = tensor, to_row_major(key, tensor, self._file)
        _, row_major = self._row_major_by_id[id(tensor)]
        return row_major

    def make(
        self,
        key: str,
        shape: tuple[int, ...],
        pieces: Sequence[Piece],
        members: Sequence[TensorRef],
        identity: Any,
    ) -> TensorRef:
        """Return the tensor that pieces of some members make, one piece of each.

        Only another maker, of sketches, needs `identity`.
        """
        return assemble_tensor(key, shape, pieces, members, self._block_cache, self._file)

    def is_same(self, one: TensorRef, other: TensorRef) -> bool:
        """Return True if two tensors of one dtype and shape have the same elements."""
        from ckptool.tensors.bytewise import has_same_elements  # Imported here: it imports threads.

        return (one.place is not None and one.place == other.place) or has_same_elements(one, other)

    def report_changes(self) -> Iterator[Change]:
        """Yield a change for the numpy arrays that became tensors."""
        if self._numpy_ids:
            text = f"converted {counted(len(self._numpy_ids), 'numpy array')} to tensors"
            yield Change("array", text, len(self._numpy_ids))


class _Box(NamedTuple):
    """The elements of a piece: their bytes, and their positions in source and target."""

    data: ByteRange
    source_start: int
    """The first element in `data`."""
    target_start: int
    axes: tuple[BoxAxis, ...]

    @property
    def target_end(self) -> int:
        """The position after the last element in the target."""
        return self.target_start + _span(self.axes)


_Pair: TypeAlias = "tuple[Piece, TensorRef]"


class _Assembly:
    """The pieces of one tensor, from which any bytes can be read."""

    def __init__(
        self, pairs: Sequence[_Pair], itemsize: int, size: int, block_cache: BlockCache
    ) -> None:
        """Take the pieces, each with the tensor that has it; `size` is in elements."""
        boxes = (
            _Box(
                _stored_bytes(member),
                member.offset + piece.source_start,
                piece.target_start,
                piece.axes,
            )
            for piece, member in pairs
        )
        self._boxes = sorted(boxes, key=lambda box: box.target_start)
        self._itemsize, self._size, self._block_cache = itemsize, size, block_cache
        inner_axes = [box.axes[-1] for box in self._boxes if box.axes]
        run_lengths = (axis.size if axis.is_run else 1 for axis in inner_axes)
        # A larger block has more elements that are contiguous in the source.
        self._has_short_runs = min(run_lengths, default=1) * itemsize < _MIN_RUN_BYTES

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on.

        Blocks may be larger than the request, so the last one is cached until it is used up. The
        assemblies share one cache, so another one may have replaced it.
        """
        itemsize, cache, done = self._itemsize, self._block_cache, 0
        while done < len(buffer):
            start = offset + done - cache.first_element * itemsize  # in the cached block
            if cache.owner is not self or not 0 <= start < len(cache.data):
                cache.first_element, start = divmod(offset + done, itemsize)
                n_bytes = len(buffer) - done + start
                cache.data = self._assemble_block(cache.first_element, n_bytes)
                cache.owner = self
            part = memoryview(cache.data)[start : start + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            if start + len(part) == len(cache.data):
                cache.owner, cache.data = None, bytearray()

    def _assemble_block(self, begin: int, n_bytes: int) -> bytearray:
        """Return the bytes of one block that begins with element `begin`.

        The block has at most the elements of `n_bytes`, or with short runs more of them.
        """
        requested_bytes = min(-(-n_bytes // self._itemsize) * self._itemsize, BLOCK)
        is_wide = self._has_short_runs and n_bytes >= _MIN_WIDE_READ_BYTES
        max_bytes = _MAX_BLOCK_BYTES if is_wide else requested_bytes
        end = min(begin + max(max_bytes // self._itemsize, 1), self._size)
        block = bytearray((end - begin) * self._itemsize)
        for box in self._boxes:
            if box.target_start >= end:
                break
            if box.target_end > begin:
                low, high = begin - box.target_start, end - box.target_start
                for source_offset, target_offset, axes in _clip_box(box.axes, low, high):
                    source_start = box.source_start + source_offset
                    target_start = box.target_start + target_offset - begin
                    _copy_box(block, target_start, box.data, source_start, axes, self._itemsize)
        return block


def _span(axes: Sequence[BoxAxis]) -> int:
    """Return the number of target elements from the first to the last of a box."""
    return 1 + sum((axis.size - 1) * axis.target_step for axis in axes)


def _clip_box(
    axes: tuple[BoxAxis, ...], low: int, high: int
) -> Iterator[tuple[int, int, tuple[BoxAxis, ...]]]:
    """Yield boxes that cover the elements of a box with target positions in [low, high).

    Each is its start in the source, its start in the target, and its axes. The indices of the first
    axis with all elements in the range become one box. The index before them and the one after them
    may be partly in the range: their boxes, without this axis, are clipped again.
    """
    if not axes:
        if low <= 0 < high:
            yield 0, 0, ()
        return
    (size, source_step, target_step), *inner_axes = axes
    inner = tuple(inner_axes)
    extent = _span(inner)  # of one index
    first = min(max(-(-low // target_step), 0), size)  # the first index completely in the range
    stop = max(min((high - extent) // target_step + 1, size), first)
    for index in (first - 1, stop):
        if 0 <= index < size:
            source_start, target_start = index * source_step, index * target_step
            for source_offset, target_offset, clipped in _clip_box(
                inner, low - target_start, high - target_start
            ):
                yield source_start + source_offset, target_start + target_offset, clipped
    if stop > first:
        complete = BoxAxis(stop - first, source_step, target_step)
        yield first * source_step, first * target_step, (complete, *inner)


def _copy_box(
    target: bytearray,
    target_start: int,
    data: ByteRange,
    source_start: int,
    axes: tuple[BoxAxis, ...],
    itemsize: int,
) -> None:
    """Copy a box of elements of `data` into the target; the starts are numbers of elements.

    Long runs are read directly into the target. Otherwise the box is copied in tiles.
    """
    last = axes[-1] if axes else BoxAxis(1, 1, 1)
    outer = axes[:-1] if last.is_run else axes
    run_bytes = last.size * itemsize if last.is_run else itemsize
    min_run_bytes = _MIN_RUN_BYTES if data.source.fd() is not None else _MIN_REMOTE_RUN_BYTES
    if run_bytes >= min_run_bytes or not outer:
        read_into, view = data.source.read_into, memoryview(target)
        for indices in product(*(range(axis.size) for axis in outer)):
            source_offset, target_offset = _locate(indices, outer)
            source_byte = (source_start + source_offset) * itemsize
            target_byte = (target_start + target_offset) * itemsize
            read_into(data.offset + source_byte, view[target_byte : target_byte + run_bytes])
        return
    for indices, tile in _cut_tiles(axes, itemsize):
        source_offset, target_offset = _locate(indices, axes)
        tile_source, tile_target = source_start + source_offset, target_start + target_offset
        _copy_tile(target, tile_target, data, tile_source, tile, itemsize)


def _locate(indices: Sequence[int], axes: Sequence[BoxAxis]) -> tuple[int, int]:
    """Return the position of an element in the source and in the target, from the box's start."""
    pairs = list(zip(indices, axes, strict=True))
    return (
        sum(index * axis.source_step for index, axis in pairs),
        sum(index * axis.target_step for index, axis in pairs),
    )


def _slice_cost(axis: BoxAxis) -> float:
    """Return the relative cost of an element copied in slices along an axis.

    A slice costs one Python operation, so long ones are cheap. Close target positions are cheap
    because they stay in the cache. The weights were measured.
    """
    return 64 / axis.size + min(axis.target_step, 64) / 32


def _cut_tiles(
    axes: tuple[BoxAxis, ...], itemsize: int
) -> Iterator[tuple[tuple[int, ...], tuple[BoxAxis, ...]]]:
    """Yield the first indices and the axes of tiles that fit into the processor's cache.

    A tile is long along the axis with the cheapest slices. Then the axes that are closest in the
    source get the remaining room, because their elements are read at once.
    """
    best, room = min(axes, key=_slice_cost), max(_TILE_BYTES // itemsize, 1)
    is_innermost = best.source_step == min(axis.source_step for axis in axes)
    size_by_axis = {best: min(best.size, room if is_innermost else _MAX_TILE_ROWS)}
    room = max(room // size_by_axis[best], 1)  # how many times the tile so far fits
    for axis in sorted(axes, key=lambda box_axis: box_axis.source_step):
        if axis is not best:
            size_by_axis[axis] = min(axis.size, room)
            room = max(room // size_by_axis[axis], 1)
    size_by_axis[best] = min(best.size, size_by_axis[best] * room)
    for first_indices in product(*(range(0, axis.size, size_by_axis[axis]) for axis in axes)):
        tile = (
            axis._replace(size=min(size_by_axis[axis], axis.size - index))
            for index, axis in zip(first_indices, axes, strict=True)
        )
        yield first_indices, tuple(tile)


def _copy_tile(
    target: bytearray,
    target_start: int,
    data: ByteRange,
    source_start: int,
    tile: Sequence[BoxAxis],
    itemsize: int,
) -> None:
    """Read a tile in the order of the source, and copy its elements to their target positions.

    They are copied by slices with a step, in units of 1, 4 or 8 bytes, as `UNITS` lists them.
    Elements of 2 bytes are copied as bytes: a bytearray is sliced faster than a view.
    """
    tile = sorted(tile, key=lambda axis: -axis.source_step)
    shape, stride = tuple(axis.size for axis in tile), tuple(axis.source_step for axis in tile)
    blocks = blocks_of(data, itemsize=itemsize, shape=shape, stride=stride, offset=source_start)
    tile_bytes = bytearray().join(blocks)
    unit = next(size for size in UNITS if itemsize % size == 0)
    units_per_element = itemsize // unit
    source_units: bytearray | memoryview = tile_bytes
    target_units: bytearray | memoryview = target
    if unit > 1:
        source_units, target_units = (
            memoryview(buffer).cast(FORMATS[unit]) for buffer in (tile_bytes, target)
        )
    # The axes in units: from the tile, which is in row-major order, to the target.
    axes = [
        BoxAxis(axis.size, step * units_per_element, axis.target_step * units_per_element)
        for axis, step in zip(tile, row_major_strides(shape), strict=True)
    ]
    single_unit = BoxAxis(1, 1, 1)
    axes = list(merge_axes([*axes, BoxAxis(units_per_element, 1, 1)])) or [single_unit]
    # Along one axis, the elements are copied by a slice; a loop goes over the other axes.
    sliced = min(axes, key=_slice_cost)
    axes.remove(sliced)
    size, source_step, target_step = sliced
    source_span, target_span = (size - 1) * source_step + 1, (size - 1) * target_step + 1
    for source, to in _list_positions(axes, target_start * units_per_element):
        target_units[to : to + target_span : target_step] = source_units[
            source : source + source_span : source_step
        ]


def _list_positions(axes: Sequence[BoxAxis], target_start: int) -> list[tuple[int, int]]:
    """Return the position in the source and in the target for each combination of indices."""
    positions = [(0, target_start)]
    for size, source_step, target_step in axes:
        positions = [
            (source + index * source_step, target + index * target_step)
            for source, target in positions
            for index in range(size)
        ]
    return positions
