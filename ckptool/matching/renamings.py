"""What was done to the names, step by step, as rules for people and for `rename --map`.

The rules of a report, one after the other, make the names of the file those of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from ckptool.matching.change_rules import differing, escaped, regex_of
from ckptool.matching.report import Renaming
from ckptool.matching.stations import Column, Stations

if TYPE_CHECKING:
    from ckptool.matching.inference import InferredRule
    from ckptool.transforms.name_rules import Rule

__all__ = ["renamings", "rewritten"]

_MOST_TRIED = 1_000_000
"""Names on which rules are tried in all; where there are more, renamings have no rule."""


def renamings(
    stations: Stations,
    still: Sequence[str],
    rules: Sequence[Rule],
    found: Sequence[InferredRule],
    names: Iterable[str] = (),
) -> tuple[Renaming, ...]:
    """By kind, in the order in which they are to be applied.

    `still` are names that stay, `names` all of the file's, matched or not.
    """
    made = [*_by_user(stations, rules, names)]
    stages = _Stages(stations, still)
    made += stages.made("wrapper", stations.ruled, stations.outer)
    made += stages.made("wrapper", stations.outer, stations.unwrapped)
    made += stages.made("prefix", stations.unwrapped, stations.bare)
    made += stages.made("known", stations.bare, stations.spelled)
    made += stages.concluded(found)
    made += stages.made("prefix", stations.inferred, stations.fronted)
    made += stages.made("wrapper", stations.fronted, stations.inner)
    made += stages.made("wrapper", stations.inner, stations.wanted)
    return tuple(made)


def _by_user(stations: Stations, rules: Sequence[Rule], names: Iterable[str]) -> Iterator[Renaming]:
    if not rules:
        return
    ends = zip(stations.own, stations.ruled, stations.wanted, strict=True)
    whose = {own: wanted for own, ruled, wanted in ends if own != ruled}
    now = {own: own for own in (*names, *whose)}
    for rule in rules:
        changed = {own: new for own, at in now.items() if (new := rule.apply(at) or at) != at}
        pairs = tuple((own, whose[own]) for own in changed if own in whose)
        if pairs:
            yield Renaming("rule", rule.text, pairs, rule.regex or _as_regex(now, changed))
        now.update(changed)


def _as_regex(now: Mapping[str, str], changed: Mapping[str, str]) -> str:
    """One that changes just these of the names as they are now."""
    changes = [(now[own], new) for own, new in changed.items()]
    others = [at for own, at in now.items() if own not in changed]
    old, new = changes[0]
    wholly = f"^{escaped(old)}$=>" + new.replace("\\", r"\\")
    return regex_of(changes, others) or regex_of(changes, others, proposed=[wholly])


_Members = Sequence[int]
"""Which of all the names, counted from 0."""


class _Stages:
    """The names on their way, and how many of them rules may still be tried on."""

    def __init__(self, stations: Stations, still: Sequence[str]) -> None:
        self._stations = stations
        self._still = still
        self._left = _MOST_TRIED
        self._every: tuple[tuple[str, str], ...] | None = None

    def made(self, kind: str, before: Column, after: Column) -> Iterator[Renaming]:
        """One renaming for all names to which a step does the same."""
        if before is after:
            return
        groups: dict[str, list[int]] = {}
        texts = self._stations.respelled if kind == "known" else map(_text, before, after)
        for at, (old, new, text) in enumerate(zip(before, after, texts, strict=True)):
            if old != new:
                if text not in groups:
                    groups[text] = []
                groups[text].append(at)
        ends = {text: _of_ends(text) for text in groups} if kind == "known" else {}
        for text, members, rule in self._ruled(groups, before, after, ends):
            yield Renaming(kind, text, self._names(members), rule)

    def concluded(self, found: Sequence[InferredRule]) -> Iterator[Renaming]:
        """One renaming for each rule that was inferred."""
        if not found:
            return
        places = {name: at for at, name in enumerate(self._stations.wanted)}
        groups: dict[str, list[int]] = {}
        proposed = {}
        kinds = {}
        for number, rule in enumerate(found):
            key = f"{number} {rule.text}"
            groups[key] = [places[name] for name in rule.pairs if name in places]
            proposed[key], kinds[key] = rule.rule, rule
        spelled, inferred = self._stations.spelled, self._stations.inferred
        for key, members, text in self._ruled(groups, spelled, inferred, proposed):
            yield Renaming(kinds[key].kind, kinds[key].text, self._names(members), text)

    def _names(self, members: _Members) -> tuple[tuple[str, str], ...]:
        own, wanted = self._stations.own, self._stations.wanted
        if len(members) < len(own):
            return tuple((own[at], wanted[at]) for at in members)
        if self._every is None:
            self._every = tuple(zip(own, wanted, strict=True))
        return self._every

    def _ruled(
        self,
        groups: Mapping[str, list[int]],
        before: Column,
        after: Column,
        proposed: Mapping[str, str],
    ) -> Iterator[tuple[str, _Members, str]]:
        """The groups of a stage, each with a rule that does its change and touches no other name.

        The groups before it have changed by then.
        """
        now = before
        every = len(before) + len(self._still)
        for text, members in groups.items():
            rule = ""
            if self._left >= every:
                self._left -= every
                if len(members) == len(before):
                    changes, beside = list(zip(now, after, strict=True)), []
                else:
                    own = set(members)
                    changes = [(now[at], after[at]) for at in members]
                    beside = [name for at, name in enumerate(now) if at not in own]
                rule = regex_of(
                    changes,
                    chain(beside, self._still),
                    proposed=[proposed[text]] if text in proposed else [],
                )
                if len(groups) > 1:
                    now = now.copy() if now is before else now
                    for at in members:
                        now[at] = after[at]
            yield text, members, rule


def _of_ends(text: str) -> str:
    """The rule that does to the ends of names what a text says of them."""
    old, _, new = text.partition(" -> ")
    literal = new.replace("\\", r"\\")
    return rf"(^|\.){escaped(old)}$=>\1{literal}"


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
    renamed = {own: matched.get(own, "") for own in names}
    for own in [own for own, new in renamed.items() if not new]:
        if own in matched:
            continue
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
