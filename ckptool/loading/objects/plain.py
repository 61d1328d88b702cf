"""Objects of a file that are plain data all the same: sets, counters, torch's constants.

A fixed table of builtin classes: what is not in it stays an inert `Opaque`, whatever it is called.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from ckptool.model import Global, Opaque

__all__ = ["torch_constant", "unpickled"]

_FACTORIES: dict[str, type[Any]] = {
    f"builtins.{kind.__name__}": kind for kind in (dict, float, int, list, set, str)
}


Maker = Callable[[Opaque, Callable[[Any], Any]], Any]
"""Takes an object and what makes the values inside; returns the object itself where it declines."""


def unpickled(node: Opaque, made: Callable[[Any], Any]) -> Any:
    """The Python object of an `Opaque` of a known builtin class; the node itself for any other.

    `made` makes the values inside.
    """
    if node.plain is not None:
        return node.plain[1]
    if node.kwargs or not isinstance(node.func, Global) or not isinstance(node.args, tuple):
        return node
    maker = _MAKERS.get(node.func.qualified)
    return node if maker is None else maker(node, made)


def _collection(kind: Callable[[Any], Any]) -> Maker:
    """`set([item, ...])` and its like: a class called with what it holds."""

    def make(node: Opaque, made: Callable[[Any], Any]) -> Any:
        match node.args:
            case () if not node.steps:
                return kind(())
            case (list() | tuple() | dict() as held,) if not node.steps:
                try:
                    return kind(made(held))
                except TypeError:  # an item that cannot be hashed
                    return node
        return node

    return make


def _bytearray(node: Opaque, made: Callable[[Any], Any]) -> Any:
    """`bytearray(b"...")`, which protocol 2 spells as text in latin-1."""
    match node.args:
        case (bytes() as raw,):
            return bytearray(raw)
        case (str() as text, "latin-1"):
            return bytearray(text, "latin-1")
    return node


def _defaultdict(node: Opaque, made: Callable[[Any], Any]) -> Any:
    """`defaultdict(factory)` and SETITEMS, where the factory is a builtin class."""
    match node.args:
        case () | (None,):
            result: defaultdict[Any, Any] = defaultdict()
        case (Global() as factory,) if factory.qualified in _FACTORIES:
            result = defaultdict(_FACTORIES[factory.qualified])
        case _:
            return node
    if any(step != "set" for step, _ in node.steps):
        return node
    for _, items in node.steps:
        result.update(made(dict(items)))
    return result


def _layout(node: Opaque, made: Callable[[Any], Any]) -> Any:
    """`torch.serialization._get_layout("torch.sparse_coo")`."""
    import torch

    match node.args:
        case (str() as name,):
            found = vars(torch).get(name.removeprefix("torch."))
            return found if isinstance(found, torch.layout) else node
    return node


def torch_constant(node: Global) -> Any:
    """The dtype, layout, memory format or qscheme that a global names; else the global itself.

    Looked up among what torch has loaded already, so that nothing is imported.
    """
    import torch

    if node.module != "torch":
        return node
    found = vars(torch).get(node.name)
    kinds = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
    return found if isinstance(found, kinds) else node


_MAKERS: dict[str, Maker] = {
    "builtins.set": _collection(set),
    "builtins.frozenset": _collection(frozenset),
    "builtins.bytearray": _bytearray,
    "collections.Counter": _collection(Counter),
    "collections.defaultdict": _defaultdict,
    "torch.serialization._get_layout": _layout,
}
