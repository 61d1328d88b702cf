"""Subtrees of which nothing but the name has changed, though numbers alone stand below it."""

from __future__ import annotations

import re

from ckptool.matching.accounts import Account, Ledger
from ckptool.matching.counters import BATCHES
from ckptool.matching.swaps import Head, Swap, is_number

__all__ = ["is_whole_front"]

_DIGITS = re.compile("[0-9]+")


def is_whole_front(ledger: Ledger, account: Account) -> bool:
    """Whether a rule gives another word to all of a subtree, and two modules at least prove it.

    `backbone.{0,2}` and `encoder.{0,2}`: every name below the one is below the other, under equal
    shapes, and none is met yet. Numbers count as modules. Counters that old files lack may lack.

    Raises:
        OutOfBudget: there is more to look at than real names have.
    """
    swap, explained = account.swap, account.explained
    if account.unfit or not _is_another_word(swap) or len(ledger.hits(account)) < len(explained):
        return False
    wanted = ledger.want.under(swap.new)
    ledger.spend(len(wanted) + len(explained))
    own = account.sources.union(name for name in account.domain if _is_counter(name))
    met = account.targets.union(name for name in wanted if _is_counter(name))
    if len(own) < len(account.domain) or len(met) < len(wanted):
        return False
    if not all(ledger.proves(*pair) for pair in explained):
        return False
    parts = len(swap.old)
    modules = {module for name, _ in explained if (module := _below(name, parts))}
    return len(modules) > 1


def _is_another_word(swap: Swap) -> bool:
    """Whether words are replaced by words, and not by the same with another number."""
    _, old, new = swap.parts
    return bool(old and new) and not any(map(is_number, old + new)) and _wordy(old) != _wordy(new)


def _wordy(head: Head) -> list[str]:
    return [_DIGITS.sub("", part or "") for part in head]


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] == BATCHES


def _below(name: str, parts: int) -> str:
    """The module of a name, without its first components."""
    return ".".join(name.split(".")[parts:-1])
