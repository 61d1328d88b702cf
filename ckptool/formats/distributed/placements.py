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
        if self.local.shape != sizes and (self.local.numel or 0 not in sizes):
            message = f"its part has shape {list(self.local.shape)}, expected {list(sizes)}"
            raise CorruptFile(message, file=file)
        # By axis, each run of rows in the full tensor, with its start in the part.
        axes = [
            list(zip(axis, accumulate((stop - start for start, stop in axis), initial=0)))  # noqa: B905
            for axis in self.rows
        ]
        for box in product(*axes) if self.local.numel else ():
            starts = tuple(start for (start, _), _ in box)
            size = tuple(stop - start for (start, stop), _ in box)
            slices = tuple(slice(at, at + n) for (_, at), n in zip(box, size, strict=True))
            view = self.local if size == sizes else self.local[slices]
            yield Tile(starts, size, row_major_data(view, "its part", file))


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
    specs = [_parse_dtensor(tensor, rank) for rank, tensor in enumerate(tensors)]
    mesh_placements = specs[0][1]
    if any(placements != mesh_placements for _, placements, _ in specs):
        raise CorruptFile("the ranks have different placements")
    mesh_sizes = [
        max(axis) + 1 for axis in zip(*(coordinate for _, _, coordinate in specs), strict=True)
    ]
    shape = tensors[0].sizes
    return [
        [
            LocalShard(
                local,
                find_owned_rows(shape, zip(mesh_placements, mesh_sizes, coordinate, strict=True)),
            )
        ]
        for local, _, coordinate in specs
    ]


def _parse_dtensor(
    tensor: TensorRef, rank: int
) -> tuple[TensorRef, list[tuple[str, Any]], tuple[int, ...]]:
    """Return the local part of a rank's DTensor, its placements, and the rank's mesh coordinate.

    A placement is the class name and the attributes. `rank` is the number of the file.
    """
    match tensor.parts:
        case {"state": (_, {"_local_tensor": TensorRef() as local, "_spec": Opaque() as spec})}:
            mesh, placements = (
                attributes_of(spec.attributes.get("mesh")),
                spec.attributes["placements"],
            )
        case _:
            raise UnsupportedFormat("its DTensor has an unknown form")
    coordinate = parse_sizes(mesh.get("_coordinate_on_dim"))
    if not isinstance(placements, tuple) or len(coordinate) != len(placements):
        raise UnsupportedFormat(f"the position of rank {rank} in its mesh is missing")
    if mesh.get("_rank", rank) != rank:
        raise CorruptFile(f"the file of rank {rank} was saved by rank {mesh['_rank']}")
    return (
        local,
        [
            (getattr(placement, "class_name", ""), attributes_of(placement))
            for placement in placements
        ],
        coordinate,
    )


def _parse_shards(tensor: TensorRef) -> Iterator[LocalShard]:
    """Yield the parts of a rank's ShardedTensor; each is a box with offsets and sizes."""
    match (tensor.parts or {}).get("state"):
        case (list() as shards, *_):
            states = map(attributes_of, shards)
        case _:
            raise UnsupportedFormat("its ShardedTensor has an unknown form")
    for shard in states:
        metadata, local = attributes_of(shard.get("metadata")), shard.get("tensor")
        offsets, sizes = (
            parse_sizes(metadata.get("shard_offsets")),
            parse_sizes(metadata.get("shard_sizes")),
        )
        if not isinstance(local, TensorRef) or not len(offsets) == len(sizes) == len(tensor.shape):
            raise UnsupportedFormat("its ShardedTensor has an unknown form")
        yield LocalShard(
            local, tuple(((at, at + n),) for at, n in zip(offsets, sizes, strict=True))
        )


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
        axis, factor = axis_and_factor or (len(shape), 1)
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
    """Return one of `parts` shares of rows, as in torch.chunk; the last may be empty."""
    size = -(-sum(stop - start for start, stop in runs) // parts)
    first, taken = part * size, []
    for begin, end in runs:
        low, high = begin + max(first, 0), min(end, begin + first + size)
        if low < high:
            taken.append((low, high))
        first -= end - begin
    return taken


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
        source.made_of, source.rearranges = (tensor.storage.data,), True
        return ByteRange(source, 0, source.size)
    return tensor.row_major
