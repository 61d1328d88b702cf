"""Storages cut down to what tensors see, and ties undone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.dtypes import PACKED
from ckptool.files import ByteRange
from ckptool.files.computed import gathered, joined
from ckptool.model import Storage, StorageRef, TensorRef, remade
from ckptool.transforms.places import CARRIER, Place, is_array, place_of
from ckptool.tree import everything, name_of, rebuild, walk
from ckptool.words import counted, listed

__all__ = ["compact", "untie", "without_unseen"]


def untie(checkpoint: Checkpoint) -> Checkpoint:
    """Every tied name with bytes of its own; the first name of each tie keeps what it has.

    Tied are tensors of one `place`. Views that only share
    memory stay views.
    """
    seen: set[Any] = set()
    count = 0

    def own(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, TensorRef) or value.storage is None:
            return value
        if value.place not in seen:
            seen.add(value.place)
            return value
        count += 1
        return replace(value, storage=replace(value.storage))

    def with_own(mapping: dict[Any, Any]) -> dict[Any, Any]:
        values = [own(value) for value in mapping.values()]
        if all(new is old for new, old in zip(values, mapping.values(), strict=True)):
            return mapping
        return remade(mapping, zip(mapping, values, strict=True))

    root = rebuild(checkpoint.root, mapping=with_own)
    if not count:
        return checkpoint
    text = f"ties resolved: {count} more of the names have bytes of their own"
    return checkpoint.with_root(root, Change("untie", text, count))


_MOST_TOLD = 20
"""Storages that have a line of their own."""


def compact(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose storages have only the bytes that tensors use.

    Shared bytes stay shared. Tensors whose spans overlap keep their span as a whole; a tensor that
    is alone in its span and has holes (a column of a matrix) gets strides without holes. Expanded
    tensors stay expanded. Storages that are values themselves, arrays inside the pickle, and types
    whose elements share bytes do not change. Bytes that nothing in the file refers to are dropped
    too; the changes count them.
    """
    trimmed = _plans(checkpoint.root)
    if not trimmed and not checkpoint.details.dead_bytes:
        return checkpoint
    root = _moved(checkpoint.root, trimmed) if trimmed else checkpoint.root
    changes = (*_told(checkpoint.root, trimmed), *_totals(checkpoint, trimmed))
    settled = replace(checkpoint, details=replace(checkpoint.details, unreferenced=()))
    return settled.with_root(root, *changes)


def without_unseen(before: Checkpoint, after: Checkpoint) -> Checkpoint:
    """What is left of `before`, in storages without the bytes that only went with the rest.

    A storage that lost a tensor is cut down as `compact` does it; others stay as they are.
    """
    if after.root is before.root:
        return after
    then, now = _seen(before.root), _seen(after.root)
    less = {storage for storage, places in now.items() if then.get(storage, places) - places}
    trimmed = _plans(after.root, less) if less else {}
    if not trimmed:
        return after
    root = _moved(after.root, trimmed)
    what = f"{_sizes(trimmed)}, without what only the tensors left out saw"
    text = f"{counted(len(trimmed), 'storage')} cut down from {what}"
    return after.with_root(root, Change("compact", text, len(trimmed)))


def _seen(root: Any) -> dict[Storage, set[Place | None]]:
    """Return what is seen of each storage: the places of tensors; None where all of it is."""
    seen: dict[Storage, set[Place | None]] = defaultdict(set)
    for node in everything(root):
        if isinstance(node, StorageRef):
            seen[node.storage].add(None)
        for tensor in _over_storages(node):
            if tensor.storage is not None:
                seen[tensor.storage].add(place_of(tensor))
                if tensor.dtype in PACKED or is_array(tensor):  # it cannot get another stride
                    seen[tensor.storage].add(None)
    return seen


def _plans(root: Any, chosen: Container[Storage] | None = None) -> dict[Storage, _Trimmed]:
    """Return what becomes of the storages that can be trimmed, of the `chosen` ones or of all."""
    plans: dict[Storage, _Trimmed] = {}
    for storage, seen in _seen(root).items():
        places = {place for place in seen if place is not None}
        if len(places) < len(seen) or storage.data is None:
            continue
        if chosen is None or storage in chosen:
            plan = _trimmed(storage, places)
            if plan is not None:
                plans[storage] = plan
    return plans


def _over_storages(node: Any) -> Iterator[TensorRef]:
    """A tensor, and the one that carries it where it is one of a TPU."""
    if isinstance(node, TensorRef):
        yield node
        if (node.parts or {}).get("carrier") == CARRIER:
            yield (node.parts or {})["data"]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of the new storage: a span of the old one, or what one view sees of it."""

    start: int
    end: int
    """In the old storage, bytes."""
    places: tuple[Place, ...]
    packed: bool
    """Whether the one place in it loses its holes."""

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes in the new storage."""
        return self.places[0].packed_bytes if self.packed else self.end - self.start

    def placed(self, place: Place) -> tuple[int, tuple[int, ...]]:
        """Return where a place is in it: bytes from its start, and the stride."""
        if self.packed:
            return 0, place.packed_stride()
        return place.offset * place.itemsize - self.start, place.stride

    def data(self, old: ByteRange) -> ByteRange:
        """Return its content."""
        if not self.packed:
            return old.slice(self.start, self.nbytes)
        place = self.places[0]
        axes = [(place.shape[dim], place.stride[dim]) for dim in place.packed_order()]
        shape, stride = zip(*(axis for axis in axes if axis[1]), strict=True)
        return gathered(
            old, itemsize=place.itemsize, shape=shape, stride=stride, offset=place.offset
        )


@dataclass(frozen=True, slots=True)
class _Trimmed:
    """A storage in place of a larger one, and where each place went."""

    storage: Storage
    moved: dict[Place, tuple[int, tuple[int, ...]]]
    """Offset and stride, in elements."""
    repacked: int


def _trimmed(storage: Storage, places: set[Place]) -> _Trimmed | None:
    """Return the storage without what no place reaches; None where that saves nothing."""
    pieces = list(_pieces(places, storage.nbytes))
    nbytes = sum(piece.nbytes for piece in pieces)
    if storage.data is None or nbytes >= storage.nbytes:
        return None
    moved = {place: (0, place.stride) for place in places}
    position = 0
    for piece in pieces:
        for place in piece.places:
            within, stride = piece.placed(place)
            moved[place] = (position + within) // place.itemsize, stride
        position += piece.nbytes
    runs = [piece.data(storage.data) for piece in pieces]
    data = joined(runs) if runs else storage.data.slice(0, 0)
    whole = storage.whole or storage.data
    new = replace(storage, data=data, nbytes=nbytes, crc32=None, whole=whole)
    return _Trimmed(new, moved, sum(piece.packed for piece in pieces))


def _pieces(places: Iterable[Place], nbytes: int) -> Iterator[_Piece]:
    """Yield the spans that places reach, in their order; places without elements reach nothing.

    A span begins and ends at whole elements of the largest type that the storage is seen as.
    """
    unit = max(place.itemsize for place in places)
    start = end = 0
    group: list[Place] = []
    for place in sorted(places, key=lambda place: (place.extent, place)):
        first, last = place.extent
        if first == last:
            continue
        first, last = first // unit * unit, min(-(-last // unit) * unit, nbytes)
        if group and first >= end:
            yield _piece(start, end, group, unit)
            group = []
        start, end = (min(start, first), max(end, last)) if group else (first, last)
        group.append(place)
    if group:
        yield _piece(start, end, group, unit)


def _piece(start: int, end: int, group: list[Place], unit: int) -> _Piece:
    alone = group[0]
    is_packed = (
        len(group) == 1
        and alone.itemsize == unit
        and alone.distinct
        and alone.packed_bytes < end - start
    )
    return _Piece(start, end, tuple(group), is_packed)


def _moved(root: Any, trimmed: dict[Storage, _Trimmed]) -> Any:
    """Return the tree with its tensors over the new storages."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, TensorRef) or leaf.storage not in trimmed:
            return leaf
        new = trimmed[leaf.storage]
        offset, stride = new.moved[place_of(leaf)]
        parts = leaf.parts
        if parts and parts.get("carrier") == CARRIER:
            parts = {**parts, "data": moved(parts["data"])}
        return replace(leaf, storage=new.storage, offset=offset, stride=stride, parts=parts)

    return rebuild(root, moved)


def _told(root: Any, trimmed: dict[Storage, _Trimmed]) -> Iterator[Change]:
    """What became of each storage; of many, the largest first and the others together."""
    names: dict[Storage, list[str]] = {storage: [] for storage in trimmed}
    for path, leaf in walk(root):
        for part in everything(leaf) if isinstance(leaf, TensorRef) else ():
            if isinstance(part, TensorRef) and part.storage in names:
                names[part.storage].append(name_of(path))
    order = sorted(trimmed, key=lambda old: trimmed[old].storage.nbytes - old.nbytes)
    for old in order[:_MOST_TOLD]:
        yield Change("compact", _sentence(names[old], [old], [trimmed[old]]), len(names[old]))
    rest = order[_MOST_TOLD:]
    if rest:
        others = [name for old in rest for name in names[old]]
        yield Change(
            "compact", _sentence(others, rest, [trimmed[old] for old in rest]), len(others)
        )


def _sentence(names: list[str], old: list[Storage], new: list[_Trimmed]) -> str:
    what = f"{len(old):,} more storages go" if len(old) > 1 else "the storage"
    sizes = _sizes(dict(zip(old, new, strict=True)))
    repacked = sum(one.repacked for one in new)
    verb = "" if len(old) > 1 else " goes"
    views = "a view" if repacked == 1 else f"{repacked:,} views"
    holes = f"; {views} made contiguous" if repacked else ""
    seen = f" of {listed(dict.fromkeys(names), most=4)}" if names else ""
    return f"{what}{seen}{verb} from {sizes}{holes}"


def _sizes(trimmed: dict[Storage, _Trimmed]) -> str:
    before = sum(storage.nbytes for storage in trimmed)
    after = sum(plan.storage.nbytes for plan in trimmed.values())
    return f"{before:,} to {after:,} bytes"


def _totals(checkpoint: Checkpoint, trimmed: dict[Storage, _Trimmed]) -> Iterator[Change]:
    """What was dead, and what all storages took and take: a file has more, such as alignment."""
    details = checkpoint.details
    for text in details.unreferenced:
        yield Change("compact", text)
    if details.dead_bytes:
        yield Change("compact", f"{details.dead_bytes:,} dead bytes are left behind")
    if trimmed:
        every = sum(storage.nbytes for storage in _seen(checkpoint.root) if storage.data)
        saved = sum(old.nbytes - new.storage.nbytes for old, new in trimmed.items())
        text = f"saves {saved:,} of the {every:,} bytes of its storages"
        yield Change("compact", text, len(trimmed))
