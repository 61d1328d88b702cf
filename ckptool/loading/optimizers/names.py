"""Which parameter of an optimizer a name is that a file's optimizer keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptool.errors import NameCollision
from ckptool.loading.optimizers.saved import Kept, Names
from ckptool.matching import Match, Slot, matched
from ckptool.model import Shape
from ckptool.wrappers import strip_names

__all__ = ["Place", "Reading", "bare_names", "leads_of", "read_names"]


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter of the optimizer that is to be filled."""

    group: int
    name: str
    """The model's name for it; another, for people, where the model has none."""
    in_model: bool = True
    own_name: str | None = None
    """What the optimizer's own `param_names` call it."""
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """Where names lead: for each parameter of the file the number of the optimizer's, or None."""

    found: tuple[int | None, ...]
    disputed: tuple[str, ...] = ()
    """Names that lead to two parameters, by two ways of reading them that are as good."""

    @property
    def is_whole(self) -> bool:
        """Whether each leads to a parameter of its own."""
        return _is_whole(self.found) and not self.disputed


_Way = Callable[[str], int | None]


def read_names(
    names: Names, kept: Sequence[Kept], places: Sequence[Place], match: Match
) -> Reading:
    """Follow the names: through the file's model, else by the optimizer's own, else by rules.

    Each way is taken for all names or for none, so that a model with a real child called `module`
    is not mistaken for its wrapper. Where no way leads all names to parameters, it is the one that
    leads most of them.
    """
    numbers = _numbers(places, match)
    readings: list[tuple[int | None, ...]] = []
    for ways in (_through_model(names, leads_of(places, match), match), _directly(names, numbers)):
        group = [tuple(map(way, names)) for way in ways]
        whole = list(dict.fromkeys(filter(_is_whole, group)))
        if whole:
            return _agreed(names, whole)
        readings += group
    own = {place.own_name: at for at, place in enumerate(places) if place.own_name is not None}
    readings.append(tuple(map(own.get, names)))
    if not _is_whole(readings[-1]):
        readings.append(_by_rules(names, kept, places))
    best = next(filter(_is_whole, reversed(readings)), None)
    return Reading(_inside(best or max(readings, key=lambda one: len(set(_inside(one))))))


def _is_whole(found: Sequence[int | None]) -> bool:
    return None not in found and len(set(found)) == len(found)


def _inside(found: Iterable[int | None]) -> tuple[int | None, ...]:
    """Without what leads to a parameter of the model that the optimizer has not."""
    return tuple(None if number is None or number < 0 else number for number in found)


def _agreed(names: Names, whole: Sequence[tuple[int | None, ...]]) -> Reading:
    """What all ways come to that lead every name somewhere."""
    columns = zip(names, zip(*whole, strict=True), strict=True)
    disputed = tuple(name for name, found in columns if len(set(found)) > 1)
    return Reading(_inside(whole[0]), disputed)


def leads_of(places: Sequence[Place], match: Match) -> dict[str, int]:
    """By each name of the file's model that was matched the number of the parameter that it is.

    Below 0 it is a tensor of the model that is none of `places`.
    """
    numbers = _numbers(places, match)
    leads: dict[str, int] = {}
    for wanted, own in match.pairs.items():
        leads.setdefault(own, numbers[wanted])
    for one in match.report.mismatched:
        leads.setdefault(one.own, numbers[one.name])
    return leads


def _through_model(names: Names, leads: Mapping[str, int], match: Match) -> Iterator[_Way]:
    """The names are of the file's model, whose names were matched with those of this one."""
    return _ways(names, leads, dict.fromkeys((*match.renamed, *leads)))


def _directly(names: Names, numbers: Mapping[str, int]) -> Iterator[_Way]:
    """The names are those that the model has here."""
    return _ways(names, numbers, numbers)


def _ways(names: Names, leads: Mapping[str, int], every: Iterable[str]) -> Iterator[_Way]:
    """With wrapper names and without on either side; `every` tells what is a wrapper."""
    bare, bare_leads = bare_names(names), bare_names(every)
    without = {bare_leads[name]: number for name, number in leads.items()}
    yield lambda name: leads.get(name)
    yield lambda name: without.get(bare[name])
    yield lambda name: leads.get(bare[name])
    yield lambda name: without.get(name)


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Each name without wrappers; as it is where two would become one."""
    names = list(names)
    try:
        renamed = strip_names(names).renamed
    except NameCollision:
        renamed = {}
    return {name: renamed.get(name, name) for name in names}


def _numbers(places: Sequence[Place], match: Match) -> dict[str, int]:
    """By each name of the model the number of its parameter; below 0 where it is none of these."""
    numbers = {place.name: number for number, place in enumerate(places) if place.in_model}
    for tied in match.report.tied:
        known = next((numbers[name] for name in tied if name in numbers), None)
        if known is not None:
            numbers.update((name, known) for name in tied)
    for name in (*match.pairs, *(one.name for one in match.report.mismatched)):
        numbers.setdefault(name, -1 - len(numbers))
    return numbers


def _by_rules(
    names: Names, kept: Sequence[Kept], places: Sequence[Place]
) -> tuple[int | None, ...]:
    """Matched as the names of a model are, by prefixes and rules: where no model has the names."""
    have = {name: Slot(one.shape) for name, one in zip(names, kept, strict=True)}
    want = {place.name: Slot(place.shape) for place in places if place.in_model}
    if len(have) != len(want) or len(want) != len(places):
        return (None,) * len(names)
    pairs = matched(have, want).pairs
    numbers = {pairs[place.name]: at for at, place in enumerate(places) if place.name in pairs}
    return tuple(numbers.get(name) for name in names)
