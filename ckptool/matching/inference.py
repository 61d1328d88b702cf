"""Rename rules that two sets of names suggest by themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

from ckptool.matching.accounts import Ledger, OutOfBudget
from ckptool.matching.contradictions import contradicted
from ckptool.matching.dominance import Gate
from ckptool.matching.families import numbers_of
from ckptool.matching.list_rules import list_rules
from ckptool.matching.prefixes import accepted_prefixes
from ckptool.matching.questions import Contested, ambiguities
from ckptool.matching.replacements import accepted_replacements
from ckptool.matching.report import Ambiguity
from ckptool.matching.rule_text import rule_text, segment_text, swap_text
from ckptool.matching.slots import Slot
from ckptool.matching.swaps import Swap, is_number
from ckptool.transforms.name_rules import regex_rule

__all__ = ["Inferred", "InferredRule", "applied", "inferred"]

_MOST_TEXTS = 64
"""Rules that are put in words, for each of which all names are gone through; more nobody reads."""
_Accepted = tuple[Swap, dict[str, str]]
"""A rule, and what it pairs: wanted names with those of the file."""


class InferredRule(NamedTuple):
    """A rule, with what it does: `kind` is `prefix` (purely taken off or put on) or `inferred`."""

    kind: str
    text: str
    rule: str
    """As `REGEX=>REPL`: applied to the names it is for, it gives their new names."""
    pairs: dict[str, str]
    """Wanted name to name in the file."""


class Inferred(NamedTuple):
    """What was found for names that had no match yet."""

    rules: tuple[InferredRule, ...] = ()
    ambiguous: tuple[Ambiguity, ...] = ()
    near: Mapping[str, str] = MappingProxyType({})
    """Wanted name to name in the file that a rule gives it, though its shape is another."""
    is_cut_short: bool = False
    """Whether there was more to look at than real names have."""


def inferred(
    have: Mapping[str, Slot], want: Mapping[str, Slot], pairs: Mapping[str, str]
) -> Inferred:
    """Rules for the names that `pairs` (wanted to have) leaves over.

    What is concluded has no rival: candidates are counted among all names, and a rule stands
    against the others that give one of its names another meaning. The rest is `ambiguous`.
    """
    ledger = Ledger(have, want, pairs)
    gate = Gate(ledger)
    done, contested = accepted_prefixes(ledger, gate)
    if not ledger.is_cut_short:
        with suppress(OutOfBudget):
            for item in accepted_replacements(ledger, gate):
                if isinstance(item, Contested):
                    contested.append(item)
                else:
                    done.append(item)
    if ledger.is_cut_short:
        ledger.renew()
    for swap, found in contradicted(ledger, done):
        ledger.take_back(found)
        done.remove((swap, found))
        contested.append(Contested(ledger.account(swap)))
    rules = tuple(_rules(ledger, done))
    asked: list[Ambiguity] = []
    with suppress(OutOfBudget):
        asked.extend(ambiguities(ledger, contested))
    near = _near(ledger, [swap for swap, _ in done])
    return Inferred(rules, tuple(asked), near, ledger.is_cut_short)


def applied(
    have: Mapping[str, Slot], pairs: Mapping[str, str]
) -> tuple[Mapping[str, Slot], Mapping[str, str]]:
    """The names of a file, and what is met, with the new names in place of the old ones.

    The same two where nothing is met by another name, or none that is free.
    """
    new = {own: name for name, own in pairs.items() if own != name and name not in have}
    if not new:
        return have, pairs
    return (
        {new.get(own, own): slot for own, slot in have.items()},
        {name: new.get(own, own) for name, own in pairs.items()},
    )


def _rules(ledger: Ledger, done: Iterable[_Accepted]) -> Iterable[InferredRule]:
    """One for each that was accepted, and one for several that replace the same components.

    Also one for a list of which each layer was found by itself: `layer1.` is `layers.1.`.
    """
    done = list(done)
    for rule in _of_lists(ledger, done):
        done = [(swap, found) for swap, found in done if not rule.pairs.items() >= found.items()]
        yield rule
    segments: dict[object, list[tuple[Swap, dict[str, str]]]] = {}
    for swap, found in done:
        segments.setdefault(swap.parts[1:], []).append((swap, found))
    texts = 0
    for alike in segments.values():
        swap = alike[0][0]
        together = {wanted: own for _, found in alike for wanted, own in found.items()}
        names = {own: wanted for wanted, own in together.items()}
        is_worded = texts < _MOST_TEXTS
        text = segment_text(swap, names, ledger.have) if is_worded and len(alike) > 1 else ""
        if text:
            texts += 1
            yield InferredRule("inferred", swap_text(Swap(*swap.parts[1:])), text, together)
            continue
        for swap, found in alike:
            kind = "prefix" if swap.is_prefix else "inferred"
            names = {own: wanted for wanted, own in found.items()}
            text = rule_text(swap, names, ledger.have) if texts < _MOST_TEXTS else ""
            texts += 1
            yield InferredRule(kind, swap_text(swap), text, found)


def _of_lists(ledger: Ledger, done: Iterable[_Accepted]) -> Iterable[InferredRule]:
    """Rules that do what several do, each for a layer whose number stands in a word."""
    pairs = {
        wanted: own for swap, found in done if _has_number(swap) for wanted, own in found.items()
    }
    if not pairs:
        return
    have, want = ledger.have.slots, ledger.want.slots
    names = {own: wanted for wanted, own in pairs.items()}
    for text in list_rules({h: have[h] for h in names}, {w: want[w] for w in pairs}):
        apply = regex_rule(text).apply
        made = {own: new for own in have if (new := apply(own)) is not None}
        if all(_may_be(ledger, *pair) for pair in made.items()):  # of many, some were looked at
            found = {new: own for own, new in made.items()}
            ledger.meet({new: own for new, own in found.items() if new not in ledger.pairs})
            told = text.removeprefix("^").replace(r"(\d+)\.", "*.").replace(r"\1", "*")
            shown = told.replace("\\", "").replace("=>", " -> ")
            yield InferredRule("inferred", shown, text, found)


def _may_be(ledger: Ledger, own: str, wanted: str) -> bool:
    """Whether one is known to be the other, or both are left and fit."""
    if own in ledger.met or wanted in ledger.pairs:
        return ledger.met.get(own) == wanted
    return wanted in ledger.want.slots and ledger.fits(own, wanted)


def _has_number(swap: Swap) -> bool:
    """Whether a number stands in a word that it replaces, or by which it does."""
    words = (part for head in swap.parts[1:] for part in head if part and not is_number(part))
    return not swap.is_prefix and any(map(numbers_of, words))


def _near(ledger: Ledger, swaps: Iterable[Swap]) -> dict[str, str]:
    """What the rules make of names whose shapes do not fit, where nothing else meets those."""
    near: dict[str, str] = {}
    used: set[str] = set()
    with suppress(OutOfBudget):
        for swap in swaps:
            for own, wanted in ledger.account(swap).unfit:
                free = own not in ledger.met and wanted not in ledger.pairs
                if free and wanted not in near and own not in used:
                    near[wanted] = own
                    used.add(own)
    return near
