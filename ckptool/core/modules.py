"""Read a pickled `torch.nn.Module` as its `state_dict()`, without its class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptool.core.model import Opaque, OrderedMap, TensorRef, find_tensors
from ckptool.core.quantizers import class_scheme
from ckptool.errors import LimitExceeded
from ckptool.limits import DEFAULT_LIMITS, Limits

_MODULE_ATTRIBUTES = ("_parameters", "_buffers", "_modules")
_COMPILED_CLASS = "torch._dynamo.eval_frame.OptimizedModule"

_VERSION_BY_CLASS = {
    f"torch.{home}.{name}": version
    for version, home, names in (
        (2, "nn.intrinsic.qat.modules.conv_fused",
         "ConvBn1d ConvBn2d ConvBn3d ConvBnReLU1d ConvBnReLU2d ConvBnReLU3d"),
        (2, "nn.quantized.dynamic.modules.rnn", "LSTM GRU"),
        (3, "nn.quantized.modules.linear", "Linear LinearPackedParams"),
        (3, "nn.intrinsic.quantized.modules.linear_relu",
         "LinearReLU LinearLeakyReLU LinearTanh"),
        (4, "nn.quantized.dynamic.modules.linear", "Linear"),
        (4, "nn.intrinsic.quantized.dynamic.modules.linear_relu", "LinearReLU"),
        (3, "quantization.observer",
         "MinMaxObserver MovingAverageMinMaxObserver PerChannelMinMaxObserver "
         "MovingAveragePerChannelMinMaxObserver HistogramObserver"),
    )
    for name in names.split()
}  # fmt: skip
"""Versions other than 1 of torch's classes, without the `ao` in their names since torch 1.13."""


class Visits:
    """Limits how deep a traversal goes, and how often it visits the same containers.

    A pickle of a few hundred bytes can refer to one list a billion times.
    """

    def __init__(self, limits: Limits) -> None:
        """Start with no visits."""
        self._limits = limits
        self._entered: set[int] = set()
        """The ids of the containers that were visited."""
        self._entries_first_seen = self._entries_seen_again = 0

    def enter(self, node: Any, size: int, depth: int) -> None:
        """Count a visit of a container with `size` entries, `depth` containers below the root.

        Raises:
            LimitExceeded: if it is too deep, or the repeated visits have more entries than the
                limit and all containers together: a large tree may repeat more. An empty container
                counts as one entry.
        """
        if depth > self._limits.max_depth:
            raise LimitExceeded(f"containers are nested deeper than {self._limits.max_depth}")
        if id(node) not in self._entered:
            self._entered.add(id(node))
            self._entries_first_seen += size + 1
            return
        self._entries_seen_again += size + 1
        if self._entries_seen_again > self._limits.max_repeats + self._entries_first_seen:
            raise LimitExceeded(
                f"the same containers occur repeatedly, with more than "
                f"{self._limits.max_repeats:,} entries in all"
            )


def is_module(node: Any) -> bool:
    """Return True if a node is a pickled `nn.Module` (an object with its three dicts), or compiled.

    A compiled module is pickled as a call, with the module inside.
    """
    if not isinstance(node, Opaque):
        return False
    attributes = node.attributes
    return all(isinstance(attributes.get(mark), dict) for mark in _MODULE_ATTRIBUTES) or bool(
        _unwrap_compiled(node)
    )


def _unwrap_compiled(node: Opaque) -> dict[Any, Opaque]:
    """Return the module in a compiled one as {"_orig_mod": module}; empty for others.

    A compiled module is pickled as a call without state. Source: torch/_dynamo/eval_frame.py
    `OptimizedModule.__reduce__`.
    """
    if isinstance(node.args, tuple) and node.args and node.class_name == _COMPILED_CLASS:
        inner = node.args[0]
        if isinstance(inner, Opaque) and inner.class_name != _COMPILED_CLASS and is_module(inner):
            return {"_orig_mod": inner}
    return {}


def to_module_state(node: Any, limits: Limits = DEFAULT_LIMITS) -> OrderedMap | None:
    """Return the `state_dict()` of a pickled module; None for anything else.

    Order and content are as in `torch/nn/modules/module.py` `_save_to_state_dict`: a module's own
    parameters, its persistent buffers, then each child, without entries that are None. `_metadata`
    has the path of every module and the version of its state.

    Raises:
        LimitExceeded: if modules are nested deeper, or shared more often, than `limits` allows.
    """
    if not is_module(node):
        return None
    names, metadata = OrderedMap(), OrderedMap()
    for prefix, module in walk_modules(node, limits):
        metadata[prefix[:-1]] = {"version": _find_version(module)}
        names.update((f"{prefix}{name}", value) for name, value in get_own_tensors(module).items())
    names.attributes["_metadata"] = metadata
    return names


def to_model_state(node: Any, limits: Limits = DEFAULT_LIMITS) -> OrderedMap | None:
    """Return the `state_dict()` of a pickled module with weights; None for anything else.

    A module without weights (a loss, a vocabulary) is an ordinary object. Weights that only the
    class of a submodule can save count, although they are not in the state.
    """
    state = to_module_state(node, limits)
    return state if state or (state is not None and find_opaque_content(node)) else None


def find_opaque_content(node: Opaque) -> dict[str, Any]:
    """Return the content of modules that only their class can save, by path.

    These are submodules whose class pickles no dict of parameters, and objects of a known quantizer
    and attributes of a Parameter that contain tensors (see `_save_to_state_dict`).
    """
    content: dict[str, Any] = {}
    seen: set[int] = set()
    for prefix, module in walk_modules(node):
        attributes = module.attributes
        children = attributes.get("_modules", {})
        candidates = {name: child for name, child in children.items() if isinstance(child, Opaque)}
        candidates.update(
            (name, value) for name, value in attributes.items() if class_scheme(value)
        )
        for name, tensor in get_own_tensors(module).items():
            candidates.update(
                (f"{name}.{key}", value) for key, value in find_tensor_attributes(tensor)
            )
        for name, value in candidates.items():
            # A submodule counts even without tensors.
            is_opaque = not is_module(value) and (name in children or has_tensors(value))
            if is_opaque and id(value) not in seen:
                seen.add(id(value))
                content[f"{prefix}{name}"] = value
    return content


def find_tensor_attributes(tensor: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the attributes of a tensor, except modules, that contain tensors over other bytes."""
    if not isinstance(tensor, TensorRef) or not tensor.wrapping:
        return
    for layer in tensor.wrapping:
        for name, value in layer.state.items() if isinstance(layer.state, dict) else ():
            is_separate = not isinstance(value, TensorRef) or value.storage is not tensor.storage
            if is_separate and not is_module(value) and has_tensors(value):
                yield name, value


def has_tensors(node: Any) -> bool:
    """Return True if it is or contains a tensor."""
    return next(find_tensors(node), None) is not None


def walk_modules(node: Opaque, limits: Limits = DEFAULT_LIMITS) -> Iterator[tuple[str, Opaque]]:
    """Yield a module and its submodules, parents first, with the prefix of their keys.

    A module that contains itself is not entered again.

    Raises:
        LimitExceeded: if modules are nested deeper, or shared more often, than `limits` allows.
    """
    visits = Visits(limits)
    open_ids = {id(node)}
    visits.enter(node, len(get_own_tensors(node)), 0)
    yield "", node
    frames = [(node, "", iter(get_child_modules(node).items()))]
    while frames:
        module, prefix, children = frames[-1]
        name, child = next(children, (None, None))
        if child is None:
            frames.pop()
            open_ids.discard(id(module))
        elif id(child) not in open_ids:
            visits.enter(child, len(get_own_tensors(child)), len(frames))
            yield f"{prefix}{name}.", child
            open_ids.add(id(child))
            frames.append((child, f"{prefix}{name}.", iter(get_child_modules(child).items())))


def _find_version(module: Opaque) -> int:
    """Return the `_version` of a module's class; that of an unknown class is guessed.

    Source: `_version` in torch/nn and torch/ao; 1 unless a class overrides it. Subclasses of batch
    and instance norm are recognized by the counter that was added in version 2.
    """
    stated = module.attributes.get("_version")
    if type(stated) is int:
        return stated
    if {"running_mean", "num_batches_tracked"} <= module.attributes.get("_buffers", {}).keys():
        return 2
    return _VERSION_BY_CLASS.get(module.class_name.replace("torch.ao.", "torch.", 1), 1)


def get_own_tensors(module: Opaque) -> dict[Any, Any]:
    """Return the parameters and persistent buffers of a module, without its children."""
    attributes = module.attributes
    non_persistent = _read_set_items(attributes.get("_non_persistent_buffers_set"))
    buffers = attributes.get("_buffers", {}).items()
    items = (
        *attributes.get("_parameters", {}).items(),
        *(pair for pair in buffers if pair[0] not in non_persistent),
    )
    return {name: tensor for name, tensor in items if tensor is not None and isinstance(name, str)}


def get_child_modules(module: Opaque) -> dict[Any, Opaque]:
    """Return the direct children of a module, by name."""
    children = module.attributes.get("_modules", {})
    items = ((name, child) for name, child in children.items() if isinstance(name, str))
    modules = {name: child for name, child in items if is_module(child)}
    return modules or _unwrap_compiled(module)


def _read_set_items(node: Any) -> tuple[Any, ...]:
    """Return the items of a pickled set of any protocol: its argument, and those added later."""
    if not isinstance(node, Opaque):
        return ()
    initial = node.args[:1] if isinstance(node.args, tuple) else ()
    added = (value for kind, value in node.steps if kind in ("add", "append"))
    return tuple(
        item for items in (*initial, *added) if isinstance(items, (list, tuple)) for item in items
    )
