"""Tensors of a model that look at some of the same memory, and are not the same tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

from ckptool.loading.fitting.contents import bytes_of
from ckptool.loading.fitting.models import Target
from ckptool.loading.fitting.states import State
from ckptool.loading.live.memory import Memory, extent, memory_of, repeats, storage_of
from ckptool.matching import Overlap

if TYPE_CHECKING:
    import torch

__all__ = ["differing_overlaps"]

_WIDEST = 16
"""Bytes of the largest type."""


def differing_overlaps(state: State, target: Target, pairs: Mapping[str, str]) -> Iterator[Overlap]:
    """Names whose tensors overlap in the model, and would get other elements than these."""
    entries = target.entries
    for group in _groups(entries, pairs):
        firsts = {names[0]: memory for memory, names in group.items()}
        if not _agree(state, entries, pairs, firsts):
            named = {name: memory for memory, names in group.items() for name in names}
            yield Overlap(tuple(named), _whole(named, target))


def _groups(
    entries: Mapping[str, torch.Tensor], pairs: Mapping[str, str]
) -> Iterator[dict[Memory, list[str]]]:
    """The places of tensors that overlap, each with the names that it has."""
    stored = {
        name: storage_of(tensor)
        for name in pairs
        if (tensor := entries.get(name)) is not None and not tensor.is_meta
    }
    several = Counter(stored.values())
    placed: dict[int, dict[Memory, list[str]]] = {}
    for name, storage in stored.items():  # most tensors have one of their own
        memory = memory_of(entries[name]) if several[storage] > 1 else None
        if memory is not None and memory.nbytes:
            placed.setdefault(memory.storage, {}).setdefault(memory, []).append(name)
    for held in placed.values():
        spans = sorted(
            (*memory.span, names, memory)
            for memory, names in held.items()
            if not repeats(memory.shape, memory.stride)
        )
        group: dict[Memory, list[str]] = {}
        reach = -1
        for start, stop, names, memory in spans:
            if start >= reach and len(group) > 1:
                yield group
            if start >= reach:
                group = {}
            group[memory] = names
            reach = max(reach, stop)
        if len(group) > 1:
            yield group


def _whole(group: Mapping[str, Memory], target: Target) -> str:
    """The tensor that looks at every byte which the others look at, a parameter before others."""
    starts, stops = zip(*(memory.span for memory in group.values()), strict=True)
    full = [
        name
        for name, memory in group.items()
        if memory.span == (min(starts), max(stops))
        and prod(memory.shape) == extent(memory.shape, memory.stride)
    ]
    return min(full, key=lambda name: target.slots[name].kind != "parameter", default="")


def _agree(
    state: State,
    entries: Mapping[str, torch.Tensor],
    pairs: Mapping[str, str],
    group: Mapping[str, Memory],
) -> bool:
    """Whether each has what it is given when all have been given theirs, in torch's order."""
    import torch

    names = [name for name in pairs if name in group]
    values = {name: state.value(pairs[name]).detach().to("cpu") for name in names}
    if any(value.is_meta for value in values.values()):
        return True
    spans = [group[name].span for name in names]
    start = min(first for first, _ in spans) // _WIDEST * _WIDEST
    stop = -(-max(last for _, last in spans) // _WIDEST) * _WIDEST
    room = torch.zeros(stop - start, dtype=torch.uint8)
    views = {}
    for name in names:
        memory, dtype = group[name], entries[name].dtype
        views[name] = room.view(dtype).as_strided(
            memory.shape, memory.stride, memory.offset - start // dtype.itemsize
        )
        values[name] = values[name].to(dtype).reshape(memory.shape)
    for name in names:
        views[name].copy_(values[name])
    return all(torch.equal(bytes_of(views[name]), bytes_of(values[name])) for name in names)
