"""Prefixes that the names of one side have and those of the other have not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from ckptool.matching.accounts import Account, Ledger, OutOfBudget, Pair
from ckptool.matching.dominance import Gate, Verdict
from ckptool.matching.numbering import renumbered
from ckptool.matching.questions import Contested
from ckptool.matching.slots import Slot
from ckptool.matching.swaps import MOST_PARTS, Swap, is_number, swap_between

__all__ = ["accepted_prefixes"]

_MOST_PREFIXES = 10_000
"""That are looked at, those first that most names ask for."""
_MOST_STARTS = 64
"""First components of names that are looked for in all names at once."""
_MOST_RIVALS = 8
"""Of one rule; that is enough to leave it."""


def accepted_prefixes(
    ledger: Ledger, gate: Gate
) -> tuple[list[tuple[Swap, dict[str, str]]], list[Contested]]:
    """Take what is beyond doubt into the ledger; say what it was, and what is contested.

    Where the budget ends, what is beyond doubt until then.
    """
    done: list[tuple[Swap, dict[str, str]]] = []
    contested: list[Contested] = []
    with suppress(OutOfBudget):
        _take(ledger, gate, done, contested)
    if ledger.is_cut_short:
        ledger.renew()
    return _steady(ledger, done, contested), contested


def _take(
    ledger: Ledger,
    gate: Gate,
    done: list[tuple[Swap, dict[str, str]]],
    contested: list[Contested],
) -> None:
    ends = _Ends(ledger)
    for swap in ends.candidates():
        account = ledger.account(swap)
        hits = ledger.hits(account)
        if not hits:
            continue
        rivals = ends.rivals(account, hits)
        if (
            rivals
            or ledger.splits(account)
            or not _is_proven(ledger, account, hits)
            or not (ledger.is_a_whole_side(hits) or gate.verdict(swap, hits) is Verdict.STANDS)
        ):
            contested.append(Contested(account, rivals))
            continue
        pairs = {w: h for h, w in hits}
        ledger.meet(pairs)
        done.append((swap, pairs))


def _steady(
    ledger: Ledger, done: list[tuple[Swap, dict[str, str]]], contested: list[Contested]
) -> list[tuple[Swap, dict[str, str]]]:
    """Take back what may be meant by other numbers.

    `model.head.{0,2}` of the file may be `head.{0,2}` of `head.{0,3}`, or may be `head.{0,3}`.
    """
    kept = []
    for swap, pairs in done:
        account = ledger.account(swap)
        try:
            shifted = renumbered(ledger, account)
        except OutOfBudget:
            shifted = account.targets  # not known to be sure
        back = {w: h for w, h in pairs.items() if w in shifted}
        if back:
            ledger.take_back(back)
            contested.append(Contested(account))
        if len(back) < len(pairs):
            kept.append((swap, {w: h for w, h in pairs.items() if w not in shifted}))
    return kept


class _Ends:
    """Which names end with a whole name of the other side that nothing meets."""

    def __init__(self, ledger: Ledger) -> None:
        own, wanted = ledger.left()
        self._ledger = ledger
        self._left = [*dict.fromkeys((*own, *wanted))] if own and wanted else []
        tails = frozenset(self._left)
        starts = {tail.partition(".")[0] for tail in tails}
        self._own = _ending(ledger, ledger.have.slots, tails, starts)
        self._wanted = _ending(ledger, ledger.want.slots, tails, starts)

    def candidates(self) -> list[Swap]:
        """Every prefix that some name asks for, what most names ask for first."""
        if not (self._own or self._wanted):
            return []
        votes = Counter(self._prefixes())
        heads = (
            (tuple(prefix.split(".")), own)
            for (prefix, own), _ in votes.most_common(_MOST_PREFIXES)
        )
        return [Swap(head, ()) if own else Swap((), head) for head, own in heads]

    def _prefixes(self) -> Iterator[tuple[str, bool]]:
        ledger = self._ledger
        for tail in self._left:
            if tail in ledger.want.slots and tail not in ledger.pairs:
                for own in self._own.get(tail, ()):
                    if own not in ledger.met and ledger.fits(own, tail):
                        yield own[: -len(tail) - 1], True
            if tail in ledger.have.slots and tail not in ledger.met:
                for wanted in self._wanted.get(tail, ()):
                    if wanted not in ledger.pairs and ledger.fits(tail, wanted):
                        yield wanted[: -len(tail) - 1], False

    def rivals(self, account: Account, hits: list[Pair]) -> tuple[Account, ...]:
        """The rules that give one of the names another meaning, and are not beaten."""
        ledger = self._ledger
        seen: set[Swap] = set()
        rivals: list[Account] = []
        for own, wanted in hits:
            for pair in self._others(account, own, wanted):
                swap = swap_between(*pair)
                if swap not in seen:
                    seen.add(swap)
                    rival = ledger.account(swap)
                    if not ledger.beats(account, rival):
                        rivals.append(rival)
            if len(rivals) >= _MOST_RIVALS:
                break
        return tuple(rivals)

    def _others(self, account: Account, own: str, wanted: str) -> list[Pair]:
        """What one of the two may mean besides the other, as the ends of names say."""
        tail = wanted if account.swap.old else own
        others = [(other, wanted) for other in self._own.get(tail, ())]
        others += [(own, other) for other in self._wanted.get(tail, ())]
        if len(others) == 1:
            return []
        self._ledger.spend(4 * len(others))
        if tail in self._ledger.have.slots:
            others.append((tail, wanted))
        if tail in self._ledger.want.slots:
            others.append((own, tail))
        return [pair for pair in others if self._is_other(account, pair, (own, wanted))]

    def _is_other(self, account: Account, pair: Pair, mine: Pair) -> bool:
        """Whether a pair is another meaning, and of a name that the rule itself leaves alone.

        Not where that name ends with more of yet another, which nothing meets either.
        """
        ledger = self._ledger
        if pair == mine or pair[0] == pair[1] or not ledger.fits(*pair):
            return False
        tail = min(*pair, key=len)
        own, wanted = pair
        if own == mine[0]:
            return wanted not in account.targets and (
                wanted in ledger.pairs
                or not any(
                    h in ledger.have.slots and ledger.fits(h, wanted) for h in _longer(wanted, tail)
                )
            )
        return own not in account.sources and (
            own in ledger.met
            or not any(w in ledger.want.slots and ledger.fits(own, w) for w in _longer(own, tail))
        )


def _longer(name: str, tail: str) -> Iterator[str]:
    """What a name ends with, itself aside, that is longer than one of its ends."""
    at, parts = name.find("."), 0
    while 0 <= at < len(name) - len(tail) - 1 and parts < MOST_PARTS:
        yield name[at + 1 :]
        at, parts = name.find(".", at + 1), parts + 1


def _ending(
    ledger: Ledger, slots: Mapping[str, Slot], tails: frozenset[str], starts: Collection[str]
) -> dict[str, list[str]]:
    """Of each tail the names that end with it and have more before it.

    `starts` are what the tails begin with.
    """
    found: dict[str, list[str]] = {}
    least = min((tail.count(".") for tail in tails), default=0)
    text = "\n".join(slots) + "\n"
    if len(starts) <= _MOST_STARTS and not any(
        f".{start}{end}" in text for start in starts for end in ".\n"
    ):
        return found
    count = 0
    for name in slots:
        below = name.count(".") - least
        at, parts = name.find(".") if below > 0 else -1, 0
        while at >= 0 and parts < min(below, MOST_PARTS):
            tail = name[at + 1 :]
            if tail in tails:
                found.setdefault(tail, []).append(name)
                count += 1
            at, parts = name.find(".", at + 1), parts + 1
        if count > 10_000:
            ledger.spend(count)
            count = 0
    return found


def _is_proven(ledger: Ledger, account: Account, hits: list[Pair]) -> bool:
    """Whether names, or shapes, say enough.

    Where only leaves agree (`fc.weight` and `weight`) nothing else may be left over of one side.
    A single module is not taken out of others, nor put among them, where anything else is left.
    Where no shape is known two modules have to agree.
    """
    tails = [w if account.swap.old else h for h, w in hits]
    modules = {tail.rpartition(".")[0] for tail in tails}
    left = ledger.count_left()
    if all(is_number(part) for module in modules for part in module.split(".") if part):
        return account.full and len(hits) in left
    if len(modules) == 1:
        is_whole = account.full or left == (len(hits), len(hits))
        return is_whole and any(ledger.proves(*pair) for pair in hits)
    return ledger.is_apt(account, len(hits))
