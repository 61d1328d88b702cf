"""What an object is as plain data, where that loses nothing but its class.

Forms after the `__reduce__` of each class in Lib/ and in numpy/core/src/multiarray/methods.c. What
is not in a pickle (the field names of a namedtuple) or is code (a function) has no plain form.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from ckptool.model import Global, Opaque, OrderedMap, TensorRef, Wrapping
from ckptool.symbolic.text import raw_bytes
from ckptool.transforms.refusals import CARRIER, is_refused
from ckptool.tree import held_items

__all__ = ["plain_form", "plain_tensor", "tuple_items"]

_LONGEST_RANGE = 100_000
_VALUES = (bool, int, float, complex, str, bytes)
_NO_STATE: tuple[Any, ...] = (None, {}, (None, {}), ({}, {}))


def plain_form(node: Opaque) -> Any:
    """The plain data that says all that `node` does; `node` itself where there is none.

    Numbers, text, dicts, lists, sets. A dict or list is that of the file where it can be, with
    what it holds not treated yet.
    """
    if node.plain is not None:
        return node.plain[1]
    if not is_refused(node):
        return node
    known = _KNOWN.get(node.class_name) or _KNOWN.get(_home(node.class_name))
    form = (known or _by_structure)(node)
    return node if form is None else form


def _home(qualified: str) -> str:
    """`pathlib.*` for a class of a module of which every class is treated alike."""
    return f"{qualified.partition('.')[0]}.*"


def _by_structure(node: Opaque) -> Any:
    """The form of an object of a class that nobody here knows, by how it is pickled."""
    kinds = {kind for kind, _ in node.steps}
    base, inside = _base_of(node)
    if base is None:
        return _sole_value(node) if not node.steps else None
    if kinds <= {"build"} and base == "object":
        return _attributes_of(node)
    if kinds <= {"build", "set"} and base in ("object", "dict"):
        return _as_dict(node, inside)
    if kinds == {"append"} and base in ("object", "list"):
        return [*inside, *(value for _, value in held_items(node))]
    return list(inside) if base == "list" and not kinds else None


def _base_of(node: Opaque) -> tuple[str | None, Any]:
    """Of what it was made, and with what in it: nothing, or the content of a builtin class.

    `cls.__new__(cls)`, `cls()` where something follows, or `copyreg._reconstructor(cls, base,
    content)` as protocols 0 and 1 spell it. None: arguments whose meaning only the class knows.
    """
    if not isinstance(node.func, Global) or node.kwargs is not None or node.maker == "persid":
        return None, ()
    match node.func.qualified, node.args:
        case "copyreg._reconstructor", (Global(), Global() as base, content):
            name = base.qualified.removeprefix("builtins.")
            is_content = isinstance(content, {"dict": dict, "list": list}.get(name, type(None)))
            return (name, content or ()) if is_content else (None, ())
        case _, ():
            return ("object", ()) if node.maker == "newobj" or node.steps else (None, ())
    return None, ()


def _sole_value(node: Opaque) -> Any:
    """The value of an object that is a call of its class on one plain value: an Enum's member.

    By the spelling of names in Python, what begins in lower case is a function.
    """
    is_class = isinstance(node.func, Global) and node.maker == "reduce" and node.kwargs is None
    if not is_class or not node.func.name.rpartition(".")[2].lstrip("_")[:1].isupper():
        return None
    match node.args:
        case (value,) if isinstance(value, _VALUES):
            return value
    return None


def _attributes_of(node: Opaque) -> dict[Any, Any] | None:
    """A plain object's attributes; None where its state is of another form, or came in parts."""
    if not node.steps:
        return {}
    state = node.state
    if len(node.steps) > 1 or not (node.attributes or state in _NO_STATE):
        return None
    return node.attributes


def _as_dict(node: Opaque, content: Any) -> dict[Any, Any] | None:
    """The items of an object of a class derived from dict; attributes besides stay attributes."""
    items = {**dict(content), **dict(held_items(node))}
    state, attributes = node.state, node.attributes
    if not (state is node or attributes or state in _NO_STATE):
        return None
    if all(name in items and items[name] is value for name, value in attributes.items()):
        return items  # as of a class whose attributes are its items
    made = OrderedMap(items)
    made.attributes = attributes
    return made


def tuple_items(node: Opaque) -> tuple[Any, ...] | None:
    """The items of a namedtuple, or of another class derived from tuple; None for anything else.

    `cls.__new__(cls, *items)`, or `cls.__new__(cls, items)` where the class has no fields; as
    protocols 0 and 1 spell it, `copyreg._reconstructor(cls, tuple, items)`. A class with attributes
    beside its items is none.
    """
    if not isinstance(node.func, Global) or node.kwargs is not None or node.steps:
        return None
    match node.func.qualified, node.args:
        case "copyreg._reconstructor", (Global(), Global(name="tuple"), tuple() as items):
            return items
        case _, (tuple() as items,) if node.maker == "newobj":
            return items
        case _, (_, _, *_) if node.maker == "newobj":
            return tuple(node.args)
    return None


def plain_tensor(tensor: TensorRef) -> TensorRef:
    """An array of numpy as a tensor, and a tensor of a class of its own as one of torch.

    Attributes stay attributes. What a TPU's tensor is carried by becomes a tensor too. Itself
    where nothing is to be done, or nothing can be: a DTensor's content is in other files too.
    """
    parts = tensor.parts or {}
    if "array" in parts:
        return replace(tensor, kind="strided", parts=None)
    if parts.get("carrier", CARRIER) != CARRIER:
        data = replace(
            tensor, device="cpu", requires_grad=False, hooks=None, parts=None, wrapping=()
        )
        return replace(tensor, parts={"carrier": CARRIER, "data": data})
    if tensor.storage is None or not any(is_refused(layer.type) for layer in tensor.wrapping):
        return tensor
    layers = [_plain_layer(layer) for layer in tensor.wrapping]
    kind = "strided" if tensor.kind == "subclass" else tensor.kind
    return replace(tensor, kind=kind, wrapping=tuple(filter(None, layers)))


def _plain_layer(layer: Wrapping) -> Wrapping | None:
    """A layer without a class of its own; None where nothing of it remains.

    The state may be one that is still to be filled.
    """
    if layer.kind != "type" or not is_refused(layer.type):
        return layer
    if layer.state is None:
        return None
    return replace(layer, type=Global("torch", "Tensor"))


# Classes of the standard library and of numpy


def _path(node: Opaque) -> str | None:
    if not isinstance(node.args, tuple) or not all(isinstance(part, str) for part in node.args):
        return None
    windows = "Windows" in node.class_name.rpartition(".")[2]
    return str((PureWindowsPath if windows else PurePosixPath)(*node.args))


def _contents(node: Opaque) -> list[Any]:
    return [value for _, value in held_items(node)]


def _deque(node: Opaque) -> list[Any] | None:
    """`deque((), maxlen)` or `deque([...])` and what was appended."""
    match node.args:
        case () | ((), _):
            return _contents(node)
        case ([*items], *_):
            return [*items, *_contents(node)]
    return None


def _frozenset(node: Opaque) -> Opaque | None:
    match node.args:
        case ([*items],):
            return Opaque(Global("builtins", "set"), (list(items),))
    return Opaque(Global("builtins", "set"), ([],)) if node.args == () else None


def _range(node: Opaque) -> list[int] | None:
    match node.args:
        case (int() as start, int() as stop, int() as step) if step:
            numbers = range(start, stop, step)
            return list(numbers) if numbers[:_LONGEST_RANGE] == numbers else None
    return None


def _text_of_one(node: Opaque) -> str | None:
    """`Decimal('1.50')`, `Fraction('1/3')`: they are made of the text that they print."""
    match node.args:
        case (str() as text,):
            return text
        case (int() as numerator, int() as denominator):
            return f"{numerator}/{denominator}"
    return None


def _uuid(node: Opaque) -> str | None:
    number = node.attributes.get("int")
    if type(number) is not int or not 0 <= number < 1 << 128:
        return None
    digits = f"{number:032x}"
    return "-".join(digits[at:end] for at, end in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))


def _moment(node: Opaque) -> str | None:
    """The ISO 8601 text of a `datetime`, `date` or `time`, which pickle as packed bytes."""
    args = node.args if isinstance(node.args, tuple) else ()
    packed = raw_bytes(args[0]) if args else None
    zone = _zone(args[1]) if len(args) > 1 else None
    length = {"datetime": 10, "date": 4, "time": 6}[node.class_name.rpartition(".")[2]]
    if packed is None or len(packed) != length or (len(args) > 1 and zone is None):
        return None
    try:
        return _iso_text(packed, zone)
    except ValueError:  # a month 13; or a fold, which the text cannot have
        return None


def _iso_text(packed: bytes, zone: datetime.timezone | None) -> str:
    """Of four bytes of a date, six of a time, or both."""
    if len(packed) == 6:
        return _clock(packed, zone).isoformat()
    day = datetime.date(int.from_bytes(packed[:2], "big"), packed[2], packed[3])
    if len(packed) == 4:
        return day.isoformat()
    return datetime.datetime.combine(day, _clock(packed[4:], zone)).isoformat()


def _clock(packed: bytes, zone: datetime.timezone | None) -> datetime.time:
    micros = int.from_bytes(packed[3:], "big")
    return datetime.time(packed[0], packed[1], packed[2], micros, zone)


def _zone(node: Any) -> datetime.timezone | None:
    """A fixed distance from UTC without a name of its own."""
    if isinstance(node, Opaque) and node.class_name == "datetime.timezone":
        match node.args:
            case (Opaque() as offset,):
                seconds = _seconds(offset)
                if seconds is not None and abs(seconds) < 86400:
                    return datetime.timezone(datetime.timedelta(seconds=seconds))
    return None


def _seconds(node: Opaque) -> float | None:
    """A `timedelta` in seconds, where a float holds them exactly."""
    match node.args:
        case (int() as days, int() as seconds, int() as micros):
            try:
                span = datetime.timedelta(days, seconds, micros)
                total = span.total_seconds()
                return total if datetime.timedelta(seconds=total) == span else None
            except OverflowError:
                return None
    return None


def _dtype(node: Opaque) -> str | None:
    """The text that `numpy.dtype` takes: `<f4`; not of records and sub-arrays."""
    match node.args, node.state:
        case (str() as code, *_), (_, str() as order, None, None, None, *_):
            if re.fullmatch(r"[a-zA-Z]\d*", code) and code[0] not in "Mm":  # those have a unit
                return code if order == "|" else f"{order}{code}"
    return None


def _scalar(node: Opaque) -> str | bytes | None:
    """A `numpy.str_` or `numpy.bytes_`; the numbers are known already (`Opaque.plain`)."""
    match node.args:
        case (Opaque() as dtype, payload) if dtype.class_name == "numpy.dtype":
            code, raw = _dtype(dtype) or "", raw_bytes(payload)
            if raw is None:
                return None
            if code.startswith("S"):
                return raw.rstrip(b"\0")
            try:
                return str(raw, _UTF32[code[:2]]).rstrip("\0")
            except (KeyError, UnicodeDecodeError):
                return None
    return None


_UTF32 = {"<U": "utf-32-le", ">U": "utf-32-be"}


_KNOWN: dict[str, Callable[[Opaque], Any]] = {
    "pathlib.*": _path,
    "builtins.frozenset": _frozenset,
    "builtins.range": _range,
    "collections.defaultdict": lambda node: _as_dict(node, ()),
    "collections.deque": _deque,
    "omegaconf.*": lambda node: None,  # its attributes are types and ways back to its holder
    "datetime.datetime": _moment,
    "datetime.date": _moment,
    "datetime.time": _moment,
    "datetime.timedelta": _seconds,
    "decimal.Decimal": _text_of_one,
    "fractions.Fraction": _text_of_one,
    "uuid.UUID": _uuid,
    "numpy.dtype": _dtype,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
"""By class. What else a `defaultdict` or a `deque` was made with (its factory, its maximal length)
goes with the class."""
