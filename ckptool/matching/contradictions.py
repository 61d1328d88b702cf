"""Rules that were concluded, held against what is known of the names when all has been tried.

A rule that gives a part of the model another word, unlike its own, has the shapes alone to speak
for it. They are as good for any part that is made like it: an encoder's are a decoder's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from ckptool.matching.accounts import Account, Ledger, OutOfBudget
from ckptool.matching.counters import BATCHES
from ckptool.matching.slots import Slot
from ckptool.matching.swaps import Head, Swap
from ckptool.matching.words import are_alike, are_opposite, words_of

__all__ = ["contradicted"]

_Found = tuple[Swap, dict[str, str]]
"""A rule, and what it pairs: wanted names with those of the file."""


def contradicted(ledger: Ledger, done: Sequence[_Found]) -> list[_Found]:
    """Those of the rules that something speaks against, where the words do not speak for them.

    Either word stays what it is on both sides elsewhere; or the two differ as words do that are
    made to be told apart; or, of a rule found in one place alone, both parts have something left
    over, or what is left elsewhere is as much like one of them; or something is left, and others
    are made like the part that was found. What is below falls with it.
    """
    leads = Counter(segment for segment, _ in {(s.parts[1:], s.parts[0]) for s, _ in done})
    stand: set[tuple[Head, Head]] = set()
    fallen: list[_Found] = []
    with suppress(OutOfBudget):
        left = _Left(ledger)
        for swap, pairs in sorted(done, key=lambda one: len(one[0].old)):
            change = _Change.of(swap, stand)
            if change.gives_another_word and (
                change.has_opposites
                or (left.keeps_words(change) and not left.are_unique(pairs))
                or any(_is_below(swap, one) for one, _ in fallen)
                or (
                    leads[swap.parts[1:]] == 1
                    and left.has_as_good(change, ledger.account(swap), pairs)
                )
            ):
                fallen.append((swap, pairs))
            else:
                stand.add((swap.old, swap.new))
    return fallen


def _is_below(swap: Swap, outer: Swap) -> bool:
    old, new = outer.old, outer.new
    return bool(old and new) and (swap.old[: len(old)], swap.new[: len(new)]) == (old, new)


class _Change(NamedTuple):
    """What a rule replaces by what, below what stays or has been replaced by other rules."""

    old: Head
    new: Head
    parts: tuple[Head, Head]
    """The outermost parts of the two sides that are called otherwise."""

    @classmethod
    def of(cls, swap: Swap, others: Container[tuple[Head, Head]]) -> _Change:
        lead, old, new = swap.parts
        at = to = len(lead)
        for end in range(at + 1, len(swap.old)):
            for stop in range(to + 1, len(swap.new)):
                if (swap.old[:end], swap.new[:stop]) in others:
                    at, to = end, stop
        old, new = swap.old[at:], swap.new[to:]
        while old and new and old[0] == new[0]:
            at, to, old, new = at + 1, to + 1, old[1:], new[1:]
        return cls(old, new, (swap.old[: at + 1], swap.new[: to + 1]))

    @property
    def gives_another_word(self) -> bool:
        """Whether words are replaced by others that are unlike them."""
        old, new = _text(self.old), _text(self.new)
        return bool(words_of(old) and words_of(new)) and not are_alike(old, new)

    @property
    def has_opposites(self) -> bool:
        """Whether the first or the last differ as words do that are made to be told apart."""
        return any(are_opposite(self.old[at] or "", self.new[at] or "") for at in (0, -1))


class _Left:
    """What nothing meets, and whether that speaks against a rule."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._own, self._wanted = (
            _kinds(*side)
            for side in zip(ledger.left(), (ledger.have.slots, ledger.want.slots), strict=True)
        )

    @cached_property
    def _every(self) -> tuple[Counter[object], ...]:
        """What kinds of tensors there are on either side."""
        ledger = self._ledger
        ledger.spend(len(ledger.have.slots) + len(ledger.want.slots))
        return tuple(_kinds(side, side) for side in (ledger.have.slots, ledger.want.slots))

    def keeps_words(self, change: _Change) -> bool:
        """Whether names of the file below one of the two parts are met below the same part."""
        met = self._ledger.met
        for head in change.parts:
            own = self._below(head)
            same = frozenset(self._ledger.want.under(head)) if own else frozenset()
            if any(met.get(name) in same for name in own):
                return True
        return False

    def are_unique(self, pairs: Mapping[str, str]) -> bool:
        """Whether each module has a tensor of a shape that nothing else has, on both sides."""
        ledger = self._ledger
        own, wanted = self._every
        modules = {name.rpartition(".")[0] for name in pairs}
        known = {
            name.rpartition(".")[0]
            for name in pairs
            if own[_kind(name, ledger.want.slots)] == wanted[_kind(name, ledger.want.slots)] == 1
        }
        return modules == known

    def has_as_good(self, change: _Change, account: Account, pairs: Mapping[str, str]) -> bool:
        """Whether both parts lack something, or much of one is in others as well.

        What is met in others counts where something is left: of one part, or on both sides.

        What has the same name then and another shape is no such thing, nor what may be the rest
        of each other's under a third name, where the shapes of what was found leave no choice.
        """
        ledger = self._ledger
        ledger.spend(2 * len(pairs))
        unfit = {name for pair in account.unfit for name in pair}
        in_file, in_model = self._parts(change)
        lost = (
            [n for n in in_file if n not in ledger.met and n not in unfit],
            [n for n in in_model if n not in ledger.pairs and n not in unfit],
        )
        own, missing = map(_kinds, lost, (ledger.have.slots, ledger.want.slots))
        if own and missing and (own != missing or not self.are_unique(pairs)):
            return True
        is_left = own or missing or (self._own and self._wanted)
        if is_left and self._has_twin(change, pairs):
            return True
        sides = (
            (_kinds(pairs.values(), ledger.have.slots), self._own),
            (_kinds(pairs, ledger.want.slots), self._wanted),
        )
        return any(2 * (kinds & left).total() >= kinds.total() for kinds, left in sides)

    def _has_twin(self, change: _Change, pairs: Mapping[str, str]) -> bool:
        """Whether the better part of what was found is as well outside the part, on a side."""
        ledger = self._ledger
        for found, head, side, every in zip(
            (pairs.values(), pairs),
            change.parts,
            (ledger.have, ledger.want),
            self._every,
            strict=True,
        ):
            inside = _kinds(side.under(head), side.slots)
            kinds = set(_kinds(found, side.slots))
            ledger.spend(len(pairs) + inside.total())
            if 2 * sum(every[kind] > inside[kind] for kind in kinds) >= len(kinds):
                return True
        return False

    def _parts(self, change: _Change) -> tuple[set[str], set[str]]:
        """The names of either side in the two parts, whichever of the two they are called by."""
        ledger = self._ledger
        own, wanted = (
            {name for head in change.parts for name in side.under(head)}
            for side in (ledger.have, ledger.want)
        )
        ledger.spend(len(own) + len(wanted))
        return own, wanted

    def _below(self, head: Head) -> list[str]:
        names = self._ledger.have.under(head)
        self._ledger.spend(len(names))
        return names


def _kinds(names: Iterable[str], slots: Mapping[str, Slot]) -> Counter[object]:
    return Counter(_kind(name, slots) for name in names if _tells(name))


def _kind(name: str, slots: Mapping[str, Slot]) -> object:
    return name.rpartition(".")[2], slots[name].shape


def _tells(name: str) -> bool:
    return name.rpartition(".")[2] != BATCHES


def _text(head: Head) -> str:
    return ".".join(part or "" for part in head)
