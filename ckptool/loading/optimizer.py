"""The state of an optimizer: found in a file, matched with parameters, and loaded.

`Optimizer.load_state_dict` goes by position alone: parameters of one shape in another order get
each other's moments, and torch reports nothing. Here names decide, or positions where they prove
whose state it is, or the user who vouches for the order.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import escape as escaped_glob
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.core.addressing import resolve
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import TensorRef
from ckptool.core.names import map_to_bare_names
from ckptool.core.optimizers import (
    OPTIONS,
    find_model,
    find_options,
    infer_shape as shape_kept,
    list_groups,
    list_names,
)
from ckptool.core.sections import (
    MODEL_KINDS,
    Section,
    is_optimizer,
    list_optimizer_names,
    restore_integer_keys,
)
from ckptool.core.tree import name_of, walk, walk_everything
from ckptool.errors import MatchError, UsageError
from ckptool.loading.fill import check_bytes, check_pickles
from ckptool.loading.plan import LoadPlan, opaque_kind
from ckptool.loading.positions import doubt_of, parameters_in
from ckptool.loading.ranks import is_spread, spread_like, without_hidden
from ckptool.loading.snapshot import layers
from ckptool.loading.source import StateDict
from ckptool.loading.target import ModelTarget
from ckptool.matching import Allowance, DtypeChange, OptimizerReport, Slot, matched
from ckptool.matching.report import holds
from ckptool.remedies import Remedy
from ckptool.tensors import is_one_part
from ckptool.tensors.live import dtype_name, shape_of
from ckptool.transforms.names import distinct
from ckptool.transforms.schedule_free import keeps_order
from ckptool.words import a_class, counted, listed, printable

if TYPE_CHECKING:
    import torch

_FILE = re.compile(r"optimizer(_\d+)?\.(pt|bin)")
"""The files of an optimizer's own: transformers writes `.pt`, accelerate `.bin`."""
_ALONE = "leave out optimizer= to load only the model"
_NAMELESS = (
    "the optimizer in the file has no parameter names, and shapes and order do not prove which "
    "state belongs to which parameter"
)
_VOUCH = Remedy(
    (("optimizer_order", "position"),),
    " if the optimizer has its parameters in the order of the file",
    instead=(Remedy(note="save it again with ckptool.save, which stores the names"),),
)
_VOUCH_PARTIAL = _VOUCH._replace(arguments=(*_VOUCH.arguments, ("optimizer_partial", True)))
_PARTIAL = Remedy(
    (("optimizer_partial", True),),
    " loads the state of the parameters that both have, by name",
    instead=(Remedy(note=_ALONE),),
)
_SPREAD = (
    "load it by name with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict and "
    "full_state_dict=True"
)
_OWN_FILE = (
    "if it is in a separate file, use load_into(model, {'model': ..., 'optimizer': "
    "ckptool.load(FILE)}, optimizer=...)"
)
_FLAT = frozenset(("prev_flat_grad", "old_dirs"))
"""Keys of LBFGS, which keeps one state of all parameters, in their order, with the first one."""


@dataclass(frozen=True, eq=False)
class OptimizerPlan:
    """A plan to load state into an optimizer."""

    optimizer: torch.optim.Optimizer
    report: OptimizerReport
    _maker: _Maker | None = None

    def apply(self) -> None:
        """Load the state by the optimizer's own `load_state_dict`, with all of its hooks."""
        if self._maker is None:
            raise MatchError("; ".join(self.report.problems), hint=self.report.remedy or None)
        tree, section, _ = self._maker.saved
        leaves = ((name_of((*section.path, *path)), leaf) for path, leaf in walk(section.node))
        check_bytes((name, leaf) for name, leaf in leaves if isinstance(leaf, TensorRef))
        check_pickles(tree.sources)
        self.optimizer.load_state_dict(self._maker.state_dict(self.optimizer))
        for source in tree.sources:
            source.check_unchanged()


class _Saved(NamedTuple):
    """An `Optimizer.state_dict()` in a file."""

    tree: Checkpoint
    section: Section
    notes: tuple[str, ...] = ()

    @property
    def options(self) -> Any:
        """The groups: learning rates and other options."""
        return self.section.node["param_groups"]

    @property
    def keys(self) -> list[tuple[int, Any]]:
        """The group and the number or name of each parameter, in the order of the groups."""
        return [(at, key) for at, keys in enumerate(list_groups(self.section)) for key in keys]

    @property
    def sizes(self) -> list[int]:
        """The number of parameters in each group."""
        return [len(keys) for keys in list_groups(self.section)]

    def state(self, key: Any) -> Any:
        """Return the state of a parameter; None if it is empty, as `momentum_buffer: None`."""
        held = self.section.node["state"].get(key)
        is_empty = isinstance(held, dict) and all(value is None for value in held.values())
        return None if is_empty else held

    def place(self, key: Any, *inside: Any) -> str:
        """Return the address of the state of a parameter."""
        return name_of((*self.section.path, "state", key, *inside))


def planned_optimizer(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    state: StateDict,
    target: ModelTarget,
    plan: LoadPlan,
    *,
    key: Any = None,
    order: str | None = None,
    partial: bool = False,
    allowance: Allowance,
) -> OptimizerPlan:
    """Plan how the state of an optimizer in the file of `state` goes into `optimizer`.

    The names that the file has for the optimizer's parameters are matched with those of its state
    dict, which `plan` matches with the model. Parameters without names are matched by position if
    that proves whose state it is, or with `order="position"`, for which the caller vouches. With
    `partial` parameters that only one side has, and groups that are divided otherwise, are told
    and no problem. `key` is the address of the optimizer if the file has several, or the name of
    its file in the folder.

    Raises:
        UsageError: `optimizer` is no optimizer.
        NotFound, AmbiguousName: nothing, or several things, answer to `key`.
    """
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "load_state_dict")):
        raise UsageError(f"optimizer is {a_class(optimizer)}, expected an optimizer")
    wanted = _Wanted(optimizer, model, target)
    report = OptimizerReport("names", 0, len(wanted.parameters))
    try:
        saved = _found(state, key)
        section = replace(saved.section, node=restore_integer_keys(saved.section.node))
        saved = saved._replace(section=section)
        report = replace(report, notes=(*saved.notes, *_objects(saved)))
        _check_kind(saved, optimizer)
        wanted.check()
        names = list_names(saved.section)
        try:
            numbers = _by_names(saved, wanted, state, plan, partial=partial)
        except MatchError:
            if order is None and list_optimizer_names(saved.section.node):
                raise
            report = replace(report, by="position")
            held = parameters_in(state, target, plan, wanted.tensors)
            if order is None:
                _check_order(saved, wanted, model, state, held)
            names, numbers = _by_position(saved, wanted, state, held, partial=partial)
        notes = [*report.notes, *_left(names, wanted, numbers)]
        groups = None
        try:
            groups = _groups(saved, wanted, numbers)
        except MatchError:
            if not partial and order is None:
                raise
            notes.append(
                "kept the learning rates and options of the groups, because the file "
                "has different groups"
            )
            notes += _schedules(saved, state)
        report = replace(report, notes=tuple(notes))
        kept = {
            number: key
            for number, (_, key) in zip(numbers, saved.keys, strict=True)
            if number is not None and saved.state(key) is not None
        }
        paths = (path for path, _ in walk(saved.section.node["state"]))
        in_order = numbers == list(range(len(wanted.names)))
        if not in_order and any(map(_FLAT.intersection, paths)):
            raise MatchError(
                "the optimizer has one state for all parameters, and their order differs"
            )
        _check_state(saved, wanted, kept)
        casts = tuple(_casts(optimizer, saved, wanted, kept))
        report = replace(report, matched=len(kept), cast=casts)
        _check_casts(casts, allowance)
    except MatchError as refused:
        remedy = refused.remedy or refused.hint or _ALONE
        return OptimizerPlan(optimizer, replace(report, problems=(refused.message,), remedy=remedy))
    return OptimizerPlan(optimizer, report, _Maker(state, saved, wanted, kept, groups))


def _found(state: StateDict, key: Any) -> _Saved:
    """Return the optimizer in the model's file, else in its own file in the model's folder."""
    names = [] if state.folder is None else _files(state.folder)
    has_own = bool(_optimizers(state.tree))
    if key not in names and (has_own or not names):
        return _Saved(state.tree, _chosen(state.tree, state.section, key, state.file))
    if key is None and len(names) > 1:
        raise MatchError(
            f"the folder has {len(names)} optimizer files: {listed(names)}",
            hint=Remedy(instead=tuple(Remedy((("optimizer_key", name),)) for name in names)),
        )
    name = key if key in names else names[0]
    tree = state.opened(os.path.join(state.folder or "", name))
    try:
        section = _chosen(tree, None, None if key in names else key, "")
    except MatchError as refused:
        refused.message = f"{name!r}, next to the model: {refused.message}"
        raise
    return _Saved(tree, section, (f"loaded the optimizer from {name!r}, next to the model",))


def _optimizers(tree: Checkpoint) -> list[Section]:
    """Return the states of torch's optimizers."""
    every = (one for one in tree.sections if one.kind == "optimizer")
    return distinct(one for one in every if not one.is_foreign)


def _files(folder: str) -> list[str]:
    with suppress(OSError):
        return sorted(filter(_FILE.fullmatch, os.listdir(folder)))
    return []


def _chosen(tree: Checkpoint, model: Section | None, key: Any, file: str) -> Section:
    """Return the optimizer under `key`, else that of `model`, else the only one of the file."""
    if key is not None:
        path, node = resolve(
            tree, key, accept=lambda one: isinstance(one, dict) and is_optimizer(one)
        )
        return Section(path, "optimizer", node, node)
    found = _optimizers(tree)
    models = distinct(one for one in tree.sections if one.kind in MODEL_KINDS)
    owners = [find_model(one, models, found) for one in found]
    holder, pairs = model and model.holder, zip(found, owners, strict=True)
    own = [one for one, owner in pairs if owner is not None and owner.holder is holder]
    if len(own) == 1 or (len(found) == 1 and (model is None or owners[0] is None)):
        return (own or found)[0]
    ways = tuple(Remedy((("optimizer_key", one.name),)) for one in found)
    if len(found) > 1:
        names = listed(one.name for one in found)
        raise MatchError(
            f"the file has {len(found)} optimizers: {names}", hint=Remedy(instead=ways)
        )
    if found and owners[0] is not None:
        text = f"{printable(found[0].name)}, belongs to {printable(owners[0].name)}, which is not"
        hint = Remedy(note=_ALONE, instead=ways)
        raise MatchError(f"the only optimizer, {text} the chosen model", hint=hint)
    text = "the file has no optimizer state"
    folder = os.path.dirname(file) or "."
    beside = _files(folder) if file else []
    if beside:
        way = f"use load_into(model, {folder!r}, optimizer=...) to load it from there"
        raise MatchError(f"{text}, but its folder has {listed(beside)}", hint=way)
    raise MatchError(text, hint=_OWN_FILE)


class _Wanted:
    """The parameters of the optimizer that is to be filled."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, target: ModelTarget
    ) -> None:
        self.optimizer = optimizer
        groups = optimizer.param_groups
        self.parameters: list[torch.Tensor] = [one for group in groups for one in group["params"]]
        self.numbers = {id(one): number for number, one in enumerate(self.parameters)}
        self.sizes = [len(group["params"]) for group in groups]
        self.group = [at for at, group in enumerate(groups) for _ in group["params"]]
        self._whole = {name: slot.shape for name, slot in target.slots.items()}
        own = {without_hidden(name): one for name, one in model.named_parameters()}
        self.tensors = {**own, **target.entries}  # FSDP's parameters are no entries
        names = {id(one): name for name, one in reversed(self.tensors.items())}  # the first name
        self.are_named = all(id(one) in names for one in self.parameters)
        self.names = [names.get(id(p), f"parameter {at}") for at, p in enumerate(self.parameters)]

    def check(self) -> None:
        """Refuse parameters that cannot have state from a file."""
        for parameter, name in zip(self.parameters, self.names, strict=True):
            whole, shape = self._whole.get(name), shape_of(parameter)
            if getattr(parameter, "_is_flat_param", False) or (whole and shape and whole != shape):
                raise MatchError(
                    f"the optimizer's {printable(name)} is sharded by FSDP: each rank has one part",
                    hint=_SPREAD,
                )
        if self.parameters and not {*self.names} & self.tensors.keys():
            raise MatchError(
                "the model has none of the optimizer's parameters",
                hint="build the optimizer from the parameters of this model",
            )


def _by_names(
    saved: _Saved, wanted: _Wanted, state: StateDict, plan: LoadPlan, *, partial: bool
) -> list[int | None]:
    """Return the number of the parameter that each name of the file's optimizer leads to.

    With `partial` None where it leads to none.
    """
    names = list_names(saved.section)
    remedy = _VOUCH if saved.sizes == wanted.sizes else _ALONE
    if len({*names}) != len(names) or not names:
        raise MatchError(
            _NAMELESS,
            hint=remedy,
        )
    leads: dict[str, int | None] = {}  # None: not in the optimizer
    for name, own in {**plan.pairs, **plan.undecided}.items():
        if leads.get(own) is None:  # one name of the file may fill several tensors
            leads[own] = wanted.numbers.get(id(wanted.tensors.get(name)))
    shapes = (shape_kept(saved.state(key)) for _, key in saved.keys)
    report = matched(
        {name: Slot(shape) for name, shape in zip(names, shapes, strict=True)},
        {own: Slot(state.slots[own].shape) for own in leads},
    )
    owns = {name: own for own, name in report.pairs.items()}
    owns |= {one.own: one.name for one in report.report.mismatched}
    found = [leads.get(owns.get(name, "")) for name in names]
    numbers = [number for number in found if number is not None]
    if len({*numbers}) == len(names) == len(wanted.names):
        return found
    if partial and numbers and len({*numbers}) == len(numbers):
        return found
    alone = [name for name, number in zip(names, found, strict=True) if number is None]
    lacking = [name for number, name in enumerate(wanted.names) if number not in numbers]
    both = [(some[0], whose) for some, whose in ((alone, "file"), (lacking, "optimizer")) if some]
    first = " and ".join(f"only the {whose} has {printable(name)}" for name, whose in both)
    if numbers and not partial:
        remedy = _PARTIAL if remedy is _ALONE else _PARTIAL._replace(instead=(_VOUCH,))
    raise MatchError(_misfit(saved, wanted, first), hint=remedy)


def _check_order(
    saved: _Saved,
    wanted: _Wanted,
    model: torch.nn.Module,
    state: StateDict,
    held: Mapping[str, torch.Tensor | None],
) -> None:
    """Refuse positions that do not prove which state belongs to which parameter."""
    keys = [key for _, key in saved.keys]
    if saved.sizes == wanted.sizes:
        doubt = doubt_of(saved.section, keys, wanted.optimizer, model, state, held)
    else:
        doubt = _misfit(saved, wanted)
    if doubt:
        is_vouched = len(keys) == len(wanted.names)
        is_ordered = keeps_order(state.tree, list(state.slots), state.metadata)
        can_name = is_ordered and len(held) == len(keys)
        raise MatchError(
            f'{_NAMELESS}: {doubt}; optimizer_order="position" loads it in the order of the file',
            hint=_VOUCH if is_vouched else _VOUCH_PARTIAL if can_name else _ALONE,
        )


def _by_position(
    saved: _Saved,
    wanted: _Wanted,
    state: StateDict,
    held: Mapping[str, torch.Tensor | None],
    *,
    partial: bool,
) -> tuple[list[str], list[int | None]]:
    """Return the number of the parameter for each position in the file's optimizer, and its name.

    With `partial`, where the two have other parameters, the file's model gives each position its
    name, and None is the number of those that the optimizer does not have.
    """
    keys, own = [key for _, key in saved.keys], wanted.numbers
    numbers = [own.get(id(tensor)) for tensor in held.values()]
    shapes = (state.slots[name].shape for name in held)
    if (
        partial
        and {*numbers} != {*own.values()}
        and {*numbers} != {None}
        and len(held) == len(keys)
        and keeps_order(state.tree, list(state.slots), state.metadata)
        and all(
            shape_kept(saved.state(key)) in (None, shape)
            for key, shape in zip(keys, shapes, strict=True)
        )
    ):
        return [*held], numbers
    if len(keys) != len(own):
        raise MatchError(_misfit(saved, wanted))
    return [], [*range(len(keys))]


def _schedules(saved: _Saved, state: StateDict) -> Iterator[str]:
    """Yield which schedulers have a value for each group of the file's optimizer."""
    for section in distinct((*state.tree.sections, *saved.tree.sections)):
        nodes = walk_everything(section.node) if section.kind == "scheduler" else ()
        if any(isinstance(node, dict) and "base_lrs" in node for node in nodes):
            yield (
                f"{printable(section.name)} has base_lrs for the groups in the file: build this "
                "scheduler for the groups of the optimizer"
            )


def _left(names: Sequence[str], wanted: _Wanted, numbers: Sequence[int | None]) -> Iterator[str]:
    """Yield which parameters have no state, and whose state is left out."""
    held = {*numbers}
    lacking = [name for number, name in enumerate(wanted.names) if number not in held]
    gone = [name for name, at in zip(names, numbers, strict=False) if at is None]
    if lacking:
        yield f"{counted(len(lacking), 'parameter')} without state: {listed(lacking)}"
    if gone:
        yield f"left out the state of {counted(len(gone), 'parameter')}: {listed(gone)}"


def _misfit(saved: _Saved, wanted: _Wanted, difference: str = "") -> str:
    there, here = saved.sizes, wanted.sizes
    if there == here:
        return f"the optimizer in the file has other parameters: {difference}"
    text = (
        f"the optimizer in the file has {counted(sum(there), 'parameter')} in groups of "
        f"{listed(map(str, there))}, the live one has {sum(here):,} in {listed(map(str, here))}"
    )
    return f"{text}; first difference: {difference}" if difference else text


def _groups(saved: _Saved, wanted: _Wanted, numbers: Sequence[int | None]) -> list[int]:
    """Return for each group of the optimizer the number of the file's group."""
    found: dict[int, int] = {}
    for number, (group, _) in zip(numbers, saved.keys, strict=True):
        if number is None:
            continue
        here = wanted.group[number]
        if found.setdefault(here, group) != group:
            raise MatchError(
                f"{printable(wanted.names[number])} is in group {group} of the file, but "
                "other parameters "
                f"of group {here} of the optimizer are in group {found[here]}",
                hint=_PARTIAL if list_names(saved.section) else None,
            )
    empty = [at for at in range(len(saved.options)) if at not in found.values()]
    if len({*found.values()}) != len(found) or len(saved.options) != len(wanted.sizes):
        raise MatchError(_misfit(saved, wanted))
    return [found[at] if at in found else empty.pop(0) for at in range(len(wanted.sizes))]


def _check_kind(saved: _Saved, optimizer: torch.optim.Optimizer) -> None:
    """Refuse state of another kind of optimizer, which torch takes: the next `step()` would fail.

    Kinds with the same options (Adam, RAdam, SparseAdam) are not told apart.
    """
    *_, inner = (one for one in layers(optimizer) if hasattr(one, "param_groups"))
    there, defaults = find_options(saved.section), {*getattr(inner, "defaults", ())}
    here = defaults & {*OPTIONS}
    if saved.options and defaults and here != there:
        words = [("has", sorted(there - here)), ("does not have", sorted(here - there))]
        details = " and ".join(f"{verb} {listed(names, 3)}" for verb, names in words if names)
        raise MatchError(f"the optimizer in the file is not {type(inner).__name__}: it {details}")


def _check_state(saved: _Saved, wanted: _Wanted, kept: Mapping[int, Any]) -> None:
    """Refuse state of another shape, and state that cannot be made or spread over ranks."""
    for number, key in kept.items():
        parameter, held = wanted.parameters[number], saved.state(key)
        shape, mine = shape_kept(held), shape_of(parameter)
        if shape is not None and mine is not None and shape != mine:
            raise MatchError(
                f"the state of {printable(wanted.names[number])} has shape {list(shape)}, "
                f"but the parameter has shape {list(mine)}"
            )
        for path, leaf in walk(held):
            what = opaque_kind(leaf)
            if isinstance(leaf, TensorRef) and is_one_part(leaf):
                what = "one rank's part of a tensor"
            elif is_spread(parameter) and getattr(leaf, "shape", ()) not in ((), mine):
                what = f"of shape {list(leaf.shape)}, unlike its DTensor"
            if what:
                where = printable(saved.place(key, *path))
                raise MatchError(f"{where} is {what}, which cannot be loaded from a file")


def _objects(saved: _Saved) -> Iterator[str]:
    """Yield which options stay as they are because the file has objects of classes there."""
    for number, group in enumerate(saved.options):
        objects = [str(key) for key, node in group.items() if opaque_kind(node)]
        if objects:
            yield f"kept {listed(objects)} of group {number}, because the file has objects there"


def _casts(
    optimizer: Any, saved: _Saved, wanted: _Wanted, kept: Mapping[int, Any]
) -> Iterator[DtypeChange]:
    """Yield the casts of torch's own `load_state_dict`: to the parameter's type, but for `step`."""
    import torch

    *_, inner = layers(optimizer)
    if type(inner).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    for number, key in kept.items():
        parameter, name = wanted.parameters[number], wanted.names[number]
        after = dtype_name(parameter)
        for path, leaf in walk(saved.state(key)) if parameter.is_floating_point() else ():
            if isinstance(leaf, TensorRef) and leaf.dtype != after and path[-1:] != ("step",):
                own, is_lossy = saved.place(key, *path), not holds(after, leaf.dtype)
                yield DtypeChange(name_of((name, *path)), own, leaf.dtype, after, is_lossy)


def _check_casts(casts: Sequence[DtypeChange], allowance: Allowance) -> None:
    """Refuse casts to types that cannot hold every number, unless the user allows them."""
    lossy = [
        one
        for one in casts
        if one.lossy and not allowance.takes_cast(one.name, one.name.partition("/")[0])
    ]
    if lossy:
        first, kinds = lossy[0], dict.fromkeys(one.name.partition("/")[2] for one in lossy)
        more = f", and {counted(len(lossy) - 1, 'more tensor')}" if len(lossy) > 1 else ""
        globs = tuple(f"*/{escaped_glob(kind)}" for kind in kinds)
        raise MatchError(
            f"casting {first.before} -> {first.after} would change the optimizer state "
            f"{printable(first.name)}{more}",
            hint=Remedy((("allow_lossy_cast", globs),)),
        )


class _Maker(NamedTuple):
    """The makings of the state dict that the optimizer's own `load_state_dict` takes."""

    state: StateDict
    saved: _Saved
    wanted: _Wanted
    kept: Mapping[int, Any]
    groups: Sequence[int] | None
    """By group of the optimizer that of the file; None: it keeps its own."""

    def state_dict(self, optimizer: Any) -> dict[str, Any]:
        """Make the state dict on the CPU: torch moves the state to the parameters' devices."""
        node = self.saved.section.node
        beside = {key: one for key, one in node.items() if key not in ("state", "param_groups")}
        shared = {key: one for key, one in node["state"].items() if isinstance(key, str)}
        if any(isinstance(key, str) for _, key in self.saved.keys):
            shared = {}  # FSDP has the names of the parameters as keys
        made = {number: self._of_parameter(number, key) for number, key in self.kept.items()}
        state, groups = {**made, **self._made_of(shared)}, list(self._groups(optimizer))
        return {**self._made_of(beside), "state": state, "param_groups": groups}

    def _of_parameter(self, number: int, key: Any) -> Any:
        """Make the state of a parameter; if ranks share the parameter, the part of this rank."""
        parameter, made = self.wanted.parameters[number], self._here(self.saved.state(key))
        if is_spread(parameter):
            for word, value in made.items():
                if getattr(value, "shape", None) == parameter.shape:
                    made[word] = spread_like(parameter, value)
        return made

    def _made_of(self, nodes: Mapping[Any, Any]) -> dict[Any, Any]:
        """Make what can be made: objects of classes stay as the optimizer has them."""
        return {key: self._here(node) for key, node in nodes.items() if not opaque_kind(node)}

    def _here(self, node: Any) -> Any:
        """Make a node; its tensors are not the caller's own, because steps change them."""
        made = self.state.made(node)
        if not self.saved.tree.in_memory:
            return made
        tensors = (leaf for _, leaf in walk(made) if hasattr(leaf, "detach"))
        return copy.deepcopy(made, {id(one): one.detach().clone() for one in tensors})

    def _groups(self, optimizer: Any) -> Iterator[dict[str, Any]]:
        """Yield the groups with the options of the file, and options that the file lacks."""
        bare = map_to_bare_names(self.wanted.names)
        names = [bare[name] for name in self.wanted.names]
        numbers = iter(range(len(names)))
        every: list[Mapping[Any, Any]] = [{}] * len(optimizer.param_groups)
        if self.groups is not None:
            every = [self.saved.options[at] for at in self.groups]
        for own, saved in zip(optimizer.param_groups, every, strict=True):
            given = {key: one for key, one in saved.items() if key != "params"}
            is_named = bool(given.pop("param_names", ())) and self.wanted.are_named
            options = self._made_of(given)
            for key, value in options.items():
                if hasattr(value, "to") and hasattr(own.get(key), "device"):
                    options[key] = value.to(own[key].device)  # a learning rate
            params = list(islice(numbers, len(own["params"])))
            group = {**own, **options, "params": params}
            if is_named:
                group.setdefault("param_names", [names[number] for number in params])
            yield group
