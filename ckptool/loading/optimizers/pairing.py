"""Which parameter's state of a file goes to which parameter of an optimizer. Nothing is guessed.

`Optimizer.load_state_dict` goes by position alone: parameters of one shape that stand in another
order get each other's moments without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

from ckptool.loading.optimizers.names import Place, Reading
from ckptool.loading.optimizers.saved import Kept, Saved, is_flat
from ckptool.loading.optimizers.shapes import Owners
from ckptool.model import Opaque, TensorRef
from ckptool.names import families
from ckptool.remedies import Remedy
from ckptool.tree import walk
from ckptool.words import counted, listed, printable

__all__ = [
    "ALONE",
    "REBUILD",
    "VOUCH",
    "Pairing",
    "Wanted",
    "by_names",
    "by_position",
    "by_shapes",
    "by_some_names",
]

VOUCH = Remedy(
    (("optimizer_order", "position"),),
    " where the optimizer was built over its parameters in the order of the file",
)
ALONE = "without optimizer= the model alone is loaded"
REBUILD = f"build the optimizer over its parameters in the order of the file; or {ALONE}"
_LOOSE = "build the optimizer over the parameters of the model that is loaded"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parameters of the optimizer that is to be filled, group after group."""

    places: tuple[Place, ...]
    sizes: tuple[int, ...]
    """How many parameters each group has."""

    @property
    def groups(self) -> int:
        """How many there are."""
        return len(self.sizes)

    def numbers(self) -> list[range]:
        """The numbers of the parameters of each group."""
        ends = accumulate(self.sizes)
        return [range(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class Pairing:
    """What goes where, or why nothing should."""

    by: str
    """`names`, `shapes` or `position`."""
    groups: tuple[int, ...] = ()
    """For each group of the optimizer that of the file."""
    kept: dict[int, Kept] = field(default_factory=dict)
    """By the number of a parameter what is kept of it; not where that is nothing."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remedy: Remedy | str = ""
    """What helps against the first problem."""


def by_names(saved: Saved, reading: Reading, wanted: Wanted) -> Pairing:
    """Each parameter of the file goes to the one that its name leads to."""
    if problem := _disputed(reading):
        return Pairing("names", problems=(problem,), remedy=_ordering(saved, wanted))
    difference = _unlike(reading, wanted) or _other_groups(saved, reading, wanted)
    if difference or len(saved.groups) != wanted.groups:
        return _unfit("names", saved, wanted, difference)
    numbers = [number for number in reading.found if number is not None]
    pairs = dict(sorted(zip(numbers, saved.parameters, strict=True)))
    kept = {number: one for number, one in pairs.items() if one.state is not None}
    if numbers != sorted(numbers) and any(is_flat(one.state) for one in kept.values()):
        text = "the optimizer keeps one state of all its parameters, which have another order"
        return Pairing("names", problems=(f"{text} in the file",), remedy=ALONE)
    filled = {wanted.places[number].group: one.group for number, one in pairs.items()}
    empty = (number for number, group in enumerate(saved.groups) if not group)
    groups = tuple(filled[at] if at in filled else next(empty) for at in range(wanted.groups))
    moved = "the groups of the optimizer stand in another order than those of the file"
    notes = (moved,) if groups != tuple(sorted(groups)) else ()
    wrong = tuple(_other_shapes(kept, wanted))
    return Pairing("names", groups, kept, wrong, notes, ALONE if wrong else "")


def by_position(saved: Saved, wanted: Wanted) -> Pairing:
    """Each parameter of the file goes to the one in its place, as its user says."""
    if refused := _other_counts("position", saved, wanted):
        return refused
    kept = {at: one for at, one in enumerate(saved.parameters) if one.state is not None}
    groups = tuple(range(wanted.groups))
    wrong = tuple(_other_shapes(kept, wanted))
    return Pairing("position", groups, kept, wrong, remedy=ALONE if wrong else "")


def by_some_names(
    saved: Saved, named: Mapping[int, str], reading: Reading, wanted: Wanted, owners: Owners
) -> Pairing:
    """What has a name, by its place in the file, goes where that leads; the rest by shapes.

    A parameter is in one group alone, so that what names lead to is no candidate for the rest.
    """
    if refused := _other_counts("names", saved, wanted):
        return refused
    if problem := _disputed(reading):
        return Pairing("names", problems=(problem,), remedy=_ordering(saved, wanted))
    difference = None
    pairs: dict[int, Kept] = {}
    for at, number, label in zip(named, reading.found, reading.labels, strict=True):
        one = saved.parameters[at]
        if number is None or number in pairs:
            difference = difference or f"{printable(label)} is in the file only"
        else:
            pairs[number] = one
            here = wanted.places[number].group
            if here != one.group and not difference:
                difference = (
                    f"{printable(label)} is in group {one.group} of the file, and in group "
                    f"{here} of the optimizer"
                )
    if difference:
        return _unfit("names", saved, wanted, difference)
    rest = by_shapes(saved, wanted, owners.without(pairs), without=frozenset(pairs.values()))
    bare = [number for number, group in enumerate(saved.options) if "param_names" not in group]
    note = f"group {listed(map(str, bare))} of the file has no names: shapes tell whose state it is"
    kept = {number: one for number, one in pairs.items() if one.state is not None}
    wrong = tuple(_other_shapes(kept, wanted))
    return Pairing(
        "names",
        rest.groups,
        dict(sorted({**kept, **rest.kept}.items())),
        (*wrong, *rest.problems),
        (note,),
        ALONE if wrong else rest.remedy,
    )


def by_shapes(
    saved: Saved, wanted: Wanted, owners: Owners, *, without: Collection[Kept] = ()
) -> Pairing:
    """Each state goes to the only parameter that it can be of, of all that the models have.

    Those `without` which it is to be done have theirs. Nothing tells groups apart that have no
    state: their options must be the same.
    """
    if refused := _other_counts("shapes", saved, wanted):
        return refused
    pairs: dict[int, Kept] = {}
    left: dict[int, list[Kept]] = {}
    lost: list[str] = []
    states = [one for one in saved.parameters if one.state is not None and one not in without]
    counts = Counter(one.likely_shape for one in states)
    groups = wanted.numbers()
    for one in states:
        shape = one.likely_shape
        found = owners.of(shape)
        if len(found) != 1 or counts[shape] > 1 or (None in counts and len(states) > 1):
            left.setdefault(one.group, []).append(one)
            continue
        ((lead, name),) = found.items()
        if isinstance(lead, int) and lead in groups[one.group]:
            pairs[lead] = one
        else:
            lost.append(_elsewhere(one, lead, name, wanted))
    problems = [
        text for number in left for text in _without_parameter(left[number], wanted, groups[number])
    ]
    if lost and not problems:
        more = f"; so it is with {counted(len(lost) - 1, 'more state')}" if lost[1:] else ""
        problems.append(f"{lost[0]}{more}")
    kept = dict(sorted(pairs.items()))
    as_they_are = tuple(range(wanted.groups))
    remedy: Remedy | str = ""
    if left and not problems:
        problems.append(_undecided(saved, [one for some in left.values() for one in some], owners))
        remedy = _ordering(saved, wanted)
    told = {one.group for one in (*kept.values(), *without)}
    if not problems and (text := _alike(saved, told)):
        problems, remedy = [text], _ordering(saved, wanted)
    problems += _other_shapes(kept, wanted)
    remedy = remedy or (ALONE if problems else "")
    return Pairing("shapes", as_they_are, kept, tuple(problems), remedy=remedy)


def _ordering(saved: Saved, wanted: Wanted) -> Remedy | str:
    """What helps where only the order is left to go by: to vouch for it, unless shapes forbid."""
    return REBUILD if by_position(saved, wanted).problems else VOUCH


def _alike(saved: Saved, told: Collection[int]) -> str | None:
    """That groups have other options, and nothing but their order says which of them is which."""
    untold = [number for number, group in enumerate(saved.groups) if group and number not in told]
    for number in untold[1:]:
        one, other = (saved.options[at] for at in (untold[0], number))
        keys = (key for key in {**one, **other} if key not in ("params", "param_names"))
        key = next((key for key in keys if not _equal(one.get(key), other.get(key))), None)
        if key is not None:
            return (
                f"nothing in the file but their order tells which groups of its optimizer are "
                f"which, and {printable(str(key))} of groups {untold[0]} and {number} differs"
            )
    return None


def _equal(one: Any, other: Any) -> bool:
    """Whether two options are the same for certain."""
    return one is other or (type(one) is type(other) and not _holds_tensor(one) and one == other)


def _holds_tensor(node: Any) -> bool:
    return any(isinstance(leaf, (TensorRef, Opaque)) for _, leaf in walk(node))


def _elsewhere(one: Kept, lead: int | str, name: str, wanted: Wanted) -> str:
    """A state of the only parameter of its shape, which is not where it should be."""
    where = "the model has not"
    if isinstance(lead, int):
        where = "the optimizer has not"
        if lead >= 0:
            where = f"is in group {wanted.places[lead].group} of the optimizer"
    return (
        f"the state of shape {list(one.likely_shape or ())} in group {one.group} of the file is "
        f"that of {printable(name)}, which {where}"
    )


def _disputed(reading: Reading) -> str | None:
    if not reading.disputed:
        return None
    name, *both = map(printable, reading.disputed)
    return (
        f"names of the file's optimizer are of a part of its model, and it is not sure which: "
        f"{name} could be {' or '.join(both)}"
    )


def _unlike(reading: Reading, wanted: Wanted) -> str | None:
    """The first names that only one of the two has."""
    met: set[int] = set()
    alone = []
    for name, number in zip(reading.labels, reading.found, strict=True):
        if number is None or number in met:
            alone.append(name)
        else:
            met.add(number)
    lacking = [place.name for number, place in enumerate(wanted.places) if number not in met]
    found = ((alone, "file"), (lacking, "optimizer"))
    first = [f"{printable(some[0])} is in the {whose} only" for some, whose in found if some]
    return " and ".join(first) or None


def _other_groups(saved: Saved, reading: Reading, wanted: Wanted) -> str | None:
    """The first two parameters that share a group in one of the two alone."""
    sides = ("the file", "the optimizer")
    firsts: tuple[dict[int, tuple[int, int]], ...] = ({}, {})
    for one, number in zip(saved.parameters, reading.found, strict=True):
        if number is None:
            continue
        here = wanted.places[number].group
        for side, (own, other) in enumerate(((one.group, here), (here, one.group))):
            first, before = firsts[side].setdefault(own, (other, number))
            if first != other:
                both = " and ".join(printable(wanted.places[at].name) for at in (before, number))
                return (
                    f"{both} are in one group of {sides[side]}, and in groups {first} and {other} "
                    f"of {sides[1 - side]}"
                )
    return None


def _unfit(by: str, saved: Saved, wanted: Wanted, difference: str | None) -> Pairing:
    """Refused, as the two are not over the same."""
    if wanted.places and not any(place.in_model for place in wanted.places):
        text = "the optimizer's parameters are not the model's: none of them is in it"
        return Pairing(by, problems=(text,), remedy=_LOOSE)
    problem = _misfit(saved, wanted, difference)
    if len(saved.parameters) != len(wanted.places) or len(saved.groups) == wanted.groups:
        return Pairing(by, problems=(problem,), remedy=ALONE)
    sizes = listed([f"{len(group):,}" for group in saved.groups])
    how = f"build it in {counted(len(saved.groups), 'group')}, of {sizes} parameters"
    remedy = f"{how}{_apart(saved)}, as the file has it; or {ALONE}"
    return Pairing(by, problems=(problem,), remedy=remedy)


def _apart(saved: Saved) -> str:
    """The first option that the groups of the file differ in."""
    first = saved.options[0] if saved.options else {}
    for key, value in first.items():
        told = [group.get(key) for group in saved.options]
        if isinstance(value, (int, float)) and any(not _equal(value, one) for one in told):
            return f" ({printable(str(key))}: {listed([printable(repr(one)) for one in told])})"
    return ""


def _misfit(saved: Saved, wanted: Wanted, difference: str | None) -> str:
    """Counts, where they differ, and the first difference."""
    mine, theirs = len(wanted.places), len(saved.parameters)
    sizes = (
        f"the file has {counted(theirs, 'parameter')} in {counted(len(saved.groups), 'group')}, "
        f"the optimizer {mine:,} in {wanted.groups:,}"
    )
    if difference is None:
        return sizes
    if (theirs, len(saved.groups)) == (mine, wanted.groups):
        return f"the file's optimizer is of other parameters or groups: {difference}"
    return f"{sizes}; first difference: {difference}"


def _other_counts(by: str, saved: Saved, wanted: Wanted) -> Pairing | None:
    """Without names: refused for the first group of another size."""
    there = tuple(len(group) for group in saved.groups)
    if wanted.sizes == there:
        return None
    for number, (mine, theirs) in enumerate(zip(wanted.sizes, there, strict=False)):
        if mine != theirs:
            sizes = f"group {number} has {theirs:,} there and {mine:,} here"
            return _unfit(by, saved, wanted, sizes)
    return _unfit(by, saved, wanted, None)


def _other_shapes(kept: dict[int, Kept], wanted: Wanted) -> Iterator[str]:
    """State of another shape than the parameter that it would go to."""
    wrong: list[tuple[str, str]] = []
    for number, one in kept.items():
        place, shape = wanted.places[number], one.shape
        if is_flat(one.state):
            yield from _other_length(one, wanted)
        elif shape is not None and place.shape is not None and shape != place.shape:
            text = f"is of shape {list(shape)}, and the parameter of {list(place.shape)}"
            wrong.append((place.name, text))
    if wrong:
        first = families(wrong)[0]
        rest = len(wrong) - len(first.names)
        more = f"; so it is with {counted(rest, 'more parameter')}" if rest else ""
        yield f"the state of {printable(first.label)} {wrong[first.numbers[0]][1]}{more}"


def _other_length(one: Kept, wanted: Wanted) -> Iterator[str]:
    """LBFGS: one vector of real numbers over all parameters (torch/optim/lbfgs.py)."""
    shapes = [place.shape for place in wanted.places]
    vector = one.state.get("prev_flat_grad")
    if isinstance(vector, TensorRef) and None not in shapes:
        length = sum(
            prod(size or 0 for size in place.shape or ()) * (2 if place.is_complex else 1)
            for place in wanted.places
        )
        if vector.numel != length:
            yield (
                f"the state is of {counted(vector.numel, 'number')} in all, and the parameters "
                f"have {length:,}"
            )


def _without_parameter(left: list[Kept], wanted: Wanted, numbers: range) -> Iterator[str]:
    """Shapes of which a group has fewer parameters than there are states."""
    having = Counter(wanted.places[number].shape for number in numbers)
    if None in having:
        return
    states = Counter(one.shape for one in left if one.shape is not None)
    for shape, count in states.items():
        if count > having[shape]:
            yield (
                f"the file has {counted(count, 'state')} of shape {list(shape or ())} in group "
                f"{left[0].group}, and the optimizer {counted(having[shape], 'parameter')} of it"
            )


def _undecided(saved: Saved, left: list[Kept], owners: Owners) -> str:
    """Which states could be several parameters'."""
    states = sum(one.state is not None for one in saved.parameters)
    why = "the file does not name the parameters of its optimizer"
    if saved.misnamed:
        why = f"the file does not name each parameter of its optimizer ({saved.misnamed})"
    told = f"{why}, and {len(left):,} of its {counted(states, 'state')} could be of several"
    shape = left[0].likely_shape
    alike = list(owners.of(shape).values()) if shape is not None else []
    if len(alike) > 1:
        labels = [family.label for family in families((name, None) for name in alike)]
        told += f" ({listed(labels, 3)}: of one shape)"
    return told
