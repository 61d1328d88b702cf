"""What shards say beside their tensors, taken together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckptool.checkpoint import Checkpoint, Details
from ckptool.formats.identify import quoted
from ckptool.formats.safetensors_metadata import PLACES
from ckptool.formats.shard_index import ShardIndex
from ckptool.model import OrderedMap, TensorRef, find_tensors
from ckptool.words import counted, listed

__all__ = ["details_of", "total_size_notes"]

_DERIVED = frozenset({"total_size", "total_parameters", PLACES})
"""Entries of an index that follow from the tensors."""


def details_of(index: ShardIndex, shards: Mapping[str, Checkpoint], root: OrderedMap) -> Details:
    """The details of the checkpoint whose state dict, joined, is `root`."""
    all_of = [shard.details for shard in shards.values()]
    header, conflicting = _headers(details.header for details in all_of)
    return Details(
        size=index.source.size + sum(details.size for details in all_of),
        writer=_writer([details.writer for details in all_of]),
        byteorder=_common([details.byteorder for details in all_of], "little", "mixed"),
        protocol=_common([details.protocol for details in all_of], None, None),
        globals=_merged(details.globals for details in all_of),
        opcodes=_merged(details.opcodes for details in all_of),
        storage_bytes=sum(details.storage_bytes for details in all_of),
        dead_bytes=sum(details.dead_bytes for details in all_of),
        notes=(
            *(() if index.weight_map else ("the index names no tensor",)),
            *total_size_notes(index, root),
            *_by_shard({file: shard.details.notes for file, shard in shards.items()}),
        ),
        left_behind=(
            *_entries("the header that differ between the shards", conflicting),
            *_entries("the index", [key for key in index.metadata if _stays(key, root)]),
            *_by_shard({file: shard.details.left_behind for file, shard in shards.items()}),
        ),
        unreferenced=tuple(
            _by_shard({file: shard.details.unreferenced for file, shard in shards.items()})
        ),
        header=header,
    )


def _writer(writers: Sequence[str]) -> str:
    kinds = ", ".join(dict.fromkeys(filter(None, writers)))
    count = f"in {counted(len(writers), 'shard')}"
    return f"{kinds}, {count}" if kinds else count


def _common(values: Sequence[Any], none: Any, several: Any) -> Any:
    """What all say; `none` where nobody does, `several` where they differ."""
    found = set(values)
    return (found.pop() if len(found) == 1 else several) if found else none


def _merged(groups: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))


def _headers(headers: Iterable[Mapping[str, str]]) -> tuple[dict[str, str], list[str]]:
    """The entries that every shard which has them has alike, and the names of the others."""
    found: dict[str, str] = {}
    conflicting: dict[str, None] = {}
    for header in headers:
        for key, text in header.items():
            if found.setdefault(key, text) != text:
                conflicting[key] = None
    return {key: text for key, text in found.items() if key not in conflicting}, list(conflicting)


def _stays(key: str, root: OrderedMap) -> bool:
    """Whether an entry of the index is something that no rewrite carries over."""
    return key not in _DERIVED and key not in root


def _entries(what: str, keys: Sequence[str]) -> Iterator[str]:
    if keys:
        yield f"entries of {what}: {listed(keys)}"


def _by_shard(sentences: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Each sentence once, with the shards that it is of unless it is of all."""
    files: dict[str, list[str]] = {}
    for file, texts in sentences.items():
        for text in texts:
            files.setdefault(text, []).append(file)
    for text, named in files.items():
        yield text if len(named) == len(sentences) else f"{listed(named, 3)}: {text}"


def total_size_notes(index: ShardIndex, root: OrderedMap) -> Iterator[str]:
    """A note where the index states another size than any that writers have counted."""
    stated = index.metadata.get("total_size")
    every = [value for value in root.values() if isinstance(value, TensorRef)]
    distinct = {_identity(tensor): tensor for tensor in every}
    storages = {id(tensor.storage): tensor.storage for tensor in find_tensors(root)}
    once = sum(tensor.nbytes for tensor in distinct.values())
    stored = sum(storage.nbytes for storage in storages.values() if storage is not None)
    if stated not in (None, once, stored, sum(tensor.nbytes for tensor in every)):
        said = f"{stated:,}" if isinstance(stated, (int, float)) else quoted(str(stated))
        yield f"the index says that the tensors take {said} bytes, and they take {once:,}"


def _identity(tensor: TensorRef) -> Any:
    if tensor.storage is None:
        return id(tensor)
    return id(tensor.storage), tensor.offset, tensor.shape, tensor.stride, tensor.dtype
