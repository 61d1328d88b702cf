"""Plan a state dict as shards and their index, in the layout of Hugging Face.

After huggingface_hub/serialization: `split_state_dict_into_shards_factory` (the
distribution of tensors; but here the order stays, also around a tensor with its own shard),
`save_torch_state_dict` (the index, with the ties that safetensors cannot store),
`parse_size_to_int`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Opaque, OrderedMap, StorageRef, TensorRef, find_tensors
from ckptool.core.tree import walk_everything
from ckptool.errors import NotRepresentable, UsageError
from ckptool.formats import load_format, load_writable_format, shard_format_of
from ckptool.formats.base import NewFile, WritePlan
from ckptool.formats.safetensors_header import FORMAT, make_metadata
from ckptool.writing.target import INDEX_SUFFIX, split_extension

DEFAULT_SIZE = 5 * 10**9
"""The default limit of the tensors in a shard, in bytes."""
_WEIGHT_EXTENSIONS = frozenset(
    {".safetensors", ".bin", ".pth", ".pt", ".th", ".ckpt", ".pkl", ".model"}
)
_SIZE_PATTERN = re.compile(
    r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(?:([KMGT]?)(I?)B)?\s*", re.IGNORECASE | re.ASCII
)
_POWER_BY_UNIT = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Return the bytes of a size: `5GB` is decimal, as in Hugging Face, and `5GiB` binary.

    Raises:
        UsageError: if it is not a size, or less than one byte.
    """
    match = _SIZE_PATTERN.fullmatch(text)
    size = 0
    if match and (match[2] or not match[3]):  # no unit `iB`
        number, unit, binary = match[1], match[2] or "", match[3]
        size = int(Fraction(number) * (1024 if binary else 1000) ** _POWER_BY_UNIT[unit.upper()])
    if size < 1:
        raise UsageError(
            f"{text!r} is not a shard size",
            hint="give a number of bytes, or a size such as 500MB, 5GB or 4.5GiB",
        )
    return size


def plan_shards(
    checkpoint: Checkpoint,
    path: str | os.PathLike[str],
    *,
    format: str,
    max_shard_size: int | None = None,
    indexed: bool = False,
    same_files: bool = False,
) -> WritePlan:
    """Return the files for a checkpoint whose root is one flat state dict.

    Shards are filled in the order of the tensors, up to `max_shard_size` bytes of tensors (None:
    `DEFAULT_SIZE`). Entries that share bytes go to the same shard, that of the first. A larger
    tensor gets its own shard.

    Args:
        checkpoint: A checkpoint with the state dict as root.
        path: The index (`model.safetensors.index.json`), or the file to use if everything fits in
            one shard (`model.safetensors`).
        format: `safetensors-sharded` or `torch-sharded`.
        max_shard_size: The limit in bytes.
        indexed: Write shards and an index even if everything fits in one file.
        same_files: Keep each tensor in the file from which it was read, whatever the size; `path`
            is the index of these files.

    Raises:
        NotRepresentable: if shards cannot store a tensor, or the root is not a state dict.
        UsageError: if `max_shard_size` is less than one byte.
    """
    limit = DEFAULT_SIZE if max_shard_size is None else max_shard_size
    if limit < 1:
        raise UsageError(f"a shard cannot have {limit} bytes")
    paths = _ShardPaths(os.fspath(path), format)
    divide = _divide_for_safetensors if load_format(format).tensors_only else _divide_for_torch
    divided = divide(checkpoint)
    if same_files:
        keys_by_file = _group_by_file(checkpoint, divided.groups)
    else:
        shards = _fill_shards(divided.groups, limit) or [[]]
        if len(shards) == 1 and not (indexed or paths.indexed):
            return load_writable_format(shard_format_of(format)).plan(checkpoint)
        keys_by_file = {
            paths.shard_path(number, len(shards)): keys for number, keys in enumerate(shards, 1)
        }
    return _plan_files(checkpoint, format, paths.index, divided, keys_by_file)


def _plan_files(
    checkpoint: Checkpoint,
    format: str,
    index: str,
    divided: _DividedStateDict,
    keys_by_file: Mapping[str, Sequence[str]],
) -> WritePlan:
    """Return the plan of the shards, each with its keys, and of their `index`, the last file."""
    plan_file = load_writable_format(shard_format_of(format)).plan
    plans = [plan_file(shard) for shard in _iterate_shards(checkpoint, keys_by_file.values())]
    shards = [
        plan.files[0]._replace(path=file) for file, plan in zip(keys_by_file, plans, strict=True)
    ]
    file_by_key = {
        key: os.path.basename(file) for file, keys in keys_by_file.items() for key in keys
    }
    metadata = {**divided.metadata, "total_size": sum(size for size, _ in divided.groups)}
    weight_map = {key: file_by_key[key] for key in divided.stored_keys}
    document = {"metadata": metadata, "weight_map": weight_map}
    text = f"{json.dumps(document, indent=2)}\n".encode()
    return WritePlan(
        format,
        (*shards, NewFile(len(text), lambda output: output.write(text), path=index)),
        tensors=sum(plan.tensors for plan in plans),
        left_out=divided.left_out,
        notes=divided.notes,
        blockers=tuple(dict.fromkeys(name for plan in plans for name in plan.blockers)),
    )


def _group_by_file(
    checkpoint: Checkpoint, groups: Iterable[tuple[int, Sequence[str]]]
) -> dict[str, list[str]]:
    """Return the keys by the file from which they were read, without files that have none.

    Groups of new or computed tensors go to the first file.
    """
    index = os.path.realpath(checkpoint.path)
    paths = [source.name for source in checkpoint.sources if os.path.realpath(source.name) != index]
    keys_by_file: dict[str, list[str]] = {path: [] for path in paths}
    for _, keys in groups:
        tensors = (tensor for key in keys for tensor in find_tensors([checkpoint.root[key]]))
        read_files = (
            tensor.storage.data.source.name
            for tensor in tensors
            if tensor.storage and tensor.storage.data
        )
        file = next((path for path in read_files if path in keys_by_file), paths[0])
        keys_by_file[file].extend(keys)
    return {file: keys for file, keys in keys_by_file.items() if keys}


class _ShardPaths:
    """The paths of the shards and their index."""

    def __init__(self, path: str, format: str) -> None:
        """Parse the path of the index, or of the one file; a stem may contain dots (`llama-2.7b`).

        `indexed` is True for the path of an index. Without an extension, shards get that of the
        format.
        """
        self.path = path
        self.indexed = path.lower().endswith(INDEX_SUFFIX)
        without_index = path[: -len(INDEX_SUFFIX)] if self.indexed else path
        stem, extension = split_extension(without_index)
        if extension.lower().removesuffix(".tar") not in _WEIGHT_EXTENSIONS:  # also `.pth.tar`
            stem, extension = without_index, ""
        self._stem, self._extension = stem, extension or load_format(format).shard_ending

    @property
    def index(self) -> str:
        """The path of the index."""
        return self.path if self.indexed else f"{self._stem}{self._extension}{INDEX_SUFFIX}"

    def shard_path(self, number: int, count: int) -> str:
        """Return the path of a shard, counted from 1."""
        return f"{self._stem}-{number:05d}-of-{count:05d}{self._extension}"


@dataclass(frozen=True, slots=True)
class _DividedStateDict:
    """A state dict as groups of keys, from which shards are filled."""

    groups: Sequence[tuple[int, Sequence[str]]]
    """Keys that must stay together, with their bytes, in the order of their first keys."""
    stored_keys: Sequence[str]
    """The keys in the index. Tied keys that safetensors cannot store are only in `metadata`."""
    metadata: Mapping[str, str]
    """Entries of the index other than the size."""
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _divide_for_safetensors(checkpoint: Checkpoint) -> _DividedStateDict:
    """Divide a state dict for safetensors files: tied keys stay together.

    Raises:
        NotRepresentable: if safetensors cannot store a tensor.
    """
    # Imported here: opening a file of another format does not need it.
    from ckptool.formats.safetensors import describe_changes, describe_overlaps, plan_content

    content = plan_content(checkpoint, {FORMAT: "pt", **checkpoint.details.header})
    tensors, ties, written = content.tensors, content.ties, content.written
    # A tied key shares the anchor of the key under which its tensor is stored.
    anchors = {name: [ties.get(name, name)] for name in tensors}
    groups = [
        (sum(written[name].nbytes for name in group if name in written), group)
        for group in _group_by_anchor(anchors)
    ]
    return _DividedStateDict(
        groups,
        list(written),
        make_metadata(ties, tensors, versions=None),
        content.left_out,
        (*describe_changes(tensors, ties), *describe_overlaps(written)),
    )


def _divide_for_torch(checkpoint: Checkpoint) -> _DividedStateDict:
    """Divide a state dict for torch files: entries with common objects stay together.

    Raises:
        NotRepresentable: if the root is not a flat state dict.
    """
    root = checkpoint.root
    if not isinstance(root, dict) or not all(isinstance(name, str) for name in root):
        raise NotRepresentable(
            "an index of shards lists one flat state dict, and this is not one",
            file=checkpoint.path,
            hint="choose a state dict with --key NAME; ckptool info lists them",
        )
    sizes_by_key = {key: _find_shareable(value) for key, value in root.items()}
    groups = []
    for keys in _group_by_anchor(sizes_by_key):
        size_by_object: dict[int, int] = {}  # each object once, even if several entries share it
        for key in keys:
            size_by_object |= sizes_by_key[key]
        groups.append((sum(size_by_object.values()), keys))
    return _DividedStateDict(groups, stored_keys=list(root), metadata={})


def _find_shareable(value: Any) -> dict[int, int]:
    """Return, by `id`, the objects in an entry that other entries can share, and their sizes.

    These are containers, tensors and storages. A size is the number of bytes outside the pickle,
    so only those of storages are not 0.
    """
    size_by_object: dict[int, int] = {}
    for node in walk_everything(value):
        if isinstance(node, (dict, list, Opaque, TensorRef, StorageRef)):
            size_by_object[id(node)] = 0
        if isinstance(node, (TensorRef, StorageRef)) and node.storage is not None:
            size_by_object[id(node.storage)] = node.storage.nbytes
    return size_by_object


def _group_by_anchor(anchors: Mapping[str, Iterable[Hashable]]) -> list[list[str]]:
    """Return the keys in groups that share an anchor, directly or through other keys.

    An anchor is a stored tensor or a shared object, which must be in one file. Groups are in the
    order of their first keys.
    """
    names = list(anchors)
    parent = list(range(len(names)))  # union-find: numbers of joined keys lead to the smallest one

    def find_root(number: int) -> int:
        """Return the smallest number of the keys joined with this one (union-find)."""
        while parent[number] != number:
            # Every key on the way gets its grandparent as parent, which shortens the next search.
            parent[number] = number = parent[parent[number]]
        return number

    first_number: dict[Hashable, int] = {}  # by anchor, the first key that has it
    for number, name in enumerate(names):
        for anchor in anchors[name]:
            roots = find_root(first_number.setdefault(anchor, number)), find_root(number)
            parent[max(roots)] = min(roots)
    groups: dict[int, list[str]] = {}
    for number, name in enumerate(names):
        groups.setdefault(find_root(number), []).append(name)
    return list(groups.values())


def _fill_shards(groups: Iterable[tuple[int, Sequence[str]]], limit: int) -> list[list[str]]:
    """Return the keys of each shard: groups of keys with their bytes, filled up to `limit` bytes.

    A group that is larger gets its own shard.
    """
    shards: list[list[str]] = []
    filled_bytes = 0
    for size, keys in groups:
        if not shards or filled_bytes + size > limit:
            shards.append([])
            filled_bytes = 0
        shards[-1].extend(keys)
        filled_bytes += size
    return shards


def _iterate_shards(
    checkpoint: Checkpoint, keys_by_shard: Iterable[Sequence[str]]
) -> Iterator[Checkpoint]:
    """Yield a checkpoint for each shard, with its keys in the order of the state dict.

    The first shard has all attributes of the state dict, any other the versions of its modules.
    """
    root = checkpoint.root
    positions = {key: number for number, key in enumerate(root)}
    attributes = root.attributes if isinstance(root, OrderedMap) else {}
    for number, keys in enumerate(keys_by_shard):
        shard = OrderedMap((key, root[key]) for key in sorted(keys, key=positions.__getitem__))
        shard.attributes = _select_metadata(keys, attributes) if number else attributes
        yield checkpoint.with_root(shard)


def _select_metadata(keys: Iterable[str], attributes: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the attribute `_metadata` for a later shard, with the versions of its modules.

    With it, the shard loads correctly by itself. Empty if the state dict has no `_metadata`.
    """
    versions = attributes.get("_metadata")
    if not isinstance(versions, dict):
        return {}
    modules: dict[str, Any] = {}
    for key in keys:
        path = ""
        for part in key.split("."):
            if path not in modules and path in versions:
                modules[path] = versions[path]
            path = f"{path}.{part}" if path else part
    return {"_metadata": OrderedMap(modules)} if modules else {}
