"""What a chunk of two tensors' elements says about their difference.

The functions are TorchScript as well as Python. Compiled, all operations on a block run in a row
without the interpreter's lock, so that two threads take half the time; as they stand they do the
same, more slowly. Flags are 1.0 and 0.0 in the type of the elements: torch makes tensors of bool
five times as slowly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["CHUNK", "Functions", "block", "figures", "fill", "functions"]

CHUNK = (1 << 15) - 64
"""Elements handled at a time: they stay in the processor's cache, and below what torch divides
among threads of its own."""


def _magnitudes(numbers: torch.Tensor, pairs: bool) -> torch.Tensor:
    """Of real numbers, or of complex ones as pairs of them."""
    if pairs:
        parts = numbers.view(-1, 2)
        return parts.select(1, 0).hypot(parts.select(1, 1))
    return numbers.abs()


def _any(flags: torch.Tensor, pairs: bool) -> torch.Tensor:
    """Of pairs, whether one of the two is 1.0."""
    return flags.view(-1, 2).amax(1) if pairs else flags


def _is_lost(total: float, numbers: torch.Tensor, least: float) -> bool:
    """Whether a sum of squares is one that the type cannot tell: too small, or not finite."""
    return not (least < total < float("inf")) and float(numbers.abs().amax()) != 0.0


def figures(
    a: torch.Tensor, b: torch.Tensor, gap: torch.Tensor, ratio: float, rtol: float, pairs: bool
) -> list[float]:
    """Figures of a chunk: `gap` is a - b. All three are used up; they hold at least one element.

    0: elements that differ, 1: all, 2 to 5: what `fill` counts; 6: the sum of the gaps, 7: of their
    squares, 8, 9: of the squares of a and of b, 10: of their products, right where the squares of a
    and b are much the same; 11: what is lost. Of all chunks the largest count: 12: the largest gap,
    13: its largest excess over `rtol` (if not negative) times |b|, 14: 1.0 if a ratio to |b| may be
    beyond `ratio`.
    """
    gap = _magnitudes(gap, pairs) if pairs else gap.abs_()
    count, total, largest = float(gap.numel()), float(gap.sum()), float(gap.amax())
    differ = float(gap.sign().sum())
    excess, beyond = -float("inf"), 0.0
    if rtol >= 0.0:
        excess = float(gap.sub(_magnitudes(b, pairs), alpha=rtol).amax())
    squares = float(gap.square_().sum())
    one, other = float(a.square_().sum()), float(b.square_().sum())
    if ratio < float("inf"):
        size = b.view(-1, 2).sum(1) if pairs else b
        over = float(gap.sub_(size, alpha=min(ratio * ratio, 1e30)).amax())
        beyond = float(not over < -1e-44)  # nearly 0: squares of small numbers are a guess
    found = [differ, count, 0.0, 0.0, 0.0, 0.0, total, squares, one, other]
    found.extend([(one + other - squares) / 2.0, 0.0, largest, excess, beyond])
    return found


def _largest_ratio(a: torch.Tensor, b: torch.Tensor, pairs: bool) -> float:
    """The largest |a - b| / |b|, 0.0 where both are 0."""
    ratios = _magnitudes(a - b, pairs).div_(_magnitudes(b, pairs))
    return float(ratios.nan_to_num_(0.0, float("inf")).amax())


def fill(
    a: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    pairs: bool,
    special: bool,
    equal_nan: bool,
) -> list[float]:
    """Put x into a and y into b; if `special`, 0 into both where either is not finite.

    Then 0: elements that differ, 1: finite pairs, 2, 3: NaN in a and in b, 4, 5: infinities.
    """
    a.copy_(x)
    b.copy_(y)
    if not special:
        return [0.0] * 0
    nan_a, nan_b = _any(a.clone().ne_(a), pairs), _any(b.clone().ne_(b), pairs)
    inf_a, inf_b = a.abs().eq_(float("inf")), b.abs().eq_(float("inf"))
    counts = [float(nan_a.sum()), float(nan_b.sum())]
    counts.extend([float(_any(inf_a, pairs).sum()), float(_any(inf_b, pairs).sum())])
    differ = float(_any(a.clone().ne_(b), pairs).sum())
    if equal_nan:
        differ -= float(nan_a.mul_(nan_b).sum())
    gone = a.mul(0.0).add_(b.mul(0.0))  # NaN where either is not finite
    if pairs:
        gone = gone.view(-1, 2).sum(1, keepdim=True).expand(-1, 2).contiguous().view(-1)
    a.add_(gone).nan_to_num_(0.0)
    b.add_(gone).nan_to_num_(0.0)
    finite = float(gone.eq_(gone).sum()) / (2 if pairs else 1)
    found = [differ, finite]
    found.extend(counts)
    return found


def block(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ratio: float,
    rtol: float,
    least: float,
    pairs: bool,
    special: bool,
    equal_nan: bool,
) -> list[float]:
    """`figures` of all elements of x and y, chunk by chunk, in the type of the buffers a and b.

    But 14 is the largest ratio, if it is beyond `ratio`.
    `pairs`: two of them are the parts of a complex number. Sums of squares up to `least` cannot be
    told from 0. Where NaN and infinities are not looked for (`special`), they are lost.
    """
    totals = [0.0] * 13 + [-float("inf"), ratio]
    for start in range(0, x.numel(), a.numel()):
        left, right = x[start : start + a.numel()], y[start : start + a.numel()]
        one, other = a[: left.numel()], b[: left.numel()]
        counts = fill(one, other, left, right, pairs, special, equal_nan)
        found = figures(one, other, one - other, totals[14], rtol, pairs)
        gaps, ones, others = found[7], found[8], found[9]
        alike = ones <= 4.0 * others and others <= 4.0 * ones
        if not (alike and least < ones < float("inf") and least < others < float("inf")):
            fill(one, other, left, right, pairs, special, equal_nan)
            found[10] = float((one * other).sum())
            found[11] = float(_is_lost(ones, one, least) or _is_lost(others, other, least))
        if not (least < gaps < float("inf")) and found[12] != 0.0:
            found[11] = 1.0
        if found[14] > 0.0:
            fill(one, other, left, right, pairs, special, equal_nan)
            found[14] = _largest_ratio(one, other, pairs)
        for at, count in enumerate(counts):
            found[at] = count
        for at, value in enumerate(found):
            totals[at] = totals[at] + value if at < 12 else max(totals[at], value)
    return totals


class Functions(NamedTuple):
    """The functions of this module that others call, the fast way if there is one."""

    block: Callable[..., list[float]]
    figures: Callable[..., list[float]]


@cache
def functions() -> Functions:
    """Compile them, which takes some hundredths of a second; once."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is to go one day
        try:
            return Functions(torch.jit.script(block), torch.jit.script(figures))
        except Exception:  # whatever a torch without it says; what it is for is speed
            return Functions(block, figures)
