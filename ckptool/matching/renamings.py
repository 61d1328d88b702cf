"""What was done to the names, step by step, as rules for people and for `rename --map`.

The rules of a report, one after the other, make the names of the file those of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from ckptool.matching.inference import InferredRule
from ckptool.matching.report import Renaming
from ckptool.matching.spelling import Respelled
from ckptool.matching.ways import Way
from ckptool.transforms.name_rules import Rule

__all__ = ["Steps", "regex_of", "renamings", "rewritten"]

_MOST_RULES = 64
"""Renamings for which one rule is looked for: each is tried on all names."""

Change = tuple[str, str]
"""A name before a step and after it."""


class Steps(NamedTuple):
    """The stations of a name from the file to the model."""

    own: str
    ruled: str
    """After the user's rules."""
    unwrapped: str
    """Without wrappers."""
    bare: str
    """Without a front, or with the model's instead."""
    spelled: str
    """In the model's spelling."""
    fronted: str
    """After the rules that were inferred, with the model's front."""
    wanted: str
    inferred: str
    """After the rules that were inferred, before the model's front."""
    respelled: str
    """What was done to the spelling, in words."""

    @classmethod
    def of(
        cls,
        own: str,
        ruled: str,
        wanted: str,
        way: Way,
        mine: Respelled | None,
        theirs: Respelled | None,
    ) -> Steps:
        """The stations between the two names, which spell their ends so."""
        off, on = way.have.front, way.want.front
        unwrapped, fronted = way.have.form.get(ruled, ruled), way.want.form.get(wanted, wanted)
        bare, inferred = unwrapped.removeprefix(off), fronted.removeprefix(on)
        if off and on and bare != unwrapped and inferred != fronted:
            bare, inferred = f"{on}{bare}", fronted
        spelled, text = bare, ""
        if mine is not None and theirs is None:
            spelled, text = mine.of(bare), f"{mine.old} -> {mine.new}"
        elif theirs is not None and mine is None:
            spelled = bare.removesuffix(theirs.new) + theirs.old
            text = f"{theirs.new} -> {theirs.old}"
        if spelled == fronted:
            unwrapped, bare, spelled, inferred, fronted = _kept_front(
                ruled, wanted, unwrapped, bare, spelled, inferred, fronted
            )
        return cls(own, ruled, unwrapped, bare, spelled, fronted, wanted, inferred, text)


def _kept_front(ruled: str, wanted: str, *stations: str) -> tuple[str, ...]:
    """The stations with the wrappers that both ends begin with, where they all lack them."""
    if len(set(stations)) > 1:
        return stations
    kept, bare = "", stations[0]
    while True:
        word = wanted[len(kept) :].partition(".")[0]
        longer = f"{kept}{word}."
        if not word or bare.startswith(f"{word}.") or not ruled.startswith(longer):
            return tuple(kept + station for station in stations)
        kept = longer


def renamings(
    steps: Sequence[Steps], rules: Sequence[Rule], found: Sequence[InferredRule]
) -> tuple[Renaming, ...]:
    """By kind, in the order in which they are to be applied."""
    made = [*_by_user(steps, rules)]
    made += _grouped(steps, "wrapper", "ruled", "unwrapped")
    made += _grouped(steps, "prefix", "unwrapped", "bare")
    made += _grouped(steps, "known", "bare", "spelled")
    made += _by_inference(steps, found)
    made += _grouped(steps, "prefix", "inferred", "fronted")
    made += _grouped(steps, "wrapper", "fronted", "wanted")
    return tuple(made)


def _by_user(steps: Sequence[Steps], rules: Sequence[Rule]) -> Iterator[Renaming]:
    now = {step.own: step.own for step in steps if step.own != step.ruled}
    whose = {step.own: step.wanted for step in steps}
    for rule in rules:
        changed = {own: new for own, at in now.items() if (new := rule.apply(at) or at) != at}
        if changed:
            changes = [(now[own], new) for own, new in changed.items()]
            text = rule.text if "=>" in rule.text else regex_of(changes)
            names = tuple((own, whose[own]) for own in changed)
            yield Renaming("rule", rule.text, names, text)
        now.update(changed)


def _by_inference(steps: Sequence[Steps], found: Sequence[InferredRule]) -> Iterator[Renaming]:
    by_name = {step.wanted: step for step in steps}
    for rule in found:
        mine = [by_name[name] for name in rule.pairs if name in by_name]
        changes = [(step.spelled, step.inferred) for step in mine]
        text = rule.rule if does(rule.rule, changes) else regex_of(changes)
        yield Renaming(rule.kind, rule.text, tuple((s.own, s.wanted) for s in mine), text)


def _grouped(steps: Sequence[Steps], kind: str, before: str, after: str) -> Iterator[Renaming]:
    """One renaming for all names to which a step does the same."""
    station = attrgetter(before, after)
    groups: dict[str, list[tuple[Steps, Change]]] = {}
    for step in steps:
        change = station(step)
        if change[0] != change[1]:
            text = step.respelled if kind == "known" else _text(*change)
            groups.setdefault(text, []).append((step, change))
    for number, (text, members) in enumerate(groups.items()):
        changes = [change for _, change in members]
        rule = regex_of(changes) if number < _MOST_RULES else ""
        yield Renaming(kind, text, tuple((s.own, s.wanted) for s, _ in members), rule)


def _text(before: str, after: str) -> str:
    """What happens to a name, in words."""
    if before.endswith(after):
        return f"{before[: -len(after)]} taken off"
    if after.endswith(before):
        return f"{after[: -len(before)]} put on"
    if (less := _dropped(before, after)) is not None:
        return f"{less} taken off"
    if (more := _dropped(after, before)) is not None:
        return f"{more} put on"
    _, old, new, _ = _differing(before, after)
    return f"{old} -> {new}"


def _dropped(longer: str, shorter: str) -> str | None:
    """The components that a name loses, joined; None where it is not only that."""
    kept = iter(shorter.split("."))
    wanted = next(kept, None)
    gone = []
    for part in longer.split("."):
        if part == wanted:
            wanted = next(kept, None)
        else:
            gone.append(f"{part}.")
    return "".join(gone) if wanted is None else None


def _differing(before: str, after: str) -> tuple[str, str, str, str]:
    """What two names have in front in common, what they have not, and what they have behind."""
    old, new = before.split("."), after.split(".")
    tail = 0
    while tail < min(len(old), len(new)) and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    head = 0
    while head < min(len(old), len(new)) - tail and old[head] == new[head]:
        head += 1
    behind = "".join(f".{part}" for part in old[len(old) - tail :])
    front = "".join(f"{part}." for part in old[:head])
    mine, theirs = (
        ".".join(parts[head : len(parts) - tail]) + "." * bool(tail and len(parts) > head + tail)
        for parts in (old, new)
    )
    return front, mine, theirs, behind.removeprefix(".")


def regex_of(changes: Sequence[Change]) -> str:
    """One `REGEX=>REPL` that makes all these changes; empty where none was found."""
    if not changes:
        return ""
    return next((rule for rule in _candidates(*changes[0]) if does(rule, changes)), "")


def _candidates(before: str, after: str) -> Iterator[str]:
    """Rules that may make the change, those that say less about the name first."""
    head, old, new, tail = _differing(before, after)
    if not head:
        yield _rule(f"^{_escaped(old)}", new)
    if not tail:
        yield _rule(rf"(^|\.){_escaped(old)}$", rf"\1{_literal(new)}", literal=False)
    if tail and not new:
        yield _rule(rf"(^|\.){_escaped(old)}", r"\1", literal=False)
    yield _rule(f"^{_escaped(head + old)}", head + new)
    numbers = iter(range(1, 100))
    pattern = re.sub(r"(?<![^.])\d+(?=\\\.)", r"(\\d+)", _escaped(head))
    groups = re.sub(r"(?<![^.])\d+(?=\.)", lambda _: rf"\g<{next(numbers)}>", _literal(head))
    yield _rule(f"^{pattern}{_escaped(old)}", groups + _literal(new), literal=False)


def _rule(pattern: str, replacement: str, *, literal: bool = True) -> str:
    return f"{pattern}=>{_literal(replacement) if literal else replacement}"


def _escaped(text: str) -> str:
    """As a regular expression, in which no arrow ends it."""
    return re.escape(text).replace("=>", "=[>]")


def _literal(text: str) -> str:
    return text.replace("\\", r"\\")


def does(rule: str, changes: Iterable[Change]) -> bool:
    """Whether the rule makes every one of the changes."""
    regex, arrow, replacement = rule.partition("=>")
    if not arrow or not regex:
        return False
    try:
        replace = re.compile(regex).sub
        return all(replace(replacement, before) == after for before, after in changes)
    except (re.error, IndexError, OverflowError):
        return False


def rewritten(
    names: Iterable[str],
    matched: Mapping[str, str],
    found: Iterable[Renaming],
    rules: Sequence[Rule],
) -> dict[str, str]:
    """Every name of the file as it is afterwards.

    What was matched has the model's name. The rest is what the rules make of it, or stays what it
    is where another has that name.
    """
    taken = set(matched.values())
    replacing = [
        (re.compile(regex).sub, replacement)
        for one in found
        if one.kind != "rule" and one.rule
        for regex, _, replacement in (one.rule.partition("=>"),)
    ]
    renamed = {}
    for own in names:
        new = matched.get(own)
        if new is None:
            new = own
            for rule in rules:
                new = rule.apply(new) or new
            for replace, replacement in replacing:
                new = replace(replacement, new)
            if not new or new in taken:
                new = own
            taken.add(new)
        renamed[own] = new
    return renamed
