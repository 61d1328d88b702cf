"""Stored elements as Python numbers, and their minimum, maximum and mean, without torch."""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ckptool.dtypes import BY_NAME

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
    """Over all elements: how many are NaN or infinite, and what the finite ones span.

    `minimum`, `maximum` and `mean` are None where no element is finite, and for complex numbers.
    """

    minimum: int | float | None
    maximum: int | float | None
    mean: float | None
    nan: int
    infinite: int


def decode(dtype: str, data: bytes) -> Sequence[Any]:
    """Little-endian elements as numbers; `float4_e2m1fn_x2` gives two for each element.

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


def statistics(dtype: str, blocks: Iterable[bytes]) -> Statistics:
    """One pass over the elements of a tensor; NaN and infinities are counted, not averaged."""
    if dtype in _COMPLEX_PARTS:
        return Statistics(None, None, None, *_oddities(_COMPLEX_PARTS[dtype], blocks))
    tally = _Tally()
    for block in _whole_elements(dtype, blocks):
        tally.add(decode(dtype, block))
    return tally.result()


class _Tally:
    """Running minimum, maximum and sum; exact for integers."""

    def __init__(self) -> None:
        self.low: Any = None
        self.high: Any = None
        self.total: Any = 0
        self.count = self.nan = self.infinite = 0

    def add(self, numbers: Sequence[Any]) -> None:
        total = _finite_sum(numbers)
        if total is None:
            finite = [number for number in numbers if math.isfinite(number)]
            nan = sum(1 for number in numbers if number != number)
            self.nan += nan
            self.infinite += len(numbers) - len(finite) - nan
            numbers, total = finite, _overflow_safe_sum(finite)
        if not numbers:
            return
        low, high = min(numbers), max(numbers)
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        self.total += total
        self.count += len(numbers)

    def result(self) -> Statistics:
        mean = self.total / self.count if self.count else None
        return Statistics(self.low, self.high, mean, self.nan, self.infinite)


def _finite_sum(numbers: Sequence[Any]) -> Any:
    """The sum, None where an element is not finite or the sum is too large for a float."""
    if not numbers or isinstance(numbers[0], int):
        return sum(numbers)
    try:
        total = math.fsum(numbers)
    except (OverflowError, ValueError):  # too large, or inf - inf
        return None
    return total if math.isfinite(total) else None


def _overflow_safe_sum(numbers: Sequence[float]) -> float:
    try:
        return math.fsum(numbers)
    except OverflowError:
        return sum(numbers)


def _oddities(dtype: str, blocks: Iterable[bytes]) -> tuple[int, int]:
    """How many complex numbers have a NaN part, and how many of the others an infinite one."""
    nan = infinite = 0
    for block in _whole_elements(dtype, blocks, 2):
        parts = decode(dtype, block)
        if _finite_sum(parts) is not None:
            continue
        for pair in zip(parts[0::2], parts[1::2], strict=True):
            if any(map(math.isnan, pair)):
                nan += 1
            elif any(map(math.isinf, pair)):
                infinite += 1
    return nan, infinite


def _whole_elements(dtype: str, blocks: Iterable[bytes], group: int = 1) -> Iterator[bytes]:
    """The same bytes, cut where elements (groups of them) end."""
    size = BY_NAME[dtype].itemsize * group
    rest = b""
    for block in blocks:
        data = rest + block if rest else block
        end = len(data) - len(data) % size
        rest = data[end:]
        yield data[:end] if rest else data


def _from_array(code: str, data: bytes) -> array[Any]:
    numbers = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


@cache
def _small_floats(dtype: str) -> tuple[float, ...]:
    """The value of every bit pattern of a float of at most 8 bits."""
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
    """Sign, exponent, mantissa; no infinities."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    if exponent:
        mantissa += 1 << mantissa_bits
    return sign * math.ldexp(mantissa, max(exponent, 1) - bias - mantissa_bits)
