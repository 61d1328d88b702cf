"""Which entry of a state dict goes where in a model, and what its elements say of that."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptool._lazy import uncollected
from ckptool.loading.fitting.contents import loss_of, same_elements
from ckptool.loading.fitting.models import Target
from ckptool.loading.fitting.overlaps import differing_overlaps
from ckptool.loading.fitting.states import State
from ckptool.loading.fitting.unmade import without_unmade
from ckptool.loading.live.slots import live_slots
from ckptool.matching import Cast, Match, matched
from ckptool.matching.report import counted
from ckptool.transforms.name_rules import Rule, rules_of
from ckptool.words import printable

if TYPE_CHECKING:
    from ckptool.loading.fitting.losses import Loss

__all__ = ["planned"]

_UNTRIED = " loads in its own way, which could not be tried beforehand"
_NO_ENTRY = "a plain value, which no model takes"


@uncollected()
def planned(
    state: State,
    target: Target,
    *,
    rules: Iterable[Rule | str] = (),
    prefixes: Iterable[str] = (),
    assign: bool = False,
    by_type: bool = False,
    as_stored: bool = False,
) -> Match:
    """Match the names, then look into the elements where a cast, or an untied tie, may lose some.

    Of a file for what another file has no torch is needed, if casts are judged `by_type`. `assign`:
    the model is to have the tensors themselves, of whatever type. `as_stored`: nobody is to have
    them yet; another file is, types, objects and all.

    Raises:
        NameCollision: the rules make two names one.
        UsageError: a text that is no rule.
        TorchMissing: elements have to be made, and torch is not installed.
        CorruptFile, DeviceError: the elements cannot be read.
    """
    loading = target.loading
    first = found = matched(
        state.slots,
        target.slots,
        rules=rules_of(rules, prefixes),
        metadata=state.metadata,
        closed=loading.closed if loading is not None else (),
        file=state.file,
        model=target.label,
    )
    if not as_stored:
        found = without_unmade(found, state, target, loading=loading, assign=assign)
    kept = dict(found.report.kept).keys()
    if loading is not None and loading.paths:
        # Imported here: few models load in a way of their own.
        from ckptool.loading.fitting.settling import settled

        found = settled(found, loading, state, target)
    untied = tuple(_untied(state, target, found.pairs))
    apart = frozenset(name for group in untied for name in group)
    casts = () if assign else found.report.cast
    counts = {} if found is first else _counts(found, target, kept)
    report = found.report.with_changes(
        cast=casts if by_type or as_stored else _judged(state, casts),
        tied=tuple(
            group
            for group in found.report.tied
            if not (apart.intersection(group) or found.pairs.keys().isdisjoint(group))
        ),
        untied=untied,
        overlapping=tuple(differing_overlaps(state, target, found.pairs)),
        notes=(
            *found.report.notes,
            *([f"{printable(found.untried)}{_UNTRIED}"] if found.untried else []),
        ),
        left_out=(*found.report.left_out, *((name, _NO_ENTRY) for name in state.beside)),
        **counts,
    )
    return found._replace(report=report)


def _counts(found: Match, target: Target, kept: AbstractSet[str]) -> Mapping[str, Any]:
    """What of the model is loaded, its own loading's part too.

    What that leaves as it is counts as parameters that are not loaded, and as no names.
    """
    unsure = target.unsure
    asked = {name: unsure[name] for name in found.report.missing_keys if name in unsure}
    slots = {**target.slots, **live_slots(asked, rest="buffer")} if asked else target.slots
    counts = counted(slots, {*found.pairs, *found.filled}, kept)
    idle = dict(found.report.kept).keys() - found.filled - kept
    counts["names"] -= len(idle)
    return counts


def _judged(state: State, casts: Iterable[Cast]) -> tuple[Cast, ...]:
    """Casts by what the elements are, where their types alone could lose something."""
    losses: dict[tuple[str, str], Loss | None] = {}
    judged = []
    for cast in casts:
        if cast.lossy:
            key = cast.own, cast.after
            if key not in losses:
                value = partial(state.value, cast.own)
                losses[key] = loss_of(state.ref(cast.own), value, cast.after)
            loss = losses[key]
            if loss is not None:
                cast = replace(cast, lossy=bool(str(loss)), loss=str(loss))
        judged.append(cast)
    return tuple(judged)


def _untied(state: State, target: Target, pairs: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Names that are one tensor in the model, and have several contents in the file."""
    groups: dict[Hashable, list[str]] = {}
    for name in pairs:
        tie = target.slots[name].tie
        if tie is not None:
            groups.setdefault(tie, []).append(name)
    for names in groups.values():
        first, *others = dict.fromkeys(pairs[name] for name in names)
        if not all(_is_same(state, first, other) for other in others):
            yield tuple(names)


def _is_same(state: State, one: str, other: str) -> bool:
    tie = state.slots[one].tie
    tied = tie is not None and tie == state.slots[other].tie
    return tied or same_elements(state, one, other)
