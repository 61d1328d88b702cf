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

__all__ = ["CHUNK", "Functions", "block", "figures", "fill", "functions", "magnitudes"]

CHUNK = (1 << 15) - 64
"""Elements handled at a time: they stay in the processor's cache, and below what torch divides
among threads of its own."""


def magnitudes(numbers: torch.Tensor, pairs: bool) -> torch.Tensor:
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
) -> tuple[float, float, float, float, float, float, float, bool]:
    """Figures of a chunk: `gap` is a - b. All three are used up; they hold at least one element.

    How many differ; the sum of the gaps, of their squares, of the squares of a and of b; the
    largest gap, the largest excess of one over `rtol` (if not negative) times |b|; whether one may
    be more than `ratio` times |b|.
    """
    gap = magnitudes(gap, pairs) if pairs else gap.abs_()
    total, largest = float(gap.sum()), float(gap.amax())
    differ = float(gap.sign().sum())
    excess, beyond = -float("inf"), False
    if rtol >= 0.0:
        excess = float(gap.sub(magnitudes(b, pairs), alpha=rtol).amax())
    squares = float(gap.square_().sum())
    ones, others = float(a.square_().sum()), float(b.square_().sum())
    if ratio < float("inf"):
        size = b.view(-1, 2).sum(1) if pairs else b
        over = float(gap.sub_(size, alpha=min(ratio * ratio, 1e30)).amax())
        beyond = not over < -1e-44  # nearly 0: squares of small numbers are a guess
    return differ, total, squares, ones, others, largest, excess, beyond


def _largest_ratio(a: torch.Tensor, b: torch.Tensor, pairs: bool) -> float:
    """The largest |a - b| / |b|, 0.0 where both are 0."""
    ratios = magnitudes(a - b, pairs).div_(magnitudes(b, pairs))
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

    Then 0: elements that differ, 1: finite pairs, 2, 3: NaN in a and in b, 4, 5: infinities
    (complex numbers with both are NaN).
    """
    a.copy_(x)
    b.copy_(y)
    if not special:
        return [0.0] * 0
    nan_a, nan_b = _any(a.clone().ne_(a), pairs), _any(b.clone().ne_(b), pairs)
    inf_a = _any(a.abs().eq_(float("inf")), pairs)
    inf_b = _any(b.abs().eq_(float("inf")), pairs)
    counts = [float(nan_a.sum()), float(nan_b.sum())]
    counts.extend([float((inf_a > nan_a).sum()), float((inf_b > nan_b).sum())])
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
    """Figures of all elements of x and y, chunk by chunk, in the type of the buffers a and b.

    `pairs`: two of them are the parts of a complex number. Sums of squares up to `least` cannot be
    told from 0. Where NaN and infinities are not looked for (`special`), they are lost.

    0 to 5: as `fill`; 6: the sum of the gaps, 7: of their squares, 8, 9: of the squares of a and of
    b, 10: of their products; 11: what is lost; 12: the largest gap, 13: the largest excess, 14: the
    largest ratio of a gap to |b|, at least `ratio`.
    """
    counts, lost = [0.0] * 6, 0.0
    total, squares, ones, others, product = 0.0, 0.0, 0.0, 0.0, 0.0
    largest, excess = 0.0, -float("inf")
    for start in range(0, x.numel(), a.numel()):
        left, right = x[start : start + a.numel()], y[start : start + a.numel()]
        one, other = a[: left.numel()], b[: left.numel()]
        known = fill(one, other, left, right, pairs, special, equal_nan)
        found = figures(one, other, one - other, ratio, rtol, pairs)
        differ, gaps, gap2, a2, b2, widest, over, beyond = found
        both = (a2 + b2 - gap2) / 2.0
        alike = a2 <= 4.0 * b2 and b2 <= 4.0 * a2
        if not (alike and least < a2 < float("inf") and least < b2 < float("inf")):
            fill(one, other, left, right, pairs, special, equal_nan)
            both = float((one * other).sum())
            lost += float(_is_lost(a2, one, least) or _is_lost(b2, other, least))
        if widest != 0.0 and not (least < gap2 < float("inf")):
            lost += 1.0
        if beyond:
            fill(one, other, left, right, pairs, special, equal_nan)
            ratio = max(ratio, _largest_ratio(one, other, pairs))
        for at, count in enumerate(known):
            counts[at] += count
        if not special:
            counts[0] += differ
            counts[1] += float(left.numel()) / (2 if pairs else 1)
        total, squares, ones, others = total + gaps, squares + gap2, ones + a2, others + b2
        product, largest, excess = product + both, max(largest, widest), max(excess, over)
    counts.extend([total, squares, ones, others, product, lost, largest, excess, ratio])
    return counts


class Functions(NamedTuple):
    """The functions of this module that others call, the fast way if there is one."""

    block: Callable[..., list[float]]
    figures: Callable[..., tuple[float, ...]]


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
