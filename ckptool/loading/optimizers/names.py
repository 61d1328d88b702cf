"""Which parameter of an optimizer a name is that a file's optimizer keeps."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptool.loading.optimizers.readings import Model, Way, ends_in, nearest, ways_of
from ckptool.loading.optimizers.saved import Kept, Names
from ckptool.matching import Match, Slot, matched
from ckptool.model import Shape

__all__ = ["Found", "Place", "Reading", "Sides", "could_train", "leads_of", "read_names"]

Found = tuple[int | None, ...]
"""For each parameter of the file the number of the optimizer's, or None."""


class Place(NamedTuple):
    """One parameter of the optimizer that is to be filled."""

    group: int
    name: str
    """The model's name for it; another, for people, where the model has none."""
    in_model: bool = True
    own_name: str | None = None
    """What the optimizer's own `param_names` call it."""
    shape: Shape | None = None
    is_complex: bool = False


class Reading(NamedTuple):
    """Where names lead."""

    found: Found
    labels: Names
    """The names in full, as the file's model has them, where that is known."""
    others: tuple[Found, ...] = ()
    """Where they lead by other ways to read them that are as good."""
    disputed: tuple[str, ...] = ()
    """A name that leads to two parameters then, and what these are called in full."""

    @property
    def is_whole(self) -> bool:
        """Whether each leads to a parameter of its own, and nothing else can be meant."""
        return _is_whole(self.found) and not self.disputed


class Sides(NamedTuple):
    """What names may be of."""

    have: Mapping[str, Slot]
    """What the file's model has."""
    want: Mapping[str, Slot]
    """What the model here has."""
    places: Sequence[Place]
    match: Match
    in_full: bool = False
    """Whether the file's names are sure to be those of the whole model: `ckptool.save` wrote it."""
    live: Model | None = None
    """The model here by what it calls its parameters, where its state dict calls them otherwise."""


def read_names(names: Names, kept: Sequence[Kept], sides: Sides) -> Reading:
    """Follow the names: those of the file's model, else those of the model here, else rules.

    Of a part of the model torch keeps the names that the part gives: they count where one part
    alone explains them. Where several do, nothing is guessed; but an optimizer whose own names are
    the same is the one that was saved, if all that speaks against it is that others have these
    names in full. What no model has is told by the optimizer's own names. Where no way leads all
    names to parameters, it is the one that leads most of them.
    """
    places = sides.places
    of_file, here = _models(sides)
    own = {place.own_name: at for at, place in enumerate(places) if place.own_name is not None}
    strangers = {
        name: own[name] for name in names if name in own and not places[own[name]].in_model
    }
    if strangers:
        doubtful = (pair for pair in zip(names, kept, strict=True) if pair[0] in strangers)
        for name in ends_in(doubtful, of_file):
            del strangers[name]
    inside = [(name, one) for name, one in zip(names, kept, strict=True) if name not in strangers]
    live = _live_ways(inside, sides)
    for model in (of_file, here, None):
        ways = live if model is None else ways_of(inside, model)
        if sides.in_full and any(way.is_full for way in ways):
            ways = [way for way in ways if way.is_full]
        elif ways:
            known = [_inside(way.owners) for way in ways]
            ways = [*ways, *(way for way in live if _inside(way.owners) not in known)]
        if ways:
            every = [_completed(way, names, strangers) for way in ways]
            return _decided(names, every, tuple(own.get(name) for name in names))
    found = _by_rules(names, kept, sides)
    if found is None:
        found = _inside(max((nearest(names, model) for model in (of_file, here)), key=_count))
    return Reading(found, names)


def _live_ways(names: Sequence[tuple[str, Kept]], sides: Sides) -> list[Way]:
    """The ways to read the names as those of the live model's parameters, all in full."""
    if sides.live is None:
        return []
    ways = (way for way in ways_of(names, sides.live) if way.is_full)
    return [way._replace(labels=tuple(_labels(way, sides.places))) for way in ways]


def _labels(way: Way, places: Sequence[Place]) -> Iterator[str]:
    """What the state dict calls the parameters."""
    for label, owner in zip(way.labels, way.owners, strict=True):
        yield places[owner].name if isinstance(owner, int) else label


def _models(sides: Sides) -> tuple[Model, Model]:
    """The file's model and the one here, with what each of their parameters is."""
    leads = leads_of(sides.places, sides.match, sides.have)
    buffers = {
        own
        for name, own in sides.match.pairs.items()
        if name in sides.want and sides.want[name].kind == "buffer"
    }
    of_file: dict[str, Hashable] = {
        name: leads.get(name, name)
        for name, slot in sides.have.items()
        if could_train(slot) and name not in buffers
    }
    numbers = _numbers(sides.places, sides.match)
    here: dict[str, Hashable] = {
        name: numbers.get(name, name) for name, slot in sides.want.items() if slot.kind != "buffer"
    }
    return Model(of_file, sides.have), Model({**here, **_unlisted(sides)}, sides.want)


def _unlisted(sides: Sides) -> dict[str, Hashable]:
    """Parameters of the model that its state dict has not."""
    return {
        place.name: number
        for number, place in enumerate(sides.places)
        if place.in_model and place.name not in sides.want
    }


def _completed(way: Way, names: Names, strangers: Mapping[str, int]) -> Way:
    """With what is none of the model's in its place."""
    if not strangers:
        return way
    of_model = iter(zip(way.labels, way.owners, strict=True))
    both = [(name, strangers[name]) if name in strangers else next(of_model) for name in names]
    return Way(tuple(name for name, _ in both), tuple(owner for _, owner in both), way.is_full)


def _decided(names: Names, ways: Sequence[Way], own: Found) -> Reading:
    """The only way; of several the one by which the optimizer itself has its names."""
    same = next((way for way in ways if way.owners == own), None)
    if same is not None and (same.is_full or all(way.is_full for way in ways if way is not same)):
        ways = [same]
    first, *others = ways
    found = tuple(_inside(way.owners) for way in ways)
    if not others:
        return Reading(found[0], first.labels)
    rows = zip(names, first.labels, first.owners, others[0].labels, others[0].owners, strict=True)
    name, *both = next((name, a, b) for name, a, one, b, other in rows if one != other)
    return Reading(found[0], names, found[1:], (name, *both))


def _is_whole(found: Sequence[Hashable]) -> bool:
    return None not in found and len(set(found)) == len(found)


def _inside(found: Iterable[Hashable]) -> Found:
    """Without what leads to a parameter of the model that the optimizer has not."""
    return tuple(one if isinstance(one, int) and one >= 0 else None for one in found)


def _count(found: Iterable[Hashable]) -> int:
    return len(set(_inside(found)))


def leads_of(places: Sequence[Place], match: Match, have: Mapping[str, Slot]) -> dict[str, int]:
    """By each name of the file's model that was matched the number of the parameter that it is.

    Below 0 it is a tensor of the model that is none of `places`. Names that are one tensor in the
    file are one parameter.
    """
    numbers = _numbers(places, match)
    leads: dict[str, int] = {}
    for wanted, own in match.pairs.items():
        leads.setdefault(own, numbers[wanted])
    for one in match.report.mismatched:
        leads.setdefault(one.own, numbers[one.name])
    tied = {slot.tie: leads[name] for name, slot in have.items() if slot.tie and name in leads}
    for name, slot in have.items():
        if slot.tie in tied:
            leads.setdefault(name, tied[slot.tie])
    return leads


def could_train(slot: Slot) -> bool:
    """Whether a gradient could be taken of it."""
    floating = ("float", "bfloat", "complex")
    return slot.kind != "extra" and (slot.dtype is None or slot.dtype.startswith(floating))


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


def _by_rules(names: Names, kept: Sequence[Kept], sides: Sides) -> Found | None:
    """Matched as the names of a model are, by prefixes and rules: where no model has the names.

    All of the one with all of the other: of a part it could be said which, and not whether.
    """
    numbers = _numbers(sides.places, sides.match)
    every = [name for name, slot in sides.want.items() if slot.kind == "parameter"]
    is_all = all(numbers.get(name, -1) >= 0 for name in every) and every
    if not is_all or not len(names) == len(sides.places) == len({numbers[name] for name in every}):
        return None
    have = {name: Slot(one.shape) for name, one in zip(names, kept, strict=True)}
    want = {place.name: Slot(place.shape) for place in sides.places}
    pairs = matched(have, want).pairs
    of = {pairs[place.name]: at for at, place in enumerate(sides.places) if place.name in pairs}
    found = tuple(of.get(name) for name in names)
    return found if _is_whole(found) else None
