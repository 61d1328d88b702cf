"""Whether the module that a rule gives a name to is the one that its name is most like.

A rule may explain all its names and be wrong: two parts of a model that are alike may be taken
for each other. A conclusion stands where no module of other names, met or not, is as much like
either of the two that it brings together: in what their names begin with, and in what they end
with. Names that differ in numbers only are one family, and within one the numbers decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from ckptool.matching.accounts import Ledger, Pair
from ckptool.matching.counters import BATCHES
from ckptool.matching.families import Families, Family, Numbers, numbers_of
from ckptool.matching.swaps import MOST_PARTS, Names, Swap
from ckptool.model import Shape

__all__ = ["Gate", "Verdict", "moves_numbers"]

_DIGITS = re.compile("[0-9]+")

_Kind = tuple[str, Shape | None]
"""The last component of a tensor's name, and its shape."""


class Verdict(Enum):
    """What comes of a rule's rivals."""

    STANDS = "stands"
    TIED = "tied"
    """Others are as much like: it stands where the same was found in other places."""
    FALLS = "falls"


@dataclass
class _Class:
    """The modules of one side that have a tensor of one kind, by family."""

    families: dict[Family, list[Numbers]] = field(default_factory=dict)
    heads: dict[Family, set[Family]] = field(default_factory=dict)
    ends: dict[Family, set[Family]] = field(default_factory=dict)

    def add(self, family: Family, numbers: Numbers) -> None:
        if family not in self.families:
            self.families[family] = []
            for end in range(1, min(len(family), MOST_PARTS) + 1):
                self.heads.setdefault(family[:end], set()).add(family)
                self.ends.setdefault(family[-end:], set()).add(family)
        self.families[family].append(numbers)


class Gate:
    """Judges rules by all names of both sides."""

    def __init__(self, ledger: Ledger) -> None:
        """Nothing is looked at yet."""
        self._ledger = ledger
        self._families = Families()
        self._own = _Classes(ledger, ledger.have, self._families)
        self._wanted = _Classes(ledger, ledger.want, self._families)
        self._known: dict[tuple[Family, Family, _Kind, _Kind], Verdict] = {}
        self._numbered: dict[tuple[Family, Family, _Kind, _Kind, bool, bool], bool] = {}

    def verdict(self, swap: Swap, pairs: Iterable[Pair]) -> Verdict:
        """Of a rule, by the names of the file and the wanted ones that it brings together.

        One that is clear for one family stands for those that are like others too.

        Raises:
            OutOfBudget: there is more to look at than real names have.
        """
        verdicts: set[Verdict] = set()
        is_one = not swap.is_prefix and any(
            part and numbers_of(part) for head in swap.parts[1:] for part in head
        )
        seen: dict[tuple[Family, Family, _Kind, _Kind], _Places] = {}
        for own, wanted in self._telling(pairs):
            mine, my_numbers = self._families.of(own)
            theirs, their_numbers = self._families.of(wanted)
            key = mine, theirs, self._own.kind(own), self._wanted.kind(wanted)
            if key not in seen:
                if not self._agree(*key, is_prefix=swap.is_prefix, is_one=is_one):
                    return Verdict.FALLS
                verdicts.add(self._judged(*key))
                if Verdict.FALLS in verdicts:
                    return Verdict.FALLS
                seen[key] = _Places.of(mine, theirs)
            places = seen[key]
            if places.own(my_numbers) != places.wanted(their_numbers):
                return Verdict.FALLS
        return Verdict.TIED if verdicts == {Verdict.TIED} else Verdict.STANDS

    def _telling(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Of each module its largest tensor."""
        found: dict[tuple[str, str], tuple[int, Pair]] = {}
        count = 0
        for own, wanted in pairs:
            count += 1
            module, _, leaf = own.rpartition(".")
            size = -1 if leaf == BATCHES else self._ledger.want.slots[wanted].elements
            key = module, wanted.rpartition(".")[0]
            if key not in found or size > found[key][0]:
                found[key] = size, (own, wanted)
        self._ledger.spend(count)
        return (pair for _, pair in found.values())

    def _judged(self, mine: Family, theirs: Family, own: _Kind, wanted: _Kind) -> Verdict:
        key = mine, theirs, own, wanted
        if key not in self._known:
            lead, trail = _likeness(mine, theirs)
            ours, others = self._own.of(own), self._wanted.of(wanted)
            self._known[key] = max(
                self._rivalled(mine, theirs, (others, ours), lead, trail),
                self._rivalled(theirs, mine, (ours, others), lead, trail),
                key=list(Verdict).index,
            )
        return self._known[key]

    def _rivalled(
        self,
        family: Family,
        partner: Family,
        sides: tuple[_Class, _Class],
        lead: int,
        trail: int,
    ) -> Verdict:
        """Whether another family than the partner is more like one, or as much.

        `sides`: the partner's, and its own. One that both have is its own partner: it counts where
        it is as much like in what the two begin and in what they end with.
        """
        others, same = sides
        self._ledger.spend(10)
        heads = others.heads.get(family[: lead + 1], set()) if lead < len(family) else set()
        ends = others.ends.get(family[-trail - 1 :], set()) if trail < len(family) else set()
        self._ledger.spend(len(heads) + len(ends))
        for other in heads | ends:
            front, back = _likeness(family, other)
            if other == partner or not (
                any(family[lead:front]) or any(family[len(family) - back : len(family) - trail])
            ):
                continue  # a number says nothing by itself
            there, here = {*others.families[other]}, {*same.families.get(other, ())}
            if other == family and there <= here:
                continue  # those are met by their own names
            is_own = there == here
            if not is_own or (front >= lead and back >= trail):
                return Verdict.FALLS
        alike: Iterable[Family] = others.families
        if lead and trail:
            sets = others.heads.get(family[:lead], set()), others.ends.get(family[-trail:], set())
            alike = set.intersection(*sets)
            self._ledger.spend(min(map(len, sets)))
        elif lead:
            alike = others.heads.get(family[:lead], ())
        elif trail:
            alike = others.ends.get(family[-trail:], ())
        for other in alike:
            self._ledger.spend(1)
            if other != partner and _likeness(family, other) >= (lead, trail):
                return Verdict.TIED
        return Verdict.STANDS

    def _agree(
        self,
        mine: Family,
        theirs: Family,
        own: _Kind,
        wanted: _Kind,
        *,
        is_prefix: bool,
        is_one: bool,
    ) -> bool:
        """Whether the numbers tell the members of two families apart, and a list has the same.

        `is_one`: the rule is for one of a list alone, and cannot be seen to leave others out.
        """
        key = mine, theirs, own, wanted, is_prefix, is_one
        if key not in self._numbered:
            places = _Places.of(mine, theirs)
            ours = [places.own(n) for n in self._changing(mine, own, wanted)]
            others = [places.wanted(n) for n in self._changing(theirs, own, wanted, of_model=True)]
            self._ledger.spend(len(ours) + len(others))
            alone = len({*ours}) == len(ours) and len({*others}) == len(others)
            is_list = is_one or places.is_another_list
            same = is_prefix or not is_list or {*ours} == {*others}
            self._numbered[key] = alone and same
        return self._numbered[key]

    def _changing(
        self, family: Family, own: _Kind, wanted: _Kind, *, of_model: bool = False
    ) -> list[Numbers]:
        """The numbers of a family on one side that it has not on the other under its own name."""
        both = self._own.of(own).families, self._wanted.of(wanted).families
        mine, others = both[::-1] if of_model else both
        stay = {*others.get(family, ())}
        return [numbers for numbers in mine[family] if numbers not in stay]


class _Classes:
    """The modules of one side, by what tensors they have."""

    def __init__(self, ledger: Ledger, side: Names, families: Families) -> None:
        self._ledger = ledger
        self._families = families
        self._slots = side.slots
        self._names: dict[_Kind, list[str]] | None = None
        self._classes: dict[_Kind, _Class] = {}

    def kind(self, name: str) -> _Kind:
        shape = self._slots[name].shape
        return name.rpartition(".")[2], (1,) if shape == () else shape

    def of(self, kind: _Kind) -> _Class:
        """The modules that have a tensor of this kind."""
        if self._names is None:
            self._names = {}
            for name in self._slots:
                self._names.setdefault(self.kind(name), []).append(name)
        if kind not in self._classes:
            names = self._names.get(kind, [])
            self._ledger.spend(len(names))
            self._classes[kind] = made = _Class()
            for name in names:
                made.add(*self._families.of(name))
        return self._classes[kind]


@dataclass(frozen=True, slots=True)
class _Places:
    """Which numbers of one family are in the place of which of another."""

    lead: int
    """Numbers in what the two begin with, or come after that in the same order."""
    mine: int
    """Numbers of the one that are in what both end with; where that begins, of the other."""
    theirs: int
    trail: int
    is_another_list: bool
    """Whether what some number counts has another name."""

    @classmethod
    def of(cls, mine: Family, theirs: Family) -> _Places:
        lead, trail = _likeness(mine, theirs)
        inside = min(len(mine), len(theirs)) - lead - trail
        if (
            trail
            and inside > 0
            and mine[-trail] is None
            and mine[-trail - 1]
            and theirs[-trail - 1]
        ):
            trail -= 1  # what it counts has two names, and may be another list's
        before, after = len(mine) - trail, len(theirs) - trail
        old, new = mine[lead:before], theirs[lead:after]
        both = min(old.count(None), new.count(None))
        first = mine[:lead].count(None)
        moved = both > 0 or (trail > 0 and mine[before] is None and (before, after) != (lead, lead))
        ends = mine[before:].count(None)
        return cls(first + both, mine.count(None) - ends, theirs.count(None) - ends, ends, moved)

    def own(self, numbers: Numbers) -> Numbers:
        return (*numbers[: self.lead], *numbers[self.mine :])

    def wanted(self, numbers: Numbers) -> Numbers:
        return (*numbers[: self.lead], *numbers[self.theirs :])


def moves_numbers(pairs: Iterable[Pair]) -> bool:
    """Whether some two names have other numbers in each other's places, also in words."""
    families = Families()
    seen: dict[tuple[Family, Family], _Places] = {}
    for own, wanted in pairs:
        digits = _DIGITS.findall(own), _DIGITS.findall(wanted)
        if len(digits[0]) == len(digits[1]) and digits[0] != digits[1]:
            return True
        (mine, numbers), (theirs, others) = families.of(own), families.of(wanted)
        if (mine, theirs) not in seen:
            seen[mine, theirs] = _Places.of(mine, theirs)
        places = seen[mine, theirs]
        if places.own(numbers) != places.wanted(others):
            return True
    return False


def _likeness(one: Family, other: Family) -> tuple[int, int]:
    """How many components two begin with, and end with besides."""
    least = min(len(one), len(other), MOST_PARTS)
    lead = trail = 0
    while lead < least and one[lead] == other[lead]:
        lead += 1
    while trail < least - lead and one[-1 - trail] == other[-1 - trail]:
        trail += 1
    return lead, trail
