"""The flat vectors of ZeRO: each rank has a part, from which the tensors of parameters are joined.

Sources, DeepSpeed 0.5 to 0.19: runtime/zero/stage_1_and_2.py and stage3.py, utils/zero_to_fp32.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from operator import index
from typing import Any, NamedTuple

from ckptool.core.model import TensorRef, make_plain_tensor
from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile
from ckptool.files import ByteRange
from ckptool.files.computed import join_ranges
from ckptool.files.tiled import make_late_range
from ckptool.formats.distributed.placements import ONE_SAVE, attributes_of, row_major_data
from ckptool.words import printable

MASTER = "fp32"
"""The key of the fp32 master in the state of a parameter, as in universal folders."""
Piece = tuple[int, int, int]
"""Elements of a parameter in the vector of a rank: the rank, the first, and the count."""
FindPieces = Callable[[], Sequence[Piece]]
"""Finds the pieces of a parameter, in the order of its elements."""


class Vector(NamedTuple):
    """Consecutive elements in the file of a rank."""

    dtype: str
    device: str
    data: ByteRange
    file: str

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.data.length // BY_NAME[self.dtype].itemsize

    def cut(self, start: int, count: int) -> ByteRange:
        """Return the bytes of `count` elements from `start`."""
        itemsize = BY_NAME[self.dtype].itemsize
        return self.data.slice(start * itemsize, count * itemsize)


class VectorGroup(NamedTuple):
    """Parameters with their elements in one vector of each rank."""

    shapes: Mapping[str, tuple[int, ...]]
    vectors: Mapping[str, Sequence[Vector]]
    """By kind (`fp32`, `exp_avg`), the vector of each rank."""
    shared_state: Mapping[Any, Any]
    """State of the whole group, for example `step`."""


def make_vector(node: Any, file: str) -> Vector:
    """Return a tensor with one dimension as a vector of its file."""
    if not isinstance(node, TensorRef) or len(node.shape) != 1:
        raise CorruptFile("an optimizer vector does not have one dimension", file=file)
    return Vector(node.dtype, node.device, row_major_data(node, "a vector", file), file)


def find_even_slices(group: VectorGroup, world: int) -> dict[str, FindPieces]:
    """Find the slices of stage 3: every rank has equally many elements of each, padded."""
    # deepspeed/utils/zero_to_fp32.py, zero3_partitioned_param_info: ceil(numel / world) elements.
    start, find_pieces = 0, dict[str, FindPieces]()
    for name, shape in group.shapes.items():
        find_pieces[name] = partial(slice_evenly, start, prod(shape), world)
        start += -(-prod(shape) // world)
    return find_pieces


def slice_evenly(start: int, numel: int, world: int) -> list[Piece]:
    """Return the pieces of a parameter with equally many elements in each rank, the last padded."""
    count = -(-numel // world)
    remaining = (numel - rank * count for rank in range(world))
    return [(rank, start, min(n, count)) for rank, n in enumerate(remaining) if n > 0]


def find_stated_slices(
    group: VectorGroup, mappings: Sequence[Mapping[Any, Any]]
) -> dict[str, FindPieces]:
    """Find the slices stated in each rank's file; `mappings` are by rank: name -> slice."""
    pieces_by_name: dict[str, list[Piece]] = {name: [] for name in group.shapes}
    for rank, mapping in enumerate(mappings):
        for name, address in mapping.items():
            attributes = attributes_of(address)
            piece = rank, index(attributes["start"]), index(attributes["numel"])
            pieces_by_name[name].append(piece)
    # These pieces are few, so they are stored: `copy` is the function that returns them.
    return {name: pieces.copy for name, pieces in pieces_by_name.items()}


def find_consecutive_slices(group: VectorGroup, paddings: Any) -> dict[str, FindPieces]:
    """Find the slices in the concatenated vectors of all ranks, with parameters in order.

    `paddings` is a list with the number of unused elements after each parameter, or anything else
    if the file states none.
    """
    vectors = group.vectors[MASTER]
    ends = list(accumulate(vector.numel for vector in vectors))
    start, find_pieces = 0, dict[str, FindPieces]()
    for number, (name, shape) in enumerate(group.shapes.items()):
        stop = start + prod(shape)
        pieces: list[Piece] = []
        for rank, (vector, vector_end) in enumerate(zip(vectors, ends, strict=True)):
            vector_start = vector_end - vector.numel
            piece_start, piece_stop = max(start, vector_start), min(stop, vector_end)
            if piece_start < piece_stop:
                pieces.append((rank, piece_start - vector_start, piece_stop - piece_start))
        find_pieces[name] = pieces.copy  # a function that returns the list
        padding = get_item(paddings, number)
        start = stop + (padding if type(padding) is int and padding > 0 else 0)
    # deepspeed/utils/zero_to_fp32.py, zero2_align: the whole vector is padded to 2 * world.
    align = 2 * len(vectors)
    needed_blocks, existing_blocks = -(-start // align), -(-ends[-1] // align)
    if needed_blocks != existing_blocks:
        message = f"the parameters need {start:,} elements, but the ranks have {ends[-1]:,}"
        raise CorruptFile(message, file=vectors[0].file, hint=ONE_SAVE)
    return find_pieces


def get_item(node: Any, number: int) -> Any:
    """Return the item of a list, or None."""
    return node[number] if isinstance(node, list) and number < len(node) else None


def join_vectors(
    name: str, shape: tuple[int, ...], vectors: Sequence[Vector], find_pieces: FindPieces
) -> TensorRef:
    """Return the tensor made of pieces of the ranks' vectors, with their dtype.

    A piece is the rank, the first element in its vector, and the number of elements. Several pieces
    are joined when the tensor is read; one piece is a range of its file.
    """
    first, pieces = vectors[0], find_pieces()
    for rank, start, count in pieces:
        vector = vectors[rank]
        if vector.dtype != first.dtype:
            message = (
                f"{printable(name)!r} is {first.dtype} in the first file and {vector.dtype} in "
                "this file"
            )
            raise CorruptFile(message, file=vector.file, hint=ONE_SAVE)
        if start + count > vector.numel:
            message = (
                f"{printable(name)!r} needs elements {start:,} to {start + count:,} of a vector"
            )
            raise CorruptFile(
                f"{message} with {vector.numel:,} elements", file=vector.file, hint=ONE_SAVE
            )
    total = sum(count for _, _, count in pieces)
    if total != prod(shape):
        message = (
            f"{printable(name)!r} of shape {list(shape)} has {total:,} elements in all "
            "ranks together"
        )
        raise CorruptFile(message, file=first.file, hint=ONE_SAVE)
    if not pieces:
        data = first.cut(0, 0)
    elif len(pieces) == 1:
        rank, start, count = pieces[0]
        data = vectors[rank].cut(start, count)
    else:  # found again on reading: thousands of ranks have millions of pieces
        size = prod(shape) * BY_NAME[first.dtype].itemsize
        data = make_late_range(first.file, size, partial(_join_pieces, vectors, find_pieces))
    return make_plain_tensor(name, first.dtype, shape, data, first.device)


def _join_pieces(vectors: Sequence[Vector], find_pieces: FindPieces) -> tuple[ByteRange, None]:
    """Return the bytes of all pieces in order, without a CRC-32."""
    return join_ranges(
        [vectors[rank].cut(start, count) for rank, start, count in find_pieces()]
    ), None
