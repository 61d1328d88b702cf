"""How many elements of a tensor are NaN or infinite, counted without torch.

The exponent of a NaN or an infinity is all ones. One slice with a step gives the highest byte of
each number of a piece, and a search in it says whether there can be any. Only where there can be,
each number is looked at. Types of one byte have few codes, which are counted.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from dataclasses import dataclass

from ckptool.files.source import Told
from ckptool.model import TensorRef

__all__ = ["is_floating", "is_infinity_or_zero", "nonfinite"]

_LETTERS = {2: "H", 4: "I", 8: "Q"}
"""The code of an unsigned number of so many bytes (`array`)."""
_PIECE = 64 << 10
"""Bytes looked at as one: they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A binary format of IEEE 754, sizes in bits; `parts` numbers are one element."""

    width: int
    mantissa: int
    parts: int = 1

    @property
    def infinity(self) -> int:
        """The bits of infinity: every bit of the exponent is one."""
        return (1 << self.width - 1) - (1 << self.mantissa)

    def numbers(self, piece: bytes) -> array[int]:
        """Return the bits of each number of a piece."""
        made = array(_LETTERS[self.width // 8], piece)
        if sys.byteorder == "big":
            made.byteswap()
        return made

    def count(self, piece: bytes) -> tuple[int, int]:
        """Return how many elements of a piece are NaN, and how many others infinite."""
        size = self.width // 8
        top = self.infinity >> self.width - 8
        highest = piece[size - 1 :: size]
        if not any(code in highest for code in range(256) if code & top == top):
            return 0, 0
        numbers = self.numbers(piece)
        elements = zip(*(numbers[part :: self.parts] for part in range(self.parts)), strict=True)
        infinity, nan, infinite = self.infinity, 0, 0
        for parts, times in Counter(elements).items():
            largest = max(bits & ~(1 << self.width - 1) for bits in parts)
            nan += times * (largest > infinity)
            infinite += times * (largest == infinity)
        return nan, infinite


_FORMS = {
    "float64": _Form(64, 52),
    "float32": _Form(32, 23),
    "float16": _Form(16, 10),
    "bfloat16": _Form(16, 7),
    "complex128": _Form(64, 52, 2),
    "complex64": _Form(32, 23, 2),
    "complex32": _Form(16, 10, 2),
}
_CODES = {
    "float8_e5m2": (b"\x7d\x7e\x7f\xfd\xfe\xff", b"\x7c\xfc"),
    "float8_e4m3fn": (b"\x7f\xff", b""),
    "float8_e4m3fnuz": (b"\x80", b""),
    "float8_e5m2fnuz": (b"\x80", b""),
    "float8_e8m0fnu": (b"\xff", b""),
}
"""The codes of NaN and of infinities, after c10/util/Float8_*.h, and OCP MX for e8m0."""


def is_floating(dtype: str) -> bool:
    """Return whether numbers of a type can be NaN or infinite."""
    return dtype in _FORMS or dtype in _CODES


def is_infinity_or_zero(ref: TensorRef) -> bool:
    """Return whether every element is an infinity or zero, as in a mask that is added.

    The search stops at the first other number. False for complex numbers, and without bytes.

    Raises:
        CorruptFile: bytes that cannot be read.
    """
    form = _FORMS.get(ref.dtype)
    if form is None or form.parts > 1 or not ref.has_content:
        return False
    sign = 1 << form.width - 1
    allowed = {0, sign, form.infinity, sign | form.infinity}
    return all(
        allowed.issuperset(form.numbers(block[start : start + _PIECE]))
        for block in ref.unrepeated.content()
        for start in range(0, len(block), _PIECE)
    )


def nonfinite(ref: TensorRef, told: Told | None = None) -> tuple[int, int]:
    """Return how many elements are NaN, and how many others infinite; parts of a complex count.

    Elements that strides repeat are read once and counted each time. `told` is called with the
    bytes of each block.

    Raises:
        UsageError: a tensor that has no plain array of bytes (`has_content`).
        CorruptFile: bytes that cannot be read.
    """
    once = ref.unrepeated
    if not is_floating(ref.dtype) or not once.numel:
        return 0, 0
    nan = infinite = 0
    for block in once.content():
        for start in range(0, len(block), _PIECE):
            piece = block[start : start + _PIECE]
            if ref.dtype in _FORMS:
                more = _FORMS[ref.dtype].count(piece)
                nan, infinite = nan + more[0], infinite + more[1]
            else:
                nans, infinities = _CODES[ref.dtype]
                nan += sum(piece.count(code) for code in nans if code in piece)
                infinite += sum(piece.count(code) for code in infinities if code in piece)
        if told is not None:
            told(len(block))
    times = ref.numel // once.numel
    return nan * times, infinite * times
