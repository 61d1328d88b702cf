"""What was done to the names, step by step, as rules for people and for `rename --map`.

The rules of a report, one after the other, make the names of the file those of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ckptool.matching.change_rules import differing, regex_of
from ckptool.matching.inference import InferredRule
from ckptool.matching.report import Renaming
from ckptool.matching.spelling import Respelled
from ckptool.matching.ways import Way, without_front
from ckptool.transforms.name_rules import Rule

__all__ = ["Steps", "renamings", "rewritten"]

_MOST_TRIED = 1_000_000
"""Names on which rules are tried in all; where there are more, renamings have no rule."""


class Steps(NamedTuple):
    """The stations of a name from the file to the model."""

    own: str
    ruled: str
    """After the user's rules."""
    outer: str
    """Without wrappers in front."""
    unwrapped: str
    """Without any."""
    bare: str
    """Without a front, or with the model's instead."""
    spelled: str
    """In the model's spelling."""
    inferred: str
    """After the rules that were inferred."""
    fronted: str
    """With the model's front."""
    inner: str
    """With the wrappers that the model has inside."""
    wanted: str
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
        outer, inner = without_front(ruled, unwrapped), without_front(wanted, fronted)
        bare, inferred = unwrapped.removeprefix(off), fronted.removeprefix(on)
        if off and on and bare != unwrapped and inferred != fronted:
            bare, inferred = f"{on}{bare}", fronted
        spelled, text = bare, ""
        if mine is not None and theirs is None:
            spelled, text = mine.of(bare), f"{mine.old} -> {mine.new}"
        elif theirs is not None and mine is None:
            spelled = bare.removesuffix(theirs.new) + theirs.old
            text = f"{theirs.new} -> {theirs.old}"
        stations = outer, unwrapped, bare, spelled, inferred, fronted, inner
        if unwrapped == fronted:
            stations = _with_kept_front(ruled, wanted, stations)
        return cls(own, ruled, *stations, wanted, text)


_Stations = tuple[str, str, str, str, str, str, str]


def _with_kept_front(ruled: str, wanted: str, stations: _Stations) -> _Stations:
    """The stations with the wrappers in front that both ends have, where only wrappers differ."""
    outer, unwrapped, bare, spelled, inferred, fronted, inner = stations
    if len(outer) == len(ruled) or len(inner) == len(wanted):
        return stations
    off, on = ruled.removesuffix(outer).split("."), wanted.removesuffix(inner).split(".")
    same = 0
    while same < min(len(off), len(on)) - 1 and off[same] == on[same]:
        same += 1
    kept = "".join(f"{word}." for word in off[:same])
    return (
        kept + outer,
        kept + unwrapped,
        kept + bare,
        kept + spelled,
        kept + inferred,
        kept + fronted,
        kept + inner,
    )


def renamings(
    steps: Sequence[Steps],
    still: Sequence[str],
    rules: Sequence[Rule],
    found: Sequence[InferredRule],
) -> tuple[Renaming, ...]:
    """By kind, in the order in which they are to be applied; `still` are names that stay."""
    made = [*_by_user(steps, rules)]
    stages = _Stages(steps, still)
    made += stages.made("wrapper", "ruled", "outer")
    made += stages.made("wrapper", "outer", "unwrapped")
    made += stages.made("prefix", "unwrapped", "bare")
    made += stages.made("known", "bare", "spelled")
    made += stages.concluded(found)
    made += stages.made("prefix", "inferred", "fronted")
    made += stages.made("wrapper", "fronted", "inner")
    made += stages.made("wrapper", "inner", "wanted")
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


class _Stages:
    """The names on their way, and how many of them rules may still be tried on."""

    def __init__(self, steps: Sequence[Steps], still: Sequence[str]) -> None:
        self._steps = steps
        self._still = still
        self._left = _MOST_TRIED

    def made(self, kind: str, before: str, after: str) -> Iterator[Renaming]:
        """One renaming for all names to which a step does the same."""
        station = attrgetter(before, after)
        groups: dict[str, list[Steps]] = {}
        for step in self._steps:
            old, new = station(step)
            if old != new:
                text = step.respelled if kind == "known" else _text(old, new)
                groups.setdefault(text, []).append(step)
        for text, members, rule in self._ruled(groups, before, after, {}):
            yield Renaming(kind, text, tuple((s.own, s.wanted) for s in members), rule)

    def concluded(self, found: Sequence[InferredRule]) -> Iterator[Renaming]:
        """One renaming for each rule that was inferred."""
        by_name = {step.wanted: step for step in self._steps} if found else {}
        groups: dict[str, list[Steps]] = {}
        proposed = {}
        kinds = {}
        for number, rule in enumerate(found):
            key = f"{number} {rule.text}"
            groups[key] = [by_name[name] for name in rule.pairs if name in by_name]
            proposed[key], kinds[key] = rule.rule, rule
        for key, members, text in self._ruled(groups, "spelled", "inferred", proposed):
            names = tuple((step.own, step.wanted) for step in members)
            yield Renaming(kinds[key].kind, kinds[key].text, names, text)

    def _ruled(
        self,
        groups: Mapping[str, list[Steps]],
        before: str,
        after: str,
        proposed: Mapping[str, str],
    ) -> Iterator[tuple[str, list[Steps], str]]:
        """The groups of a stage, each with a rule that does its change and touches no other name.

        The groups before it have changed by then.
        """
        old, new = attrgetter(before), attrgetter(after)
        moved: set[str] = set()
        for text, members in groups.items():
            rule = ""
            every = len(self._steps) + len(self._still)
            if self._left >= every:
                own = {step.own for step in members}
                beside = (
                    new(step) if step.own in moved else old(step)
                    for step in (self._steps if len(own) < len(self._steps) else ())
                    if step.own not in own
                )
                self._left -= every
                rule = regex_of(
                    [(old(step), new(step)) for step in members],
                    chain(beside, self._still),
                    proposed=[proposed[text]] if text in proposed else [],
                )
                moved |= own
            yield text, members, rule


def _text(before: str, after: str) -> str:
    """What happens to a name, in words."""
    if before.endswith(after):
        return f"{before[: -len(after)]} taken off"
    if after.endswith(before):
        return f"{after[: -len(before)]} put before"
    if (less := _dropped(before, after)) is not None:
        return f"{less} taken off"
    if (more := _dropped(after, before)) is not None:
        return f"{more} put in"
    _, old, new, _ = differing(before, after)
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
