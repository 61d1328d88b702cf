"""One entry of a checkpoint: a value, a tensor's head and statistics, or an object's parts."""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from ckptool.core.addressing import resolve
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Opaque, Path, TensorRef
from ckptool.core.modules import to_model_state
from ckptool.core.reading import Meter, RepeatedBytes
from ckptool.core.tree import name_of, with_late_values
from ckptool.core.values import (
    class_name_of,
    summarize,
    to_document,
    to_json_path,
    to_json_value,
    to_plain_value,
)
from ckptool.dtypes import PACKED, REAL_PARTS
from ckptool.errors import without_query
from ckptool.files.source import BytesDone, Progress
from ckptool.inspection.equality import type_name
from ckptool.inspection.listing import TensorRow, make_tensor_rows
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.tensors.bytewise import count_nonfinite_elements

HEAD = 8
_Entries = tuple[tuple[str, str], ...]
"""Keys and summaries of values."""


@dataclass(frozen=True, slots=True)
class Shown:
    """The fields of every result of `show`."""

    file: str
    path: tuple[str | int, ...]
    name: str
    what: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.show/1`."""
        identity = {"file": self.file, "path": self.path, "name": self.name}
        return {"schema": "ckptool.show/1", **identity, "what": self.what, **self._to_fields()}

    def _to_fields(self) -> dict[str, Any]:
        """Return the keys of this kind of result."""
        return to_document(self, "file", "path", "name")


@dataclass(frozen=True, slots=True)
class ShownTensor(Shown):
    """A tensor: its row, first elements, and statistics over all of it."""

    what = "tensor"
    row: TensorRow
    head: tuple[Any, ...]
    """The first elements in row-major order; empty for kinds without plain elements."""
    statistics: Statistics | None
    parts: _Entries = ()
    """The parts of a tensor that is not strided."""

    def _to_fields(self) -> dict[str, Any]:
        """Return the fields of the row, the first elements, the statistics and the parts."""
        row = self.row.to_dict()
        # Every `Shown` has a path and a name already.
        row_fields = {key: row[key] for key in row if key not in ("path", "name")}
        stats = self.statistics
        return {
            **row_fields,
            "head": [to_json_value(number) for number in self.head],
            "min": to_json_value(stats.minimum) if stats else None,
            "max": to_json_value(stats.maximum) if stats else None,
            "mean": to_json_value(stats.mean) if stats else None,
            "nan": stats.nan if stats else None,
            "infinite": stats.infinite if stats else None,
            "parts": dict(self.parts),
        }


@dataclass(frozen=True, slots=True)
class ShownValue(Shown):
    """A plain value."""

    what = "value"
    type: str
    value: Any


@dataclass(frozen=True, slots=True)
class ShownObject(Shown):
    """An object of any other class: its arguments and content, in words."""

    what = "object"
    class_name: str
    arguments: tuple[str, ...]
    attributes: _Entries
    items: _Entries

    def _to_fields(self) -> dict[str, Any]:
        """Return the class, the arguments, the attributes and the items."""
        content = to_document(self, "file", "path", "name", "class_name")
        return {"class": self.class_name, **content}


@dataclass(frozen=True, slots=True)
class ShownContainer(Shown):
    """A dict, list or tuple: its entries, in words."""

    what = "container"
    type: str
    entries: _Entries


def show(
    checkpoint: Checkpoint,
    name: Any,
    *,
    count: int = HEAD,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Shown:
    """Show the entry at the path `name`; for a tensor, the first `count` elements.

    Raises:
        NotFound: no entry has this path (`AmbiguousName`: `name` is ambiguous).
        LimitExceeded: the strides of a tensor repeat more bytes than `limits` allows.
    """
    path, node = _find_module_attribute(checkpoint, str(name)) or resolve(checkpoint, name)
    node = with_late_values(node)  # values may be in another file
    file = without_query(checkpoint.path)
    if isinstance(node, TensorRef):
        return _show_tensor(file, path, node, count, progress, limits)
    identity = (file, to_json_path(path), name_of(path))
    if type_and_value := to_plain_value(node):
        return ShownValue(*identity, *type_and_value)
    if isinstance(node, (dict, list, tuple)):
        return ShownContainer(*identity, type_name(node), _list_entries(node))
    return _show_object(identity, node)


def _find_module_attribute(checkpoint: Checkpoint, name: str) -> tuple[Path, Any] | None:
    """Return path and value of a pickled module's attribute outside its state dict, or None.

    `model/names` is the attribute `names` of the module at `model`.
    """
    for section in checkpoint.sections:
        prefix = f"{section.name}/" if section.name else ""  # no prefix if it is the root
        if section.kind == "module" and name.startswith(prefix):
            attributes = section.holder.attributes
            attribute = name.removeprefix(prefix)
            if attribute in attributes:
                return (*section.path, attribute), attributes[attribute]
    return None


def _show_tensor(
    file: str,
    path: Path,
    tensor: TensorRef,
    count: int,
    progress: Progress | None,
    limits: Limits,
) -> ShownTensor:
    """Return a tensor with its first elements, and statistics if it has plain elements."""
    head: tuple[Any, ...] = ()
    stats = None
    if tensor.has_content and tensor.dtype not in PACKED:  # several elements may share a byte
        unrepeated = tensor.unrepeated
        RepeatedBytes(limits).add(path, unrepeated)  # raises if a few bytes expand to too many
        head = _read_head(tensor, count)
        stats = compute_statistics(tensor, Meter(progress, unrepeated.nbytes).advance)
    [row] = make_tensor_rows([(path, tensor)])
    parts = tuple((str(key), summarize(part)) for key, part in (tensor.parts or {}).items())
    return ShownTensor(file, row.path, row.name, row, head, stats, parts)


def _read_head(tensor: TensorRef, count: int) -> tuple[Any, ...]:
    """Return the first `count` elements, reading only the first blocks that contain them."""
    length = min(count, tensor.numel) * tensor.itemsize
    data = b""
    for block in tensor.content():
        data += block[: length - len(data)]
        if len(data) >= length:
            break
    numbers = decode(tensor.dtype, data)
    return tuple(map(bool, numbers)) if tensor.dtype == "bool" else tuple(numbers)


def _show_object(identity: tuple[str, tuple[str | int, ...], str], node: Any) -> ShownObject:
    """Return an object with its arguments, attributes and items, or a module with its state dict.

    `identity` is the file, path and name of the result. A state that is not a dict is shown as one
    attribute, `state`.
    """
    if not isinstance(node, Opaque):  # a class, function, device or storage
        summaries = (summarize(node),)
        return ShownObject(
            *identity, class_name_of(node), arguments=summaries, attributes=(), items=()
        )
    state_dict = to_model_state(node)
    if state_dict is not None:
        items = _list_entries(state_dict)
        return ShownObject(*identity, node.class_name, arguments=(), attributes=(), items=items)
    arguments = node.args if isinstance(node.args, tuple) else (node.args,)
    attributes: Any = node.attributes
    if not attributes and node.state is not None:
        attributes = {"state": node.state}
    return ShownObject(
        *identity,
        node.class_name,
        arguments=tuple(summarize(argument) for argument in arguments),
        attributes=_list_entries(attributes),
        items=tuple(_list_items(node.steps)),
    )


def _list_items(steps: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield key and text of the items of an object that is filled like a list, set or dict.

    `steps` are kind and items: `set` has pairs of a dict, `append` and `add` have plain items.
    """
    for kind, items in steps:
        if kind == "set":
            yield from ((_format_key(key), summarize(item)) for key, item in items)
        elif kind in ("append", "add"):
            yield from ((str(index), summarize(item)) for index, item in enumerate(items))


def _list_entries(node: Any) -> _Entries:
    """Return key and text of the entries of a container."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    return tuple((_format_key(key), summarize(value)) for key, value in pairs)


def _format_key(key: Any) -> str:
    """Return a key unchanged if it is text, else its repr."""
    return key if isinstance(key, str) else repr(key)


_ARRAY_CODES = {
    "float64": "d",
    "float32": "f",
    "int64": "q",
    "int32": "i",
    "int16": "h",
    "int8": "b",
    "uint64": "Q",
    "uint32": "I",
    "uint16": "H",
    "uint8": "B",
    "bool": "B",
    "bits1x8": "B",
    "bits2x4": "B",
    "bits4x2": "B",
    "bits8": "B",
    "bits16": "H",
    "qint8": "b",
    "quint8": "B",
    "qint32": "i",
    "quint4x2": "B",
    "quint2x4": "B",
}


@dataclass(frozen=True, slots=True)
class Statistics:
    """How many elements are NaN or infinite, and the range and mean of the finite elements.

    `minimum`, `maximum` and `mean` are None if no element is finite, and for complex numbers.
    """

    minimum: int | float | None
    maximum: int | float | None
    mean: float | None
    nan: int
    infinite: int


def decode(dtype: str, data: bytes) -> Sequence[Any]:
    """Return little-endian elements as numbers, two for each element of `float4_e2m1fn_x2`.

    `data` has only complete elements. Format rules: IEEE 754; bfloat16 is the upper half of a
    float32; the 8-bit floats as in c10/util/Float8_*.h and OCP MX for e8m0 and e2m1.
    """
    if dtype in _ARRAY_CODES:
        return _from_array(_ARRAY_CODES[dtype], data)
    if dtype == "float16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    if dtype == "bfloat16":  # the lower half of each float32 is zero
        widened = bytearray(len(data) * 2)
        widened[2::4], widened[3::4] = data[0::2], data[1::2]
        return _from_array("f", bytes(widened))
    if dtype in REAL_PARTS:
        parts = decode(REAL_PARTS[dtype], data)
        return [complex(*pair) for pair in zip(parts[0::2], parts[1::2], strict=True)]
    table = _list_small_floats(dtype)
    if dtype == "float4_e2m1fn_x2":
        return [table[nibble] for byte in data for nibble in (byte & 15, byte >> 4)]
    return [table[byte] for byte in data]


def compute_statistics(tensor: TensorRef, on_progress: BytesDone | None = None) -> Statistics:
    """Return the statistics of a tensor: minimum, maximum and mean of its finite elements.

    The tensor is read twice, first to count NaN and infinities; only once if it is complex, which
    has just these counts. Elements that a stride of zero repeats are read once. Sums are exact for
    integers. `on_progress` is called with the bytes of each block of the last pass.
    """
    is_complex = tensor.dtype in REAL_PARTS
    nan, infinite = count_nonfinite_elements(tensor, on_progress if is_complex else None)
    if is_complex:
        return Statistics(None, None, None, nan, infinite)
    low: Any = None
    high: Any = None
    total: Any = 0
    count = 0
    for block in tensor.unrepeated.content():
        numbers = decode(tensor.dtype, block)
        if nan or infinite:
            numbers = [number for number in numbers if math.isfinite(number)]
        if numbers:
            minimum, maximum = min(numbers), max(numbers)
            low, high = (min(low, minimum), max(high, maximum)) if count else (minimum, maximum)
            total += _sum_exactly(numbers)
            count += len(numbers)
        if on_progress is not None:
            on_progress(len(block))
    return Statistics(low, high, total / count if count else None, nan, infinite)


def _sum_exactly(numbers: Sequence[Any]) -> Any:
    """Return the sum, exact for integers; for floats `fsum` unless a partial sum overflows."""
    try:
        return sum(numbers) if isinstance(numbers[0], int) else math.fsum(numbers)
    except OverflowError:
        return sum(numbers)


def _from_array(code: str, data: bytes) -> array[Any]:
    """Return little-endian bytes as numbers of an `array` code."""
    numbers = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


@cache
def _list_small_floats(dtype: str) -> tuple[float, ...]:
    """Return the values of all bit patterns of a float of at most 8 bits."""
    if dtype == "float8_e8m0fnu":  # a power of two without a sign
        return (*(math.ldexp(1.0, code - 127) for code in range(255)), math.nan)
    if dtype == "float8_e5m2":  # the upper byte of a float16
        halves = b"".join(bytes((0, code)) for code in range(256))
        return struct.unpack("<256e", halves)
    if dtype == "float4_e2m1fn_x2":
        return tuple(
            _decode_minifloat(code, exponent_bits=2, mantissa_bits=1, bias=1) for code in range(16)
        )
    exponent_bits, bias, nan_codes = {
        "float8_e4m3fn": (4, 7, (0x7F, 0xFF)),
        "float8_e4m3fnuz": (4, 8, (0x80,)),
        "float8_e5m2fnuz": (5, 16, (0x80,)),
    }[dtype]
    values = [
        _decode_minifloat(code, exponent_bits, 7 - exponent_bits, bias) for code in range(256)
    ]
    for code in nan_codes:
        values[code] = math.nan
    return tuple(values)


def _decode_minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Return the value of a code of sign, exponent and mantissa, without infinities."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    if exponent:
        mantissa += 1 << mantissa_bits  # the leading 1 that is not stored
    else:
        exponent = 1  # of subnormal numbers
    return sign * math.ldexp(mantissa, exponent - bias - mantissa_bits)
