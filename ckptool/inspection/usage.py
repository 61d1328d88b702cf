"""What the tensors of a tree take: bytes of storages that they reach, and who shares them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckptool.files import MemorySource
from ckptool.model import Path, TensorRef
from ckptool.transforms.compacting import merged, spans_used
from ckptool.tree import name_of

__all__ = ["distinct", "storage_use", "ties"]


def distinct(tensors: Iterable[tuple[Path, TensorRef]]) -> list[tuple[Path, TensorRef]]:
    """Return the tensors, of each tie the first name alone."""
    seen: dict[Any, tuple[Path, TensorRef]] = {}
    for path, tensor in tensors:
        seen.setdefault(tensor.place or path, (path, tensor))
    return list(seen.values())


def ties(tensors: Iterable[tuple[Path, TensorRef]]) -> Iterator[tuple[str, ...]]:
    """Yield the names of each tie: one storage, offset, shape, stride and dtype."""
    groups: dict[Any, list[str]] = {}
    for path, tensor in tensors:
        key = tensor.place
        if key is not None:
            groups.setdefault(key, []).append(name_of(path))
    return (tuple(names) for names in groups.values() if len(names) > 1)


def storage_use(root: Any) -> tuple[int, int]:
    """Return the bytes of the storages in the file, and how many of these bytes tensors reach.

    A tensor reaches from its first to its last element; what several reach counts once. Payloads
    that lie inside the pickle are left out.
    """
    used = {
        storage: merged(spans, storage.nbytes)
        for storage, spans in spans_used(root).items()
        if storage.data is not None and not isinstance(storage.data.source, MemorySource)
    }
    reached = sum(stop - start for spans in used.values() for start, stop in spans)
    return sum(storage.nbytes for storage in used), reached
