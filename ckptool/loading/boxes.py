"""Dicts of torch tensors in memory as trees of the model, with a stand-in for each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint
from ckptool.dtypes import BY_NAME
from ckptool.loading.memory import dtype_name, memory_of, shape_of
from ckptool.model import (
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Size,
    Storage,
    StorageRef,
    TensorRef,
)

if TYPE_CHECKING:
    import torch

__all__ = ["Boxes", "Held"]

_AS_THEY_ARE = (bool, int, float, complex, str, bytes, type(None))
_NODES = (TensorRef, StorageRef, DeviceValue, Global, Opaque)
"""What an open checkpoint gave: a node of a tree already."""


class Held:
    """Stands for some object of the caller's that is neither plain data nor a tensor."""

    __slots__ = ()


class Boxes:
    """Makes the trees, and remembers what stands for what.

    A tensor becomes a `TensorRef` of its shape, dtype and place in memory, over a storage without
    bytes; tensors that share memory share that storage. A module becomes its state dict.
    """

    def __init__(self) -> None:
        """Nothing is boxed yet."""
        self.originals: dict[int, Any] = {}
        """By the `id` of a stand-in, the tensor or object that it stands for."""
        self.containers: dict[int, Any] = {}
        """The same of the containers around them."""
        self._boxes: dict[int, Any] = {}
        self._storages: dict[int, Storage] = {}
        self._alive: list[Any] = []

    def checkpoint(self, mapping: Mapping[Any, Any], path: str = "") -> Checkpoint:
        """What stands for `mapping`; its root is an ordered dict whatever that is."""
        return Checkpoint(self._mapping(mapping, OrderedMap()), "memory", path)

    def _box(self, node: Any) -> Any:
        if isinstance(node, _AS_THEY_ARE + _NODES):
            return node
        known = self._boxes.get(id(node))
        if known is None:
            self._alive.append(node)
            known = self._boxes[id(node)] = self._made(node)
            if id(known) not in self.originals:
                self.containers[id(known)] = node
        return known

    def _made(self, node: Any) -> Any:
        import torch

        if isinstance(node, torch.Tensor):
            return self._standing_for(node, self._tensor(node))
        if isinstance(node, Mapping):
            return self._mapping(node, {} if type(node) is dict else OrderedMap())
        if isinstance(node, torch.nn.Module):
            return self._box(node.state_dict())
        if type(node) is list:
            box = self._boxes[id(node)] = []
            box.extend(map(self._box, node))
            return box
        if isinstance(node, torch.Size):
            return Size(node)
        if isinstance(node, tuple):
            return tuple(map(self._box, node))
        if _is_array_of_numbers(node):
            array = torch.from_numpy(node)
            return self._standing_for(array, self._tensor(array))
        return self._standing_for(node, Held())

    def _mapping(self, node: Mapping[Any, Any], box: dict[Any, Any]) -> dict[Any, Any]:
        self._boxes[id(node)] = box
        box.update((key, self._box(value)) for key, value in node.items())
        metadata = (
            node.metadata if isinstance(node, OrderedMap) else getattr(node, "_metadata", None)
        )
        if isinstance(box, OrderedMap) and isinstance(metadata, Mapping):
            box.attributes = {"_metadata": self._box(metadata)}
        return box

    def _standing_for(self, original: Any, box: Any) -> Any:
        self.originals[id(box)] = original
        self._alive.append((original, box))
        return box

    def _tensor(self, tensor: torch.Tensor) -> TensorRef:
        dtype, device = dtype_name(tensor), str(tensor.device)
        memory = memory_of(tensor) if dtype in BY_NAME else None
        if memory is None:
            return TensorRef(dtype, shape_of(tensor) or (), (), 0, None, device)
        if memory.storage not in self._storages:
            key = str(len(self._storages))
            self._storages[memory.storage] = Storage(key, None, memory.nbytes, device)
        storage = self._storages[memory.storage]
        return TensorRef(dtype, memory.shape, memory.stride, memory.offset, storage, device)


def _is_array_of_numbers(node: Any) -> bool:
    is_array = type(node).__module__ == "numpy" and type(node).__name__ == "ndarray"
    return is_array and node.dtype.kind in "biufc"
