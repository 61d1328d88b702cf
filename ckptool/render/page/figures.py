"""Numbers as the page has them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptool.tensors.statistics import Histogram

__all__ = ["DIGITS", "bars", "figure"]

DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_"
"""One digit for the height of a bar, as `histogram.js` reads it."""

_EXACT = 1 << 53  # beyond this the numbers of JavaScript have holes


def figure(value: Any) -> float | int | str | None:
    """Six digits of a number; a word where JSON has no number, None where there is none."""
    if value is None or isinstance(value, complex):
        return None
    if isinstance(value, int) and abs(value) < _EXACT:
        return int(value)
    number = float(f"{value:.6g}")
    if not math.isfinite(number):
        return str(number)
    return int(number) if number.is_integer() and abs(number) < _EXACT else number


def bars(histogram: Histogram) -> str:
    """The heights of the bars, a digit each; where there are any elements it is above zero."""
    most, steps = max(histogram.counts, default=0), len(DIGITS) - 1
    return "".join(
        DIGITS[max(1, steps * count // most)] if count else DIGITS[0] for count in histogram.counts
    )
