"""Ties: two names of one tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptool.checkpoint import Change, Checkpoint
from ckptool.model import OrderedMap, TensorRef
from ckptool.tree import rebuild

__all__ = ["untie"]


def untie(checkpoint: Checkpoint) -> Checkpoint:
    """Every tied name with bytes of its own; the first name of each tie keeps what it has.

    Tied are tensors of one storage with the same offset, shape and stride. Views that only share
    memory stay views.
    """
    seen: set[tuple[Any, ...]] = set()
    count = 0

    def own(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, TensorRef) or value.storage is None:
            return value
        place = (id(value.storage), value.offset, value.shape, value.stride)
        if place not in seen:
            seen.add(place)
            return value
        count += 1
        return replace(value, storage=replace(value.storage))

    def with_own(mapping: dict[Any, Any]) -> dict[Any, Any]:
        values = [own(value) for value in mapping.values()]
        if all(new is old for new, old in zip(values, mapping.values(), strict=True)):
            return mapping
        copy = type(mapping)(zip(mapping, values, strict=True))
        if isinstance(copy, OrderedMap) and isinstance(mapping, OrderedMap):
            copy.attributes = mapping.attributes
        return copy

    root = rebuild(checkpoint.root, mapping=with_own)
    if not count:
        return checkpoint
    text = f"ties resolved: {count} more of the names have bytes of their own"
    return checkpoint.with_root(root, Change("untie", text, count))
