"""How many elements of a tensor are out of range in another type, counted without torch.

Magnitudes of IEEE 754 compare as the integers that their bits are: a piece is taken as one large
integer, and all its numbers are held against a bound at once.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from functools import lru_cache

from ckptool.model import TensorRef

__all__ = ["narrows", "out_of_range"]

_PIECE = 256 << 10
"""Bytes looked at as one."""

_FLOATS = {"float64": (64, "d"), "float32": (32, "f"), "bfloat16": (16, "f"), "float16": (16, "e")}
"""Bits of a number, and the code of `struct` for it; bfloat16 is the upper half of a float32."""

_BECOMES_INFINITE = {
    "float32": (2 - 2**-24) * 2.0**127,
    "bfloat16": (2 - 2**-8) * 2.0**127,
    "float16": 65520.0,
    "float8_e5m2": 61440.0,
}
"""The smallest magnitude that is rounded to infinity: half a step above the largest number."""

_INTEGERS = {
    "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I",
    "int64": "q", "uint64": "Q",
}  # fmt: skip
"""Their codes of `array`."""


def narrows(source: str, target: str) -> bool:
    """Whether a number of one type may be out of range in the other (as far as is counted)."""
    if source in _FLOATS and target in _BECOMES_INFINITE:
        return _bound(source, target) < _infinity(source)
    if source not in _INTEGERS:
        return False
    limits, own = _limits(target), _limits(source)
    return limits is not None and own is not None and (limits[0] > own[0] or limits[1] < own[1])


def out_of_range(ref: TensorRef, target: str) -> int:
    """How many finite elements become infinite, or integers wrap around, when cast to `target`.

    What strides repeat is read once and counted as often as it is there.

    Raises:
        UsageError: a tensor that has no plain array of bytes (`has_content`).
        CorruptFile: bytes that cannot be read.
    """
    once = ref.unrepeated
    if not once.numel or not narrows(ref.dtype, target):
        return 0
    count = _large if ref.dtype in _FLOATS else _beside
    found = 0
    for block in once.content():
        for start in range(0, len(block), _PIECE):
            found += count(block[start : start + _PIECE], ref.dtype, target)
    return found * (ref.numel // once.numel)


def _large(piece: bytes, source: str, target: str) -> int:
    """Finite numbers of a magnitude that the target has not."""
    width = _FLOATS[source][0]
    bound = _bound(source, target)
    size = width // 8
    if max(piece[size - 1 :: size].translate(_WITHOUT_SIGN)) < bound >> width - 8:
        return 0
    bits, lanes = int.from_bytes(piece, "little"), len(piece) // size
    sign = _repeated(1 << width - 1, width, lanes)
    magnitudes = bits & ~sign

    def at_least(least: int) -> int:
        carried = magnitudes + _repeated((1 << width - 1) - least, width, lanes)
        return (carried & sign).bit_count()

    return at_least(bound) - at_least(_infinity(source))


_WITHOUT_SIGN = bytes(code & 0x7F for code in range(256))


@lru_cache(maxsize=16)
def _repeated(bits: int, width: int, lanes: int) -> int:
    """The same number in every lane."""
    return int.from_bytes(bits.to_bytes(width // 8, "little") * lanes, "little")


@lru_cache(maxsize=16)
def _bound(source: str, target: str) -> int:
    """The bits of the smallest number of the source that is infinite in the target."""
    width, code = _FLOATS[source]
    value = _BECOMES_INFINITE[target]
    if source == "float64" and target != "float32":  # torch casts by way of float32
        value -= 2.0 ** (math.frexp(value)[1] - 25)
    try:
        packed = struct.pack(f"<{code}", value)
    except OverflowError:
        return _infinity(source)
    bits = int.from_bytes(packed, "little")
    if source == "bfloat16":
        return bits + 0xFFFF >> 16
    return bits + (struct.unpack(f"<{code}", packed)[0] < value) if width < 64 else bits


def _infinity(source: str) -> int:
    width, code = _FLOATS[source]
    return int.from_bytes(struct.pack(f"<{code}", float("inf"))[-width // 8 :], "little")


def _limits(dtype: str) -> tuple[int, int] | None:
    """The smallest and the largest integer of a type; None where it is no type of integers."""
    if dtype == "bool":
        return 0, 1
    if dtype not in _INTEGERS:
        return None
    bits = 8 * array(_INTEGERS[dtype]).itemsize
    return (0, (1 << bits) - 1) if dtype[0] == "u" else (-(1 << bits - 1), (1 << bits - 1) - 1)


def _beside(piece: bytes, source: str, target: str) -> int:
    """Integers that the target has not."""
    low, high = _limits(target) or (0, 0)
    numbers = array(_INTEGERS[source], piece)
    if sys.byteorder == "big":
        numbers.byteswap()
    if low <= min(numbers) and max(numbers) <= high:
        return 0
    return sum(not low <= number <= high for number in numbers)
