"""A pickled `torch.nn.Module`, read as its `state_dict()` would be, without its class."""

from __future__ import annotations

from typing import Any

from ckptool.model import Opaque, OrderedMap, TensorRef

__all__ = ["module_state"]

_MARKS = ("_parameters", "_buffers", "_modules")


def module_state(node: Any) -> OrderedMap | None:
    """What `state_dict()` would give for a pickled module; None for anything else.

    Order and content as `torch/nn/modules/module.py` `_save_to_state_dict`: a module's own
    parameters, its persistent buffers, then each child. Entries that are None are left out.
    `_metadata` holds the version of each module's class where the pickle tells it: it never does
    (the version is a class attribute), so there is none.
    """
    if not _is_module(node):
        return None
    names = OrderedMap()
    _collect(node, "", names, set())
    return names


def _is_module(node: Any) -> bool:
    if not isinstance(node, Opaque):
        return False
    attributes = node.attributes
    return all(isinstance(attributes.get(mark), dict) for mark in _MARKS)


def _collect(module: Opaque, prefix: str, names: OrderedMap, entered: set[int]) -> None:
    if id(module) in entered:
        return
    attributes = module.attributes
    passing = _items_of_set(attributes.get("_non_persistent_buffers_set"))
    for group, left_out in (("_parameters", ()), ("_buffers", passing)):
        for name, tensor in attributes[group].items():
            if isinstance(tensor, TensorRef) and name not in left_out:
                names[f"{prefix}{name}"] = tensor
    for name, child in attributes["_modules"].items():
        if _is_module(child):
            _collect(child, f"{prefix}{name}.", names, entered | {id(module)})


def _items_of_set(node: Any) -> tuple[Any, ...]:
    """The items of a pickled set, whatever protocol spelled it."""
    if not isinstance(node, Opaque):
        return ()
    items: list[Any] = []
    if isinstance(node.args, tuple) and node.args and isinstance(node.args[0], (list, tuple)):
        items.extend(node.args[0])
    for kind, value in node.steps:
        if kind in ("add", "append"):
            items.extend(value)
    return tuple(items)
