"""Figures of tensors whose names differ only in numbers, as those of one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptool.patterns import families
from ckptool.tensors.moments import Moments
from ckptool.tensors.statistics import Histogram, Measures
from ckptool.words import counted

if TYPE_CHECKING:
    from ckptool.inspection.stats import TensorStats

__all__ = ["folded", "together"]

_MOST_NAMED = 8
_SAID: dict[str, Callable[[Measures], str]] = {
    "nan": lambda found: f"{found.nan:,} NaN of {counted(found.elements, 'element')}",
    "inf": lambda found: f"{found.infinite:,} infinite of {counted(found.elements, 'element')}",
    "all-zero": lambda found: "all zero",
    "constant": lambda found: f"constant, {found.minimum:.6g}",
}
"""What is said of one tensor of a folded row that has the flag."""


def folded(rows: Sequence[TensorStats]) -> Iterator[TensorStats]:
    """A row for each family of tensors of equal type, shape, device and kind, in order."""
    by_name: dict[str, list[TensorStats]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    heads = (
        (row.name, (row.row.dtype, row.row.shape, row.row.device, row.row.kind, row.reason))
        for row in rows
    )
    for family in families(dict(heads).items()):
        members = [row for name in family.names for row in by_name[name]]
        yield members[0] if len(members) == 1 else _one(family.label, members)


def _one(label: str, members: Sequence[TensorStats]) -> TensorStats:
    first = members[0]
    measures = [member.measures for member in members if member.measures is not None]
    flags = Counter(flag for member in members for flag in member.flags)
    return replace(
        first,
        row=replace(
            first.row,
            name=label,
            nbytes=sum(member.row.nbytes for member in members),
            numel=sum(member.row.numel for member in members),
        ),
        measures=together(measures) if measures else None,
        tie=None,
        flags=tuple(flags),
        flagged=tuple(flags.values()),
        remarks=(
            *_flagged(label, members),
            *(f"{member.name}: {remark}" for member in members for remark in member.remarks),
        ),
        count=len(members),
    )


def _flagged(label: str, members: Sequence[TensorStats]) -> Iterator[str]:
    """Which of the tensors are odd by themselves, where not all are."""
    for flag, said in _SAID.items():
        odd = [(one.name, one.measures) for one in members if one.measures and flag in one.flags]
        if len(odd) == len(members):
            continue
        for name, found in odd[:_MOST_NAMED]:
            yield f"{name}: {said(found)}"
        if len(odd) > _MOST_NAMED:
            yield f"{label}: {len(odd) - _MOST_NAMED:,} more are flagged {flag}"


def together(parts: Sequence[Measures]) -> Measures:
    """The figures of all elements of several tensors.

    The histogram is drawn from theirs: each bin is put where its middle lies.
    """
    moments = Moments()
    for part in parts:
        if part.mean is not None and part.std is not None:
            moments.add(Moments(part.finite, part.mean, part.std * part.std * part.finite))
    lows = [part.minimum for part in parts if part.minimum is not None]
    highs = [part.maximum for part in parts if part.maximum is not None]
    low, high = min(lows, default=None), max(highs, default=None)
    drawn = [part.histogram for part in parts if part.histogram is not None]
    return Measures(
        elements=sum(part.elements for part in parts),
        minimum=low,
        maximum=high,
        mean=moments.mean if lows else None,
        std=math.sqrt(moments.squares / moments.count) if lows else None,
        zeros=sum(part.zeros for part in parts),
        nan=sum(part.nan for part in parts),
        infinite=sum(part.infinite for part in parts),
        norm=math.hypot(*(part.norm for part in parts)),
        histogram=None if low is None or high is None else _merged(drawn, low, high),
    )


def _merged(parts: Sequence[Histogram], low: float, high: float) -> Histogram:
    bins = max(len(part.counts) for part in parts)
    counts = [0] * bins
    half = high / 2 - low / 2  # whole, it may be beyond float64
    for part in parts:
        step = (part.high / 2 - part.low / 2) / len(part.counts)
        for place, count in enumerate(part.counts):
            share = (part.low / 2 - low / 2 + step * (place + 0.5)) / half if half else 0.5
            counts[min(int(share * bins), bins - 1)] += count
    return Histogram(low, high, tuple(counts))
