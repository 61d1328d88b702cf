"""The ways to read names of parameters: as names of a model, or of a part of it.

`named_parameters()` of a part gives the names that the part has of itself: `weight`, for
`encoder.weight` and `decoder.weight` alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ckptool.errors import NameCollision
from ckptool.loading.optimizers.saved import Kept, Names
from ckptool.matching import Slot
from ckptool.model import Shape
from ckptool.names import strip_names

__all__ = ["Model", "Spelling", "Way", "bare_names", "ends_in", "nearest", "ways_of"]

_MOST_DEPTHS = 16
"""Lengths of names in components, with which names are not looked for apart any more."""


@dataclass(frozen=True, eq=False)
class Model:
    """What names are looked for in."""

    owners: Mapping[str, Hashable]
    """By name what a parameter is: equal where names are one parameter."""
    slots: Mapping[str, Slot]
    """All that the model has: these tell what is a wrapper."""

    @cached_property
    def spellings(self) -> list[Spelling]:
        """The names of its parameters, with wrapper names and without."""
        bare = bare_names((*self.slots, *self.owners))
        plain = {name: name for name in self.owners}
        without = {bare[name]: name for name in self.owners}
        return [Spelling(plain)] if without == plain else [Spelling(plain), Spelling(without)]


@dataclass(frozen=True, eq=False)
class Spelling:
    """Names of parameters as they may be written."""

    names: Mapping[str, str]
    """Each with the one that the model has."""
    _ends: dict[int, dict[str, list[str]]] = field(default_factory=dict)

    def ending(self, name: str) -> list[str]:
        """Those that end with a name as with whole components."""
        dots = name.count(".")
        if dots not in self._ends:
            ends = self._ends[dots] = {}
            for other in self.names:
                more = other.count(".") - dots
                if more >= 0:
                    end = other.split(".", more)[-1] if more else other
                    ends.setdefault(end, []).append(other)
        return self._ends[dots].get(name, [])


class Way(NamedTuple):
    """Names that all have been found, or all of a group."""

    labels: Names
    """Their names in the model."""
    owners: tuple[Hashable, ...]
    is_full: bool
    """Whether they are the model's own, and not those of a part of it."""


def ways_of(names: Sequence[tuple[str, Kept]], model: Model) -> list[Way]:
    """Every way to find all names below one path of the model; else those of each group below one.

    The shapes that the state tells must agree.
    """
    found = _ways([name for name, _ in names], [one.shape for _, one in names], model)
    groups: dict[int, list[int]] = {}
    for at, (_, one) in enumerate(names):
        groups.setdefault(one.group, []).append(at)
    if found or len(groups) < 2 or len({name.count(".") for name, _ in names}) > _MOST_DEPTHS:
        return found
    parts = [ways_of([names[at] for at in group], model) for group in groups.values()]
    if not all(parts):
        return []
    order = [at for group in groups.values() for at in group]
    ways = [_joined([some[0] for some in parts], order)]
    if max(map(len, parts)) > 1:
        ways.append(_joined([some[-1] for some in parts], order))
    return [way for way in ways if len(set(way.owners)) == len(way.owners)]


def _joined(parts: Sequence[Way], order: Sequence[int]) -> Way:
    """The ways of groups as one, in the order of the names."""
    rows = [row for part in parts for row in zip(part.labels, part.owners, strict=True)]
    both = [row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])]
    is_full = all(part.is_full for part in parts)
    return Way(tuple(label for label, _ in both), tuple(owner for _, owner in both), is_full)


def _ways(names: Sequence[str], shapes: Sequence[Shape | None], model: Model) -> list[Way]:
    """The ways for all of them together, wrappers on either side or none."""
    if not names:
        return [Way((), (), True)]
    found: dict[tuple[Hashable, ...], Way] = {}
    for own, spelling in _spelled(names, model):
        longest, every = max(own, key=len), spelling.names
        for other in spelling.ending(longest):
            front = other[: -len(longest)]
            labels = []
            for name, shape in zip(own, shapes, strict=True):
                label = every.get(front + name)
                if label is None or not _fits(shape, model.slots.get(label)):
                    break
                labels.append(label)
            owners = tuple(model.owners[label] for label in labels)
            if len(labels) == len(names) == len(set(owners)):
                known = found.get(owners)
                if known is None or not (front or known.is_full):
                    found[owners] = Way(tuple(labels), owners, not front)
    return list(found.values())


def _spelled(names: Sequence[str], model: Model) -> Iterator[tuple[tuple[str, ...], Spelling]]:
    """The names, with wrapper names and without, each with both of the model's."""
    bare = bare_names(names)
    for own in dict.fromkeys((tuple(names), tuple(bare[name] for name in names))):
        for spelling in model.spellings:
            yield own, spelling


def _fits(shape: Shape | None, slot: Slot | None) -> bool:
    return shape is None or slot is None or slot.shape is None or slot.shape == shape


def nearest(names: Sequence[str], model: Model) -> tuple[Hashable, ...]:
    """What most of the names are, as names of the model; None where one is nothing of it."""
    every = [
        tuple(model.owners.get(spelling.names.get(name, "")) for name in own)
        for own, spelling in _spelled(names, model)
    ]
    return max(every, key=lambda owners: len(set(owners) - {None}))


def ends_in(names: Iterable[tuple[str, Kept]], model: Model) -> set[str]:
    """Those of the names that some name of the model, by itself, ends with, shape and all."""
    names = list(names)
    if len({name.count(".") for name, _ in names}) > _MOST_DEPTHS:
        return {name for name, _ in names}
    bare = bare_names(name for name, _ in names)
    return {
        name
        for name, one in names
        for form in (name, bare[name])
        for spelling in model.spellings
        if any(
            _fits(one.shape, model.slots.get(spelling.names[other]))
            for other in spelling.ending(form)
        )
    }


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without wrappers; as it is where two would become one."""
    names = list(names)
    try:
        renamed = strip_names(names).renamed
    except NameCollision:
        renamed = {}
    return {name: renamed.get(name, name) for name in names}
