"""What the tensors of a tree take: bytes of storages that they reach, and who shares them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckptool.files import MemorySource
from ckptool.model import Path, Storage, StorageRef, TensorRef
from ckptool.tree import everything, name_of

__all__ = ["distinct", "storage_use", "ties"]


def distinct(tensors: Iterable[tuple[Path, TensorRef]]) -> list[tuple[Path, TensorRef]]:
    """The first name of each tie."""
    seen: dict[Any, tuple[Path, TensorRef]] = {}
    for path, tensor in tensors:
        seen.setdefault(tensor.place or path, (path, tensor))
    return list(seen.values())


def ties(tensors: Iterable[tuple[Path, TensorRef]]) -> Iterator[tuple[str, ...]]:
    """Groups of names for one tensor: same storage, offset, shape, stride and dtype."""
    groups: dict[Any, list[str]] = {}
    for path, tensor in tensors:
        key = tensor.place
        if key is not None:
            groups.setdefault(key, []).append(name_of(path))
    return (tuple(names) for names in groups.values() if len(names) > 1)


def storage_use(root: Any) -> tuple[int, int]:
    """Bytes of the storages that the tree has, and those of them that tensors reach.

    A tensor reaches from its first to its last element; what several reach counts once. Payloads
    that lie inside the pickle are left out.
    """
    extents: dict[Storage, list[tuple[int, int]]] = {}
    for node in everything(root):
        if isinstance(node, StorageRef):
            extents.setdefault(node.storage, []).append((0, node.storage.nbytes))
        elif isinstance(node, TensorRef) and node.storage is not None:
            extents.setdefault(node.storage, []).append(node.reach)
    in_file = {
        storage: spans
        for storage, spans in extents.items()
        if storage.data is not None and not isinstance(storage.data.source, MemorySource)
    }
    return sum(storage.nbytes for storage in in_file), sum(map(_union, in_file.values()))


def _union(spans: list[tuple[int, int]]) -> int:
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
