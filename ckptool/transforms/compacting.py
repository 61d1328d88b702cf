"""Storages cut down to what tensors see of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.dtypes import PACKED
from ckptool.files import ByteRange
from ckptool.files.gathered import gathered
from ckptool.files.joined import joined
from ckptool.model import Storage, StorageRef, TensorRef
from ckptool.paths import everything, name_of, rebuild, walk
from ckptool.transforms.cutting import Cut, cut
from ckptool.transforms.places import Place, place_of
from ckptool.transforms.refusals import CARRIER
from ckptool.words import counted, listed

__all__ = ["compact", "without_unseen"]

_MOST_TOLD = 20
"""Storages that have a line of their own."""
_MOST_COMPARED = 500
"""Tensors with extents that overlap, of which each pair is looked at."""


def compact(checkpoint: Checkpoint) -> Checkpoint:
    """Storages without the bytes that no tensor sees; what shared bytes still shares them.

    The runs of a storage that tensors reach are put one behind the other. A tensor that shares no
    byte with another and has holes (a column of a matrix) gets strides without them; so do some
    that share bytes, where all stay regular (`cutting.cut`): a row and a column that cross cannot
    lie closer. Expanded tensors stay expanded. Storages that are values themselves, that lie inside
    the pickle (arrays), or whose elements share bytes, are left whole. What nothing in the file
    refers to goes with the old file; the changes count it.
    """
    trimmed = _plans(checkpoint.root)
    if not trimmed and not checkpoint.details.dead_bytes:
        return checkpoint
    root = rebuild(checkpoint.root, _Mover(trimmed).moved) if trimmed else checkpoint.root
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
    root = rebuild(after.root, _Mover(trimmed).moved)
    what = f"{_sizes(trimmed)}, without what only the tensors left out saw"
    text = f"{counted(len(trimmed), 'storage')} cut down from {what}"
    return after.with_root(root, Change("compact", text, len(trimmed)))


def _seen(root: Any) -> dict[Storage, set[Any]]:
    """What is seen of each storage: places of tensors, and all of those that are values."""
    seen: dict[Storage, set[Any]] = defaultdict(set)
    for node in everything(root):
        if isinstance(node, StorageRef):
            seen[node.storage].add(StorageRef)
        for tensor in _over_storages(node):
            if tensor.storage is not None:
                seen[tensor.storage].add(place_of(tensor))
    return seen


def _plans(root: Any, chosen: Container[Storage] | None = None) -> dict[Storage, _Trimmed]:
    """What becomes of the storages that can be trimmed, of the `chosen` ones or of all."""
    return {
        storage: plan
        for storage, places in _places(root).items()
        if (chosen is None or storage in chosen) and (plan := _trimmed(storage, places)) is not None
    }


def _places(root: Any) -> dict[Storage, set[Place]]:
    """Which places tensors have in each storage, where that says all about its use."""
    places: dict[Storage, set[Place]] = defaultdict(set)
    whole: set[Storage] = set()
    for node in everything(root):
        if isinstance(node, StorageRef):
            whole.add(node.storage)
        for tensor in _over_storages(node):
            if tensor.storage is None:
                continue
            if _is_movable(tensor):
                places[tensor.storage].add(place_of(tensor))
            else:
                whole.add(tensor.storage)
    return {
        storage: found
        for storage, found in places.items()
        if storage not in whole and storage.data is not None
    }


def _over_storages(node: Any) -> Iterator[TensorRef]:
    """A tensor, and the one that carries it where it is one of a TPU."""
    if isinstance(node, TensorRef):
        yield node
        if (node.parts or {}).get("carrier") == CARRIER:
            yield (node.parts or {})["data"]


def _is_movable(tensor: TensorRef) -> bool:
    """Whether it may get another offset and stride: not what is pickled as an array."""
    parts = tensor.parts or {}
    is_array = "array" in parts or parts.get("carrier", CARRIER) != CARRIER
    return tensor.dtype not in PACKED and not is_array


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of the new storage: a run of the old one, or what places see of it without holes."""

    start: int
    end: int
    """In the old storage, bytes."""
    packed: Place | None = None
    cut: Cut | None = None
    itemsize: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in the new storage."""
        if self.cut is not None:
            return self.cut.size * self.itemsize
        return self.end - self.start if self.packed is None else self.packed.packed_bytes

    def placed(self, place: Place) -> tuple[int, tuple[int, ...]]:
        """Where a place is in it: bytes from its start, and the stride."""
        if self.cut is not None:
            offset, stride = self.cut.placed[place]
            return offset * self.itemsize, stride
        if self.packed is not None:
            return 0, place.packed_stride()
        return place.offset * place.itemsize - self.start, place.stride

    def data(self, old: ByteRange) -> ByteRange:
        """Its content."""
        if self.cut is not None:
            size = self.itemsize
            return joined([old.slice(at * size, (end - at) * size) for at, end in self.cut.runs])
        if self.packed is None:
            return old.slice(self.start, self.nbytes)
        place = self.packed
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
    """The storage without what none of the places reaches; None where that saves nothing."""
    unit = max(place.itemsize for place in places)
    pieces: list[tuple[_Piece, list[Place]]] = []
    for group in _overlapping(places, unit):
        pieces.extend(_pieces(group, unit, storage.nbytes))
    nbytes = sum(piece.nbytes for piece, _ in pieces)
    if storage.data is None or nbytes >= storage.nbytes:
        return None
    moved = {place: (0, place.stride) for place in places}
    position = 0
    for piece, inside in pieces:
        for place in inside:
            within, stride = piece.placed(place)
            moved[place] = (position + within) // place.itemsize, stride
        position += piece.nbytes
    runs = [piece.data(storage.data) for piece, _ in pieces]
    data = joined(runs) if runs else storage.data.slice(0, 0)
    whole = storage.whole or storage.data
    new = replace(storage, data=data, nbytes=nbytes, crc32=None, whole=whole)
    return _Trimmed(new, moved, sum(piece.packed is not None for piece, _ in pieces))


def _overlapping(places: Iterable[Place], unit: int) -> Iterator[list[Place]]:
    """Groups of places whose extents, in whole units, overlap; those without elements in none."""
    group: list[Place] = []
    reached = 0
    for place in sorted(places, key=lambda place: (place.extent, place)):
        start, end = place.extent
        if start == end:
            continue
        if group and start // unit * unit >= reached:
            yield group
            group = []
        group.append(place)
        reached = max(reached if len(group) > 1 else 0, -(-end // unit) * unit)
    if group:
        yield group


def _pieces(group: list[Place], unit: int, nbytes: int) -> list[tuple[_Piece, list[Place]]]:
    """What to keep for a group: the run that it reaches, or less where that has holes.

    A run begins and ends at whole units, as the largest element type of the storage counts them.
    """
    whole = _run(group, unit, nbytes)
    least = sum(min(place.packed_bytes, whole.nbytes) for place in group)
    if least >= whole.nbytes or len(group) > _MOST_COMPARED or nbytes % unit:
        return [(whole, group)]
    parts: list[tuple[_Piece, list[Place]]] = []
    for together in _sharing(group):
        alone = together[0] if len(together) == 1 else None
        run = _run(together, unit, nbytes)
        if alone and alone.distinct and alone.itemsize == unit and alone.packed_bytes < run.nbytes:
            run = replace(run, packed=alone)
        elif not alone and together[0].itemsize == unit and (less := cut(together)):
            run = replace(run, cut=less, itemsize=unit)
        parts.append((run, together))
    parts.sort(key=lambda part: part[0].start)
    return parts if sum(run.nbytes for run, _ in parts) < whole.nbytes else [(whole, group)]


def _run(places: list[Place], unit: int, nbytes: int) -> _Piece:
    starts, ends = zip(*(place.extent for place in places), strict=True)
    return _Piece(min(starts) // unit * unit, min(-(-max(ends) // unit) * unit, nbytes))


def _sharing(group: list[Place]) -> list[list[Place]]:
    """The group in parts between which no byte is shared, as far as that can be told."""
    parts: list[list[Place]] = []
    for place in group:
        apart = [part for part in parts if all(map(place.apart_from, part))]
        joined_part = [place, *(other for part in parts if part not in apart for other in part)]
        parts = [*apart, joined_part]
    return parts


class _Mover:
    """Puts tensors over the new storages."""

    def __init__(self, trimmed: dict[Storage, _Trimmed]) -> None:
        self._trimmed = trimmed

    def moved(self, leaf: Any) -> Any:
        """A tensor over the storage that replaces its own; anything else itself."""
        if not isinstance(leaf, TensorRef) or leaf.storage not in self._trimmed:
            return leaf
        new = self._trimmed[leaf.storage]
        offset, stride = new.moved[place_of(leaf)]
        parts = leaf.parts
        if parts and parts.get("carrier") == CARRIER:
            parts = {**parts, "data": self.moved(parts["data"])}
        return replace(leaf, storage=new.storage, offset=offset, stride=stride, parts=parts)


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
