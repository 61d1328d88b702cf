"""What to save in the place of an object that is no plain data."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from ckptool.words import printable

__all__ = ["remedy", "spelled"]


def remedy(node: Any, path: Sequence[Any]) -> str:
    """The expression that makes plain data of the object at `path`, as a piece of advice.

    It is called by the last word on the way, and what is asked of that: `rng[1].tolist()`.
    """
    words = [at for at, key in enumerate(path) if isinstance(key, str) and key.isidentifier()]
    name = spelled(path[words[-1] :]) if words else "value"
    return f"save {_expression(node, name)} in its place"


def spelled(path: Iterable[Any]) -> str:
    """A place as Python spells it: `config.args`, `rng['numpy.state'][1]`."""
    text = ""
    for key in path:
        if isinstance(key, str) and key.isidentifier():
            text += f".{key}" if text else key
        else:
            text += f"[{printable(repr(key))}]"
    return text


def _expression(node: Any, name: str) -> str:
    if isinstance(node, (type, FunctionType, BuiltinFunctionType, MethodType)):
        is_nameless = isinstance(node, FunctionType) and "<" in node.__qualname__
        return f"inspect.getsource({name})" if is_nameless else f"{name}.__qualname__"
    if type(node) is int:  # one of more bits than torch reads
        return f"str({name})"
    for kind, expression in _BY_CLASS:
        if isinstance(node, kind):
            return expression.format(name)
    if type(node).__module__.partition(".")[0] == "numpy":
        return _of_numpy(node, name)
    if dataclasses.is_dataclass(node):
        return f"dataclasses.asdict({name})"
    for method in ("_asdict", "to_dict", "get_state", "getstate", "tolist"):
        if callable(getattr(type(node), method, None)):
            return f"{name}.{method}()"
    if isinstance(node, Mapping):
        return f"dict({name})"
    if isinstance(node, Iterable):
        return f"list({name})"
    return f"vars({name})" if getattr(node, "__dict__", None) else f"repr({name})"


def _of_numpy(node: Any, name: str) -> str:
    """Of an array, a number, or what makes numbers: `tolist` does not make all of them plain."""
    dtype = getattr(node, "dtype", None)
    if getattr(dtype, "kind", "") in _WORDS:
        return f"{name}.astype(str).tolist()"
    if getattr(dtype, "name", "").startswith(_LONG):
        kind = "complex" if getattr(dtype, "kind", "") == "c" else "float"
        return f"{name}.astype({kind}).tolist()"
    for method in ("tolist", "get_state"):
        if callable(getattr(node, method, None)):
            return f"{name}.{method}()"
    for state in ("state", "bit_generator.state"):
        if hasattr(node, state.partition(".")[0]):
            return f"{name}.{state}"
    return f"str({name})"


_WORDS = frozenset("mM")
"""Kinds of dtype, dates and spans of time, that Python has as objects."""
_LONG = ("longdouble", "clongdouble", "float96", "float128", "complex192", "complex256")


_BY_CLASS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (enum.Enum, "{}.value"),
    (os.PathLike, "str({})"),
    (date, "{}.isoformat()"),
    ((bytearray, memoryview), "bytes({})"),
    (frozenset, "set({})"),
    (str, "str({})"),
    (bytes, "bytes({})"),
    (int, "int({})"),
    (float, "float({})"),
    (complex, "complex({})"),
)
