"""How many elements of a tensor are NaN or infinite, counted without torch.

The exponent of a NaN or an infinity is all ones. One slice with a step gives the highest byte of
each number of a piece, and a search in it says whether there can be any. Only where there can be,
the piece is taken as one large integer, and what is asked of a number is asked of all. Types
of one byte have few codes, which are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

from ckptool.model import TensorRef

__all__ = ["is_floating", "is_infinity_or_zero", "nonfinite"]

Told = Callable[[int], None]
"""Told how many more bytes have been read."""


_LETTERS: dict[int, Literal["H", "I", "Q"]] = {2: "H", 4: "I", 8: "Q"}
"""The code of an unsigned number of so many bytes (`memoryview.cast`)."""
_PIECE = 256 << 10
"""Bytes looked at as one: they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A binary format of IEEE 754, sizes in bits; `parts` numbers are one element."""

    width: int
    mantissa: int
    parts: int = 1

    def count(self, piece: bytes) -> tuple[int, int]:
        """How many elements of a piece are NaN, and how many others infinite."""
        size = self.width // 8
        highest = piece[size - 1 :: size]
        if not any(code in highest for code in _codes_of_ones(self)):
            return 0, 0
        masks = _masks(self, len(piece) // size)
        bits = int.from_bytes(piece, "little")
        odd = ((bits & masks.exponent) + masks.one) & masks.sign
        fraction = ((bits & masks.fraction) + masks.fraction) & masks.one
        nan = odd & fraction << (self.width - 1 - self.mantissa)
        for part in range(1, self.parts):
            nan, odd = nan | nan >> self.width * part, odd | odd >> self.width * part
        found = (nan & masks.first).bit_count()
        return found, (odd & masks.first).bit_count() - found


@dataclass(frozen=True, slots=True)
class _Masks:
    """Bits of every number of a piece; `first` are the signs of the first one of each element."""

    sign: int
    exponent: int
    fraction: int
    one: int
    """The lowest of the exponent."""
    first: int


@lru_cache(maxsize=16)
def _masks(form: _Form, count: int) -> _Masks:
    """The masks of a piece of `count` numbers."""

    def repeated(bits: int, numbers: int = 1) -> int:
        pattern = bits.to_bytes(form.width // 8 * numbers, "little")
        return int.from_bytes(pattern * (count // numbers), "little")

    sign, one = 1 << form.width - 1, 1 << form.mantissa
    return _Masks(
        repeated(sign), repeated(sign - one), repeated(one - 1), repeated(one),
        repeated(sign, form.parts),
    )  # fmt: skip


@cache
def _codes_of_ones(form: _Form) -> tuple[bytes, ...]:
    """The highest bytes of a number in which every bit of the exponent that is there is one."""
    exponent = (1 << form.width - 1) - (1 << form.mantissa) >> form.width - 8
    return tuple(bytes([code]) for code in range(256) if code & exponent == exponent)


@dataclass(frozen=True, slots=True)
class _Codes:
    """A format of one byte, by its codes of NaN and of infinities."""

    nan: bytes
    infinite: bytes = b""

    def count(self, piece: bytes) -> tuple[int, int]:
        """How many elements of a piece are NaN, and how many infinite."""
        nan, infinite = (
            sum(piece.count(code) for code in codes if code in piece)
            for codes in (self.nan, self.infinite)
        )
        return nan, infinite


_FORMS: dict[str, _Form | _Codes] = {
    "float64": _Form(64, 52),
    "float32": _Form(32, 23),
    "float16": _Form(16, 10),
    "bfloat16": _Form(16, 7),
    "complex128": _Form(64, 52, 2),
    "complex64": _Form(32, 23, 2),
    "complex32": _Form(16, 10, 2),
    "float8_e5m2": _Codes(b"\x7d\x7e\x7f\xfd\xfe\xff", b"\x7c\xfc"),
    "float8_e4m3fn": _Codes(b"\x7f\xff"),
    "float8_e4m3fnuz": _Codes(b"\x80"),
    "float8_e5m2fnuz": _Codes(b"\x80"),
    "float8_e8m0fnu": _Codes(b"\xff"),
}
"""Every type that has NaN; the codes are those of c10/util/Float8_*.h, and of OCP MX for e8m0."""


def is_floating(dtype: str) -> bool:
    """Whether numbers of that type can be NaN or infinite."""
    return dtype in _FORMS


def is_infinity_or_zero(ref: TensorRef) -> bool:
    """Whether every element is an infinity or zero, as in a mask that is added.

    It stops at the first other number. False for complex numbers, and where there are no bytes.

    Raises:
        CorruptFile: bytes that cannot be read.
    """
    form = _FORMS.get(ref.dtype)
    if not isinstance(form, _Form) or form.parts > 1 or not ref.has_content:
        return False
    size = form.width // 8
    sign, infinity = 1 << form.width - 1, (1 << form.width - 1) - (1 << form.mantissa)
    allowed = {code.to_bytes(size, "little") for code in (0, sign, infinity, sign | infinity)}
    native = {int.from_bytes(code, sys.byteorder) for code in allowed}
    return all(
        native.issuperset(memoryview(block)[start : start + _PIECE].cast(_LETTERS[size]))
        for block in ref.unrepeated.content()
        for start in range(0, len(block), _PIECE)
    )


def nonfinite(ref: TensorRef, told: Told | None = None) -> tuple[int, int]:
    """How many elements are NaN, and how many of the others infinite; parts of a complex count.

    What strides repeat is read once and counted as often as it is there. `told` is called with the
    bytes of each block.

    Raises:
        UsageError: a tensor that has no plain array of bytes (`has_content`).
        CorruptFile: bytes that cannot be read.
    """
    form = _FORMS.get(ref.dtype)
    once = ref.unrepeated
    if form is None or not once.numel:
        return 0, 0
    nan = infinite = 0
    for block in once.content():
        for start in range(0, len(block), _PIECE):
            found = form.count(block[start : start + _PIECE])
            nan, infinite = nan + found[0], infinite + found[1]
        if told is not None:
            told(len(block))
    times = ref.numel // once.numel
    return nan * times, infinite * times
