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
from ckptool.writing.target import INDEX, split

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
    found = _SIZE.fullmatch(text)
    size = 0
    if found:
        number, power, binary = found[1], found[2] or "", found[3]
        size = int(Fraction(number) * (1024 if binary else 1000) ** _POWERS[power.upper()])
    if not found or size < 1 or (found[3] and not found[2]):
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
    of_tensors = load_format(format).tensors_only
    parts = (_safetensors_parts if of_tensors else _torch_parts)(checkpoint)
    if same_files:
        placed = _by_file(checkpoint, parts.groups)
        return _plan_files(checkpoint, format, names.index, parts, placed)
    runs = _fill_shards(parts.groups, limit) or [[]]
    if not (indexed or names.indexed) and len(runs) == 1:
        return load_writable_format(shard_format_of(format)).plan(checkpoint)
    files = {names.shard(number, len(runs)): run for number, run in enumerate(runs, 1)}
    return _plan_files(checkpoint, format, names.index, parts, files)


def _plan_files(
    checkpoint: Checkpoint,
    format: str,
    index: str,
    parts: _Parts,
    files: Mapping[str, Sequence[str]],
) -> WritePlan:
    """Return the plan of `files`, each with its keys, and of their `index`."""
    planned = load_writable_format(shard_format_of(format)).plan
    plans = [planned(part) for part in _shards(checkpoint, files.values())]
    shards = [plan.files[0]._replace(path=file) for file, plan in zip(files, plans, strict=True)]
    places = {name: os.path.basename(file) for file, run in files.items() for name in run}
    metadata = {**parts.metadata, "total_size": sum(size for size, _ in parts.groups)}
    index_of = {"metadata": metadata, "weight_map": {name: places[name] for name in parts.held}}
    text = f"{json.dumps(index_of, indent=2)}\n".encode()
    return WritePlan(
        format,
        (*shards, NewFile(len(text), lambda output: output.write(text), path=index)),
        tensors=sum(plan.tensors for plan in plans),
        left_out=parts.left_out,
        notes=parts.notes,
        blockers=tuple(dict.fromkeys(name for plan in plans for name in plan.blockers)),
    )


def _by_file(
    checkpoint: Checkpoint, groups: Iterable[tuple[int, Sequence[str]]]
) -> dict[str, list[str]]:
    """Return the keys by the file that they were read from; others go to the first."""
    index = os.path.realpath(checkpoint.path)
    paths = [one.name for one in checkpoint.sources if os.path.realpath(one.name) != index]
    files: dict[str, list[str]] = {path: [] for path in paths}
    for _, names in groups:
        tensors = (one for name in names for one in find_tensors([checkpoint.root[name]]))
        homes = (
            one.storage.data.source.name for one in tensors if one.storage and one.storage.data
        )
        files[next((home for home in homes if home in files), paths[0])].extend(names)
    return {file: names for file, names in files.items() if names}


class _Names:
    """The names of the files."""

    def __init__(self, path: str, format: str) -> None:
        """Parse the path of the index or file; a stem may contain dots (`llama-2.7b`)."""
        self.path = path
        self.indexed = path.lower().endswith(INDEX)
        whole = path[: -len(INDEX)] if self.indexed else path
        stem, ending = split(whole)
        if ending.lower().removesuffix(".tar") not in _ENDINGS:
            stem, ending = whole, ""
        self._stem, self._ending = stem, ending or load_format(format).shard_ending

    @property
    def index(self) -> str:
        """The path of the index."""
        return self.path if self.indexed else f"{self._stem}{self._ending}{INDEX}"

    def shard(self, number: int, count: int) -> str:
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


def _safetensors_parts(checkpoint: Checkpoint) -> _Parts:
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


def _torch_parts(checkpoint: Checkpoint) -> _Parts:
    root = checkpoint.root
    if not isinstance(root, dict) or not all(isinstance(name, str) for name in root):
        raise NotRepresentable(
            "an index of shards lists one flat state dict, and this is not one",
            file=checkpoint.path,
            hint="choose a state dict with --key NAME; ckptool info lists them",
        )
    held = {name: _shareable(value) for name, value in root.items()}
    groups = []
    for group in _group_by_anchor({name: list(found) for name, found in held.items()}):
        sizes = {key: size for name in group for key, size in held[name].items()}
        groups.append((sum(sizes.values()), group))
    return _Parts(groups, list(root), {})


def _shareable(value: Any) -> dict[int, int]:
    """Return the shareable parts of an entry, with their bytes outside the pickle."""
    found: dict[int, int] = {}
    for node in walk_everything(value):
        storage: Storage | None = None
        if isinstance(node, (TensorRef, StorageRef)):
            storage = node.storage
        elif not isinstance(node, (dict, list, Opaque)):
            continue
        found[id(node)] = 0
        if storage is not None:
            found[id(storage)] = storage.nbytes
    return found


def _group_by_anchor(anchors: Mapping[str, Iterable[Hashable]]) -> list[list[str]]:
    """Return the keys in groups that share an anchor, directly or through others."""
    names = list(anchors)
    parent = list(range(len(names)))

    def root_of(number: int) -> int:
        while parent[number] != number:
            parent[number] = number = parent[parent[number]]
        return number

    owners: dict[Hashable, int] = {}
    for number, name in enumerate(names):
        for anchor in anchors[name]:
            first, second = root_of(owners.setdefault(anchor, number)), root_of(number)
            parent[max(first, second)] = min(first, second)
    groups: dict[int, list[str]] = {}
    for number, name in enumerate(names):
        groups.setdefault(root_of(number), []).append(name)
    return list(groups.values())


def _fill_shards(groups: Iterable[tuple[int, Sequence[str]]], limit: int) -> list[list[str]]:
    """Return the keys of each shard."""
    runs: list[list[str]] = []
    taken = 0
    for size, names in groups:
        if not runs or taken + size > limit:
            runs.append([])
            taken = 0
        runs[-1].extend(names)
        taken += size
    return runs


def _shards(checkpoint: Checkpoint, runs: Iterable[Sequence[str]]) -> Iterator[Checkpoint]:
    """Yield a checkpoint for each run of keys, in the order of the state dict."""
    root = checkpoint.root
    order = {name: number for number, name in enumerate(root)}
    attributes = root.attributes if isinstance(root, OrderedMap) else {}
    for number, run in enumerate(runs):
        shard = OrderedMap((name, root[name]) for name in sorted(run, key=order.__getitem__))
        shard.attributes = _attributes_for(run, attributes) if number else attributes
        yield checkpoint.with_root(shard)


def _attributes_for(names: Iterable[str], attributes: Mapping[Any, Any]) -> dict[Any, Any]:
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
