"""Names of repeated layers as one pattern: `layers.{0..31}.mlp.weight`."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

__all__ = ["Family", "families", "numbered", "ranges"]

_NUMBER = re.compile(r"(?<![^./])(0|[1-9][0-9]{0,8})(?![^./])")
_MOST_NUMBERS = 4  # of a name; hostile ones have a million, and each costs a look at the others

_Place = tuple[int, ...]
"""The numbers of a name, from left to right."""
_Box = tuple[tuple[int, ...], ...]
"""For each number of a pattern the values that it takes; every combination is a name."""


class Family(NamedTuple):
    """Names that differ only in numbers, in the order in which they came.

    `label` says exactly which: `layers.{0..1}.experts.{0..3,8}.w` is ten names. That of a single
    name is the name.
    """

    label: str
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    """As which of all the names each one came, counted from 0."""


def families(names: Iterable[tuple[str, Hashable]]) -> list[Family]:
    """Names of equal signature that differ only in whole components that are numbers, folded.

    Components end at a `.` or a `/`. Where a name has several numbers and not every combination of
    them is there, it is folded along the one that leaves fewest. Each name is in one family; the
    families are in the order of their first names.
    """
    groups: dict[tuple[Hashable, tuple[str, ...]], dict[_Place, list[tuple[int, str]]]] = {}
    for number, (name, signature) in enumerate(names):
        texts, place = numbered(name)
        group = groups.setdefault((signature, texts), {})
        group.setdefault(place, []).append((number, name))
    found = []
    for (_, texts), group in groups.items():
        for box in _boxes(list(group)):
            members = sorted(member for place in product(*box) for member in group[place])
            numbers, folded = zip(*members, strict=True)
            found.append(Family(_label(texts, box), folded, numbers))
    return sorted(found, key=lambda family: family.numbers[0])


def numbered(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """A name taken apart: the texts around its numbers, one more than those, and the numbers."""
    parts = _NUMBER.split(name, _MOST_NUMBERS)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))


def ranges(numbers: Iterable[int]) -> str:
    """`{0..3,8}` for 0, 1, 2, 3 and 8."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return "{" + ",".join(str(a) if a == b else f"{a}..{b}" for a, b in runs) + "}"


def _boxes(places: Sequence[_Place]) -> Iterator[_Box]:
    """Distinct places, parted into boxes that are full: few, not always the fewest there could be.

    The values that stand on one line along an axis make one side of a box; the lines with the same
    values are parted likewise, with one number less.
    """
    sides = tuple(tuple(dict.fromkeys(axis)) for axis in zip(*places, strict=True))
    if prod(map(len, sides)) == len(places):
        yield sides
        return
    axis = min(range(len(sides)), key=lambda axis: len({_without(p, axis) for p in places}))
    lines: dict[_Place, list[int]] = {}
    for place in places:
        lines.setdefault(_without(place, axis), []).append(place[axis])
    alike: dict[_Place, list[_Place]] = {}
    for rest, values in lines.items():
        alike.setdefault(tuple(sorted(values)), []).append(rest)
    for side, rests in alike.items():
        for box in _boxes(rests):
            yield (*box[:axis], side, *box[axis:])


def _without(place: _Place, axis: int) -> _Place:
    return place[:axis] + place[axis + 1 :]


def _label(texts: tuple[str, ...], box: _Box) -> str:
    label = texts[0]
    for side, text in zip(box, texts[1:], strict=True):
        label += (str(side[0]) if len(side) == 1 else ranges(side)) + text
    return label
