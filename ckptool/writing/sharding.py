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
from ckptool.core.model import Opaque, OrderedMap, Storage, StorageRef, TensorRef, find_tensors
from ckptool.core.tree import walk_everything
from ckptool.errors import NotRepresentable, UsageError
from ckptool.formats import load_format, load_writable_format, shard_format_of
from ckptool.formats.base import NewFile, WritePlan
from ckptool.formats.safetensors_header import FORMAT, make_metadata
from ckptool.writing.target import INDEX, split_extension

DEFAULT_SIZE = 5 * 10**9
"""The default size of the tensors in a shard, in bytes."""
_ENDINGS = frozenset({".safetensors", ".bin", ".pth", ".pt", ".th", ".ckpt", ".pkl", ".model"})
_SIZE = re.compile(
    r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(?:([KMGT]?)(I?)B)?\s*", re.IGNORECASE | re.ASCII
)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Return the bytes of a size: `5GB` is decimal, as in Hugging Face, and `5GiB` binary.

    Raises:
        UsageError: if it is not a size, or less than one byte.
    """
    match = _SIZE.fullmatch(text)
    size = 0
    if match:
        number, power, binary = match[1], match[2] or "", match[3]
        size = int(Fraction(number) * (1024 if binary else 1000) ** _POWERS[power.upper()])
    if not match or size < 1 or (match[3] and not match[2]):
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
    names = _Names(os.fspath(path), format)
    is_tensors_only = load_format(format).tensors_only
    parts = (_divide_for_safetensors if is_tensors_only else _divide_for_torch)(checkpoint)
    if same_files:
        placed = _group_by_file(checkpoint, parts.groups)
        return _plan_files(checkpoint, format, names.index, parts, placed)
    runs = _fill_shards(parts.groups, limit) or [[]]
    if not (indexed or names.indexed) and len(runs) == 1:
        return load_writable_format(shard_format_of(format)).plan(checkpoint)
    files = {names.shard_path(number, len(runs)): run for number, run in enumerate(runs, 1)}
    return _plan_files(checkpoint, format, names.index, parts, files)


def _plan_files(
    checkpoint: Checkpoint,
    format: str,
    index: str,
    parts: _Parts,
    files: Mapping[str, Sequence[str]],
) -> WritePlan:
    """Return the plan of `files`, each with its keys, and of their `index`."""
    plan_file = load_writable_format(shard_format_of(format)).plan
    plans = [plan_file(part) for part in _iterate_shards(checkpoint, files.values())]
    shards = [plan.files[0]._replace(path=file) for file, plan in zip(files, plans, strict=True)]
    file_of = {name: os.path.basename(file) for file, run in files.items() for name in run}
    metadata = {**parts.metadata, "total_size": sum(size for size, _ in parts.groups)}
    index_of = {"metadata": metadata, "weight_map": {name: file_of[name] for name in parts.held}}
    text = f"{json.dumps(index_of, indent=2)}\n".encode()
    return WritePlan(
        format,
        (*shards, NewFile(len(text), lambda output: output.write(text), path=index)),
        tensors=sum(plan.tensors for plan in plans),
        left_out=parts.left_out,
        notes=parts.notes,
        blockers=tuple(dict.fromkeys(name for plan in plans for name in plan.blockers)),
    )


def _group_by_file(
    checkpoint: Checkpoint, groups: Iterable[tuple[int, Sequence[str]]]
) -> dict[str, list[str]]:
    """Return the keys by the file that they were read from; others go to the first."""
    index = os.path.realpath(checkpoint.path)
    paths = [source.name for source in checkpoint.sources if os.path.realpath(source.name) != index]
    files: dict[str, list[str]] = {path: [] for path in paths}
    for _, names in groups:
        tensors = (source for name in names for source in find_tensors([checkpoint.root[name]]))
        files_read = (
            source.storage.data.source.name
            for source in tensors
            if source.storage and source.storage.data
        )
        files[next((file_read for file_read in files_read if file_read in files), paths[0])].extend(
            names
        )
    return {file: names for file, names in files.items() if names}


class _Names:
    """The paths of the shards and their index."""

    def __init__(self, path: str, format: str) -> None:
        """Parse the path of the index or file; a stem may contain dots (`llama-2.7b`)."""
        self.path = path
        self.indexed = path.lower().endswith(INDEX)
        without_index = path[: -len(INDEX)] if self.indexed else path
        stem, extension = split_extension(without_index)
        if extension.lower().removesuffix(".tar") not in _ENDINGS:
            stem, extension = without_index, ""
        self._stem, self._ending = stem, extension or load_format(format).shard_ending

    @property
    def index(self) -> str:
        """The path of the index."""
        return self.path if self.indexed else f"{self._stem}{self._ending}{INDEX}"

    def shard_path(self, number: int, count: int) -> str:
        """Return the path of a shard, counted from 1."""
        return f"{self._stem}-{number:05d}-of-{count:05d}{self._ending}"


@dataclass(frozen=True, slots=True)
class _Parts:
    """The content of the shards."""

    groups: Sequence[tuple[int, Sequence[str]]]
    """Keys that must stay together, with their bytes, in the order of their first keys."""
    held: Sequence[str]
    """The keys in the index: those that are in a shard."""
    metadata: Mapping[str, str]
    """Entries of the index other than the size."""
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _divide_for_safetensors(checkpoint: Checkpoint) -> _Parts:
    """Return the parts of a state dict for safetensors: tied keys stay together.

    Raises:
        NotRepresentable: if safetensors cannot store a tensor.
    """
    # Imported here: opening a file of another format does not need it.
    from ckptool.formats.safetensors import describe_changes, describe_overlaps, plan_content

    content = plan_content(checkpoint, {FORMAT: "pt", **checkpoint.details.header})
    tensors, ties, written = content.tensors, content.ties, content.written
    anchors = {name: [ties.get(name, name)] for name in tensors}
    groups = [
        (sum(written[name].nbytes for name in group if name in written), group)
        for group in _group_by_anchor(anchors)
    ]
    return _Parts(
        groups,
        list(written),
        make_metadata(ties, tensors, None),
        content.left_out,
        (*describe_changes(tensors, ties), *describe_overlaps(written)),
    )


def _divide_for_torch(checkpoint: Checkpoint) -> _Parts:
    """Return the parts of a state dict for torch files: entries with common objects stay together.

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
    shareable = {name: _find_shareable(value) for name, value in root.items()}
    groups = []
    for group in _group_by_anchor(
        {name: list(sizes_by_id) for name, sizes_by_id in shareable.items()}
    ):
        sizes = {key: size for name in group for key, size in shareable[name].items()}
        groups.append((sum(sizes.values()), group))
    return _Parts(groups, list(root), {})


def _find_shareable(value: Any) -> dict[int, int]:
    """Return the objects and storages in an entry, by identity, with bytes outside the pickle."""
    sizes: dict[int, int] = {}
    for node in walk_everything(value):
        storage: Storage | None = None
        if isinstance(node, (TensorRef, StorageRef)):
            storage = node.storage
        elif not isinstance(node, (dict, list, Opaque)):
            continue
        sizes[id(node)] = 0
        if storage is not None:
            sizes[id(storage)] = storage.nbytes
    return sizes


def _group_by_anchor(anchors: Mapping[str, Iterable[Hashable]]) -> list[list[str]]:
    """Return the keys in groups that share an anchor, directly or through others."""
    names = list(anchors)
    parent = list(range(len(names)))

    def find_root(number: int) -> int:
        """Return the root of a key in the forest of joined keys."""
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    owners: dict[Hashable, int] = {}
    for number, name in enumerate(names):
        for anchor in anchors[name]:
            first, second = find_root(owners.setdefault(anchor, number)), find_root(number)
            parent[max(first, second)] = min(first, second)
    groups: dict[int, list[str]] = {}
    for number, name in enumerate(names):
        groups.setdefault(find_root(number), []).append(name)
    return list(groups.values())


def _fill_shards(groups: Iterable[tuple[int, Sequence[str]]], limit: int) -> list[list[str]]:
    """Return the keys of each shard, filled in order up to `limit` bytes."""
    runs: list[list[str]] = []
    filled = 0
    for size, names in groups:
        if not runs or filled + size > limit:
            runs.append([])
            filled = 0
        runs[-1].extend(names)
        filled += size
    return runs


def _iterate_shards(checkpoint: Checkpoint, runs: Iterable[Sequence[str]]) -> Iterator[Checkpoint]:
    """Yield a checkpoint for each run of keys, in the order of the state dict."""
    root = checkpoint.root
    positions = {name: number for number, name in enumerate(root)}
    attributes = root.attributes if isinstance(root, OrderedMap) else {}
    for number, run in enumerate(runs):
        shard = OrderedMap((name, root[name]) for name in sorted(run, key=positions.__getitem__))
        shard.attributes = _select_attributes(run, attributes) if number else attributes
        yield checkpoint.with_root(shard)


def _select_attributes(names: Iterable[str], attributes: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the attributes that a later shard repeats; the first shard has all of them.

    It repeats the `_metadata` of its modules, so that it loads correctly by itself.
    """
    versions = attributes.get("_metadata")
    if not isinstance(versions, dict):
        return {}
    modules: dict[str, Any] = {}
    for name in names:
        path = ""
        for part in name.split("."):
            if path not in modules and path in versions:
                modules[path] = versions[path]
            path = f"{path}.{part}" if path else part
    return {"_metadata": OrderedMap(modules)} if modules else {}
