"""The transforms for dicts of torch tensors in memory. This module never imports torch."""

from __future__ import annotations

import copy
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckptool.core.checkpoint import MEMORY, Checkpoint
from ckptool.core.model import Opaque, OrderedMap, TensorRef
from ckptool.core.tree import rebuild, walk_everything
from ckptool.errors import DeviceError, warn
from ckptool.tensors.live import LiveObject, LiveTree, describe_tensor, is_array


def change_dict(
    mapping: Mapping[Any, Any], change: Callable[[Checkpoint], Checkpoint]
) -> OrderedDict[Any, Any]:
    """Apply `change` to a state dict, or a dict that contains state dicts; return a new dict.

    `_metadata` changes accordingly. The tensors are the same objects. Each warning of the change
    becomes a `CheckpointWarning`.

    Raises:
        CheckpointError: if `change` raises it.
    """
    live = _Live()
    result = change(live.to_checkpoint(mapping))
    for note in result.changes:
        if note.kind == "warning":
            warn(note.text)
    new_dict: OrderedDict[Any, Any] = live.to_object(result.root)
    return new_dict


def remap_dict(
    state_dict: Mapping[Any, Any], decide: Callable[[str], str]
) -> OrderedDict[Any, Any]:
    """Return a new dict with tensors and `torch.device` values moved to `decide(device)`.

    Tensors that share a storage share the new one, and tensors that stay are the same objects. The
    argument does not change. The content of modules and other objects is not moved.

    Raises:
        DeviceError: if a target is not a device, or torch cannot use it on this machine.
    """
    live = _Live()
    root = live.to_checkpoint(state_dict).root
    originals = live.originals
    relocation = _Relocation(decide, [originals.get(id(node)) for node in walk_everything(root)])

    def move(node: Any) -> Any:
        """Return the node of the moved tensor or device; any other node unchanged."""
        original = originals.get(id(node))
        moved = relocation.move(original)
        return node if moved is original else live.make_node(moved)

    new_dict: OrderedDict[Any, Any] = live.to_object(rebuild(root, move))
    return new_dict


class _Live(LiveTree):
    """Converts a dict of torch tensors to a tree, and a changed tree back to a dict."""

    def __init__(self) -> None:
        super().__init__()
        self._object_by_node: dict[int, Any] = {}
        """The new containers by the identity of their nodes."""

    def to_checkpoint(self, mapping: Mapping[Any, Any]) -> Checkpoint:
        """Return the checkpoint for `mapping`; its root is an ordered dict in any case."""
        return Checkpoint(self.fill_mapping(mapping, OrderedMap()), MEMORY, "")

    def make_leaf(self, node: Any) -> Any:
        """Return the node for a tensor or object; a dict of another class keeps its class."""
        torch = _get_torch()
        if isinstance(node, OrderedDict):
            return self.fill_mapping(node, OrderedMap())
        if isinstance(node, dict):
            items = [(key, self.make_node(value)) for key, value in node.items()]
            return Opaque(LiveObject(node), steps=[("set", items)])
        if torch is not None and isinstance(node, torch.Tensor):
            return self.register_leaf(node, describe_tensor(node))
        if is_array(node):
            array = TensorRef(str(node.dtype), node.shape, (), 0, None, "cpu", kind="numpy")
            return self.register_leaf(node, array)
        return super().make_leaf(node)

    def to_object(self, node: Any) -> Any:
        """Return the original object of a node, or a new container with such objects."""
        if id(node) in self.originals:
            return self.originals[id(node)]
        if not isinstance(node, (dict, list, tuple, Opaque)):
            return node
        if id(node) not in self._object_by_node:
            self._object_by_node[id(node)] = self._make_object(node)
        return self._object_by_node[id(node)]

    def _make_object(self, node: Any) -> Any:
        """Return a new container for a node.

        A dict is registered before its items, which ends cycles; `to_object` registers the others.
        """
        if isinstance(node, (list, tuple)):
            return type(node)([self.to_object(item) for item in node])
        if isinstance(node, Opaque):  # a dict of another class: one step sets its items
            ((_, item_pairs),) = node.steps
            container, items = copy.copy(node.func.original), dict(item_pairs)
            container.clear()
        else:
            container, items = OrderedDict() if isinstance(node, OrderedMap) else {}, node
        self._object_by_node[id(node)] = container
        container.update((key, self.to_object(value)) for key, value in items.items())
        if isinstance(node, OrderedMap):
            vars(container).update(
                (key, self.to_object(value)) for key, value in node.attributes.items()
            )
        return container


def _get_torch() -> Any:
    """Return torch if the caller has imported it; otherwise the dict has no tensors."""
    return sys.modules.get("torch")


class _Relocation:
    """Moves tensors, and each shared storage only once."""

    def __init__(self, decide: Callable[[str], str], nodes: Iterable[Any]) -> None:
        """Count the users of each storage among the nodes."""
        self._decide = decide
        self._users = Counter(filter(None, map(_get_storage_id, nodes)))
        self._moved_storages: dict[tuple[int, str], Any] = {}
        """The new storages by the id of the old one and the new device."""

    def move(self, node: Any) -> Any:
        """Return a tensor or device, moved by the rules, or any other leaf unchanged.

        Raises:
            DeviceError: if torch cannot use the new device.
        """
        torch = _get_torch()
        if torch is None or not isinstance(node, (torch.Tensor, torch.device)):
            return node
        is_tensor = isinstance(node, torch.Tensor)
        tag = str(node.device if is_tensor else node)
        target = self._decide(tag)
        if target == tag:
            return node
        try:
            return self._move_tensor(node, target) if is_tensor else torch.device(target)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise DeviceError(f"torch cannot use {target} here ({reason})") from error

    def _move_tensor(self, tensor: Any, target: str) -> Any:
        """Return the tensor on another device, over the moved storage if others share it."""
        storage_id = _get_storage_id(tensor)
        data = tensor.detach()
        if storage_id is None or self._users[storage_id] < 2:
            moved = data.to(target)
        else:
            storage = self._move_storage(storage_id, data, target)
            moved = data.new_empty(0, device=target)
            moved.set_(storage, data.storage_offset(), data.size(), data.stride())
        if isinstance(tensor, _get_torch().nn.Parameter):
            return _get_torch().nn.Parameter(moved, requires_grad=tensor.requires_grad)
        return moved.requires_grad_() if tensor.requires_grad else moved

    def _move_storage(self, shared: int, data: Any, target: str) -> Any:
        """Return the storage of `data` on another device; `shared` is its id. Moves it once."""
        if (shared, target) not in self._moved_storages:
            whole = data.new_empty(0, dtype=_get_torch().uint8).set_(data.untyped_storage())
            self._moved_storages[shared, target] = whole.to(target).untyped_storage()
        return self._moved_storages[shared, target]


def _get_storage_id(node: Any) -> int | None:
    """Return the id of the storage of a plain strided tensor, or None for any other node."""
    torch = _get_torch()
    if torch is None or type(node) not in (torch.Tensor, torch.nn.Parameter):
        return None
    is_plain = node.layout is torch.strided and not (
        node.is_quantized or node.is_nested or node.is_conj() or node.is_neg() or node.is_meta
    )
    return int(node.untyped_storage()._cdata) if is_plain else None
