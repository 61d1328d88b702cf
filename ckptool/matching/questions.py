"""What is not concluded about names, as questions that a rule of the user's would answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ckptool.matching.accounts import Account, Ledger, Pair
from ckptool.matching.crossings import Crossings
from ckptool.matching.dominance import moves_numbers
from ckptool.matching.numbering import renumbered
from ckptool.matching.report import Ambiguity
from ckptool.matching.rule_text import rule_text, segment_text
from ckptool.matching.swaps import Swap, is_number
from ckptool.matching.words import are_alike

__all__ = ["Contested", "ambiguities"]

_MOST_CONTESTED = 64
"""Rules that are reported as not concluded; of names all alike there would be no end."""
_MOST_RULES = 8
"""That are proposed to decide one question."""


@dataclass(frozen=True, slots=True)
class Contested:
    """A rule that is not concluded: others mean the same names as well, or too little proves it."""

    account: Account
    rivals: tuple[Account, ...] = ()


@dataclass
class _Question:
    """Names that rules share with one another."""

    hits: dict[Swap, list[Pair]] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    wanted: set[str] = field(default_factory=set)
    rules: tuple[str, ...] = ()

    def add(self, swap: Swap, hits: list[Pair]) -> None:
        self.hits[swap] = hits
        self.own.update(h for h, _ in hits)
        self.wanted.update(w for _, w in hits)

    def take(self, other: _Question) -> None:
        self.hits = other.hits | self.hits
        self.own |= other.own
        self.wanted |= other.wanted


def ambiguities(ledger: Ledger, contested: Iterable[Contested]) -> Iterator[Ambiguity]:
    """The questions, each with rules any one of which decides it; of names that nothing meets.

    There are none where they would give numbers to other layers, or one part the name of another,
    or guess by a leaf's name alone which of several modules is meant.
    """
    crossings = Crossings(ledger)
    asked = list(_segments(ledger, contested, crossings))
    told = {swap for question in asked for swap in question.hits}
    rest = [item for item in contested if item.account.swap not in told]
    asked += _shared(ledger, rest[:_MOST_CONTESTED])
    if not asked:
        return
    ours, theirs = ({name: at for at, name in enumerate(left)} for left in ledger.left())
    for question in asked:
        yield Ambiguity(
            tuple(sorted(question.own, key=ours.__getitem__)),
            tuple(sorted(question.wanted, key=theirs.__getitem__)),
            question.rules or tuple(_deciding(ledger, question, crossings)),
        )


def _segments(
    ledger: Ledger, contested: Iterable[Contested], crossings: Crossings
) -> Iterator[_Question]:
    """One for rules without rivals that replace the same components in several places."""
    segments: dict[object, list[Swap]] = {}
    for item in contested:
        if ledger.hits(item.account) and not any(map(ledger.hits, item.rivals)):
            segments.setdefault(item.account.swap.parts[1:], []).append(item.account.swap)
    for swaps in segments.values():
        question = _Question()
        for swap in swaps:
            question.add(swap, ledger.hits(ledger.account(swap)))
        names = {h: w for hits in question.hits.values() for h, w in hits}
        hits = [pair for found in question.hits.values() for pair in found]
        if crossings.is_one(swaps[0]) or not _is_safe(ledger, swaps[0], hits):
            continue
        if len(swaps) > 1 and (text := segment_text(swaps[0], names, ledger.have)):
            question.rules = (text,)
            yield question


def _shared(ledger: Ledger, contested: Sequence[Contested]) -> list[_Question]:
    questions: list[_Question] = []
    for item in contested:
        mine = ledger.hits(item.account)
        if not mine or any(all(h in q.own and w in q.wanted for h, w in mine) for q in questions):
            continue  # none of its names is left, or it is a lesser rule about the same
        question = _Question()
        for account in (item.account, *item.rivals):
            if hits := ledger.hits(account):
                question.add(account.swap, hits)
        for other in questions[:]:
            if not (
                question.own.isdisjoint(other.own) and question.wanted.isdisjoint(other.wanted)
            ):
                questions.remove(other)
                question.take(other)
        questions.append(question)
    return questions


def _deciding(ledger: Ledger, question: _Question, crossings: Crossings) -> Iterator[str]:
    """Rules between names that are alike first, then those of most names."""
    by_size = sorted(
        question.hits, key=lambda swap: (not _is_alike(swap), -len(question.hits[swap]))
    )
    for swap in by_size[:_MOST_RULES]:
        hits = question.hits[swap]
        if not ledger.is_a_whole_side(hits) and crossings.is_one(swap):
            continue
        if ledger.splits(ledger.account(swap)) or not _is_safe(ledger, swap, hits):
            continue
        if text := rule_text(swap, dict(hits), ledger.have):
            yield text


def _is_alike(swap: Swap) -> bool:
    old, new = (".".join(part or "" for part in head) for head in swap.parts[1:])
    return are_alike(old, new)


def _is_safe(ledger: Ledger, swap: Swap, hits: Sequence[Pair]) -> bool:
    """Whether a rule that the user is told of can be wrong only in what names do not tell."""
    if moves_numbers(hits) or renumbered(ledger, ledger.account(swap)) or _is_of_a_layer(swap):
        return False
    alike = [_ends_alike(*pair) for pair in hits]
    if any(alike) and all(
        is_alike or _is_bare(swap, own) for is_alike, (own, _) in zip(alike, hits, strict=True)
    ):
        return True
    if swap.is_prefix and not all("." in own and "." in wanted for own, wanted in hits):
        return True
    return not any(map(_are_several, ledger.left()))


def _is_of_a_layer(swap: Swap) -> bool:
    """Whether it takes one of a list out of it: `blocks.0.` taken off."""
    head = swap.old or swap.new
    return swap.is_prefix and not all(map(is_number, head)) and any(map(is_number, head))


def _is_bare(swap: Swap, own: str) -> bool:
    """Whether a name is of the very module that gets another name: `vit.pos` of `vit.`."""
    return not swap.is_prefix and own.count(".") == len(swap.old)


def _ends_alike(own: str, wanted: str) -> bool:
    """Whether the modules of two names are called the same."""
    mine, theirs = own.rsplit(".", 2)[:-1], wanted.rsplit(".", 2)[:-1]
    return bool(mine and theirs) and mine[-1] == theirs[-1]


def _are_several(names: Iterable[str]) -> bool:
    """Whether names are of more than one module."""
    modules = (name.rpartition(".")[0] for name in names)
    first = next(modules, None)
    return any(module != first for module in modules)
