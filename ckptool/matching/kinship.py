"""Names of the two sides that end alike, under equal shapes: one may have replaced the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from ckptool.matching.accounts import Ledger
from ckptool.matching.families import Numbers, numbers_of
from ckptool.matching.slots import Slot
from ckptool.matching.swaps import MOST_PARTS
from ckptool.model import Shape

__all__ = ["Kin", "kin_of", "sampled"]

_MOST_NAMES = 2_000
"""That are asked what they are like; where there are more, some of each kind."""
_MOST_KIN = 8
"""Names that one name is like; where there are more it says nothing."""

_NUMBER = re.compile(r"\.[0-9]+(?=\.)")
"""A component that is a number, with the dot before it, where there are dots around the name."""


@dataclass(frozen=True, slots=True)
class Kin:
    """The names of the other side that a name has most of its end in common with."""

    names: tuple[str, ...]
    crowded: bool = False
    """There are too many to tell."""

    def has(self, name: str) -> bool:
        """Whether a name may be among them."""
        return self.crowded or name in self.names


def sampled(names: Iterable[str], slots: Mapping[str, Slot]) -> tuple[list[str], bool]:
    """Names of each kind, a few where there are many, and whether that is all the kinds.

    Names of a kind have one shape and differ in numbers only.
    """
    kinds: dict[tuple[str, Shape], list[str]] = {}
    for name in names:
        shape = slots[name].shape
        if shape is not None and name.count(".") < MOST_PARTS:
            kind = _NUMBER.sub("#", f".{name}."), shape
            if kind not in kinds:
                kinds[kind] = []
            kinds[kind].append(name)
    if len(kinds) > _MOST_NAMES:
        return [alike[0] for alike in kinds.values()][:: len(kinds) // _MOST_NAMES + 1], False
    most = _MOST_NAMES // max(1, len(kinds))
    found: list[str] = []
    for alike in kinds.values():
        found += alike[:: -(-len(alike) // most)]
    return found, True


def kin_of(
    names: Iterable[str],
    slots: Mapping[str, Slot],
    others: Mapping[str, Slot],
    fits: Callable[[str, str], bool],
    ledger: Ledger,
) -> dict[str, Kin]:
    """For each of the names, those of `others` that end most like it and have its shape.

    Of several, those with the same numbers. A shape that is not known counts as the same.

    Raises:
        OutOfBudget: there is more to look at than real names have.
    """
    names = list(names)
    index = _index(names, slots, others, ledger)
    return {
        name: found
        for name in names
        if (found := _nearest(name, slots[name].shape, index, fits)) is not None
    }


class _Ending:
    """The names that end alike, under one shape, and those of them that have some numbers."""

    __slots__ = ("_names", "_numbered", "last", "longer", "place")

    def __init__(self, place: int) -> None:
        self.place = place
        """In the order in which they are looked for."""
        self.last: list[str] = []
        """Those that have no longer end in common with what is asked for."""
        self.longer: list[_Ending] = []
        self._names: list[str] | None = None
        self._numbered: dict[Callable[[str], Numbers], dict[Numbers, list[str]]] = {}

    @property
    def names(self) -> list[str]:
        """All of them; the list of what is longer where there is nothing else."""
        if self._names is None:
            self.longer.sort(key=lambda ending: -ending.place)
            parts = [one for ending in self.longer if (one := ending.names)]
            if self.last:
                parts.insert(0, self.last)
            self._names = parts[0] if len(parts) == 1 else [name for one in parts for name in one]
        return self._names

    def numbered(self, numbers: Numbers, count: Callable[[str], Numbers]) -> list[str]:
        """Those with some numbers, as `count` finds them in a name."""
        if len(self.names) <= _MOST_KIN:
            return [name for name in self.names if count(name) == numbers]
        if count not in self._numbered:
            self._numbered[count] = {}
            for name in self.names:
                self._numbered[count].setdefault(count(name), []).append(name)
        return self._numbered[count].get(numbers, [])


_Index = dict[Shape | None, dict[str, _Ending]]


def _index(
    names: Iterable[str], slots: Mapping[str, Slot], others: Mapping[str, Slot], ledger: Ledger
) -> _Index:
    """What of `others` ends like some of the names."""
    asked: dict[Shape | None, dict[str, int]] = {None: {}}
    every = any(slot.shape is None for slot in others.values())
    for name in names:
        known = _rounded(slots[name].shape)
        for shape in {known, None} if every else {known}:
            places = asked.setdefault(shape, {})
            for end in _ends(name):
                places.setdefault(end, len(places))
    index: _Index = {shape: {} for shape in asked}
    entries = 0
    for other, slot in others.items():
        shape = _rounded(slot.shape)
        if not asked.get(shape):
            continue
        places, ends = asked[shape], index[shape]
        at = len(other)
        last = None
        while at >= 0:  # as `_ends`; here most of the time goes
            at = other.rfind(".", 0, at)
            end = other[at + 1 :]
            found = ends.get(end)
            if found is None:
                if end not in places:
                    break
                found = ends[end] = _Ending(places[end])
                if last is not None:
                    last.longer.append(found)
            last = found
            entries += 1
        if last is not None:
            last.last.append(other)
    ledger.spend(entries)
    return index


def _ends(name: str) -> Iterator[str]:
    """What a name ends with, in whole components, the shortest first."""
    at = len(name)
    for _ in range(MOST_PARTS):
        at = name.rfind(".", 0, at)
        yield name[at + 1 :]
        if at < 0:
            return


def _components(name: str) -> Numbers:
    """The numbers that stand between dots: `fc1` is a word, where all numbers say too much."""
    return tuple(filter(str.isdecimal, name.split(".")))


def _rounded(shape: Shape | None) -> Shape | None:
    """A scalar may be [1] in old files."""
    return (1,) if shape == () else shape


def _nearest(
    name: str, shape: Shape | None, index: _Index, fits: Callable[[str, str], bool]
) -> Kin | None:
    all_numbers, numbers = numbers_of(name), _components(name)
    tables = [table for key in (_rounded(shape), None) if (table := index[key])]
    for end in reversed(list(_ends(name))):
        found = [at for table in tables if (at := table.get(end)) and at.names]
        if not found:
            continue
        alike = (other for at in found for other in at.numbered(all_numbers, numbers_of))
        every = (other for at in found for other in at.names)
        below = (other for at in found for other in at.numbered(numbers, _components))
        is_crowded = False
        for group in (alike, every, below):
            seen = list(islice(group, 4 * _MOST_KIN))
            kin = tuple(other for other in seen if other != name and fits(name, other))
            if len(kin) > _MOST_KIN or len(seen) == 4 * _MOST_KIN:
                is_crowded = True
            elif kin:
                return Kin(kin)
        if is_crowded:
            return Kin((), crowded=True)
    return None
