"""What the floating types that are cast from and to can express."""

from __future__ import annotations

import sys
from dataclasses import dataclass

__all__ = ["FLOATS", "SATURATES", "is_exact"]


@dataclass(frozen=True, slots=True)
class FloatType:
    """What a floating type can express.

    Sources: IEEE 754, the OCP specification of 8-bit and microscaling formats, and the notes on the
    `fnuz` types in c10/util/Float8_*.h.
    """

    digits: int
    """Significant bits, the implicit one too."""
    lowest: int
    """Exponent of two of the smallest positive value."""
    largest: float
    infinite: bool = True
    """Whether it has infinities."""
    signed: bool = True
    """Whether it has signs, and a zero."""


FLOATS = {
    "float64": FloatType(53, -1074, sys.float_info.max),
    "float32": FloatType(24, -149, (2 - 2.0**-23) * 2.0**127),
    "float16": FloatType(11, -24, 65504.0),
    "bfloat16": FloatType(8, -133, (2 - 2.0**-7) * 2.0**127),
    "float8_e4m3fn": FloatType(4, -9, 448.0, infinite=False),
    "float8_e5m2": FloatType(3, -16, 57344.0),
    "float8_e4m3fnuz": FloatType(4, -10, 240.0, infinite=False),
    "float8_e5m2fnuz": FloatType(3, -17, 57344.0, infinite=False),
    "float8_e8m0fnu": FloatType(1, -127, 2.0**127, infinite=False, signed=False),
}
"""The types that are cast from and to."""

SATURATES = {"float8_e4m3fn": 464.0}
"""Types of which torch makes what is too large the largest: beyond this nothing rounds to it."""


def is_exact(source: str, target: str) -> bool:
    """Whether every value of the one type is one of the other."""
    old, new = FLOATS[source], FLOATS[target]
    return old == new or (
        new.digits >= old.digits
        and new.lowest <= old.lowest
        and new.largest >= old.largest
        and (new.infinite or not old.infinite)
        and new.signed
    )
