"""Whether a rule gives one part of a model the name of another, though each has its own there."""

from __future__ import annotations

from collections.abc import Collection

from ckptool.matching.accounts import Ledger
from ckptool.matching.swaps import MOST_PARTS, Head, Names, Swap
from ckptool.matching.words import are_alike, words_of

__all__ = ["Crossings"]

_MOST = 64
"""Names beside one another that are held against a word; of more only equal ones count."""


class Crossings:
    """What the parts of both sides are called, each place looked at once."""

    def __init__(self, ledger: Ledger) -> None:
        """Nothing is looked at yet."""
        self._ledger = ledger
        self._known: dict[tuple[bool, Head], frozenset[str]] = {}

    def is_one(self, swap: Swap) -> bool:
        """Whether what a rule replaces is called so on the other side too, and the reverse.

        `dec.` is no `encoder.` where there are `enc.` and `decoder.` as well.

        Raises:
            OutOfBudget: there is more to look at than real names have.
        """
        lead, olds, news = swap.parts
        old, new = (_word(head[0] or "") if head else "" for head in (olds, news))
        if len(lead) > MOST_PARTS or not (old or new) or (old and new and are_alike(old, new)):
            return False
        beside = self._beside(lead, of_model=True), self._beside(lead, of_model=False)
        if not (olds and news):
            return old in beside[0] if olds else new in beside[1]
        return bool(old and new) and _has(beside[0], old) and _has(beside[1], new)

    def _beside(self, lead: Head, *, of_model: bool) -> frozenset[str]:
        """The words that come after a head."""
        key = of_model, lead
        if key not in self._known:
            side: Names = self._ledger.want if of_model else self._ledger.have
            names = side.under(lead)
            self._ledger.spend(len(names))
            parts = {name.split(".", len(lead) + 1)[len(lead)] for name in names}
            self._known[key] = frozenset(filter(None, map(_word, parts)))
        return self._known[key]


def _word(part: str) -> str:
    return " ".join(words_of(part))


def _has(words: Collection[str], word: str) -> bool:
    return word in words or (
        len(words) <= _MOST and any(are_alike(word, another) for another in words)
    )
