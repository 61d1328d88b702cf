"""Nodes of a checkpoint as JSON values, as short texts, and as keys of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from ckptool.core.model import DeviceValue, Global, Opaque, Path, TensorRef
from ckptool.core.tree import name_of

Key = tuple[Any, ...]
"""A path with keys that are equal in two files if they mean the same."""

_FEW = 8
"""The most items of a set to show."""
_PLAIN = (str, int, float, complex, type(None))
_PLAIN_KEYS = frozenset({str, int})
_TUPLE_FIELDS = frozenset({"path", "shape", "stride"})
"""Fields that stay tuples in a document: they can be keys of a dict."""
_SETS = frozenset({"builtins.set", "builtins.frozenset"})


def to_json_path(path: Path) -> tuple[str | int, ...]:
    """Return the path with all keys as strings and integers; others as their repr."""
    for key in path:
        if type(key) is not str and type(key) is not int:
            return tuple(part if type(part) in (str, int) else _format_key(part) for part in path)
    return path  # the common case, without a copy


def _format_key(key: Any) -> str:
    """Return the repr of plain data, or the class of an object, because its repr may be huge."""
    if isinstance(key, tuple):
        items = ", ".join(map(_format_key, key))
        return f"({items},)" if len(key) == 1 else f"({items})"  # as Python writes tuples
    is_plain = is_value(key) or isinstance(key, bytes)
    return repr(key) if is_plain else name_of((key,))


def to_json_value(value: Any) -> Any:
    """Return a plain value for JSON: non-finite floats and other types as their repr."""
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return repr(value)


def to_document(result: Any, *left_out: str) -> dict[str, Any]:
    """Return the fields of a dataclass but `left_out` for a JSON document, nested results too.

    Paths, shapes and strides stay tuples, which can be keys of a dict.
    """
    names = [field.name for field in fields(result) if field.name not in left_out]
    values = ((name, getattr(result, name)) for name in names)
    return {
        name: value if name in _TUPLE_FIELDS else _to_document_value(value)
        for name, value in values
    }


def _to_document_value(value: Any) -> Any:
    """Return a field for a JSON document: a mapping, a list, a nested result or a value."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return [_to_document_value(item) for item in value]
    return value.to_dict() if hasattr(value, "to_dict") else to_json_value(value)


def class_name_of(node: Any) -> str:
    """Return the qualified name of an object's class, as in the file."""
    class_name = getattr(node, "class_name", None)
    return class_name if isinstance(class_name, str) else f"builtins.{type(node).__name__}"


def is_value(node: Any) -> bool:
    """Return True for a leaf that is listed as a value."""
    return isinstance(node, _PLAIN)


def to_plain_value(node: Any) -> tuple[str, Any] | None:
    """Return the type and value of a node that is shown as a plain value, or None."""
    if isinstance(node, Opaque):
        return node.plain
    return (type(node).__name__, node) if is_value(node) else None


def summarize(node: Any, max_length: int = 60) -> str:
    """Return a short text for a node: the repr of a value, the dtype and shape of a tensor, ..."""
    if isinstance(node, TensorRef):
        return f"tensor {node.dtype} {format_shape(node.shape)} on {node.device}"
    if isinstance(node, Opaque):
        if node.plain is None:
            return _summarize_object(node, max_length)
        _type, value = node.plain
        return shorten_value(value, max_length)
    if isinstance(node, dict):
        return f"dict of {len(node):,}"
    if isinstance(node, (list, tuple)):
        if len(node) <= 4 and all(is_value(item) for item in node):
            return shorten_value(node, max_length)
        return f"{type(node).__name__.lower()} of {len(node):,}"
    if is_value(node) or isinstance(node, (bytes, bytearray)):
        return shorten_value(node, max_length)
    # A device has a tag, and a class or function its qualified name.
    return getattr(node, "tag", None) or getattr(node, "qualified", None) or class_name_of(node)


def _summarize_object(node: Opaque, max_length: int) -> str:
    """Return `pathlib.PosixPath('out', 'run1')` if the arguments are plain, else the class."""
    if is_set(node):
        return _summarize_set(node, max_length)
    arguments = node.args if isinstance(node.args, tuple) else ()
    if arguments and all(map(is_value, arguments)):
        return shorten_text(f"{node.class_name}({', '.join(map(repr, arguments[:4]))})", max_length)
    return f"{node.class_name} object"


def set_items(node: Opaque) -> Iterator[Any]:
    """Yield the items of a set (`is_set`) of any pickle protocol: its argument, and those added."""
    if isinstance(node.args, tuple) and node.args and isinstance(node.args[0], (list, tuple)):
        yield from node.args[0]
    for kind, value in node.steps:
        if kind != "build":  # which sets attributes
            yield from value


def _summarize_set(node: Opaque, max_length: int) -> str:
    """Return `{'a', 'b'}` in a reproducible order, or `set of 1,000`."""
    items = list(set_items(node))
    name = node.class_name.rpartition(".")[2]
    if not items or len(items) > _FEW or not all(is_value(item) for item in items):
        return f"{name} of {len(items):,}"
    text = f"{{{', '.join(sorted(shorten_value(item, max_length) for item in items))}}}"
    return shorten_text(text if name == "set" else f"{name}({text})", max_length)


def format_shape(shape: tuple[int | None, ...]) -> str:
    """Return `[2, 3]`, with `?` for a ragged dimension."""
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def shorten_value(value: Any, max_length: int) -> str:
    """Return the start of the repr of plain data, at most `max_length` characters."""
    if isinstance(value, (str, bytes, bytearray)) and len(value) > max_length:
        text = repr(value[:max_length])
    else:
        text = repr(tuple(value) if isinstance(value, tuple) else value)
    return shorten_text(text, max_length)


def shorten_text(text: str, max_length: int) -> str:
    """Return a text, cut to `max_length` characters that end with `...` if it is longer."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def to_comparable(path: Path) -> Key:
    """Return the path with keys that are equal in another file if they mean the same."""
    for key in path:
        if type(key) not in _PLAIN_KEYS:
            return tuple(
                key if type(key) in _PLAIN_KEYS else _to_comparable_key(key) for key in path
            )
    return path  # the common case, without a copy


def _to_comparable_key(key: Any) -> Any:
    """Return a key together with its type, because `True == 1 == 1.0` as keys."""
    match key:
        case str():
            return str(key)
        case tuple():
            return ("tuple", *map(_to_comparable_key, key))
        case Opaque():
            return ("object", key.plain or key.class_name)
        case DeviceValue():
            return ("device", key.tag)
        case Global():
            return ("global", key.qualified)
        case float() | complex():
            return (type(key).__name__, repr(key))
        case int() | bytes():
            return (type(key).__name__, key)
    return (type(key).__name__,)


def is_set(node: Any) -> bool:
    """Return True for a set, whose items have no order and so no paths."""
    return isinstance(node, Opaque) and node.class_name in _SETS
