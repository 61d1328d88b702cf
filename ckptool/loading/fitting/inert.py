"""What of an extra state comes out of a file as something else than was saved: by its header."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptool.dtypes import BY_NAME
from ckptool.loading.objects.plain import unpickled
from ckptool.model import Global, Opaque, TensorRef
from ckptool.words import printable

__all__ = ["inert"]

_LAYOUT = "torch.serialization._get_layout"
_CONSTANTS = {
    *("strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"),
    *("contiguous_format", "channels_last", "channels_last_3d", "preserve_format"),
    *("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric"),
    "per_channel_affine_float_qparams",
}
"""What torch itself has that is no dtype, and that a file may name."""


def inert(node: Any) -> str:
    """The first value inside that `ckptool.load` does not make as it was, in words; empty: none.

    Objects of classes stay inert, and arrays of numpy become tensors. Torch is not needed.
    """
    for one in _inside(node):
        if isinstance(one, Opaque) and not _is_made(one):
            return f"an object of {printable(getattr(one.func, 'qualified', 'some class'))}"
        if isinstance(one, Global) and not _is_constant(one):
            return printable(one.qualified)
        if isinstance(one, TensorRef) and one.kind == "numpy":
            return "a numpy array"
    return ""


def _is_made(node: Opaque) -> bool:
    """Whether it is plain data all the same, as a set is."""
    if isinstance(node.func, Global) and node.func.qualified == _LAYOUT:
        return True
    try:
        return unpickled(node, _items) is not node
    except RecursionError:  # sets in sets, deeper than Python's stack
        return False


def _items(held: Any) -> Any:
    """What is in a set or its like, the sets among it made."""
    if isinstance(held, (list, tuple)):
        return [unpickled(one, _items) if isinstance(one, Opaque) else one for one in held]
    return held


def _is_constant(node: Global) -> bool:
    return node.module == "torch" and (node.name in BY_NAME or node.name in _CONSTANTS)


def _inside(node: Any) -> Iterator[Any]:
    """A value and all that its containers hold."""
    todo, seen = [node], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, Mapping):
            todo += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple, set, frozenset)):
            todo += one
        elif isinstance(one, Opaque) and one.plain is None and isinstance(one.args, tuple):
            todo += [held for held in one.args if not isinstance(held, Global)]  # a factory
            todo += [value for _, value in one.steps]
