"""Names of the two sides that end alike, under equal shapes: one may have replaced the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from ckptool.matching.accounts import Ledger
from ckptool.matching.slots import Slot
from ckptool.matching.swaps import ANY_NUMBER, MOST_PARTS
from ckptool.model import Shape

__all__ = ["Kin", "kin_of", "sampled"]

_MOST_NAMES = 4_000
"""That are asked what they are like; where there are more, some of each kind."""
_MOST_KIN = 8
"""Names that one name is like; where there are more it says nothing."""

_Numbers = tuple[str, ...]


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
            kinds.setdefault((ANY_NUMBER.sub("#", name), shape), []).append(name)
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

    __slots__ = ("_numbered", "names")

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbered: dict[_Numbers, list[str]] | None = None

    def numbered(self, numbers: _Numbers) -> list[str]:
        if self._numbered is None:
            self._numbered = {}
            for name in self.names:
                self._numbered.setdefault(_numbers(name), []).append(name)
        return self._numbered.get(numbers, [])


_Index = dict[Shape | None, dict[str, _Ending]]


def _index(
    names: Iterable[str], slots: Mapping[str, Slot], others: Mapping[str, Slot], ledger: Ledger
) -> _Index:
    """What of `others` ends like some of the names."""
    index: _Index = {None: {}}
    for name in names:
        ends = index.setdefault(_rounded(slots[name].shape), {})
        for end in _ends(name):
            ends.setdefault(end, _Ending())
            index[None].setdefault(end, _Ending())
    entries = 0
    for other, slot in others.items():
        ends = index.get(_rounded(slot.shape), {})
        at = len(other)
        while ends and at >= 0:  # as `_ends`; here most of the time goes
            at = other.rfind(".", 0, at)
            found = ends.get(other[at + 1 :])
            if found is None:
                break
            found.names.append(other)
            entries += 1
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


def _numbers(name: str) -> _Numbers:
    return tuple(ANY_NUMBER.findall(name))


def _rounded(shape: Shape | None) -> Shape | None:
    """A scalar may be [1] in old files."""
    return (1,) if shape == () else shape


def _nearest(
    name: str, shape: Shape | None, index: _Index, fits: Callable[[str, str], bool]
) -> Kin | None:
    numbers = _numbers(name)
    for end in reversed(list(_ends(name))):
        found = [at for key in (_rounded(shape), None) if (at := index[key][end]).names]
        alike = (other for at in found for other in at.numbered(numbers))
        every = (other for at in found for other in at.names)
        for group in (alike, every):
            seen = list(islice(group, 4 * _MOST_KIN))
            kin = tuple(other for other in seen if other != name and fits(name, other))
            if len(kin) > _MOST_KIN or len(seen) == 4 * _MOST_KIN:
                return Kin((), crowded=True)
            if kin:
                return Kin(kin)
    return None
