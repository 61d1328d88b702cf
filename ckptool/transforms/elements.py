"""Tensors over other elements: all that they are besides stays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckptool.model import Opaque, OrderedMap, Path, TensorRef
from ckptool.tree import everything, rebuild

__all__ = ["Originals", "over_elements", "tensors_placed"]


def over_elements(tensor: TensorRef, **place: Any) -> TensorRef:
    """The tensor with another `dtype`, `storage`, `offset`, `stride` or `flags`.

    One of a back end without storages (a TPU's) is carried as a tensor of the CPU from then on.
    """
    made = replace(tensor, **place)
    if "carrier" not in (tensor.parts or {}):
        return made
    data = replace(made, device="cpu", requires_grad=False, hooks=None, wrapping=(), parts=None)
    return replace(made, parts={"carrier": "cpu_tensor", "data": data})


class Originals:
    """Some tensors of a tree, to be known again while it is rebuilt.

    `rebuild` hands on a copy of a tensor where its attributes or hooks are new.
    """

    def __init__(self, root: Any, chosen: Iterable[TensorRef]) -> None:
        """Know the tensors `chosen` among all that `root` holds."""
        self._chosen = {id(tensor): tensor for tensor in chosen}
        self._by_view = {_view(tensor): tensor for tensor in self._chosen.values()}
        self._known = {id(node) for node in everything(root)}

    def of(self, node: Any) -> TensorRef | None:
        """The chosen tensor that a node is, or is a copy of."""
        if not isinstance(node, TensorRef) or id(node) in self._known:
            return self._chosen.get(id(node))
        return self._by_view.get(_view(node))


def _view(tensor: TensorRef) -> tuple[Any, ...]:
    place = tensor.offset, tensor.shape, tensor.stride
    return id(tensor.storage), tensor.dtype, tensor.kind, *place


def tensors_placed(root: Any, placed: Mapping[Path, TensorRef]) -> Any:
    """The tree with other tensors at some paths; the same tensor elsewhere stays.

    A path that is none of containers and attributes (a name within a pickled module) is left out.
    """
    holders: dict[int, dict[Any, dict[Path, TensorRef]]] = {}
    for path, tensor in placed.items():
        found = _holder(root, path)
        if found is not None:
            holder, depth = found
            key, rest = path[depth], path[depth + 1 :]
            holders.setdefault(id(holder), {}).setdefault(key, {})[rest] = tensor

    def mapping(old: dict[Any, Any]) -> dict[Any, Any]:
        if id(old) not in holders:
            return old
        new = type(old)(old)
        if isinstance(new, OrderedMap) and isinstance(old, OrderedMap):
            new.attributes = old.attributes
        for key, inside in holders[id(old)].items():
            for rest, tensor in inside.items():
                new[key] = _with(new[key], rest, tensor)
        return new

    return rebuild(root, None, mapping) if holders else root


def _holder(root: Any, path: Path) -> tuple[dict[Any, Any], int] | None:
    """The innermost dict on the way to a tensor, and how deep it lies."""
    node, found = root, None
    for depth, key in enumerate(path):
        node = node.attributes if isinstance(node, Opaque) else node
        if isinstance(node, dict) and key in node:
            found = node, depth
        elif not (isinstance(node, (list, tuple)) and isinstance(key, int) and key < len(node)):
            return None
        node = node[key]
    return found if isinstance(node, TensorRef) else None


def _with(node: Any, path: Path, tensor: TensorRef) -> Any:
    """A list or tuple with a tensor in place of another; that tensor where the path ends."""
    if not path:
        return tensor
    items = list(node)
    items[path[0]] = _with(items[path[0]], path[1:], tensor)
    return items if isinstance(node, list) else type(node)(items)
