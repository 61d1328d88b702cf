"""What a pickled module holds that its `state_dict()` does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckptool.limits import DEFAULT_LIMITS
from ckptool.model import DeviceValue, Global, Opaque, TensorRef, find_tensors
from ckptool.modules import held_apart, module_state, modules_below, own_tensors
from ckptool.statedict import only_its_class
from ckptool.words import printable

__all__ = ["ModuleRest", "module_rest"]

_HELD = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_OF_EVERY_MODULE = frozenset({"training", "_version", "_is_full_backward_hook", "_backend"})
_SCALARS = (bool, int, float, complex, str, bytes, type(None), DeviceValue)


@dataclass(frozen=True, slots=True)
class ModuleRest:
    """What is beside the state dict of a module and of those in it."""

    lost: tuple[str, ...]
    """Data: tensors, hooks, objects and dicts, each in words."""
    settings: tuple[str, ...]
    """Names of attributes such as `in_features`, each once: numbers, text, lists of them."""


def module_rest(module: Opaque) -> ModuleRest:
    """What `state_dict()` would leave of a module.

    Tensors that the state dict has under another name (as `_flat_weights` of an LSTM) are in it;
    so is nothing of what is empty. Numbers, text, types and functions of torch, and lists of such,
    are how a class was set up; so is what a class of torch keeps under names with an underscore.
    """
    state = set(map(_bytes_of, find_tensors(dict(module_state(module) or {}))))
    lost, settings = [], dict[str, None]()
    for path, one in held_apart(module).items():
        lost.append(only_its_class(path, one))
    for prefix, part in modules_below(module, DEFAULT_LIMITS):
        for name, value in _beside(part):
            tensors = list(find_tensors(value))
            is_in_state = state.issuperset(map(_bytes_of, tensors))
            if is_in_state and _is_setting(part, name, value):
                settings.update({} if tensors else {printable(str(name)): None})
            else:
                lost.append(f"{printable(f'{prefix}{name}')} ({_described(value)})")
    return ModuleRest(tuple(lost), tuple(settings))


def _bytes_of(tensor: TensorRef) -> Any:
    """What two names of the same elements have in common."""
    if tensor.storage is None:
        return tensor
    return tensor.storage, tensor.dtype, tensor.offset, tensor.shape, tensor.stride


def _beside(module: Opaque) -> Iterator[tuple[Any, Any]]:
    """The attributes of one module that say something, and its buffers that do not persist."""
    own = own_tensors(module)
    for name, value in module.attributes.get("_buffers", {}).items():
        if value is not None and name not in own:
            yield name, value
    for name, value in module.attributes.items():
        if name not in _HELD and name not in _OF_EVERY_MODULE and not _is_empty(value):
            yield name, value


def _is_empty(value: Any) -> bool:
    """Whether it says nothing: None, or a container with nothing in it."""
    if isinstance(value, Opaque):
        return value.class_name == "builtins.set" and value.args in ((), ([],)) and not value.steps
    return value is None or (isinstance(value, (dict, list, tuple)) and not value)


def _is_setting(module: Opaque, name: Any, value: Any) -> bool:
    if "_hooks" in str(name):
        return False
    if str(name).startswith("_") and module.class_name.startswith("torch."):
        return True
    todo, seen = [value], set[int]()
    while todo:
        node = todo.pop()
        if isinstance(node, (list, tuple)):
            todo.extend(() if id(node) in seen else node)
            seen.add(id(node))
        elif not _is_plain(node):
            return False
    return True


def _is_plain(node: Any) -> bool:
    if isinstance(node, Opaque):
        return node.plain is not None
    if isinstance(node, Global):
        return node.module.partition(".")[0] == "torch"
    return isinstance(node, (*_SCALARS, TensorRef))


def _described(value: Any) -> str:
    if isinstance(value, TensorRef):
        return "a tensor"
    if isinstance(value, Opaque):
        return printable(value.class_name)
    if isinstance(value, Global):
        return printable(value.qualified)
    return "a dict" if isinstance(value, dict) else f"a {type(value).__name__}"
