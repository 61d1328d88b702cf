"""Whether every number of one element type is one of another."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["holds"]

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
    # Imported here: of most files no type changes.
    from ckptool.tensors.floats import FLOATS, is_exact

    if wide in _COMPLEX:
        return holds(_COMPLEX[wide], _COMPLEX.get(narrow, narrow))
    if narrow in FLOATS:
        return wide in FLOATS and is_exact(narrow, wide)
    if narrow not in _INTEGERS:
        return False
    least, most = _INTEGERS[narrow]
    if wide in _INTEGERS:
        return _INTEGERS[wide][0] <= least and most <= _INTEGERS[wide][1]
    kind = FLOATS.get(wide)
    if kind is None or not kind.signed:
        return False
    return most.bit_length() <= kind.digits and -least <= kind.largest
