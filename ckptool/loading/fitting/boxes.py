"""Dicts of torch tensors in memory as trees of the model, with a stand-in for each tensor."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint
from ckptool.loading.live.memory import dtype_name, shape_of
from ckptool.model import (
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Size,
    StorageRef,
    TensorRef,
)
from ckptool.statedict import OF_THE_MODEL, is_extra_state

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

    A tensor becomes a `TensorRef` of its shape and dtype, without a storage. A module becomes its
    state dict.
    """

    def __init__(self) -> None:
        """Nothing is boxed yet."""
        self.originals: dict[int, Any] = {}
        """By the `id` of a stand-in, the tensor or object that it stands for."""
        self.containers: dict[int, Any] = {}
        """The same of the containers around them."""
        self._boxes: dict[int, Any] = {}
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
            return self._standing_for(node, _stand_in(node))
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
        array = _tensor_over(node) if _is_array_of_numbers(node) else None
        if array is not None:
            return self._standing_for(array, _stand_in(array))
        return self._standing_for(node, Held())

    def _mapping(self, node: Mapping[Any, Any], box: dict[Any, Any]) -> dict[Any, Any]:
        import torch

        self._boxes[id(node)] = box
        boxes, originals, alive = self._boxes, self.originals, self._alive
        alike: dict[Any, tuple[str, tuple[int, ...], str]] = {}
        for key, value in node.items():
            if type(value) is torch.Tensor and not value.is_nested and id(value) not in boxes:
                # As `_box` does it; a state dict may have a hundred thousand of them.
                kind = value.dtype, value.shape, value.device
                known = alike.get(kind)
                if known is None:
                    known = alike[kind] = dtype_name(value), tuple(kind[1]), _tag(kind[2])
                made = TensorRef(known[0], known[1], (), 0, None, known[2])
                boxes[id(value)], originals[id(made)] = made, value
                alive.append(value)
                box[key] = made
            elif is_extra_state(key) and _is_array_of_numbers(value):
                alive.append(value)  # the module's own, whatever it is
                box[key] = self._standing_for(value, Held())
            else:
                box[key] = self._box(value)
        metadata = (
            node.metadata if isinstance(node, OrderedMap) else getattr(node, "_metadata", None)
        )
        if isinstance(box, OrderedMap) and isinstance(metadata, Mapping):
            box.attributes = {"_metadata": metadata}
            if hasattr(node, OF_THE_MODEL):
                box.attributes[OF_THE_MODEL] = getattr(node, OF_THE_MODEL)
        return box

    def _standing_for(self, original: Any, box: Any) -> Any:
        self.originals[id(box)] = original
        return box


def _stand_in(tensor: torch.Tensor) -> TensorRef:
    # Shape and strides are not known of every kind; where it lies is asked of the tensor itself.
    device = _tag(tensor.device)
    return TensorRef(dtype_name(tensor), shape_of(tensor) or (), (), 0, None, device)


@cache
def _tag(device: torch.device) -> str:
    return str(device)


def _tensor_over(array: Any) -> torch.Tensor | None:
    """A tensor of the numbers of an array; None where torch has no such type."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it may not be written to: nobody does
            return torch.from_numpy(array)
    except TypeError:
        return None
    except ValueError:  # it has strides or an order of bytes that torch does not know
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C"))


def _is_array_of_numbers(node: Any) -> bool:
    is_array = type(node).__module__ == "numpy" and type(node).__name__ == "ndarray"
    return is_array and node.dtype.kind in "biufc"
