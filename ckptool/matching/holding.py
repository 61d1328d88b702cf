"""Whether every number of one element type is one of another."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["holds"]

_FLOATS = {
    "float64": (53, -1074, 1023),
    "float32": (24, -149, 127),
    "float16": (11, -24, 15),
    "bfloat16": (8, -133, 127),
    "float8_e4m3fn": (4, -9, 8),
    "float8_e5m2": (3, -16, 15),
    "float8_e4m3fnuz": (4, -10, 7),
    "float8_e5m2fnuz": (3, -17, 15),
    "float8_e8m0fnu": (1, -127, 127),
}
"""Binary digits of a number, and the exponents of the smallest and of the largest."""
_WITHOUT_ZERO = "float8_e8m0fnu"
_INTEGERS = {
    "bool": (0, 1),
    **{f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
}
"""The smallest and the largest number."""
_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
"""The type of the two parts."""


@lru_cache(maxsize=256)
def holds(wide: str, narrow: str) -> bool:
    """Whether a cast from `narrow` to `wide` changes no number; no for types not known of."""
    if wide == narrow:
        return True
    if wide in _COMPLEX:
        return holds(_COMPLEX[wide], _COMPLEX.get(narrow, narrow))
    if narrow in _INTEGERS:
        least, most = _INTEGERS[narrow]
        if wide in _INTEGERS:
            return _INTEGERS[wide][0] <= least and most <= _INTEGERS[wide][1]
        if wide not in _FLOATS or wide == _WITHOUT_ZERO:
            return False
        digits, _, largest = _FLOATS[wide]
        return most.bit_length() <= digits and (-least).bit_length() - 1 <= largest
    if narrow not in _FLOATS or wide not in _FLOATS or wide == _WITHOUT_ZERO:
        return False
    (digits, small, large), (own_digits, own_small, own_large) = _FLOATS[wide], _FLOATS[narrow]
    return own_digits <= digits and small <= own_small and own_large <= large
