"""Trim storages to the bytes that tensors use, and untie tensors."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, ClassVar

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import Storage, StorageRef, TensorRef, copy_with_items, replace_elements
from ckptool.core.tree import name_of, rebuild, walk, walk_everything
from ckptool.files import ByteRange, MemorySource
from ckptool.files.computed import join_ranges
from ckptool.transforms.step import Step
from ckptool.words import counted, listed


@dataclass(frozen=True)
class Untie(Step):
    """Give every tied key its own copy of the data.

    Tensors are tied if they have the same `place`. The first key keeps the storage. Views that only
    share memory stay views.
    """

    flag: ClassVar[str] = "ties=copy"
    on_files: ClassVar[str] = (
        "clone the tensors instead: {key: tensor.clone() for key, tensor in ...}"
    )

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint without ties; itself if there are none."""
        seen_places: set[Any] = set()
        count = 0

        def copy_tied(mapping: dict[Any, Any]) -> dict[Any, Any]:
            """Return a dict in which each tensor that was seen before has its own storage."""
            nonlocal count
            items, count_before = dict(mapping), count
            for key, value in mapping.items():
                if isinstance(value, TensorRef) and value.storage is not None:
                    if value.place in seen_places:
                        own_storage = replace(value.storage)
                        items[key] = replace(value, storage=own_storage)
                        count += 1
                    seen_places.add(value.place)
            return mapping if count == count_before else copy_with_items(mapping, items)

        root = rebuild(checkpoint.root, mapping=copy_tied)
        if not count:
            return checkpoint
        text = f"untied {counted(count, 'key')}, which now have data of their own"
        return checkpoint.with_root(root, Change("untie", text, count))


_MOST_LISTED = 20
"""The number of storages that get their own line."""


@dataclass(frozen=True)
class Compact(Step):
    """Trim storages to the bytes that tensors span.

    Shared bytes stay shared, and every tensor keeps its strides: a column of a matrix keeps the
    bytes from its first element to its last. Storages that are values themselves, arrays inside the
    pickle, and dtypes with several elements per byte do not change. Bytes that nothing in the file
    refers to are also dropped; the changes count them.
    """

    flag: ClassVar[str] = "compact"
    on_files: ClassVar[str] = (
        "clone the tensors instead: {key: tensor.clone() for key, tensor in ...}"
    )

    def applied(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint with trimmed storages; itself if there is nothing to trim."""
        trimmed = _plan_trims(checkpoint.root)
        if not trimmed and not checkpoint.details.dead_bytes:
            return checkpoint
        root = _move_tensors(checkpoint.root, trimmed) if trimmed else checkpoint.root
        changes = (*_report_trims(checkpoint.root, trimmed), *_report_totals(checkpoint, trimmed))
        tidied = replace(checkpoint, details=replace(checkpoint.details, unreferenced=()))
        return tidied.with_root(root, *changes)


def drop_unused_bytes(before: Checkpoint, after: Checkpoint) -> Checkpoint:
    """Return `after` without the bytes that only removed tensors of `before` used.

    A storage that lost a tensor is trimmed as in `Compact`; other storages do not change.
    """
    if after.root is before.root:
        return after
    spans_before, spans_after = _find_used_spans(before.root), _find_used_spans(after.root)
    with_lost_spans = {
        storage
        for storage, spans in spans_after.items()
        if spans_before.get(storage, spans) - spans
    }
    trimmed = _plan_trims(after.root, with_lost_spans) if with_lost_spans else {}
    if not trimmed:
        return after
    root = _move_tensors(after.root, trimmed)
    storages = counted(len(trimmed), "storage")
    sizes = _format_sizes(trimmed)
    text = f"trimmed {storages} from {sizes}, dropping data that only removed tensors used"
    return after.with_root(root, Change("compact", text, len(trimmed), of_storages=True))


Span = tuple[int, int]
"""A range of bytes in a storage: the first, and the one after the last."""


def _find_used_spans(root: Any) -> dict[Storage, set[Span]]:
    """Return the byte ranges that tensors use, by storage.

    A storage that is a value itself, or that of a numpy array, is used as a whole.
    """
    spans: dict[Storage, set[Span]] = defaultdict(set)
    for node in walk_everything(root):
        if isinstance(node, TensorRef) and node.storage is not None and not node.is_array:
            spans[node.storage].add(node.reach)
        elif isinstance(node, (StorageRef, TensorRef)) and node.storage is not None:
            spans[node.storage].add((0, node.storage.nbytes))
    return spans


def measure_storages(root: Any) -> tuple[int, int]:
    """Return the bytes of the storages in the file, and how many of these bytes tensors use.

    A tensor uses the bytes from its first to its last element. Shared bytes count once. Data inside
    the pickle does not count.
    """
    used = {
        storage: _merge_spans(spans, storage.nbytes)
        for storage, spans in _find_used_spans(root).items()
        if storage.data is not None and not isinstance(storage.data.source, MemorySource)
    }
    n_used = sum(stop - start for spans in used.values() for start, stop in spans)
    return sum(storage.nbytes for storage in used), n_used


@dataclass(frozen=True, slots=True)
class _Trimmed:
    """A storage that replaces a larger one."""

    storage: Storage
    moves: list[tuple[int, int]]
    """The start of each kept span in the old storage and in this one."""

    def compute_offset(self, tensor: TensorRef) -> int:
        """Return the offset in this storage of a tensor over the old one, in elements."""
        if not tensor.numel:
            return 0
        first_byte, _ = tensor.reach
        # The last span that starts at the first byte or before.
        index = bisect(self.moves, first_byte, key=itemgetter(0)) - 1
        old_start, new_start = self.moves[index]
        return tensor.offset - (old_start - new_start) // tensor.itemsize


def _plan_trims(root: Any, chosen: Container[Storage] | None = None) -> dict[Storage, _Trimmed]:
    """Return the trimmed form of each storage that shrinks, among the `chosen` ones or all."""
    # The largest element size in a storage: offsets count elements, so spans start at multiples.
    max_itemsizes: dict[Storage, int] = {}
    for tensor in walk_everything(root):
        if isinstance(tensor, TensorRef) and tensor.storage is not None:
            max_itemsizes[tensor.storage] = max(
                max_itemsizes.get(tensor.storage, 1), tensor.itemsize
            )
    trims: dict[Storage, _Trimmed] = {}
    for storage, spans in _find_used_spans(root).items():
        if storage.data is None or not (chosen is None or storage in chosen):
            continue
        kept_spans = _merge_spans(spans, storage.nbytes, max_itemsizes.get(storage, 1))
        nbytes = sum(stop - start for start, stop in kept_spans)
        if nbytes >= storage.nbytes:
            continue
        pieces, moves, new_start = list[ByteRange](), list[tuple[int, int]](), 0
        for start, stop in kept_spans:
            pieces.append(storage.data.slice(start, stop - start))
            moves.append((start, new_start))
            new_start += stop - start
        data = join_ranges(pieces) if pieces else storage.data.slice(0, 0)
        untrimmed = storage.whole or storage.data  # has the CRC-32 that the source is checked by
        smaller = replace(storage, data=data, nbytes=nbytes, crc32=None, whole=untrimmed)
        trims[storage] = _Trimmed(smaller, moves)
    return trims


def _merge_spans(spans: Iterable[Span], nbytes: int, unit: int = 1) -> list[Span]:
    """Return the sorted union of spans, widened to multiples of `unit` bytes, up to `nbytes`."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if start == stop:
            continue
        start, stop = start // unit * unit, min(-(-stop // unit) * unit, nbytes)
        if merged and start < merged[-1][1]:  # it overlaps the span before it
            start_before, stop_before = merged.pop()
            start, stop = start_before, max(stop, stop_before)
        merged.append((start, stop))
    return merged


def _move_tensors(root: Any, trimmed: dict[Storage, _Trimmed]) -> Any:
    """Return the tree with its tensors over the trimmed storages, at their new offsets."""

    def move_leaf(leaf: Any) -> Any:
        """Return a tensor over its new storage; any other leaf unchanged."""
        if not isinstance(leaf, TensorRef) or leaf.storage not in trimmed:
            return leaf
        new = trimmed[leaf.storage]
        return replace_elements(leaf, storage=new.storage, offset=new.compute_offset(leaf))

    return rebuild(root, move_leaf)


def _report_trims(root: Any, trimmed: dict[Storage, _Trimmed]) -> Iterator[Change]:
    """Yield a change for each of the storages that shrink most, and one for all others."""
    names: dict[Storage, list[str]] = {storage: [] for storage in trimmed}
    for path, leaf in walk(root):
        for part in walk_everything(leaf) if isinstance(leaf, TensorRef) else ():
            if isinstance(part, TensorRef) and part.storage in names:
                names[part.storage].append(name_of(path))
    # The change of the size is negative, so the lowest comes first.
    largest_first = sorted(trimmed, key=lambda old: trimmed[old].storage.nbytes - old.nbytes)
    groups = [[storage] for storage in largest_first[:_MOST_LISTED]]
    if others := largest_first[_MOST_LISTED:]:
        groups.append(others)
    for group in groups:
        subject = "the storage" if len(group) == 1 else f"{len(group):,} more storages"
        users = [name for old in group for name in names[old]]
        owners = f" of {listed(dict.fromkeys(users), most=4)}" if users else ""
        sizes = _format_sizes({old: trimmed[old] for old in group})
        yield Change("compact", f"trimmed {subject}{owners} from {sizes}", len(users))


def _format_sizes(trimmed: dict[Storage, _Trimmed]) -> str:
    """Return the total size of the storages before and after: `12,000 to 120 bytes`."""
    before = sum(storage.nbytes for storage in trimmed)
    after = sum(plan.storage.nbytes for plan in trimmed.values())
    return f"{before:,} to {after:,} bytes"


def _report_totals(checkpoint: Checkpoint, trimmed: dict[Storage, _Trimmed]) -> Iterator[Change]:
    """Yield changes for the dropped unused bytes of the file, and for the total that was saved.

    `trimmed` has the new storages by the old ones.
    """
    details = checkpoint.details
    for text in details.unreferenced:
        yield Change("compact", text)
    if details.dead_bytes:
        yield Change(
            "compact", f"dropped {counted(details.dead_bytes, 'byte')} that nothing refers to"
        )
    if trimmed:  # all storages with bytes in the file count
        total = sum(storage.nbytes for storage in _find_used_spans(checkpoint.root) if storage.data)
        saved = sum(old.nbytes - new.storage.nbytes for old, new in trimmed.items())
        text = f"saved {saved:,} of {total:,} bytes of tensor data"
        yield Change("compact", text, len(trimmed))
