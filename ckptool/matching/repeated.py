"""Rules found by the first of many layers that are alike, where they hold for all of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ckptool.matching.inference import Inferred, inferred
from ckptool.matching.slots import Slot, fits
from ckptool.transforms.name_rules import regex_rule

__all__ = ["inferred_by_few"]

_MANY = 20_000
"""Names of both sides; below, looking at all of them takes no time."""
_NUMBER = re.compile("[0-9]+")
_LATE = re.compile("[0-9]{3}|[7-9][0-9]|6[4-9]")
"""A number of 64 or more, or one that is written so."""


class _Some(NamedTuple):
    """The names of one side, in part."""

    names: dict[str, Slot]
    """With small numbers alone, or unlike any such name."""
    others: dict[str, Slot]
    groups: list[list[str]]
    """All that differ in numbers alone, of which some are in the others."""


def inferred_by_few(
    have: Mapping[str, Slot], want: Mapping[str, Slot], pairs: Mapping[str, str]
) -> Inferred | None:
    """As `inferred` has it, found by names with small numbers; None where that may not be all.

    It is all where nothing is contested, and where each rule does the same for the names with
    large numbers as it does for those that differ from them in numbers alone.
    """
    if len(have) + len(want) < _MANY:
        return None
    mine, wanted = _some(have), _some(want)
    if not (_is_even(mine.groups) and _is_even(wanted.groups)):
        return None
    if 2 * (len(mine.names) + len(wanted.names)) > len(have) + len(want):
        return None
    if any((name in wanted.names) is not (own in mine.names) for name, own in pairs.items()):
        return None
    few = {name: own for name, own in pairs.items() if name in wanted.names}
    found = inferred(mine.names, wanted.names, few)
    if found.ambiguous or found.near or found.is_cut_short or not all(r.rule for r in found.rules):
        return None
    used = set(pairs.values())
    met = dict(pairs)
    rules = []
    for rule in found.rules:
        apply = regex_rule(rule.rule).apply
        made = {own: new for own in mine.others if (new := apply(own)) is not None}
        for own, new in made.items():
            slot = wanted.others.get(new)
            if slot is None or new in met or own in used or not fits(mine.others[own], slot):
                return None
            met[new] = own
            used.add(own)
        met.update(rule.pairs)
        used.update(rule.pairs.values())
        rules.append(rule._replace(pairs={**rule.pairs, **{n: own for own, n in made.items()}}))
    if _are_alike(mine.groups, used) and _are_alike(wanted.groups, met):
        return found._replace(rules=tuple(rules))
    return None


def _is_even(groups: Iterable[Sequence[str]]) -> bool:
    """Whether every layer of a list has the names of the first ones."""
    sizes: dict[str, int] = {}
    for names in groups:
        *_, last = _NUMBER.finditer(names[0])
        front = _NUMBER.sub("0", names[0][: last.end()])
        if sizes.setdefault(front, len(names)) != len(names):
            return False
    return True


def _some(names: Mapping[str, Slot]) -> _Some:
    groups: dict[Hashable, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    known: dict[str, tuple[str, bool]] = {}
    for name, slot in names.items():
        module, _, leaf = name.rpartition(".")
        for part in (module, leaf):  # there are fewer of either than names
            if part not in known:
                known[part] = _NUMBER.sub("\0", part), _LATE.search(part) is not None
        (above, is_late), (below, ends_late) = known[module], known[leaf]
        group = groups[above, below, slot.shape, slot.kind]
        group[is_late or ends_late].append(name)
    others = {name: names[name] for early, late in groups.values() if early for name in late}
    few = {name: slot for name, slot in names.items() if name not in others}
    both = [[*early, *late] for early, late in groups.values() if early and late]
    return _Some(few, others, both)


def _are_alike(groups: Iterable[list[str]], met: Mapping[str, str] | set[str]) -> bool:
    """Whether of each group all are met, or none."""
    return all(len({name in met for name in group}) == 1 for group in groups)
