"""Nodes of a checkpoint as what JSON can hold, and as a few words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from ckptool.inspection.diff_regions import is_set
from ckptool.model import Opaque, Path, TensorRef
from ckptool.tree import name_of

__all__ = ["class_of", "json_path", "json_value", "set_items", "summarise"]

_FEW = 8
"""Items of a set that are spelled out."""
_PLAIN = (str, int, float, complex, type(None))


def json_path(path: Path) -> tuple[str | int, ...]:
    """Return the path with every key that is neither a string nor an integer as its repr."""
    for key in path:
        if type(key) is not str and type(key) is not int:
            return tuple(k if type(k) in (str, int) else _key_repr(k) for k in path)
    return path


def _key_repr(key: Any) -> str:
    """Return the repr of plain data; of an object, whose repr may be huge, the class."""
    if isinstance(key, tuple):
        inside = ", ".join(map(_key_repr, key))
        return f"({inside},)" if len(key) == 1 else f"({inside})"
    plain = is_value(key) or isinstance(key, bytes)
    return repr(key) if plain else name_of((key,))


def json_value(value: Any) -> Any:
    """Return a plain value as JSON has it: non-finite floats and other types as their repr."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return repr(value)


def class_of(node: Any) -> str:
    """Return the qualified name of an object's class, as the file names it."""
    named = getattr(node, "class_name", None)
    return named if isinstance(named, str) else f"builtins.{type(node).__name__}"


def is_value(node: Any) -> bool:
    """Return True for a leaf that is listed among the values."""
    return isinstance(node, _PLAIN)


def summarise(node: Any, most: int = 60) -> str:
    """Return a node in a few words: a value's repr, a tensor's type and shape, a length."""
    if isinstance(node, TensorRef):
        return f"tensor {node.dtype} {shape_text(node.shape)} on {node.device}"
    if isinstance(node, Opaque):
        return _object(node, most) if node.plain is None else shortened(node.plain[1], most)
    if isinstance(node, dict):
        return f"dict of {len(node):,}"
    if isinstance(node, (list, tuple)):
        if len(node) <= 4 and all(is_value(item) for item in node):
            return shortened(node, most)
        return f"{type(node).__name__.lower()} of {len(node):,}"
    if is_value(node) or isinstance(node, (bytes, bytearray)):
        return shortened(node, most)
    return getattr(node, "tag", None) or getattr(node, "qualified", None) or class_of(node)


def _object(node: Opaque, most: int) -> str:
    """Return `pathlib.PosixPath('out', 'run1')` if the arguments are plain, else the class."""
    if is_set(node):
        return _set(node, most)
    arguments = node.args if isinstance(node.args, tuple) else ()
    if arguments and all(map(is_value, arguments)):
        return shortened_text(f"{node.class_name}({', '.join(map(repr, arguments[:4]))})", most)
    return f"{node.class_name} object"


def set_items(node: Opaque) -> Iterator[Any]:
    """Yield the items of a set (`is_set`), however its pickle protocol spells it."""
    if isinstance(node.args, tuple) and node.args and isinstance(node.args[0], (list, tuple)):
        yield from node.args[0]
    for kind, value in node.steps:
        if kind != "build":
            yield from value


def _set(node: Opaque, most: int) -> str:
    """Return `{'a', 'b'}` in an order that is the same in every run, or `set of 1,000`."""
    items = list(set_items(node))
    name = node.class_name.rpartition(".")[2]
    if not items or len(items) > _FEW or not all(is_value(item) for item in items):
        return f"{name} of {len(items):,}"
    text = f"{{{', '.join(sorted(shortened(item, most) for item in items))}}}"
    return shortened_text(text if name == "set" else f"{name}({text})", most)


def shape_text(shape: tuple[int | None, ...]) -> str:
    """Return `[2, 3]`, with `?` for a ragged dimension."""
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def shortened(value: Any, most: int) -> str:
    """Return the beginning of the repr of plain data, at most `most` characters."""
    if isinstance(value, (str, bytes, bytearray)) and len(value) > most:
        text = repr(value[:most])
    else:
        text = repr(tuple(value) if isinstance(value, tuple) else value)
    return shortened_text(text, most)


def shortened_text(text: str, most: int) -> str:
    """Return the first `most` characters of a longer text."""
    return text if len(text) <= most else f"{text[: most - 3]}..."
