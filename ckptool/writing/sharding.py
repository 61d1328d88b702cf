"""A state dict planned as shards and their index, in Hugging Face's layout.

After huggingface_hub/serialization: `split_state_dict_into_shards_factory` (which tensor goes
where; but the order stays, also around a tensor that has a shard of its own),
`save_torch_state_dict` (the index, with the ties that safetensors cannot hold),
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
from ckptool.core.tree import everything
from ckptool.errors import NotRepresentable, UsageError
from ckptool.formats import format_of, shard_of, writer
from ckptool.formats.base import NewFile, WritePlan
from ckptool.formats.safetensors_header import FORMAT, metadata_of
from ckptool.writing.target import INDEX, split

DEFAULT_SIZE = 5 * 10**9
"""Bytes of tensors in a shard, where the user does not say."""
_ENDINGS = frozenset({".safetensors", ".bin", ".pth", ".pt", ".th", ".ckpt", ".pkl", ".model"})
_SIZE = re.compile(
    r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(?:([KMGT]?)(I?)B)?\s*", re.IGNORECASE | re.ASCII
)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(text: str) -> int:
    """Return the bytes of a size in words: `5GB` is decimal, as in Hugging Face, `5GiB` binary.

    Raises:
        UsageError: it is none, or less than a byte.
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

    The tensors go to the shards in their order; a shard ends where the next tensor would make it
    exceed `max_shard_size` bytes of tensors (None: `DEFAULT_SIZE`). What shares bytes goes
    together, to the place of the first. A tensor larger than that has a shard of its own.

    Args:
        checkpoint: Its root is the state dict.
        path: The index (`model.safetensors.index.json`), or the one file that it is when all of it
            fits in one shard (`model.safetensors`).
        format: `safetensors-sharded` or `torch-sharded`.
        max_shard_size: Bytes.
        indexed: Shards and an index even where all of it fits in one.
        same_files: Each tensor stays in the file from which it was read, whatever that one takes;
            `path` is the index of those files.

    Raises:
        NotRepresentable: the shards cannot hold a tensor, or the root is no state dict.
        UsageError: `max_shard_size` is less than a byte.
    """
    limit = DEFAULT_SIZE if max_shard_size is None else max_shard_size
    if limit < 1:
        raise UsageError(f"a shard cannot have {limit} bytes")
    names = _Names(os.fspath(path), format)
    of_tensors = format_of(format).tensors_only
    parts = (_safetensors_parts if of_tensors else _torch_parts)(checkpoint)
    if same_files:
        placed = _by_file(checkpoint, parts.groups)
        return _plan_files(checkpoint, format, names.index, parts, placed)
    runs = _fill_shards(parts.groups, limit) or [[]]
    if not (indexed or names.indexed) and len(runs) == 1:
        return writer(shard_of(format)).plan(checkpoint)
    files = {names.shard(number, len(runs)): run for number, run in enumerate(runs, 1)}
    return _plan_files(checkpoint, format, names.index, parts, files)


def _plan_files(
    checkpoint: Checkpoint,
    format: str,
    index: str,
    parts: _Parts,
    files: Mapping[str, Sequence[str]],
) -> WritePlan:
    """Return the plan of `files`, each with the names that it is to hold, and of their `index`."""
    planned = writer(shard_of(format)).plan
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
    """Return the names by the file that they were read from; others go to the first."""
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
    """What the files are called."""

    def __init__(self, path: str, format: str) -> None:
        """Take the index, or the one file; a stem may hold dots (`llama-2.7b`)."""
        self.path = path
        self.indexed = path.lower().endswith(INDEX)
        whole = path[: -len(INDEX)] if self.indexed else path
        stem, ending = split(whole)
        if ending.lower().removesuffix(".tar") not in _ENDINGS:
            stem, ending = whole, ""
        self._stem, self._ending = stem, ending or format_of(format).shard_ending

    @property
    def index(self) -> str:
        """The path of the index."""
        return self.path if self.indexed else f"{self._stem}{self._ending}{INDEX}"

    def shard(self, number: int, count: int) -> str:
        """Return the path of a shard, counted from 1."""
        return f"{self._stem}-{number:05d}-of-{count:05d}{self._ending}"


@dataclass(frozen=True, slots=True)
class _Parts:
    """What goes into the shards."""

    groups: Sequence[tuple[int, Sequence[str]]]
    """Names that must stay together, with their bytes, in the order of the first of each."""
    held: Sequence[str]
    """The names that the index has: those that a shard holds itself."""
    metadata: Mapping[str, str]
    """What the index says beside the size."""
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def _safetensors_parts(checkpoint: Checkpoint) -> _Parts:
    # Here: opening a file of another format imports none of it.
    from ckptool.formats.safetensors import content_of, overlapping, remarks

    content = content_of(checkpoint, {FORMAT: "pt", **checkpoint.details.header})
    tensors, ties, written = content.tensors, content.ties, content.written
    anchors = {name: [ties.get(name, name)] for name in tensors}
    groups = [
        (sum(written[name].nbytes for name in group if name in written), group)
        for group in _group_by_anchor(anchors)
    ]
    return _Parts(
        groups,
        list(written),
        metadata_of(ties, tensors, None),
        content.left_out,
        (*remarks(tensors, ties), *overlapping(written)),
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
    """Return what entries could have in common, with the bytes of each outside the pickle."""
    found: dict[int, int] = {}
    for node in everything(value):
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
    """Return the names in groups: those that have an anchor in common, directly or by others."""
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
    """Return the names of each shard."""
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
    """Yield a checkpoint of each run of names, in the order that they have in the state dict."""
    root = checkpoint.root
    order = {name: number for number, name in enumerate(root)}
    attributes = root.attributes if isinstance(root, OrderedMap) else {}
    for number, run in enumerate(runs):
        shard = OrderedMap((name, root[name]) for name in sorted(run, key=order.__getitem__))
        shard.attributes = _attributes_for(run, attributes) if number else attributes
        yield checkpoint.with_root(shard)


def _attributes_for(names: Iterable[str], attributes: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what a later shard repeats of the attributes, all of which the first one has.

    Of `_metadata` the entries of its modules, so that it loads by itself as the whole does.
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
