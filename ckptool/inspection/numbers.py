"""Stored elements as Python numbers, and their minimum, maximum and mean, without torch."""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ckptool.model import TensorRef
from ckptool.tensors.nonfinite import nonfinite
from ckptool.tensors.sameness import Told

__all__ = ["Statistics", "decode", "statistics"]

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
_COMPLEX_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


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

    `data` holds whole elements. Format rules: IEEE 754; bfloat16 is the upper half of a float32;
    the 8-bit floats as in c10/util/Float8_*.h and OCP MX for e8m0 and e2m1.
    """
    if dtype in _ARRAY_CODES:
        return _from_array(_ARRAY_CODES[dtype], data)
    if dtype == "float16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    if dtype == "bfloat16":
        wide = bytearray(len(data) * 2)
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        return _from_array("f", bytes(wide))
    if dtype in _COMPLEX_PARTS:
        parts = decode(_COMPLEX_PARTS[dtype], data)
        return [complex(*pair) for pair in zip(parts[0::2], parts[1::2], strict=True)]
    table = _small_floats(dtype)
    if dtype == "float4_e2m1fn_x2":
        return [table[nibble] for byte in data for nibble in (byte & 15, byte >> 4)]
    return [table[byte] for byte in data]


def statistics(tensor: TensorRef, told: Told | None = None) -> Statistics:
    """Read a tensor twice: count NaN and infinities, then span the other elements.

    Elements that a stride of zero repeats are read once. Sums are exact for integers. `told` is
    called with the bytes of each block of the last pass.
    """
    is_complex = tensor.dtype in _COMPLEX_PARTS
    nan, infinite = nonfinite(tensor, told if is_complex else None)
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
            least, most = min(numbers), max(numbers)
            low, high = (min(low, least), max(high, most)) if count else (least, most)
            total += _sum(numbers)
            count += len(numbers)
        if told is not None:
            told(len(block))
    return Statistics(low, high, total / count if count else None, nan, infinite)


def _sum(numbers: Sequence[Any]) -> Any:
    try:
        return sum(numbers) if isinstance(numbers[0], int) else math.fsum(numbers)
    except OverflowError:
        return sum(numbers)


def _from_array(code: str, data: bytes) -> array[Any]:
    numbers = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


@cache
def _small_floats(dtype: str) -> tuple[float, ...]:
    """Return the value of every bit pattern of a float of at most 8 bits."""
    if dtype == "float8_e8m0fnu":
        return (*(math.ldexp(1.0, code - 127) for code in range(255)), math.nan)
    if dtype == "float8_e5m2":
        return tuple(struct.unpack("<256e", bytes(b for code in range(256) for b in (0, code))))
    if dtype == "float4_e2m1fn_x2":
        return tuple(_minifloat(code, 2, 1, 1) for code in range(16))
    exponent, bias = {"float8_e4m3fn": (4, 7), "float8_e4m3fnuz": (4, 8)}.get(dtype, (5, 16))
    values = [_minifloat(code, exponent, 7 - exponent, bias) for code in range(256)]
    for code in (0x7F, 0xFF) if dtype == "float8_e4m3fn" else (0x80,):
        values[code] = math.nan
    return tuple(values)


def _minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Return the value of a code of sign, exponent and mantissa, without infinities."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    if exponent:
        mantissa += 1 << mantissa_bits
    return sign * math.ldexp(mantissa, max(exponent, 1) - bias - mantissa_bits)
