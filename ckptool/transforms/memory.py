"""The same transforms for dicts of torch tensors in memory. Torch itself is never imported here."""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import DeviceError, warn
from ckptool.model import Opaque, OrderedMap, TensorRef
from ckptool.transforms.devices import Rules
from ckptool.tree import everything, rebuild

__all__ = ["changed_dict", "remap_dict"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def changed_dict(
    mapping: Mapping[Any, Any], change: Callable[[Checkpoint], Checkpoint]
) -> OrderedDict[Any, Any]:
    """Return a new dict: `mapping`, a state dict or a dict that contains some, after `change`.

    `_metadata` is kept and follows. The tensors are the same objects. Each warning of the change
    is a `CheckpointWarning`.

    Raises:
        CheckpointError: as `change`.
    """
    boxes = _Boxes()
    changed = change(boxes.checkpoint(mapping))
    for one in changed.changes:
        if one.kind == "warning":
            warn(one.text)
    return boxes.unbox_root(changed.root)


def remap_dict(state_dict: Mapping[Any, Any], rules: Mapping[str, str]) -> OrderedDict[Any, Any]:
    """A new dict whose tensors, and `torch.device` values, are where `rules` send them.

    Rules as `devices.remap`. Tensors that share a storage share the new one; those that stay are
    the same objects. The argument is not touched; modules and other objects are not looked into.

    Raises:
        DeviceError: a target is no device, or torch cannot use it here.
    """
    boxes = _Boxes()
    root = boxes.checkpoint(state_dict).root
    relocation = _Relocation(Rules(rules), [boxes.original(node) for node in everything(root)])

    def move(node: Any) -> Any:
        original = boxes.original(node)
        moved = relocation.moved(original)
        return node if moved is original else boxes.box(moved)

    return boxes.unbox_root(rebuild(root, move))


@dataclass(frozen=True, eq=False)
class _Held:
    """A leaf that is no tensor: some object of the caller's."""

    original: Any


class _Boxes:
    """Trees of torch tensors as the model's trees, with a stand-in for each tensor and object."""

    def __init__(self) -> None:
        self._boxed: dict[int, Any] = {}
        self._tensors: dict[int, Any] = {}
        self._unboxed: dict[int, Any] = {}
        self._alive: list[Any] = []

    def checkpoint(self, mapping: Mapping[Any, Any]) -> Checkpoint:
        """What stands for `mapping`; its root is an ordered dict whatever that is."""
        return Checkpoint(self._box_mapping(mapping, OrderedMap()), "memory", "")

    def original(self, node: Any) -> Any:
        """The tensor or object that a stand-in stands for; None for a container."""
        return node.original if isinstance(node, _Held) else self._tensors.get(id(node))

    def box(self, node: Any) -> Any:
        """The model's form of a node."""
        if isinstance(node, _PLAIN):
            return node
        if id(node) not in self._boxed:
            self._alive.append(node)
            self._boxed[id(node)] = self._made(node)
        return self._boxed[id(node)]

    def _made(self, node: Any) -> Any:
        if type(node) is dict or isinstance(node, OrderedDict):
            return self._box_mapping(node, {} if type(node) is dict else OrderedMap())
        if type(node) in (list, tuple):
            return type(node)([self.box(item) for item in node])
        if isinstance(node, dict):
            items = [(key, self.box(value)) for key, value in node.items()]
            return Opaque(_Held(node), steps=[("set", items)])
        tensor = _stand_in(node)
        if tensor is None:
            return _Held(node)
        self._tensors[id(tensor)] = node
        self._alive.append(tensor)
        return tensor

    def _box_mapping(self, node: Mapping[Any, Any], box: dict[Any, Any]) -> dict[Any, Any]:
        self._boxed[id(node)] = box
        box.update((key, self.box(value)) for key, value in node.items())
        if isinstance(box, OrderedMap) and isinstance(node, OrderedDict):
            box.attributes = {key: self.box(value) for key, value in vars(node).items()}
        return box

    def unbox_root(self, root: Any) -> OrderedDict[Any, Any]:
        """The dict that a root stands for."""
        unboxed: OrderedDict[Any, Any] = self.unbox(root)
        return unboxed

    def unbox(self, node: Any) -> Any:
        """What a node stands for, in new containers."""
        if isinstance(node, (TensorRef, _Held)):
            return self.original(node)
        if not isinstance(node, (dict, list, tuple, Opaque)):
            return node
        if id(node) not in self._unboxed:
            self._unboxed[id(node)] = self._unmade(node)
        return self._unboxed[id(node)]

    def _unmade(self, node: Any) -> Any:
        if isinstance(node, (list, tuple)):
            return type(node)([self.unbox(item) for item in node])
        if isinstance(node, Opaque):
            made, items = copy.copy(node.func.original), dict(node.steps[0][1])
            made.clear()
        else:
            made, items = OrderedDict() if isinstance(node, OrderedMap) else {}, node
        self._unboxed[id(node)] = made
        made.update((key, self.unbox(value)) for key, value in items.items())
        if isinstance(node, OrderedMap):
            vars(made).update((key, self.unbox(value)) for key, value in node.attributes.items())
        return made


def _torch() -> Any:
    """Torch, if the caller has imported it: else there are no tensors either."""
    return sys.modules.get("torch")


def _stand_in(node: Any) -> TensorRef | None:
    """A `TensorRef` with what the rules for state dicts look at; None for anything but a tensor."""
    torch = _torch()
    if torch is not None and isinstance(node, torch.Tensor):
        dtype = str(node.dtype).removeprefix("torch.")
        shape = (1,) * node.dim()
        return TensorRef(dtype, shape, shape, 0, None, str(node.device))
    if type(node).__module__ == "numpy" and type(node).__name__ == "ndarray":
        return TensorRef(str(node.dtype), node.shape, (), 0, None, "cpu", kind="numpy")
    return None


class _Relocation:
    """Moves tensors, each shared storage once."""

    def __init__(self, decide: Callable[[str], str], every: Iterable[Any]) -> None:
        self._decide = decide
        self._users = Counter(filter(None, map(_shareable, every)))
        self._moved: dict[tuple[int, str], Any] = {}

    def moved(self, node: Any) -> Any:
        """The tensor or device where the rules send it; anything else itself."""
        torch = _torch()
        if torch is None or not isinstance(node, (torch.Tensor, torch.device)):
            return node
        is_tensor = isinstance(node, torch.Tensor)
        tag = str(node.device if is_tensor else node)
        target = self._decide(tag)
        if target == tag:
            return node
        try:
            return self._tensor(node, target) if is_tensor else torch.device(target)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise DeviceError(f"torch cannot use {target} here ({reason})") from error

    def _tensor(self, tensor: Any, target: str) -> Any:
        shared = _shareable(tensor)
        data = tensor.detach()
        if shared is None or self._users[shared] < 2:
            moved = data.to(target)
        else:
            storage = self._storage(shared, data, target)
            moved = data.new_empty(0, device=target)
            moved.set_(storage, data.storage_offset(), data.size(), data.stride())
        if isinstance(tensor, _torch().nn.Parameter):
            return _torch().nn.Parameter(moved, requires_grad=tensor.requires_grad)
        return moved.requires_grad_() if tensor.requires_grad else moved

    def _storage(self, shared: int, data: Any, target: str) -> Any:
        if (shared, target) not in self._moved:
            whole = data.new_empty(0, dtype=_torch().uint8).set_(data.untyped_storage())
            self._moved[shared, target] = whole.to(target).untyped_storage()
        return self._moved[shared, target]


def _shareable(node: Any) -> int | None:
    """Which storage a plain strided tensor lies in; None for anything else."""
    torch = _torch()
    if torch is None or type(node) not in (torch.Tensor, torch.nn.Parameter):
        return None
    plain = node.layout is torch.strided and not (
        node.is_quantized or node.is_nested or node.is_conj() or node.is_neg() or node.is_meta
    )
    return int(node.untyped_storage()._cdata) if plain else None
