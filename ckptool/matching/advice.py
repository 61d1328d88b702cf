"""What is advised where a state dict does not fit: the arguments that help, the safe ones first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from ckptool.errors import NameCollision, UsageError
from ckptool.matching.again import Again
from ckptool.matching.folding import folded
from ckptool.matching.globs import globs_of
from ckptool.matching.report import Ambiguity, Cast, MatchReport, Mismatch
from ckptool.remedies import Remedy, together
from ckptool.transforms.name_rules import regex_rule
from ckptool.words import printable

__all__ = [
    "ANY_RULE",
    "BELOW",
    "OTHER",
    "SCATTERED",
    "allowing",
    "allowing_all",
    "by_torch",
    "by_who_wrote_it",
    "deciding",
    "doubted",
    "either",
    "elsewhere",
    "is_named_otherwise",
    "is_of_another",
    "may_be_asked",
    "naming",
    "renumbering",
    "ruling",
    "tried",
]

_LITTLE = 4
"""A share of which one in so many is next to nothing."""
_MOST_RULES = 3
_MOST_MOVED = 2
_NAMED = (None, (), (1,))
"""Shapes that say nothing of what a tensor is."""
_NUMBERS = re.compile(r"(?<![^.])\d+(?![^.])")

ANY_RULE = Remedy((("rules", ("REGEX=>REPL",)),), to_fill_in=True)
"""No rule is known."""
BELOW = Remedy(lead="give the layers' tensors the names that the model has: ", instead=(ANY_RULE,))
NAMES = Remedy(
    lead="what is left on both sides has the same shapes: ",
    instead=(ANY_RULE._replace(note=" gives it the names that the model has"),),
)
OTHER = Remedy(
    lead="is it of another model? ",
    instead=(
        Remedy((("key", "NAME"),), " takes another state dict of the file", to_fill_in=True),
        ANY_RULE._replace(note=" renames"),
    ),
)

SCATTERED = Remedy(
    note="too much is left, in too many places, to be allowed by a few globs; the report lists it"
)


def is_of_another(report: MatchReport) -> bool:
    """Whether next to nothing of the model is met, by next to nothing of the file."""
    held = report.fitting + len(report.unexpected_keys)
    return _LITTLE * report.fitting < report.names and _LITTLE * report.fitting < held


def may_be_asked(report: MatchReport, unclear: Sequence[Ambiguity]) -> bool:
    """Whether a rule is likely to be what is wanted.

    Not where a lone module is all that speaks for it while the rest fits, nor where layers would
    get other numbers, nor where most would be as it was.
    """
    if any(_renumbers(one) for one in unclear) or not any(one.rules for one in unclear):
        return False
    if is_of_another(report):
        most = max(len(one.candidates) for one in unclear)
        return 2 * most >= len(report.missing_keys)
    return not all(_is_lone(one) for one in unclear)


def _is_lone(one: Ambiguity) -> bool:
    return len({name.rpartition(".")[0] for name in one.candidates}) < 2


def _renumbers(one: Ambiguity) -> bool:
    """Whether the names have numbers on both sides, and not the same."""
    own, wanted = (
        {tuple(_NUMBERS.findall(n)) for n in side} for side in (one.names, one.candidates)
    )
    return len(one.rules) < 2 and any(own) and any(wanted) and own.isdisjoint(wanted)


def ruling(unclear: Sequence[Ambiguity], rest: Callable[[Sequence[str]], Remedy | None]) -> Remedy:
    """The rules that decide the questions, each with what `rest` says has to be allowed then.

    `rest` is None for rules that do no good: those are not told. Empty where no rules are left.
    """
    unclear = [one for one in unclear if not _is_lone(one)] or unclear
    firsts = tuple(rule for one in unclear for rule in one.rules[:1])[:_MOST_RULES]
    others = unclear[0].rules[1:_MOST_RULES] if len(unclear) == 1 else ()
    ways = [firsts, *((rule,) for rule in others)] if firsts else []
    found = [
        Remedy((("rules", rules), *left.arguments), left.note)
        for rules in ways
        if (left := rest(rules)) is not None
    ]
    return found[0]._replace(instead=tuple(found[1:])) if found else Remedy()


def deciding(question: Remedy) -> Remedy:
    """The first of the ways to decide a question, as one that names alone do not speak for."""
    rules = dict(question.arguments).get("rules")
    is_one = not isinstance(rules, tuple) or len(rules) == 1
    same = "that is the same layer" if is_one else "those are the same layers"
    return Remedy(question.arguments, f"{question.note} where {same}")


def tried(
    report: MatchReport,
    rules: Sequence[str],
    again: Callable[[Sequence[str]], MatchReport] | None,
) -> MatchReport | None:
    """What would be left of a report with these rules; None where they do no good.

    That is where they meet no name more, or one that is met would be so no longer. What was found
    beside the names, in elements or by the model's own loading, is as it was.
    """
    again = again or partial(_by_names, report)
    before = again(())
    try:
        after = again(rules)
    except (NameCollision, UsageError):
        return None
    met = {*before.missing_keys}.difference(after.missing_keys)
    used = {*before.unexpected_keys}.difference(after.unexpected_keys)
    apart = {one.name: one.own for one in before.mismatched}
    lost = {*after.missing_keys}.difference(before.missing_keys, apart)
    dropped = {*after.unexpected_keys}.difference(before.unexpected_keys, apart.values())
    if not (met and used) or lost or dropped:
        return None
    wrong = {one.name for one in after.mismatched}
    mismatched = [one for one in report.mismatched if one.name in wrong or one.name not in apart]
    return report.with_changes(
        missing_keys=[name for name in report.missing_keys if name not in met],
        unexpected_keys=[own for own in report.unexpected_keys if own not in used],
        mismatched=(*mismatched, *(one for one in after.mismatched if one.name not in apart)),
        ambiguous=after.ambiguous,
        respelled=after.respelled,
        reformed=after.reformed,
        fitting=report.fitting + after.fitting - before.fitting,
    )


def _by_names(report: MatchReport, texts: Sequence[str]) -> MatchReport:
    """The same by the names that a report tells of, where nothing else is known."""
    rules, wanted = [regex_rule(text) for text in texts], set(report.missing_keys)
    met: dict[str, str] = {}
    for own in report.unexpected_keys:
        new = own
        for rule in rules:
            new = rule.apply(new) or new
        if new in wanted and new != own:
            met[own] = new
    wanted.difference_update(met.values())
    return report.with_changes(
        missing_keys=[name for name in report.missing_keys if name in wanted],
        unexpected_keys=[own for own in report.unexpected_keys if own not in met],
        ambiguous=() if met else report.ambiguous,
        fitting=report.fitting + len(met),
    )


def allowing(
    name: str, some: Iterable[str | Mismatch | Cast], known: Collection[str] = ()
) -> Remedy:
    """The argument that allows just these of the names known; `SCATTERED` where none can be told.

    It is all names only where all are meant.
    """
    names = [one if isinstance(one, str) else one.name for one in some]
    globs = globs_of(names, known)
    if globs:
        is_one = len(globs) == 1 < len(names)
        return Remedy(((name, globs[0] if is_one else globs),))
    if known and set(names).issuperset(known):
        return Remedy(((name, True),))
    return SCATTERED


def allowing_all(remedies: Sequence[Remedy]) -> Remedy:
    """All of them at once, or none where that would not be all that has to be allowed."""
    return SCATTERED if SCATTERED in remedies else together(remedies)


def is_named_otherwise(report: MatchReport, again: Again | None, share: float = 0) -> bool:
    """Whether more than a share of what the model lacks may be left of the file, by its shape."""
    if again is None or not report.missing_keys:
        return False
    ours, theirs = (Counter(slot.shape for slot in side.values()) for side in again.unmet(report))
    met = sum(count for shape, count in (ours & theirs).items() if shape not in _NAMED)
    return met > share * len(report.missing_keys)


def elsewhere(report: MatchReport, again: Again | None) -> list[str]:
    """Names that the model lacks and the file may have under others.

    Those of modules of which the file has as many of every shape left over.
    """
    if again is None:
        return []
    ours, theirs = again.unmet(report)
    left, wanted = (Counter(slot.shape for slot in side.values()) for side in (ours, theirs))
    sure = {
        name.rpartition(".")[0]
        for name, slot in theirs.items()
        if slot.shape not in _NAMED and left[slot.shape] < wanted[slot.shape]
    }
    telling = {name.rpartition(".")[0] for name in theirs if theirs[name].shape not in _NAMED}
    return [name for name in theirs if name.rpartition(".")[0] in telling - sure]


def either(question: Remedy, allowed: Remedy) -> Remedy:
    """The way to decide a question, and what to allow where it is decided otherwise."""
    other = Remedy(allowed.arguments, " where it is not")
    return Remedy(instead=(question, other) if allowed.arguments else (question,))


def doubted(names: Sequence[str], allowed: Remedy) -> Remedy:
    """What helps where such names may be in the file under others: allowing them comes last."""
    lead = f"{folded(names)} may be in the file under another name: "
    return either(ANY_RULE, allowed)._replace(lead=lead)


def by_who_wrote_it(maker: str, other: Remedy) -> Remedy:
    """What loads the file as those do who wrote it, before what else there is to be tried."""
    others = (other._replace(instead=()), *other.instead) if not other.lead else ()
    return Remedy(note=maker, instead=tuple(one for one in others if one.arguments))


def naming(report: MatchReport, again: Again | None) -> Remedy:
    """What helps where next to nothing fits."""
    if report.respelled:
        return BELOW
    return NAMES if is_named_otherwise(report, again) else OTHER


def renumbering(moved: Sequence[str], rules: Remedy | None) -> Remedy:
    """What helps where layers have other numbers: rules for all of a list, and none for just one.

    Nothing is allowed: what is taken for the same layer by its number is as likely another.
    """
    lead = f"{'; '.join(moved[:_MOST_MOVED])}: "
    if rules is None:
        return Remedy(lead=lead, instead=(ANY_RULE._replace(note=" for each layer of the list"),))
    note = f"{rules.note} where they are the same layers, in this order"
    return Remedy(lead=lead, instead=(rules._replace(note=note),))


def by_torch(kind: str) -> Remedy:
    """What helps where the class that loads in a way of its own could not be tried."""
    return Remedy(
        note=f"{printable(kind)} loads in its own way, which could not be tried beforehand: "
        "model.load_state_dict(ckptool.load_state_dict(path)) does what torch does"
    )
