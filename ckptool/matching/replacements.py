"""Heads and inner components of names that were replaced by others: `backbone.` by `encoder.`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ckptool.matching.accounts import Account, Ledger, Pair
from ckptool.matching.counters import BATCHES
from ckptool.matching.dominance import Gate, Verdict
from ckptool.matching.fronts import is_whole_front
from ckptool.matching.kinship import Kin, kin_of, sampled
from ckptool.matching.numbering import renumbered
from ckptool.matching.questions import Contested
from ckptool.matching.swaps import Head, Swap, is_number, swap_between
from ckptool.model import Shape

__all__ = ["accepted_replacements"]

_Segment = tuple[Head, Head]
"""What a rule replaces, without the components that stay before it."""


@dataclass(frozen=True)
class _Case:
    """A rule that some names suggest, and what speaks for and against it."""

    account: Account
    rivals: tuple[Account, ...]
    shifted: frozenset[str]
    """Wanted names that may be others of the file, by another number."""
    is_crowded: bool
    """Too many names are like its own to tell whether one is meant."""
    is_mutual: bool
    """Some names are most like each other, from both sides."""
    modules: tuple[str, ...]
    """Two that agree in more than a leaf (`attn.q` of `attn.q.weight`), if there are so many."""
    is_whole_front: bool
    """What is below is the same on both sides, and nothing else is like it."""

    @property
    def segment(self) -> _Segment:
        return self.account.swap.parts[1:]


def accepted_replacements(
    ledger: Ledger, gate: Gate
) -> Iterator[tuple[Swap, dict[str, str]] | Contested]:
    """Take what is beyond doubt into the ledger and say what it was; then what is contested.

    Raises:
        OutOfBudget: the names suggest more rules than real ones do; what was said before stands.
    """
    trial = _Trial(ledger, gate)
    for is_open in (True, False):
        cases = trial.cases(is_open=is_open)
        while concluded := trial.concluded(cases):
            yield from concluded
        for case in cases:
            if case.is_mutual:
                yield Contested(case.account, case.rivals)


class _Trial:
    """The names that are left, what they are like, and which rules were accepted."""

    def __init__(self, ledger: Ledger, gate: Gate) -> None:
        self._ledger = ledger
        self._gate = gate
        have, want = ledger.have.slots, ledger.want.slots
        own, wanted = ledger.left()
        self._own: dict[str, Kin] = {}
        self._wanted: dict[str, Kin] = {}
        self._moved: dict[Swap, frozenset[str]] = {}
        self._is_sample = False
        """Whether there are kinds of names that were not asked what they are like."""
        if own and wanted:
            names, every = sampled(own, have)
            self._own = kin_of(names, have, want, ledger.fits, ledger)
            names, every_wanted = sampled(wanted, want)
            self._wanted = kin_of(names, want, have, lambda w, h: ledger.fits(h, w), ledger)
            self._is_sample = not (every and every_wanted)
        self._leads: dict[_Segment, set[Head]] = {}
        """Before which components a segment was replaced, by rules that were accepted."""
        self._shapes: tuple[Counter[Shape], Counter[Shape]] | None = None

    def cases(self, *, is_open: bool) -> list[_Case]:
        """Every rule that names which are left suggest, what most names ask for first.

        `is_open`: numbers that both names have count as any; else, those with numbers again, for
        just these.
        """
        ledger = self._ledger
        swaps: dict[Swap, Swap] = {}
        for own, wanted in self._suggested():
            ledger.spend(10)
            if own not in ledger.met and wanted not in ledger.pairs:
                whole = swap_between(own, wanted)
                swap = whole if is_open else swap_between(own, wanted, is_open=False)
                if not swap.is_prefix and (is_open or swap != whole):  # prefixes were judged before
                    swaps[swap] = whole
        found = [(ledger.account(swap), ledger.account(whole)) for swap, whole in swaps.items()]
        found.sort(key=lambda both: -len(ledger.hits(both[0])))
        return [self._case(*both) for both in found]

    def _suggested(self) -> Iterator[Pair]:
        for own, kin in self._own.items():
            yield from ((own, wanted) for wanted in kin.names)
        for wanted, kin in self._wanted.items():
            yield from ((own, wanted) for own in kin.names)

    def _case(self, account: Account, whole: Account) -> _Case:
        """`whole`: the account of the same rule for any numbers."""
        ledger = self._ledger
        shifted = self._renumbered(account) | self._renumbered(whole)
        others: dict[Swap, None] = {}
        crowds, mutual, sure = 0, 0, 0
        for own, wanted in ledger.hits(account):
            a, b = self._own.get(own), self._wanted.get(wanted)
            if a is not None and b is not None and wanted in a.names and own in b.names:
                mutual += 1
                sure += len(a.names) == len(b.names) == 1
            if wanted in shifted:
                continue
            crowds += (a is not None and a.crowded) or (b is not None and b.crowded)
            pairs = [(own, other) for other in (a.names if a else ()) if other != wanted]
            pairs += [(other, wanted) for other in (b.names if b else ()) if other != own]
            ledger.spend(len(pairs))
            for pair in pairs:
                if self._is_other(account, pair, own):
                    others[swap_between(*pair)] = None
                    others[swap_between(*pair, is_open=False)] = None
        every = list(map(ledger.account, others))
        rivals = tuple(rival for rival in every if not ledger.beats(account, rival))
        is_crowded = bool(crowds) and not (sure and account.full)
        modules = tuple(islice(_deep_modules(ledger, account, shifted), 2))
        is_front = (
            len(modules) < 2
            and not (shifted or rivals)
            and all(rival.unfit for rival in every)
            and is_whole_front(ledger, account)
        )
        return _Case(account, rivals, shifted, is_crowded, bool(mutual), modules, is_front)

    def _renumbered(self, account: Account) -> frozenset[str]:
        if account.swap not in self._moved:
            self._moved[account.swap] = renumbered(self._ledger, account)
        return self._moved[account.swap]

    def _is_other(self, account: Account, pair: Pair, own: str) -> bool:
        """Whether a pair is another meaning, and of a name that the rule itself leaves alone.

        Not where that name is more like others still, if nothing meets it.
        """
        if pair[0] == own:
            kin = None if pair[1] in self._ledger.pairs else self._wanted.get(pair[1])
            return pair[1] not in account.targets and (kin is None or kin.has(own))
        kin = None if pair[0] in self._ledger.met else self._own.get(pair[0])
        return pair[0] not in account.sources and (kin is None or kin.has(pair[1]))

    def concluded(self, cases: Sequence[_Case]) -> list[tuple[Swap, dict[str, str]]]:
        """Take what can be accepted now, by the strongest kind of evidence that there is."""
        cases = [case for case in cases if self._hits(case)]
        if self._is_sample:
            cases = [case for case in cases if self._is_whole(case)]
        open_ = [case for case in cases if not (case.rivals or case.is_crowded)]
        modules: dict[_Segment, set[str]] = {}
        for case in open_:
            modules.setdefault(case.segment, set()).update(case.modules)
        strong = [
            case
            for case in open_
            if case.modules
            and not case.account.swap.renumbers
            and len(modules[case.segment]) > 1
            and self._ledger.is_apt(case.account, len(self._hits(case)))
        ]
        fronts = [case for case in open_ if case.is_whole_front]
        done = []
        for case in (
            self._standing(strong)
            or self._standing(fronts)
            or self._standing(self._unique(open_))
            or self._standing(self._alike(cases))
        ):
            found = {wanted: own for own, wanted in self._hits(case)}
            if found:
                self._ledger.meet(found)
                self._leads.setdefault(case.segment, set()).add(case.account.swap.parts[0])
                done.append((case.account.swap, found))
        return done

    def _standing(self, cases: Iterable[_Case]) -> list[_Case]:
        """Those whose names are most like each other, or are it in other places."""
        verdicts = [
            (case, self._gate.verdict(case.account.swap, self._hits(case))) for case in cases
        ]
        leads = {segment: set(found) for segment, found in self._leads.items()}
        for case, verdict in verdicts:
            if verdict is Verdict.STANDS:
                leads.setdefault(case.segment, set()).add(case.account.swap.parts[0])
        return [
            case
            for case, verdict in verdicts
            if verdict is Verdict.STANDS
            or (verdict is Verdict.TIED and len(leads.get(case.segment, ())) > 1)
        ]

    def _hits(self, case: _Case) -> list[Pair]:
        return [pair for pair in self._ledger.hits(case.account) if pair[1] not in case.shifted]

    def _is_whole(self, case: _Case) -> bool:
        """Whether it leaves nothing open of all that it is about."""
        if case.account.unfit or case.shifted or case.is_crowded:
            return False
        return len(self._hits(case)) == self._ledger.concerned(case.account)

    def _unique(self, cases: Iterable[_Case]) -> list[_Case]:
        """Rules of which only the leaf agrees, with a shape that nothing else has on either side.

        They count where the better part of the model is met already. Where it is one module alone
        nothing may be left over on either side: the model's one head may be none of the file's two.
        """
        if 2 * len(self._ledger.pairs) < len(self._ledger.want.slots):
            return []
        own, wanted = self._counted_shapes()
        segments: dict[_Segment, list[Account]] = {}
        for case in cases:
            if self._is_whole(case):
                segments.setdefault(case.segment, []).append(case.account)
        found: set[Swap] = set()
        for accounts in segments.values():
            pairs = {pair for account in accounts for pair in account.explained}
            shapes = Counter(shape for pair in pairs if (shape := self._telling(pair)) is not None)
            alone = {s for s, count in shapes.items() if count == own[s] == wanted[s]}
            found.update(
                account.swap
                for account in accounts
                if any(self._telling(pair) in alone for pair in account.explained)
            )
        chosen = [case for case in cases if case.account.swap in found]
        if self._is_all(chosen):
            return chosen
        return [case for case in chosen if not _is_lone(segments[case.segment])]

    def _is_all(self, cases: Iterable[_Case]) -> bool:
        """Whether some rules leave nothing over, but for counters."""
        hits = [pair for case in cases for pair in self._hits(case)]
        for left, met in zip(self._ledger.left(), map(set, zip(*hits, strict=True)), strict=False):
            if any(name not in met and name.rpartition(".")[2] != BATCHES for name in left):
                return False
        return bool(hits)

    def _telling(self, pair: Pair) -> Shape | None:
        """The shape of a pair, if both have it and it is more than a single number's."""
        slot = self._ledger.have.slots[pair[0]]
        same = slot.shape == self._ledger.want.slots[pair[1]].shape
        return slot.shape if same and slot.elements > 1 else None

    def _counted_shapes(self) -> tuple[Counter[Shape], Counter[Shape]]:
        if self._shapes is None:
            own, wanted = (
                Counter(slot.shape for slot in side.slots.values() if slot.shape is not None)
                for side in (self._ledger.have, self._ledger.want)
            )
            self._shapes = own, wanted
        return self._shapes

    def _alike(self, cases: Iterable[_Case]) -> list[_Case]:
        """Rules whose shapes leave a choice, which was made alike in two other places or more."""
        return [
            case
            for case in cases
            if self._is_whole(case)
            and len(self._leads.get(case.segment, ())) > 1
            and not any(rival.swap.parts[1:] in self._leads for rival in case.rivals)
        ]


def _is_lone(accounts: Iterable[Account]) -> bool:
    """Whether it is one module that they are about."""
    pairs = (pair for account in accounts for pair in account.explained)
    return len({own.rpartition(".")[0] for own, _ in pairs}) < 2


def _deep_modules(ledger: Ledger, account: Account, shifted: Container[str]) -> Iterator[str]:
    """The modules, each once, that agree in shape and in more than a leaf and numbers."""
    parts = len(account.swap.old)
    seen: set[str] = set()
    for own, wanted in ledger.hits(account):
        module = own.rpartition(".")[0]
        if module in seen or wanted in shifted or not ledger.proves(own, wanted):
            continue
        seen.add(module)
        if any(not is_number(part) for part in module.split(".")[parts:]):
            yield module
