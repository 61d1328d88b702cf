"""What a rule would explain of the names on both sides, and whether it beats another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ckptool.matching.slots import Slot, fits
from ckptool.matching.swaps import Names, Swap, is_number

__all__ = ["Account", "Ledger", "OutOfBudget"]

_COST = 50
"""Of an account, counted in names that are looked at."""
_BUDGET = 2_000_000
_BUDGET_A_NAME = 20
"""How many names may be looked at, for each that there is."""

Pair = tuple[str, str]
"""A name of the file, and one that is wanted."""


class OutOfBudget(Exception):
    """The names suggest more rules than real ones do; what is not looked at is not concluded."""


def places_of(names: Iterable[str], slots: Mapping[str, Slot]) -> Counter[object]:
    """What shapes there are under which numbers, whatever the names are beside them."""
    return Counter((*filter(is_number, name.split(".")), slots[name].shape) for name in names)


@dataclass(frozen=True)
class Account:
    """A rule held against all names that it applies to, those that are met already too."""

    swap: Swap
    domain: tuple[str, ...]
    """Names of the file that it applies to; of a prefix put on, only those it is wanted for."""
    applied: int
    """How many names it applies to; of a prefix put on, how many are wanted with it."""
    explained: tuple[Pair, ...]
    """Those that become a wanted name whose shape fits."""
    unfit: tuple[Pair, ...]
    """Those that become a wanted name of another shape."""

    @property
    def full(self) -> bool:
        """Whether it leaves nothing unexplained."""
        return len(self.explained) == self.applied

    @cached_property
    def sources(self) -> frozenset[str]:
        """The names of the file that it explains."""
        return frozenset(h for h, _ in self.explained)

    @cached_property
    def targets(self) -> frozenset[str]:
        """The wanted names that it explains."""
        return frozenset(w for _, w in self.explained)


class Ledger:
    """Both sides, what is met of them so far, and the accounts that were asked for."""

    def __init__(
        self, have: Mapping[str, Slot], want: Mapping[str, Slot], pairs: Mapping[str, str]
    ) -> None:
        """`pairs`: wanted name to name in the file."""
        self.have = Names(have)
        self.want = Names(want)
        self.pairs = dict(pairs)
        self.met = {own: wanted for wanted, own in pairs.items()}
        """The same by the names of the file."""
        self._accounts: dict[Swap, Account] = {}
        self._hits: dict[Swap, list[Pair]] = {}
        self._left: tuple[list[str], list[str]] | None = None
        self._budget = _BUDGET + _BUDGET_A_NAME * (len(have) + len(want))
        self.is_cut_short = False
        """Whether the budget was not enough once."""

    def left(self) -> tuple[list[str], list[str]]:
        """The names of the file, and those wanted, that nothing meets; not to be changed."""
        if self._left is None:
            self.spend((len(self.have.slots) + len(self.want.slots)) // 10)
            self._left = (
                [name for name in self.have.slots if name not in self.met],
                [name for name in self.want.slots if name not in self.pairs],
            )
        return self._left

    def count_left(self) -> tuple[int, int]:
        """How many they are."""
        return len(self.have.slots) - len(self.met), len(self.want.slots) - len(self.pairs)

    def fits(self, own: str, wanted: str) -> bool:
        """Whether what the file has under a name can be loaded under the other."""
        return fits(self.have.slots[own], self.want.slots[wanted])

    def proves(self, own: str, wanted: str) -> bool:
        """Whether the two shapes are known, so that their equality says something."""
        return self.have.slots[own].shape is not None and self.want.slots[wanted].shape is not None

    def spend(self, steps: int) -> None:
        """Count work.

        Raises:
            OutOfBudget: it is more than names of real models cost.
        """
        self._budget -= steps
        if self._budget < 0:
            self.is_cut_short = True
            raise OutOfBudget

    def renew(self) -> None:
        """Have a budget for what is still to be said of the names where the first is spent."""
        self._budget = max(
            self._budget, _BUDGET_A_NAME * (len(self.have.slots) + len(self.want.slots))
        )

    def meet(self, found: Mapping[str, str]) -> None:
        """Take pairs, wanted to own, as concluded."""
        self._forget()
        self.pairs.update(found)
        self.met.update((own, wanted) for wanted, own in found.items())

    def take_back(self, found: Mapping[str, str]) -> None:
        """Undo `meet` of pairs that nothing else meets."""
        self._forget()
        for wanted, own in found.items():
            del self.pairs[wanted]
            del self.met[own]

    def _forget(self) -> None:
        self._hits.clear()
        self._left = None

    def account(self, swap: Swap) -> Account:
        """What a rule comes to.

        Raises:
            OutOfBudget: too many names would have to be looked at.
        """
        if swap not in self._accounts:
            self._accounts[swap] = self._counted(swap)
        return self._accounts[swap]

    def _counted(self, swap: Swap) -> Account:
        names = self.have.under(swap.old) if swap.old else self.want.under(swap.new)
        self.spend(len(names) + _COST)
        if swap.old:
            pairs = zip(names, map(swap.image, names), strict=True)
        else:
            pairs = zip(map(swap.source, names), names, strict=True)
        explained: list[Pair] = []
        unfit: list[Pair] = []
        for pair in pairs:
            if pair[0] in self.have.slots and pair[1] in self.want.slots:
                (explained if self.fits(*pair) else unfit).append(pair)
        return Account(
            swap,
            tuple(names) if swap.old else tuple(h for h, _ in explained),
            len(names),
            tuple(explained),
            tuple(unfit),
        )

    def is_apt(self, account: Account, hits: int) -> bool:
        """Whether `hits` are the greater part of its names, on one of the sides.

        Or the rest has the same shapes on both: there names below are others too.
        """
        if hits <= len(account.unfit):
            return False
        if 2 * hits >= self.concerned(account):
            return True
        swap = account.swap
        wanted = self.want.under(swap.new) if swap.new else self.left()[1]
        self.spend(len(wanted))
        own = frozenset(account.domain if swap.old else ())
        if 2 * hits >= sum(self.pairs.get(name) not in own for name in wanted):
            return True
        ours = [name for name in own if name not in self.met]
        theirs = [name for name in wanted if name not in self.pairs]
        return places_of(ours, self.have.slots) == places_of(theirs, self.want.slots)

    def concerned(self, account: Account) -> int:
        """How many names of the file a rule is about.

        Not counted are those that are found to go the same way and then another: `layers.*.attn.`
        to `blocks.*.attention.` does not speak against `layers.` to `blocks.`.
        """
        own = account.domain if account.swap.old else self.left()[0]
        wanted = self.want.under(account.swap.new) if account.swap.new else ()
        self.spend(len(own) + len(wanted))
        below = frozenset(wanted)
        return sum(self.met.get(name) not in below for name in own)

    def hits(self, account: Account) -> list[Pair]:
        """What a rule explains of the names that are left."""
        found = self._hits.get(account.swap)
        if found is None:
            self.spend(len(account.explained))
            found = self._hits[account.swap] = [
                (h, w) for h, w in account.explained if h not in self.met and w not in self.pairs
            ]
        return found

    def is_a_whole_side(self, hits: Sequence[Pair]) -> bool:
        """Whether they are all of the file, or of the model: no other module may be meant."""
        return len(hits) in (len(self.have.slots), len(self.want.slots))

    def splits(self, account: Account) -> bool:
        """Whether a rule leaves aside some of a part, as another part's names meet what that is."""
        return any((h in self.met) != (w in self.pairs) for h, w in account.explained)

    def beats(self, account: Account, rival: Account) -> bool:
        """Whether a rule is better than another that gives one of the names another meaning.

        It explains strictly more, and the other leaves something of its own unexplained; or the
        other explains nothing that is left, and takes away from names that are met.
        """
        if len(account.explained) > len(rival.explained) and not rival.full:
            return True
        if self.hits(rival):
            return False
        self.spend(len(rival.domain))
        return any(own in self.met and self.met[own] not in rival.targets for own in rival.domain)
