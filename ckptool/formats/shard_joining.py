"""Shards held against their index, both ways, and joined to the one state dict that they are.

Nothing is passed over: transformers leaves weights that it does not find as they were initialised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CorruptFile
from ckptool.formats.safetensors_metadata import VERSIONS, restored
from ckptool.formats.shard_index import ShardIndex
from ckptool.model import OrderedMap, TensorRef
from ckptool.words import listed, printable

__all__ = ["joined"]

_MOST_NAMED = 5


def joined(index: ShardIndex, shards: Mapping[str, Checkpoint]) -> OrderedMap:
    """The state dict of all shards (by file name), in the order of the index.

    Ties within a shard stay. Tied names that no shard holds as safetensors cannot hold them come
    back from the headers of the shards, or from the index, where huggingface_hub notes them.
    `_metadata` is that of all shards together.

    Raises:
        CorruptFile: a name is in two shards; in another than the index says; in none; in a shard,
            and not in the index; or a file that belongs to the set is not in the index.
    """
    for name in index.unnamed():
        raise CorruptFile(
            f"the index does not name {name!r}, which lies beside it and is of the same set",
            file=index.path,
            hint=f"look at it (ckptool list {index.beside(name)}), and move it away if it is not",
        )
    for file, names in index.names_by_shard().items():
        _check_root(index, file, names, shards[file].root)
    places = _places(index, shards)
    _check_places(index, shards, places)
    entries = {name: shards[file].root[name] for name, file in index.weight_map.items()}
    for name, file in places.items():  # values that an index does not name
        entries.setdefault(name, shards[file].root[name])
    root, _ = restored(entries, *_told(index, shards, places))
    root.attributes = _attributes(shards.values())
    return root


def _check_root(index: ShardIndex, file: str, names: Iterable[str], root: Any) -> None:
    """Refuse a shard that holds something else than entries of a state dict at its top."""
    if not isinstance(root, dict):
        what = f"holds a {type(root).__name__}"
    elif root.keys().isdisjoint(names):
        what = f"holds none of the tensors that the index places there, but {listed(_shown(root))}"
    else:
        return
    raise CorruptFile(
        f"the shard {file!r} {what}",
        file=index.path,
        hint=f"a shard is a part of one flat state dict: ckptool info {index.beside(file)}",
    )


def _shown(names: Iterable[Any]) -> list[str]:
    return [f"'{printable(str(name))}'" for name in names]


def _places(index: ShardIndex, shards: Mapping[str, Checkpoint]) -> dict[Any, str]:
    """Which shard holds each name itself; a tied name that a header mentions is not held."""
    places: dict[Any, str] = {}
    for file, shard in shards.items():
        for name in shard.root:
            if _tied_to(shard, name) is None and places.setdefault(name, file) != file:
                raise CorruptFile(
                    f"tensor '{printable(str(name))}' is in two shards, "
                    f"{places[name]!r} and {file!r}",
                    file=index.path,
                    hint="the shards are of different checkpoints, or of different saves of one",
                )
    return places


def _tied_to(shard: Checkpoint, name: Any) -> str | None:
    """The name in whose place the header of a safetensors file mentions this one."""
    if shard.format != "safetensors":
        return None
    kept: str = shard.root[name].storage.key
    return kept if kept != name else None


def _check_places(
    index: ShardIndex, shards: Mapping[str, Checkpoint], places: Mapping[Any, str]
) -> None:
    wrong: dict[str, list[str]] = {}
    for name, file in index.weight_map.items():
        there = places.get(name, file)
        if there != file:
            text = f"the index places in {file!r} a tensor that is in {there!r}"
            wrong.setdefault(text, []).append(name)
        elif name not in shards[file].root:
            text = f"the index places in {file!r} a tensor that no shard has"
            wrong.setdefault(text, []).append(name)
    for name, file in places.items():
        if name not in index.weight_map and isinstance(shards[file].root[name], TensorRef):
            text = f"{file!r} has a tensor that the index does not name"
            wrong.setdefault(text, []).append(name)
    if wrong:
        facts = (f"{text}: {listed(_shown(names), _MOST_NAMED)}" for text, names in wrong.items())
        raise CorruptFile(
            listed(facts, 1) if len(wrong) > _MOST_NAMED else "; ".join(facts),
            file=index.path,
            hint="index and shards are of different saves: fetch them again, together",
        )


def _told(
    index: ShardIndex, shards: Mapping[str, Checkpoint], places: Mapping[Any, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """The entries of the index that may be ties, and the ties that the shards' headers tell."""
    if any(shard.format != "safetensors" for shard in shards.values()):
        return {}, {}
    ties: dict[str, str] = {}
    for shard in shards.values():
        for name in shard.root:
            kept = _tied_to(shard, name)
            if kept is not None and name not in places:
                ties[name] = kept
    texts = {
        key: text
        for key, text in index.metadata.items()
        if isinstance(text, str) and key != VERSIONS
    }
    return texts, ties


def _attributes(shards: Iterable[Checkpoint]) -> dict[Any, Any]:
    """The attributes of all shards' roots; of `_metadata` the entries of all, the first counts."""
    found: dict[Any, Any] = {}
    for shard in shards:
        if not isinstance(shard.root, OrderedMap):
            continue
        for key, value in shard.root.attributes.items():
            before = found.setdefault(key, value)
            if before is not value and isinstance(before, dict) and isinstance(value, dict):
                merged = type(before)(before)
                merged.update((name, value[name]) for name in value if name not in before)
                found[key] = merged
    return found
