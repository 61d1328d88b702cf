"""A folder of rank files, in which each FSDP process saved its part of every tensor.

Each is a torch.save file; the parts are read as full tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Storage, TensorRef, copy_with_items, row_major_strides
from ckptool.core.tree import name_of, rebuild, walk
from ckptool.errors import CheckpointError, CorruptFile, UnsupportedFormat
from ckptool.files.tiled import Tile, join_tiles
from ckptool.formats.base import Format, Probe, combine_details, distributed_refusal
from ckptool.formats.distributed.placements import (
    ONE_SAVE,
    LocalShard,
    check_ranks,
    find_local_shards,
)
from ckptool.formats.opening import TORCH_FILES, open_together
from ckptool.words import counted, few, listed, printable, shell

_RANK_FILE_NAME = re.compile(
    r"(model_world_size_(?P<world>\d+)_rank_"  # verl, SkyRL, oumi
    r"|pytorch_model_fsdp(_\d+)?_rank(?=\d+\.bin)"  # accelerate
    r"|model_\w+\.rank_(?=\d+\.pth)"  # dinov2
    r"|optim_world_size_\d+_rank_|optimizer(_\d+)?_rank(?=\d+\.bin))"
    r"(?P<rank>\d{1,9})\.(pt|bin|pth)",
    re.ASCII,
)
_OTHER_STATE_NAME = re.compile(r"(optim|extra_state)\w+_rank_?\d+\.(pt|bin)", re.ASCII)
FLAT_PARAMETER = re.compile(r"(^|\.)_?flat_param(_\d+)?$")
_PLAIN_TYPES = (bool, int, float, complex, str, type(None))
_MISSING = object()
"""In place of a leaf that a rank does not have."""
_SAVE_FULL = (
    "save it again with StateDictType.FULL_STATE_DICT, or with torch.distributed.checkpoint"
)


class FsdpRanks(Format):
    """The format `fsdp-ranks`."""

    name = "fsdp-ranks"
    refusal = distributed_refusal(
        "it is a folder of FSDP rank files: each has a part of every tensor"
    )

    def recognize(self, probe: Probe) -> bool:
        """Return True for a folder with rank files of a model or an optimizer."""
        return any(map(parse_rank_name, probe.entries))

    def read(self, probe: Probe) -> Checkpoint:
        """Return the tree of rank 0, each tensor joined from the files of all ranks.

        Rank files of other states (optimizer, extra state) are only listed.
        """
        with open_together(find_rank_files(probe), probe.limits, TORCH_FILES) as ranks:
            root, differing = _join_ranks(ranks, probe.path)
        joined = {os.path.basename(rank.path) for rank in ranks}
        others = sorted(set(filter(_OTHER_STATE_NAME.fullmatch, probe.entries)) - joined)
        unread = [f"rank files of other states ({listed(others)})"] if others else []
        if differing:
            unread.append(f"different copies in the files of other ranks: {few(differing)}")
        note = (
            f"joined {counted(len(ranks), 'rank file')}; plain tensors and values are from rank 0"
        )
        return combine_details(
            ranks,
            Checkpoint(root, self.name, probe.path),
            notes=(note, *ranks[0].details.notes),
            left_behind=tuple(unread),
        )


FSDP_RANKS = FsdpRanks()


def parse_rank_name(path: str) -> tuple[str, int] | None:
    """Return the pattern of a rank file, `model_world_size_4_rank_{rank}.pt`, and its rank.

    None if the name is not that of a rank file.
    """
    name = os.path.basename(path)
    match = _RANK_FILE_NAME.fullmatch(name)
    if match is None:
        return None
    before, after = name[: match.start("rank")], name[match.end("rank") :]
    return f"{before}{{rank}}{after}", int(match["rank"])


def is_model_rank_file(path: str) -> bool:
    """Return True if a file has the name of a model's rank file, not of an optimizer's."""
    return parse_rank_name(path) is not None and not os.path.basename(path).startswith("optim")


def find_rank_files(probe: Probe) -> tuple[str, ...]:
    """Return the paths of one set of rank files, in the order of the ranks.

    These are the files of the model, if there are any, else those of the optimizer. The number of
    ranks is in the names (`world_size_8`), or else is one more than the highest rank.

    Raises:
        FileMissing: if one is missing.
        CorruptFile: if one belongs to no rank.
        UnsupportedFormat: if there are several sets.
    """
    sets: dict[str, dict[int, str]] = {}  # path by rank, by the pattern of the names
    names = set(filter(is_model_rank_file, probe.entries)) or probe.entries
    for name in names:
        pattern_and_rank = parse_rank_name(name)
        if pattern_and_rank is not None:
            pattern, rank = pattern_and_rank
            sets.setdefault(pattern, {})[rank] = os.path.join(probe.path, name)
    if len(sets) > 1:
        message = f"has {len(sets)} sets of rank files: {listed(sorted(sets))}"
        first = shell(os.path.join(probe.path, min(sets).format(rank="*")))
        hint = f"choose one set: ckptool list {first}"
        raise UnsupportedFormat(message, file=probe.path, hint=hint)
    ((pattern, files),) = sets.items()
    match = re.search(r"world_size_(\d+)", pattern)
    world = int(match[1]) if match else max(files) + 1
    hint = "copy it as well; open the file of one rank with ckptool list FILE"
    check_ranks(files, world, pattern, probe.path, hint)
    return tuple(files[rank] for rank in range(world))


def _join_ranks(ranks: Sequence[Checkpoint], folder: str) -> tuple[Any, list[str]]:
    """Return the tree of rank 0 with full tensors, and the names of tensors with different copies.

    Each path must have leaves of one kind in all ranks. A distributed tensor is joined from its
    parts; a plain tensor is taken from rank 0. Copies of the same rows are compared by checksum.
    """
    differing: list[str] = []
    rank_leaves = [dict(walk(rank.root)) for rank in ranks]  # by rank: path -> leaf
    joined_tensors: dict[int, TensorRef] = {}
    storages: dict[Any, Storage] = {}  # of the joined tensors, shared by tied ones
    for path in dict.fromkeys(path for leaves in rank_leaves for path in leaves):
        try:
            if FLAT_PARAMETER.search(str(path[-1] if path else "")):
                raise UnsupportedFormat(
                    "is a flat FSDP parameter, without the names and shapes of the original "
                    "parameters",
                    hint=_SAVE_FULL,
                )
            first = rank_leaves[0].get(path, _MISSING)
            for rank, leaves in zip(ranks, rank_leaves, strict=True):
                _check_alike(ranks, rank, first, leaves.get(path, _MISSING))
            if not isinstance(first, TensorRef):
                continue
            tensors = [leaves[path] for leaves in rank_leaves]
            # For each rank its rows (a plain tensor has none), and their elements.
            copies: list[tuple[Any, TensorRef]] = [((), tensor) for tensor in tensors]
            if first.is_spread:
                rank_shards = find_local_shards(tensors)
                copies = [(shard.rows, shard.local) for shards in rank_shards for shard in shards]
                joined_tensors[id(first)] = _join_tensor(ranks, first, rank_shards, storages)
            if _has_different_copies(copies):
                differing.append(name_of(path))
        except CheckpointError as error:
            error.message = f"{printable(name_of(path))!r}: {error.message}"
            error.file = error.file or folder
            # Contradicting parts may be of two saves; an unknown form needs another one.
            error.advise(error.hint or (ONE_SAVE if isinstance(error, CorruptFile) else _SAVE_FULL))
            raise
    if not joined_tensors and len(ranks) > 1:
        what = "has rank files that do not state which part of a tensor they contain (DTensor)"
        raise UnsupportedFormat(what, file=folder, hint=_SAVE_FULL)
    return _replace_tensors(ranks[0].root, joined_tensors), differing


def _has_different_copies(copies: Sequence[tuple[Any, TensorRef]]) -> bool:
    """Return True if copies of the same rows differ, by the checksums in their files.

    A checksum is of a whole storage: only copies at the same place in it can be compared.
    """
    checksums: dict[Any, Any] = {}
    for rows, tensor in copies:
        if tensor.numel and tensor.storage is not None and tensor.storage.crc32 is not None:
            layout = rows, tensor.shape, tensor.stride, tensor.offset, tensor.storage.nbytes
            if checksums.setdefault(layout, tensor.storage.crc32) != tensor.storage.crc32:
                return True
    return False


def _check_alike(ranks: Sequence[Checkpoint], rank: Checkpoint, first: Any, other: Any) -> None:
    """Raise CorruptFile if the leaves at one path in rank 0 and in `rank` do not match.

    Tensors must have one class, dtype and shape; plain values must be equal. A missing leaf is
    `_MISSING`.
    """
    files = f"{os.path.basename(ranks[0].path)} and {os.path.basename(rank.path)}"
    if type(first) is not type(other):
        raise CorruptFile(f"is missing in one of {files}, or has another type there")
    if isinstance(first, TensorRef):
        for attribute in ("class_name", "dtype", "shape"):
            first_value, other_value = getattr(first, attribute), getattr(other, attribute)
            if first_value != other_value:
                raise CorruptFile(
                    f"has a different {attribute} in {files}: {first_value} and {other_value}"
                )
    elif isinstance(first, _PLAIN_TYPES) and repr(first) != repr(other):  # nan equals nan
        values = f"{printable(repr(first))} and {printable(repr(other))}"
        raise CorruptFile(f"is different in {files}: {values}")


def _join_tensor(
    ranks: Sequence[Checkpoint],
    first: TensorRef,
    rank_shards: Sequence[Sequence[LocalShard]],
    storages: dict[Any, Storage],
) -> TensorRef:
    """Return a tensor like `first`, joined from the parts in each rank.

    Tensors of the same parts are tied: they share one of `storages`, which is added if it is new.
    The type DTensor or ShardedTensor is removed, others such as Parameter are kept.
    """
    shape = first.sizes
    tiles: dict[tuple[Any, Any], Tile] = {}
    identity: list[Any] = [first.dtype, shape]
    for rank, shards in zip(ranks, rank_shards, strict=True):
        for shard in shards:
            local = shard.local
            if local.dtype != first.dtype:
                message = f"its part is {local.dtype}, expected {first.dtype}"
                raise CorruptFile(message, file=rank.path)
            if local.numel:
                identity.append((id(local.storage), local.offset, local.stride, shard.rows))
            for tile in shard.cut_tiles(rank.path):  # the rows of a replica are the same
                tiles.setdefault((tile.offsets, tile.sizes), tile)
    parts_key = tuple(identity)
    if parts_key not in storages:
        data = join_tiles(ranks[0].path, shape, first.itemsize, list(tiles.values()))
        storages[parts_key] = Storage(f"joined/{len(storages)}", data, data.length)
    return replace(
        first,
        stride=row_major_strides(shape),
        offset=0,
        storage=storages[parts_key],
        kind="strided",
        parts=None,
        wrapping=tuple(layer for layer in first.wrapping if layer.kind != "type"),
    )


def _replace_tensors(root: Any, joined_tensors: Mapping[int, TensorRef]) -> Any:
    """Return the tree with joined tensors in dicts, given by the id of the tensors to replace.

    Raises:
        UnsupportedFormat: a distributed tensor is not in a dict.
    """

    def replace_values(node: dict[Any, Any]) -> dict[Any, Any]:
        """Return a dict with joined tensors as values."""
        return copy_with_items(
            node, ((key, joined_tensors.get(id(value), value)) for key, value in node.items())
        )

    tree = rebuild(root, mapping=replace_values)
    for path, leaf in walk(tree):
        if isinstance(leaf, TensorRef) and leaf.is_spread:
            raise UnsupportedFormat(
                f"{printable(name_of(path))!r} is not in a dict, so it cannot be joined"
            )
    return tree
