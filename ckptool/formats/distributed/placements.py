"""The part of a full tensor in a rank's DTensor or ShardedTensor, and its row-major elements.

Sources, torch 2.2 to 2.13: torch/distributed/tensor/placement_types.py and device_mesh.py,
torch/distributed/_shard/sharded_tensor/api.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

from ckptool.core.model import Opaque, TensorRef
from ckptool.errors import CorruptFile, FileMissing, UnsupportedFormat
from ckptool.files import ByteRange, MemorySource
from ckptool.files.tiled import Tile
from ckptool.limits import DEFAULT_LIMITS
from ckptool.words import printable

ONE_SAVE = "copy all files of one save again: these are damaged or from different saves"

_MAX_RUNS = 4096
"""The most runs of rows that a rank has of a tensor; FSDP with tensor parallelism has a few."""

Run = tuple[int, int]
"""Rows of one axis: the first, and the one after the last."""
Rows = tuple[tuple[Run, ...], ...]
"""By axis, the rows of the full tensor in a part, in its order."""


def check_ranks(
    ranks: Collection[int], world: int, name_pattern: str, folder: str, hint: str
) -> None:
    """Refuse a folder without the files of exactly `world` ranks, each named `name_pattern`.

    Raises:
        FileMissing: if a rank has no file; the error has this `hint`.
        CorruptFile: if there are files of more ranks.
    """
    distinct = frozenset(ranks)  # `ranks` may be a list with a rank twice
    missing = next((rank for rank in range(world) if rank not in distinct), None)
    if missing is not None:
        message = (
            f"the file of rank {missing} of {world} is missing: {name_pattern.format(rank=missing)}"
        )
        raise FileMissing(message, file=folder, hint=hint)
    if len(ranks) > world:
        message = f"has the files of {len(ranks)} ranks, but {world} ranks saved it"
        raise CorruptFile(message, file=folder, hint=ONE_SAVE)


class LocalShard(NamedTuple):
    """A part of a full tensor in the file of one rank."""

    local: TensorRef
    """The part itself."""
    rows: Rows

    def cut_tiles(self, file: str) -> Iterator[Tile]:
        """Yield the boxes of the full tensor that the part fills.

        Raises:
            CorruptFile: if its shape does not match its rows.
            UnsupportedFormat: if it is not a plain array.
        """
        sizes = tuple(sum(stop - start for start, stop in axis) for axis in self.rows)
        is_empty = not self.local.numel and 0 in sizes  # its shape may differ
        if self.local.shape != sizes and not is_empty:
            message = f"its part has shape {list(self.local.shape)}, expected {list(sizes)}"
            raise CorruptFile(message, file=file)
        if is_empty:
            return
        # By axis, each run of rows in the full tensor, with its start in the part.
        runs_by_axis = [
            list(zip(axis, accumulate((stop - start for start, stop in axis), initial=0)))  # noqa: B905
            for axis in self.rows
        ]
        for box in product(*runs_by_axis):  # one run of each axis
            starts = tuple(start for (start, _), _ in box)
            box_sizes = tuple(stop - start for (start, stop), _ in box)
            slices = tuple(
                slice(local_start, local_start + size)
                for (_, local_start), size in zip(box, box_sizes, strict=True)
            )
            view = self.local if box_sizes == sizes else self.local[slices]
            yield Tile(starts, box_sizes, row_major_data(view, "its part", file))


class _LocalTensor(NamedTuple):
    """The content of a rank's DTensor."""

    local: TensorRef
    placements: list[tuple[str, dict[Any, Any]]]
    """By axis of the mesh, the class and the attributes."""
    coordinate: tuple[int, ...]
    """By axis of the mesh, the position of the rank."""


def find_local_shards(tensors: Sequence[TensorRef]) -> list[list[LocalShard]]:
    """Return for each rank its parts of one full tensor, a DTensor or ShardedTensor.

    `tensors` are the objects at one key in the files of all ranks, in order. A DTensor has one part
    in each rank; all ranks must have the same placements.

    Raises:
        CorruptFile: if the ranks contradict each other.
        UnsupportedFormat: if a placement is unknown, or a sum is pending.
    """
    if not tensors[0].class_name.endswith("DTensor"):
        return [list(_parse_shards(tensor)) for tensor in tensors]
    locals_by_rank = [_parse_dtensor(tensor, rank) for rank, tensor in enumerate(tensors)]
    placements = locals_by_rank[0].placements
    if any(local.placements != placements for local in locals_by_rank):
        raise CorruptFile("the ranks have different placements")
    positions_by_axis = zip(*(local.coordinate for local in locals_by_rank), strict=True)
    mesh_sizes = [max(positions) + 1 for positions in positions_by_axis]
    shape = tensors[0].sizes
    shards = []
    for local, _, coordinate in locals_by_rank:
        mesh_axes = zip(placements, mesh_sizes, coordinate, strict=True)
        shards.append([LocalShard(local, find_owned_rows(shape, mesh_axes))])
    return shards


def _parse_dtensor(tensor: TensorRef, rank: int) -> _LocalTensor:
    """Return the content of a DTensor in the file of `rank`, which must be the rank of its mesh."""
    match tensor.parts:
        case {"state": (_, {"_local_tensor": TensorRef() as local, "_spec": Opaque() as spec})}:
            mesh = attributes_of(spec.attributes.get("mesh"))
            placements = spec.attributes["placements"]
        case _:
            raise UnsupportedFormat("its DTensor has an unknown form")
    coordinate = parse_sizes(mesh.get("_coordinate_on_dim"))
    if not isinstance(placements, tuple) or len(coordinate) != len(placements):
        raise UnsupportedFormat(f"the position of rank {rank} in its mesh is missing")
    if mesh.get("_rank", rank) != rank:
        raise CorruptFile(f"the file of rank {rank} was saved by rank {mesh['_rank']}")
    classes_and_attributes = [
        (getattr(placement, "class_name", ""), attributes_of(placement)) for placement in placements
    ]
    return _LocalTensor(local, classes_and_attributes, coordinate)


def _parse_shards(tensor: TensorRef) -> Iterator[LocalShard]:
    """Yield the parts of a rank's ShardedTensor; each is a box with offsets and sizes."""
    match (tensor.parts or {}).get("state"):
        case (list() as shards, *_):  # ShardedTensor.__getstate__ has the local shards first
            pass
        case _:
            raise UnsupportedFormat("its ShardedTensor has an unknown form")
    for shard in map(attributes_of, shards):
        metadata, local = attributes_of(shard.get("metadata")), shard.get("tensor")
        offsets = parse_sizes(metadata.get("shard_offsets"))
        sizes = parse_sizes(metadata.get("shard_sizes"))
        if not isinstance(local, TensorRef) or not len(offsets) == len(sizes) == len(tensor.shape):
            raise UnsupportedFormat("its ShardedTensor has an unknown form")
        # A box has one run of rows along each axis.
        rows = tuple(
            ((offset, offset + size),) for offset, size in zip(offsets, sizes, strict=True)
        )
        yield LocalShard(local, rows)


def find_owned_rows(
    shape: Sequence[int], mesh_axes: Iterable[tuple[tuple[str, dict[Any, Any]], int, int]]
) -> Rows:
    """Return the rows along each axis that a rank has of a tensor.

    `mesh_axes` are from left to right: the placement (class and attributes), the number of ranks on
    the axis, and the position of the rank. With `Shard(0)` a rank has one run of rows; with
    `_StridedShard` it has its share of each of `split_factor` parts.

    Raises:
        UnsupportedFormat: if a placement is unknown, or a sum is pending (`Partial`).
    """
    owned: list[list[Run]] = [[(0, size)] for size in shape]
    for (name, attributes), ranks, rank in mesh_axes:
        kind = name.rpartition(".")[2]
        if kind == "Replicate":
            continue
        axis_and_factor = parse_sizes((attributes.get("dim"), attributes.get("split_factor", 1)))
        axis, factor = axis_and_factor or (len(shape), 1)  # invalid: an axis that does not exist
        is_known = kind in ("Shard", "_StridedShard") and axis < len(shape)
        if not is_known or not 1 <= factor <= _MAX_RUNS:
            why = ": a sum is pending" if kind.endswith("Partial") else ""
            raise UnsupportedFormat(f"its placement {printable(kind)} is not supported{why}")
        # `Shard` has one part. Each part is divided among all ranks.
        parts = (_take_share(owned[axis], factor, part) for part in range(factor))
        owned[axis] = [run for part in parts for run in _take_share(part, ranks, rank)]
        if prod(map(len, owned)) > _MAX_RUNS:
            raise UnsupportedFormat(f"a rank has more than {_MAX_RUNS:,} pieces of it")
    return tuple(map(tuple, owned))


def _take_share(runs: Sequence[Run], parts: int, part: int) -> list[Run]:
    """Return share number `part` of `parts` of the rows, as in torch.chunk; it may be empty."""
    share_size = -(-sum(stop - start for start, stop in runs) // parts)
    share, skipped_rows = [], part * share_size
    rows_before = 0
    for start, stop in runs:
        # The share begins after `skipped_rows` of all runs: before, inside or after this one.
        share_start = start + skipped_rows - rows_before
        first, end = max(start, share_start), min(stop, share_start + share_size)
        if first < end:
            share.append((first, end))
        rows_before += stop - start
    return share


def attributes_of(node: Any) -> dict[Any, Any]:
    """Return the attributes of an object; empty for anything else."""
    return node.attributes if isinstance(node, Opaque) else {}


def parse_sizes(value: Any) -> tuple[int, ...]:
    """Return a list of sizes as a tuple; empty for anything else, or too many."""
    if not isinstance(value, (list, tuple)) or len(value) > DEFAULT_LIMITS.max_dimensions:
        return ()
    return tuple(value) if all(type(size) is int and size >= 0 for size in value) else ()


def row_major_data(tensor: TensorRef, label: str, file: str) -> ByteRange:
    """Return the elements of a tensor in row-major order, as bytes of the file where possible.

    Big-endian and lazily conjugated or negated elements are converted in memory.

    Raises:
        UnsupportedFormat: if it has no plain elements; the message shows `label` and `file`.
    """
    if not tensor.has_content or tensor.storage is None or tensor.storage.data is None:
        raise UnsupportedFormat(f"{label} is a {tensor.kind} tensor", file=file)
    if tensor.flags or tensor.storage.byteorder == "big":
        source = MemorySource(tensor.read(), file)
        # The checksum of the storage applies to the converted bytes too.
        source.made_of, source.rearranges = (tensor.storage.data,), True
        return ByteRange(source, 0, source.size)
    return tensor.row_major
