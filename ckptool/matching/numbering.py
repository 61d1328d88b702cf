"""Lists of modules whose numbers may have moved, or that are called otherwise below them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ckptool.matching.change_rules import escaped
from ckptool.matching.words import are_alike
from ckptool.words import printable

if TYPE_CHECKING:
    from ckptool.matching.accounts import Account, Ledger
    from ckptool.matching.slots import Slot

__all__ = [
    "ANY_NUMBER",
    "Move",
    "moved_lists",
    "numbered_otherwise",
    "renumbered",
    "respelled_lists",
]

_Place = TypeVar("_Place")
"""Where a number stands: what is before it, and behind it where that counts."""

ANY_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
"""Finds the components of a name that are numbers."""

_DIGITS = re.compile("[0-9]+")
_DEEPEST = 8
"""Numbers of a name that are looked at."""
_MOST_NUMBERS = 8
"""Of a list that has gaps; more nobody reads."""
_MOST_LISTS = 8
_MOST_LAYERS = 64
"""Of a list that rules are made for, one for each."""


class Move(NamedTuple):
    """A list of the file that may be one of the model's, by other numbers."""

    own: str
    """What stands before its numbers."""
    wanted: str
    """The same in the model."""
    mine: Collection[str]
    theirs: Collection[str]
    below: str = ""
    """What of each layer it is about, dot and all; empty: all of it."""

    def __str__(self) -> str:
        """`layers.{1..4} of the file may be layers.{0..3} of the model, by other numbers`."""
        own, wanted, below = map(printable, (self.own, self.wanted, self.below))
        return (
            f"{own}{_shown(self.mine)}{below} of the file may be "
            f"{wanted}{_shown(self.theirs)}{below} of the model, by other numbers"
        )

    def rules(self, names: Iterable[str]) -> list[str]:
        """What gives each layer the number that is the model's in its place, one after the other.

        `names` are the file's. None where the two have not as many layers, or too many.
        """
        if len(self.mine) != len(self.theirs) or len(self.mine) > _MOST_LAYERS:
            return []
        both = [*zip(*(sorted(side, key=_order) for side in (self.mine, self.theirs)), strict=True)]
        up = [pair for pair in both if _order(pair[0]) < _order(pair[1])]
        first = f"{self.own}{both[0][0]}{self.below}."
        end, dot = (r"\.", ".") if any(name.startswith(first) for name in names) else ("$", "")
        made = []
        for old, new in (*(pair for pair in both if pair not in up), *reversed(up)):
            head, target = f"{self.own}{old}{self.below}", f"{self.wanted}{new}{self.below}"
            if head != target:
                target = target.replace("\\", r"\\")
                made.append(f"^{escaped(head)}{end}=>{target}{dot}")
        return made


def renumbered(ledger: Ledger, account: Account) -> frozenset[str]:
    """Wanted names that a rule explains, yet may be meant by others of the file.

    They are below a list (`blocks.`, by its name in the model) of which either side has numbers
    that the other has not: `layers.{0..10}` is `blocks.{1..11}`, each the next, or its first ten
    are `blocks.{1..10}`.

    Raises:
        OutOfBudget: there is more to look at than real names have.
    """
    swap = account.swap
    if swap.old and account.full:
        return frozenset()  # nothing of the file's is left over
    known = account.sources.union(name for name, _ in account.unfit)
    rest = [h for h in (account.domain if swap.old else ledger.left()[0]) if h not in known]
    lost = {place for name in rest for place in _places(swap.image(name))}
    lists = {start for start, number in lost if not ledger.want.has_below(f"{start}{number}.")}
    if not lists:
        return frozenset()
    own, wanted = ledger.have.under(swap.old), ledger.want.under(swap.new)
    ledger.spend(len(own) + len(wanted))
    ours = _members(map(swap.image, own), lists, _places)
    theirs = _members(wanted, lists, _places)
    lists = {
        start for start in lists if ours[start] - theirs[start] and theirs[start] - ours[start]
    }
    return frozenset(
        name
        for name in (account.targets if lists else ())
        if any(start in lists for start, _ in _places(name))
    )


def moved_lists(
    have: Iterable[str],
    want: Iterable[str],
    unused: Mapping[str, Slot],
    missing: Mapping[str, Slot],
) -> tuple[Move, ...]:
    """The lists of which either side has numbers that the other has not.

    `unused` of the file's names and `missing` of the model's are those that nothing meets.
    """
    moved = numbered_otherwise(have, want, unused, missing, places=_places)
    told: list[Move] = []
    for start in sorted(moved, key=lambda start: (start.count("."), start)):
        if not any(start.startswith(one.own) for one in told):
            told.append(Move(start, start, *moved[start]))
    for one in _moved_to_others(unused, missing):
        if not any(
            one.own.startswith(known.own) or one.wanted.startswith(known.wanted) for known in told
        ):
            told.append(one)
    return tuple(told[:_MOST_LISTS])


def numbered_otherwise(
    have: Iterable[str],
    want: Iterable[str],
    unused: Iterable[str],
    missing: Iterable[str],
    *,
    places: Callable[[str], Iterable[tuple[_Place, str]]],
) -> dict[_Place, tuple[set[str], set[str]]]:
    """The numbers that stand in a place on the two sides, where either has some of its own.

    Of the places of which both have names left over; `places` finds those of a name, with numbers.
    """
    both = {place for name in unused for place, _ in places(name)}
    both &= {place for name in missing for place, _ in places(name)}
    if not both:
        return {}
    mine, wanted = (_members(side, both, places) for side in (have, want))
    return {
        place: (mine[place], wanted[place])
        for place in both
        if mine[place] - wanted[place] and wanted[place] - mine[place]
    }


def _moved_to_others(unused: Mapping[str, Slot], missing: Mapping[str, Slot]) -> Iterator[Move]:
    """Lists of the file whose layers are like those of one of another name, by other numbers."""
    ours, theirs = (_lists_by_layers(side) for side in (unused, missing))
    for layers, lists in ours.items():
        others = theirs.get(layers, {})
        for own, mine in islice(lists.items(), _MOST_LISTS):
            if mine in others.values():
                continue
            moved = {new: n for new, n in others.items() if n - mine and mine - n and new != own}
            if moved:
                new = max(moved, key=lambda new: are_alike(own, new))
                yield Move(own, new, mine, moved[new])


def _lists_by_layers(side: Mapping[str, Slot]) -> dict[object, dict[str, set[str]]]:
    """The numbers of each list, outer ones first, by the shapes that its layers have."""
    lists: dict[str, dict[str, Counter[object]]] = {}
    for name, slot in side.items():
        for start, number in _places(name) if slot.shape is not None else ():
            lists.setdefault(start, {}).setdefault(number, Counter())[slot.shape] += 1
    found: dict[object, dict[str, set[str]]] = {}
    for start in sorted(lists, key=lambda start: (start.count("."), start)):
        if len(lists[start]) > 1:
            layers = frozenset(frozenset(held.items()) for held in lists[start].values())
            found.setdefault(layers, {})[start] = {*lists[start]}
    return found


def respelled_lists(unused: Mapping[str, Slot], missing: Mapping[str, Slot]) -> tuple[str, ...]:
    """Lists of the model that lack just what some list of the file has over, in words.

    Each layer the same shapes as the one of its number; told where that is one list alone.
    """
    sides = unused, missing
    ours, theirs = map(_contents, sides)
    told = []
    for start, wanted in islice(theirs.items(), _MOST_LISTS):
        numbers = {number for number, _ in wanted}
        alike = [own for own, held in ours.items() if wanted <= held]
        if len(alike) == 1 and len(numbers) > 1 and not _reads_alike(alike[0], start, *sides):
            shown = _shown(numbers)
            told.append(
                f"{printable(alike[0])}{shown} of the file may be {printable(start)}{shown} of the "
                "model, by other names below"
            )
    return tuple(told)


def _reads_alike(
    start: str, other: str, unused: Mapping[str, Slot], missing: Mapping[str, Slot]
) -> bool:
    """Whether the names behind the one are those behind the other."""
    below = (name.removeprefix(other) for name in missing if name.startswith(other))
    return all(start + rest in unused for rest in below)


def _contents(side: Mapping[str, Slot]) -> dict[str, Counter[tuple[str, object]]]:
    """By what stands before the first number of a name: the shapes that each number has."""
    found: dict[str, Counter[tuple[str, object]]] = {}
    for name, slot in side.items():
        first = ANY_NUMBER.search(name)
        if first is not None and slot.shape is not None:
            held = found.setdefault(name[: first.start()], Counter())
            held[first[0], slot.shape] += 1
    return found


def _order(number: str) -> tuple[int, str]:
    return len(number), number


def _shown(numbers: Iterable[str]) -> str:
    ordered = sorted(numbers, key=_order)
    first, last = int(ordered[0][:9]), int(ordered[-1][:9])
    if len(ordered) > 1 and last - first == len(ordered) - 1:
        return f"{{{first}..{last}}}"
    more = ",..." * (len(ordered) > _MOST_NUMBERS)
    return f"{{{','.join(ordered[:_MOST_NUMBERS])}{more}}}" if len(ordered) > 1 else ordered[0]


def _members(
    names: Iterable[str],
    among: Iterable[_Place],
    places: Callable[[str], Iterable[tuple[_Place, str]]],
) -> dict[_Place, set[str]]:
    found: dict[_Place, set[str]] = {place: set() for place in among}
    for name in names:
        for place, number in places(name):
            if place in found:
                found[place].add(number)
    return found


def _places(name: str) -> list[tuple[str, str]]:
    """Where a name has numbers, also in words: what stands before each, and the number."""
    found = islice(_DIGITS.finditer(name), _DEEPEST)
    return [(name[: one.start()], one[0]) for one in found]
