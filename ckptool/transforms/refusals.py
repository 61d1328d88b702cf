"""What of a tree `torch.load(weights_only=True)` refuses, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ckptool.model import Global, Opaque, OrderedMap, Path, TensorRef
from ckptool.symbolic.encoder import blocking
from ckptool.tree import held_items

__all__ = ["CARRIER", "class_of", "is_refused", "located", "refusals"]

CARRIER = "cpu_tensor"
"""What a tensor of a TPU may be carried by."""

_COUNTER = "collections.Counter"


def is_refused(node: Any) -> bool:
    """Whether a node itself, whatever it holds, keeps `weights_only=True` from taking the file.

    Source: torch/_weights_only_unpickler.py, which allows names and, of objects, only some to be
    filled. A tensor that is refused for nothing but the class of a layer around it is not.
    """
    if isinstance(node, Global):
        return "." in node.name or bool(blocking((node.qualified,)))
    if isinstance(node, Opaque):
        return not _is_accepted(node)
    if isinstance(node, TensorRef):
        parts = node.parts or {}
        is_array = "array" in parts or parts.get("carrier", CARRIER) != CARRIER
        is_jagged = node.kind == "nested" and "state" in parts
        foreign = "type" in parts and (parts["type"] is None or is_refused(parts["type"]))
        return is_array or is_jagged or foreign
    return False


def _is_accepted(node: Opaque) -> bool:
    if not isinstance(node.func, Global) or is_refused(node.func):
        return False
    if node.maker == "persid" or node.kwargs is not None:
        return False
    filled = {"build", "set"} if node.class_name == _COUNTER else {"build"}
    return {kind for kind, _ in node.steps} <= filled


def class_of(node: Any) -> str:
    """The class of a node in words."""
    if isinstance(node, Opaque) and node.plain is not None:
        return f"numpy.{node.plain[0]}"
    if isinstance(node, (Opaque, Global)):
        return node.qualified if isinstance(node, Global) else node.class_name
    parts = (node.parts or {}) if isinstance(node, TensorRef) else {}
    if isinstance(parts.get("type"), Global):
        return str(parts["type"].qualified)
    return "numpy.ndarray" if "array" in parts or "carrier" in parts else "jagged nested tensor"


def refusals(root: Any) -> Iterator[tuple[Path, Any]]:
    """Every mention of a node that is refused, with its path; nothing of what such a node holds."""
    for path, node in located(root, enter=lambda node: not is_refused(node)):
        if is_refused(node):
            yield path(), node


Link = tuple[Any, Any] | None
"""The way to a node: that to its holder, and the key there."""


def located(
    root: Any, enter: Callable[[Any], bool] = lambda node: True
) -> Iterator[tuple[Callable[[], Path], Any]]:
    """Every mention of an object, class or tensor below `root`, and what tells its path.

    Unlike `paths.walk` it yields dict keys too, and what tensors are made of. What a node holds is
    yielded at its first mention; not at all where `enter` refuses it.
    """
    seen: set[int] = set()
    todo: list[tuple[Link, Any]] = [(None, root)]
    while todo:
        link, node = todo.pop()
        if not isinstance(node, _HOLDERS):
            continue
        if isinstance(node, _YIELDED):
            yield partial(_path, link), node
        if id(node) in seen or (isinstance(node, _YIELDED) and not enter(node)):
            continue
        seen.add(id(node))
        entries = [((link, key) if key is not _HERE else link, held) for key, held in _held(node)]
        todo.extend(reversed(entries))


_HOLDERS = (dict, list, tuple, Opaque, TensorRef, Global)
_YIELDED = (Opaque, TensorRef, Global)
_HOOKS = "_backward_hooks"
_HERE = object()
"""In place of a key: what stands at its holder's own path."""


def _path(link: Link) -> Path:
    keys = []
    while link is not None:
        link, key = link
        keys.append(key)
    return tuple(reversed(keys))


def _held(node: Any) -> Iterator[tuple[Any, Any]]:
    """What a node holds, keys included, under the keys that paths have for it."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from ((key, key), (key, value))
        if isinstance(node, OrderedMap):
            yield from node.attributes.items()
    elif isinstance(node, (list, tuple)):
        yield from enumerate(node)
    elif isinstance(node, Opaque):
        yield from _held_by_object(node)
    elif isinstance(node, TensorRef):
        yield _HOOKS, node.hooks
        if "carrier" not in (node.parts or {}):
            yield from (node.parts or {}).items()
        for layer in node.wrapping:
            yield from ((_HOOKS, layer.hooks), ("__class__", layer.type), (_HERE, layer.state))


def _held_by_object(node: Opaque) -> Iterator[tuple[Any, Any]]:
    for key, value in held_items(node):
        yield from ((key, key), (key, value))
    attributes = node.attributes
    yield from attributes.items() if attributes else ((_HERE, node.state),)
    yield _HERE, node.args if isinstance(node.args, tuple) else None
