"""Reading pickles from memory, and what the machine's data stands for, for the tests beside it."""

from typing import Any

from ckptool.core.model import Global, Opaque, OrderedMap, Size
from ckptool.files import ByteRange, MemorySource
from ckptool.limits import DEFAULT_LIMITS
from ckptool.symbolic import unpickle


def read(data: bytes, *, limits=DEFAULT_LIMITS, persistent_load=None, nested=None):
    """What the machine makes of a pickle."""
    span = ByteRange(MemorySource(data, "test.pkl"), 0, len(data))
    return unpickle(span, limits=limits, persistent_load=persistent_load, nested=nested)


def plain(node: Any) -> Any:
    """The Python value of a tree that holds plain data, sets and bytes alone."""
    if isinstance(node, (OrderedMap, dict)):
        return {plain(key): plain(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)) and not isinstance(node, Size):
        return type(node)(plain(item) for item in node)
    if isinstance(node, Opaque) and isinstance(node.func, Global):
        makers = {"set": set, "frozenset": frozenset, "bytearray": bytearray}
        make = makers[node.func.name]
        return make(*(plain(arg) for arg in node.args[:1])) if node.args else make()
    return node
