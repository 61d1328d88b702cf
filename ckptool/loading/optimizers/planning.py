"""The state of an optimizer, matched with its parameters before anything of it is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptool.errors import MatchError, UsageError
from ckptool.loading.filling.reading import check_bytes
from ckptool.loading.fitting.models import Target
from ckptool.loading.fitting.states import State
from ckptool.loading.live.memory import shape_of
from ckptool.loading.live.spreading import sharded, without_hidden
from ckptool.loading.optimizers.conversions import Conversions, conversions
from ckptool.loading.optimizers.finding import Unchosen, found_optimizer
from ckptool.loading.optimizers.kind import cousin, other_kind
from ckptool.loading.optimizers.names import Found, Place, Reading, Sides, read_names
from ckptool.loading.optimizers.pairing import (
    ALONE,
    REBUILD,
    VOUCH,
    Pairing,
    Wanted,
    by_names,
    by_position,
    by_shapes,
    by_some_names,
)
from ckptool.loading.optimizers.readings import Model, bare_names
from ckptool.loading.optimizers.saved import Kept, Names, Saved
from ckptool.loading.optimizers.shapes import owners_by_shape
from ckptool.loading.optimizers.state import Maker, casts, casts_state, holds_inert, undealt, unmade
from ckptool.loading.optimizers.undo import remembered
from ckptool.matching import Allowance, Cast, Match, OptimizerReport, Slot
from ckptool.matching.refusal import escaped_glob
from ckptool.remedies import Remedy
from ckptool.statedict import is_the_models
from ckptool.words import counted, listed, printable

if TYPE_CHECKING:
    import torch

__all__ = ["OptimizerPlan", "planned_optimizer"]

_SPREAD = (
    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with full_state_dict=True "
    "loads such state, by names"
)
_UNVOUCHED = 'without optimizer_order="position" the names decide'


@dataclass(frozen=True, eq=False)
class OptimizerPlan:
    """What is to become of an optimizer."""

    optimizer: torch.optim.Optimizer
    report: OptimizerReport
    _maker: Maker | None = None

    def remembered(self) -> Callable[[], None]:
        """What puts the optimizer back as it is now."""
        return remembered(self.optimizer)

    def apply(self) -> None:
        """Load the state, by the optimizer's own `load_state_dict`.

        Its hooks run, as do those of a wrapper. What raises may leave it changed: see `remembered`.

        Raises:
            MatchError: the report has problems.
            CorruptFile: bytes of the state are not what they were when the file was written.
            UnreadableFile: its file was written to meanwhile.
            DeviceError, UnsupportedFormat: a tensor cannot be made here.
        """
        if self._maker is None or self.report.problems:
            raise MatchError("; ".join(self.report.problems), hint=self.report.remedy or None)
        check_bytes(self._maker.stored())
        self._maker.load(self.optimizer)
        for source in self._maker.saved.tree.sources:
            source.check_unchanged()


def planned_optimizer(
    optimizer: torch.optim.Optimizer,
    named: Mapping[int, str],
    state: State,
    target: Target,
    match: Match,
    *,
    key: Any = None,
    order: str | None = None,
    allowance: Allowance,
) -> OptimizerPlan:
    """How the state of an optimizer in the file of `state` goes into this one.

    `named` has the model's name of each parameter by its `id`, `match` says which name of the
    file that is in `target`. Parameters are matched by the names that the file
    keeps of them; without such by the shapes that the state tells, where each is one parameter's
    alone of all that the file's model has; with `order="position"` by position, for which the
    caller vouches. `key` is the address of the optimizer where the file has several, or the name of
    its file in the folder that was given.

    Raises:
        UsageError: what is given is no optimizer.
        NotFound, AmbiguousName: nothing, or several things, answer to `key`.
        CorruptFile: elements cannot be read that a cast may change.
    """
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "load_state_dict")):
        raise UsageError(f"optimizer= takes an optimizer, not a {type(optimizer).__name__}")
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    wanted = Wanted(
        tuple(_places(optimizer, named)), tuple(len(g["params"]) for g in optimizer.param_groups)
    )
    report = OptimizerReport("names", 0, len(parameters))
    try:
        saved = found_optimizer(state, key)
    except Unchosen as error:
        return OptimizerPlan(
            optimizer, replace(report, problems=(str(error),), remedy=error.remedy)
        )
    known = conversions(target, state, match)
    in_full = saved.tree is state.tree and is_the_models(state.section)
    in_full = in_full and saved.section.path == ("optimizer",)
    live = _live(target, parameters)
    sides = Sides(state.slots, target.slots, wanted.places, known.match, in_full, live)
    pairing = _paired(saved, wanted, sides, order)
    if pairing.remedy == VOUCH and _stand_otherwise(sides):
        pairing = replace(pairing, remedy=REBUILD)
    notes = [*_notes(saved, optimizer, pairing), *filter(None, [known.note])]
    report = replace(report, by=pairing.by, notes=tuple(notes))
    refused = _refused(optimizer, parameters, saved, pairing, wanted, target.slots)
    refused = refused or _converted(known, pairing, wanted)
    if refused is not None:
        problems, remedy = refused
        return OptimizerPlan(optimizer, replace(report, problems=problems, remedy=remedy))
    names = [place.name for place in wanted.places]
    cast: tuple[Cast, ...] = ()
    if casts_state(optimizer):
        cast = tuple(casts(state, saved, pairing.kept, parameters, names))
    lossy = [
        one
        for one in cast
        if one.lossy and not allowance.takes_cast(one.name, one.name.partition("/")[0])
    ]
    report = replace(
        report,
        matched=len(pairing.kept),
        cast=cast,
        problems=tuple(_lost(lossy)),
        remedy=_casting(lossy) if lossy else "",
    )
    bare = bare_names(named.values())
    inside = [bare.get(named.get(id(param), "")) for param in parameters]
    return OptimizerPlan(
        optimizer, report, Maker(state, saved, pairing.kept, pairing.groups, inside)
    )


def _converted(
    known: Conversions, pairing: Pairing, wanted: Wanted
) -> tuple[tuple[str, ...], str] | None:
    """Why state of tensors that the model's own loading changes is not loaded."""
    problem = known.problem(wanted.places[number].name for number in pairing.kept)
    return None if problem is None else ((problem,), ALONE)


def _places(optimizer: torch.optim.Optimizer, named: Mapping[int, str]) -> Iterator[Place]:
    """The optimizer's parameters, group after group."""
    for number, group in enumerate(optimizer.param_groups):
        own_names = group.get("param_names") or [None] * len(group["params"])
        for at, (parameter, own) in enumerate(zip(group["params"], own_names, strict=False)):
            name = named.get(id(parameter))
            shown = name or own or f"parameter {at} of group {number}"
            shape = shape_of(parameter)
            yield Place(number, shown, name is not None, own, shape, parameter.is_complex())


def _live(target: Target, parameters: Sequence[torch.Tensor]) -> Model | None:
    """What the model calls its parameters, where its own code has other names in a state dict.

    `Optimizer` keeps those of `named_parameters()`, whatever the hooks of a state dict make of it.
    """
    if target.model is None or sharded(target.model):
        return None
    numbers = {id(parameter): at for at, parameter in enumerate(parameters)}
    every = {
        without_hidden(name): parameter
        for name, parameter in target.model.named_parameters(remove_duplicate=False)
    }
    if all(target.entries.get(name) is parameter for name, parameter in every.items()):
        return None
    owners = {name: numbers.get(id(parameter), name) for name, parameter in every.items()}
    return Model(owners, {name: Slot(shape_of(parameter)) for name, parameter in every.items()})


def _paired(saved: Saved, wanted: Wanted, sides: Sides, order: str | None) -> Pairing:
    """By names where they lead somewhere, else by position or shapes."""

    def read(names: Names, kept: Sequence[Kept] = saved.parameters) -> Reading:
        return read_names(names, kept, sides)

    owners = owners_by_shape(sides)
    own = saved.names()
    if own is None and (some := saved.some_names()):
        reading = read(tuple(some.values()), [saved.parameters[at] for at in some])
        if order is None:
            return by_some_names(saved, some, reading, wanted, owners)
        return _contradicted(some, reading) or by_position(saved, wanted)
    lists = [own] if own else saved.names_beside()
    readings = {reading: names for names in lists if _leads_anywhere(reading := read(names)) or own}
    best = [reading for reading in readings if reading.is_whole] or list(readings)
    has_state = any(one.state is not None for one in saved.parameters)
    if len(best) == 1 and (best[0].is_whole or (order is None and has_state)):
        return by_names(saved, best[0], wanted)
    if order is None:
        return by_shapes(saved, wanted, owners)
    told = (_contradicted(dict(enumerate(readings[reading])), reading) for reading in best)
    return next(filter(None, told), None) or by_position(saved, wanted)


def _stand_otherwise(sides: Sides) -> bool:
    """Whether parameters of a group, in the order of the model, are in another in the file's.

    The names of safetensors say nothing: its writer sorts them.
    """
    if [*sides.have] == sorted(sides.have):
        return False
    here, there = ({name: at for at, name in enumerate(side)} for side in (sides.want, sides.have))
    groups: dict[int, list[tuple[int, int]]] = {}
    for place in sides.places:
        own = sides.match.pairs.get(place.name)
        if own in there and place.name in here:
            groups.setdefault(place.group, []).append((here[place.name], there[own]))
    return any(
        found == sorted(found) and [at for _, at in found] != sorted(at for _, at in found)
        for found in groups.values()
    )


def _contradicted(names: Mapping[int, str], reading: Reading) -> Pairing | None:
    """That names, by their places in the file, are not in the order that was vouched for."""
    others = [_turned(names, found) for found in (reading.found, *reading.others)]
    turned = None if None in others else others[0]
    if turned is None:
        return None
    at, number = turned
    text = f"the file's names contradict the order: {printable(names[at])} is parameter {at:,}"
    return Pairing("position", problems=(f"{text} there, and {number:,} here",), remedy=_UNVOUCHED)


def _turned(names: Mapping[int, str], found: Found) -> tuple[int, int] | None:
    """The first place in the file that leads to another here."""
    pairs = zip(names, found, strict=True)
    return next(((at, number) for at, number in pairs if number not in (None, at)), None)


def _leads_anywhere(reading: Reading) -> bool:
    """Whether the names are of parameters at all: a file may hold a list of classes as well."""
    return bool(reading.disputed) or any(number is not None for number in reading.found)


def _refused(
    optimizer: Any,
    parameters: Sequence[torch.Tensor],
    saved: Saved,
    pairing: Pairing,
    wanted: Wanted,
    slots: Mapping[str, Slot],
) -> tuple[tuple[str, ...], Remedy | str] | None:
    """Why it is not loaded, and what helps against that."""
    names = [place.name for place in wanted.places]
    unfit = _unfit(parameters, names)
    if unfit is not None:
        return (unfit[0],), unfit[1]
    if (other := other_kind(saved, optimizer)) is not None:
        return (other,), ALONE
    if pairing.problems and (part := _in_parts(parameters, wanted, slots)) is not None:
        return (part,), _SPREAD
    unmakeable = unmade(saved, pairing.kept) or undealt(saved, pairing.kept, parameters)
    if unmakeable is not None:
        return (*pairing.problems, unmakeable), pairing.remedy or ALONE
    return (pairing.problems, pairing.remedy) if pairing.problems else None


def _unfit(parameters: Sequence[torch.Tensor], names: Sequence[str]) -> tuple[str, str] | None:
    """Parameters that no state can be put beside, and what helps."""
    for parameter, name in zip(parameters, names, strict=True):
        if parameter.is_meta:
            return (
                f"the optimizer's {printable(name)} is on the meta device, and loading puts "
                "another in its place",
                "load the model, build the optimizer, then load again with it",
            )
    return None


def _in_parts(
    parameters: Sequence[torch.Tensor], wanted: Wanted, slots: Mapping[str, Slot]
) -> str | None:
    """The first parameter of which this rank has a part, inside the first FSDP."""
    for parameter, place in zip(parameters, wanted.places, strict=True):
        slot = slots.get(place.name)
        whole = None if slot is None else slot.shape
        flat = getattr(parameter, "_is_flat_param", False)
        if flat or (whole is not None and place.shape is not None and place.shape != whole):
            return (
                f"the optimizer's {printable(place.name)} is of FSDP, of which every rank has a "
                "part"
            )
    return None


def _casting(lossy: Iterable[Cast]) -> Remedy:
    """What allows just these kinds of state, of whatever parameter."""
    kinds = dict.fromkeys(one.name.partition("/")[2] for one in lossy)
    return Remedy((("allow_lossy_cast", tuple(f"*/{escaped_glob(kind)}" for kind in kinds)),))


def _lost(lossy: Sequence[Cast]) -> Iterator[str]:
    """What casts lose that may not be lost."""
    if lossy:
        first = lossy[0]
        more = f", and of {counted(len(lossy) - 1, 'more tensor')}" if len(lossy) > 1 else ""
        yield (
            f"of the optimizer's state {printable(first.name)} does not survive {first.before} -> "
            f"{first.after}{f' ({first.loss})' if first.loss else ''}{more}"
        )


def _notes(saved: Saved, optimizer: torch.optim.Optimizer, pairing: Pairing) -> Iterator[str]:
    """What is worth knowing, and no reason to refuse."""
    yield from (*saved.notes, *pairing.notes)
    if saved.strays:
        count = counted(len(saved.strays), "parameter")
        yield f"the file keeps state of {count} that no group of its optimizer has: left out"
    for number, group in enumerate(saved.options):
        inert = [str(key) for key, node in group.items() if holds_inert(node)]
        if inert:
            yield (
                f"group {number} keeps its own {listed(inert)}: in the file that is an object, "
                "which is never made"
            )
    for number, own in enumerate(pairing.groups):
        mine, theirs = optimizer.param_groups[number], saved.options[own]
        bound = [key for key in ("capturable", "fused") if theirs.get(key) and not mine.get(key)]
        if bound:  # torch takes them over too, and step() fails on a device that has no such
            yield f"group {number} is {' and '.join(bound)} now, as the file has it"
    if (other := cousin(saved, optimizer)) is not None:
        yield other
    told = [_decoupled(groups) for groups in (saved.options, optimizer.param_groups)]
    if None not in told and told[0] != told[1]:
        yield f"the file's optimizer had decoupled_weight_decay={told[0]}, this one has {told[1]}"


def _decoupled(groups: Sequence[Mapping[Any, Any]]) -> bool | None:
    """What tells AdamW from Adam, since torch 2.7."""
    found = {group.get("decoupled_weight_decay") for group in groups}
    (only,) = found if len(found) == 1 else (None,)
    return only if isinstance(only, bool) else None
