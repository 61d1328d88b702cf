"""Tensors that are odd by themselves, and those that are unlike the others of their role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from ckptool.inspection.listing import TensorRow
from ckptool.inspection.values import shape_text
from ckptool.names import families
from ckptool.words import counted

if TYPE_CHECKING:
    from ckptool.tensors.statistics import Measures

__all__ = ["Oddity", "outliers", "own_flags"]

FEWEST = 3
"""Tensors of a role of which one can be unlike the others."""
MAJORITY = 2 / 3
"""The share of them that must be alike for the rest to be odd."""
TIMES = 10
"""How far off the median a norm or a standard deviation is odd."""

Subject = tuple[TensorRow, "Measures | None"]


@dataclass(frozen=True, slots=True)
class Oddity:
    """What one tensor has otherwise than the others of its role."""

    flags: tuple[str, ...]
    remark: str
    """Without a full stop."""


def own_flags(measures: Measures) -> tuple[str, ...]:
    """Return the flags of a tensor by itself: `nan`, `inf`, `all-zero`, `constant`.

    A single element is neither of the last two.
    """
    flags = [name for name, found in (("nan", measures.nan), ("inf", measures.infinite)) if found]
    if measures.elements > 1 and measures.finite == measures.elements:
        if measures.zeros == measures.elements:
            flags.append("all-zero")
        elif measures.minimum == measures.maximum:
            flags.append("constant")
    return tuple(flags)


def outliers(subjects: Sequence[Subject]) -> Iterator[tuple[int, Oddity]]:
    """Yield the flags of tensors that differ from the others of one role, by position.

    Of one role are tensors whose names differ only in numbers, with as many dimensions:
    `layers.{0..31}.mlp.weight`. Numbers are compared among those of one shape.
    """
    places: dict[str, list[int]] = {}
    for place, (row, _) in enumerate(subjects):
        places.setdefault(row.name, []).append(place)
    for family in families((name, None) for name in places):
        members = [place for name in family.names for place in places[name]]
        if len(members) < FEWEST:
            continue
        for role in _grouped(members, lambda place: len(subjects[place][0].shape)):
            yield from _other_headers(subjects, role, family.label)
        for role in _grouped(members, lambda place: subjects[place][0].shape):
            yield from _other_numbers(subjects, role, family.label)


def _grouped(members: Iterable[int], by: Callable[[int], Hashable]) -> list[list[int]]:
    """Return groups of equal members that are large enough to compare."""
    groups: dict[Hashable, list[int]] = {}
    for member in members:
        groups.setdefault(by(member), []).append(member)
    return [group for group in groups.values() if len(group) >= FEWEST]


_HEADERS: tuple[tuple[str, Callable[[TensorRow], Any], Callable[[Any], str]], ...] = (
    ("dtype", lambda row: row.dtype, str),
    ("shape", lambda row: row.shape, shape_text),
    ("device", lambda row: row.device, lambda device: f"on {device}"),
)
"""What tensors of a role have in common, and how it is said."""


def _other_headers(
    subjects: Sequence[Subject], role: list[int], label: str
) -> Iterator[tuple[int, Oddity]]:
    for word, read, said in _HEADERS:
        values = {place: read(subjects[place][0]) for place in role}
        [(usual, count)] = Counter(values.values()).most_common(1)
        if count == len(role) or count < MAJORITY * len(role):
            continue
        for place, value in values.items():
            if value != usual:
                remark = f"{said(value)}, where {count:,} of {label} are {said(usual)}"
                yield place, Oddity((f"{word}-outlier",), remark)


def _other_numbers(
    subjects: Sequence[Subject], role: list[int], label: str
) -> Iterator[tuple[int, Oddity]]:
    measured = [(place, found) for place in role if (found := subjects[place][1]) is not None]
    known = [(place, found) for place, found in measured if found.std is not None]
    if len(known) < FEWEST:
        return
    norms, deviations = [one.norm for _, one in known], [one.std or 0.0 for _, one in known]
    usual = {"norm": median(norms), "std": median(deviations)}
    for (place, _), norm, deviation in zip(known, norms, deviations, strict=True):
        own = {"norm": norm, "std": deviation}
        odd = [word for word in own if _is_far(own[word], usual[word])]
        if odd:
            facts = " and ".join(
                f"{word} {own[word]:.4g} against {usual[word]:.4g}" for word in odd
            )
            remark = f"{facts}, the median of {counted(len(known), 'tensor')} of {label}"
            yield place, Oddity(tuple(f"{word}-outlier" for word in odd), remark)


def _is_far(own: float, usual: float) -> bool:
    """Return True if a figure is far from the others; zeros have flags of their own."""
    return own > 0 and not usual / TIMES <= own <= usual * TIMES
