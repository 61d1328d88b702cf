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
    infer_shape,
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
from ckptool.loading.plan import LoadPlan, describe_opaque
from ckptool.loading.positions import find_doubt, list_file_parameters
from ckptool.loading.ranks import distribute_like, is_dtensor, remove_hidden_parts
from ckptool.loading.snapshot import iterate_layers
from ckptool.loading.source import StateDict
from ckptool.loading.target import ModelTarget
from ckptool.matching import Allowance, DtypeChange, OptimizerReport, Slot, match_keys
from ckptool.matching.report import is_exact_cast
from ckptool.remedies import Remedy
from ckptool.tensors import is_one_part
from ckptool.tensors.live import dtype_name, shape_of
from ckptool.transforms.names import list_distinct_sections
from ckptool.transforms.schedule_free import is_in_model_order
from ckptool.words import a_class, counted, listed, printable

if TYPE_CHECKING:
    import torch

_OPTIMIZER_FILE_NAME = re.compile(r"optimizer(_\d+)?\.(pt|bin)")
"""The files of an optimizer's own: transformers writes `.pt`, accelerate `.bin`."""
_HINT_MODEL_ONLY = "leave out optimizer= to load only the model"
_NO_PROOF = (
    "the optimizer in the file has no parameter names, and shapes and order do not prove which "
    "state belongs to which parameter"
)
_HINT_BY_ORDER = Remedy(
    (("optimizer_order", "position"),),
    " if the optimizer has its parameters in the order of the file",
    instead=(Remedy(note="save it again with ckptool.save, which stores the names"),),
)
_HINT_BY_ORDER_PARTIAL = _HINT_BY_ORDER._replace(
    arguments=(*_HINT_BY_ORDER.arguments, ("optimizer_partial", True))
)
_HINT_PARTIAL = Remedy(
    (("optimizer_partial", True),),
    " loads the state of the parameters that both have, by name",
    instead=(Remedy(note=_HINT_MODEL_ONLY),),
)
_HINT_LOAD_SHARDED = (
    "load it by name with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict and "
    "full_state_dict=True"
)
_HINT_SEPARATE_FILE = (
    "if it is in a separate file, use load_into(model, {'model': ..., 'optimizer': "
    "ckptool.load(FILE)}, optimizer=...)"
)
_LBFGS_KEYS = frozenset(("prev_flat_grad", "old_dirs"))
"""Keys of LBFGS, which keeps one state of all parameters, in their order, with the first one."""


@dataclass(frozen=True, eq=False)
class OptimizerPlan:
    """A plan to load state into an optimizer."""

    optimizer: torch.optim.Optimizer
    report: OptimizerReport
    _maker: _StateDictMaker | None = None

    def apply(self) -> None:
        """Load the state by the optimizer's own `load_state_dict`, with all of its hooks."""
        if self._maker is None:
            raise MatchError("; ".join(self.report.problems), hint=self.report.remedy or None)
        checkpoint, section, _ = self._maker.saved
        leaves = ((name_of((*section.path, *path)), leaf) for path, leaf in walk(section.node))
        check_bytes((name, leaf) for name, leaf in leaves if isinstance(leaf, TensorRef))
        check_pickles(checkpoint.sources)
        self.optimizer.load_state_dict(self._maker.make_state_dict(self.optimizer))
        for source in checkpoint.sources:
            source.check_unchanged()


class _SavedOptimizer(NamedTuple):
    """An `Optimizer.state_dict()` in a file."""

    tree: Checkpoint
    """The file, or a separate file next to the model."""
    section: Section
    """The state dict of the optimizer in `tree`."""
    notes: tuple[str, ...] = ()
    """Notes for the report about where it was found."""

    @property
    def groups(self) -> Any:
        """The groups: learning rates and other options."""
        return self.section.node["param_groups"]

    @property
    def parameter_keys(self) -> list[tuple[int, Any]]:
        """The group and the number or name of each parameter, in the order of the groups."""
        return [
            (group, key) for group, keys in enumerate(list_groups(self.section)) for key in keys
        ]

    @property
    def group_sizes(self) -> list[int]:
        """The number of parameters in each group."""
        return [len(keys) for keys in list_groups(self.section)]

    def state_of(self, key: Any) -> Any:
        """Return the state of a parameter, or None if it is empty, like `momentum_buffer: None`."""
        state = self.section.node["state"].get(key)
        is_empty = isinstance(state, dict) and all(value is None for value in state.values())
        return None if is_empty else state

    def path_of(self, key: Any, *inside: Any) -> str:
        """Return the path of the state of a parameter."""
        return name_of((*self.section.path, "state", key, *inside))


def plan_optimizer(
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

    The file's names for the optimizer's parameters are matched with those of its state dict, which
    `plan` matches with the model. Parameters without names are matched by position if that proves
    the owner of each state, or with `order="position"`, for which the caller is responsible. With
    `partial`, parameters of only one side, and differently divided groups, are notes and not
    problems. `key` is the path of the optimizer if the file has several, or the name of its file in
    the folder.

    Raises:
        UsageError: if `optimizer` is not an optimizer.
        NotFound, AmbiguousName: if `key` matches nothing, or several entries.
    """
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "load_state_dict")):
        raise UsageError(f"optimizer is {a_class(optimizer)}, expected an optimizer")
    live = _LiveOptimizer(optimizer, model, target)
    report = OptimizerReport("names", 0, len(live.parameters))
    try:
        saved = _find_optimizer(state, key)
        section = replace(saved.section, node=restore_integer_keys(saved.section.node))
        saved = saved._replace(section=section)
        report = replace(report, notes=(*saved.notes, *_describe_kept_objects(saved)))
        _check_kind(saved, optimizer)
        live.refuse_unloadable()
        names = list_names(saved.section)
        try:
            live_numbers = _match_by_names(saved, live, state, plan, partial=partial)
        except MatchError:
            if order is None and list_optimizer_names(saved.section.node):
                raise
            report = replace(report, by="position")
            file_parameters = list_file_parameters(state, target, plan, live.model_tensors)
            if order is None:
                _refuse_uncertain_order(saved, live, model, state, file_parameters)
            names, live_numbers = _match_by_position(
                saved, live, state, file_parameters, partial=partial
            )
        notes = [*report.notes, *_describe_partial(names, live, live_numbers)]
        file_groups = None
        try:
            file_groups = _match_groups(saved, live, live_numbers)
        except MatchError:
            if not partial and order is None:
                raise
            notes.append(
                "kept the learning rates and options of the groups, because the file "
                "has different groups"
            )
            notes += _warn_of_schedulers(saved, state)
        report = replace(report, notes=tuple(notes))
        key_by_number = {
            number: key
            for number, (_, key) in zip(live_numbers, saved.parameter_keys, strict=True)
            if number is not None and saved.state_of(key) is not None
        }
        paths = (path for path, _ in walk(saved.section.node["state"]))
        in_order = live_numbers == list(range(len(live.names)))
        if not in_order and any(map(_LBFGS_KEYS.intersection, paths)):
            raise MatchError(
                "the optimizer has one state for all parameters, and their order differs"
            )
        _check_state(saved, live, key_by_number)
        casts = tuple(_list_casts(optimizer, saved, live, key_by_number))
        report = replace(report, matched=len(key_by_number), cast=casts)
        _refuse_lossy_casts(casts, allowance)
    except MatchError as refused:
        remedy = refused.remedy or refused.hint or _HINT_MODEL_ONLY
        return OptimizerPlan(optimizer, replace(report, problems=(refused.message,), remedy=remedy))
    return OptimizerPlan(
        optimizer, report, _StateDictMaker(state, saved, live, key_by_number, file_groups)
    )


def _find_optimizer(state: StateDict, key: Any) -> _SavedOptimizer:
    """Return the optimizer in the model's file, or in its own file in the model's folder."""
    names = [] if state.folder is None else _list_optimizer_files(state.folder)
    has_own = bool(_list_optimizers(state.tree))
    if key not in names and (has_own or not names):
        return _SavedOptimizer(
            state.tree, _select_optimizer(state.tree, state.section, key, state.file)
        )
    if key is None and len(names) > 1:
        raise MatchError(
            f"the folder has {len(names)} optimizer files: {listed(names)}",
            hint=Remedy(instead=tuple(Remedy((("optimizer_key", name),)) for name in names)),
        )
    name = key if key in names else names[0]
    tree = state.open_sibling(os.path.join(state.folder or "", name))
    try:
        section = _select_optimizer(tree, None, None if key in names else key, "")
    except MatchError as refused:
        refused.message = f"{name!r}, next to the model: {refused.message}"
        raise
    return _SavedOptimizer(
        tree, section, (f"loaded the optimizer from {name!r}, next to the model",)
    )


def _list_optimizers(tree: Checkpoint) -> list[Section]:
    """Return the states of torch's optimizers."""
    sections = (section for section in tree.sections if section.kind == "optimizer")
    return list_distinct_sections(section for section in sections if not section.is_foreign)


def _list_optimizer_files(folder: str) -> list[str]:
    """Return the names of the optimizer files in a folder."""
    with suppress(OSError):
        return sorted(filter(_OPTIMIZER_FILE_NAME.fullmatch, os.listdir(folder)))
    return []


def _select_optimizer(tree: Checkpoint, model: Section | None, key: Any, file: str) -> Section:
    """Return the optimizer at `key`, or that of `model`, or the only one of the file.

    Raises:
        MatchError: if there is none, or several.
    """
    if key is not None:
        path, node = resolve(
            tree, key, accept=lambda node: isinstance(node, dict) and is_optimizer(node)
        )
        return Section(path, "optimizer", node, node)
    optimizers = _list_optimizers(tree)
    models = list_distinct_sections(
        section for section in tree.sections if section.kind in MODEL_KINDS
    )
    owners = [find_model(optimizer, models, optimizers) for optimizer in optimizers]
    holder, pairs = model and model.holder, zip(optimizers, owners, strict=True)
    of_model = [
        optimizer for optimizer, owner in pairs if owner is not None and owner.holder is holder
    ]
    if len(of_model) == 1 or (len(optimizers) == 1 and (model is None or owners[0] is None)):
        return (of_model or optimizers)[0]
    remedies = tuple(Remedy((("optimizer_key", optimizer.name),)) for optimizer in optimizers)
    if len(optimizers) > 1:
        names = listed(optimizer.name for optimizer in optimizers)
        raise MatchError(
            f"the file has {len(optimizers)} optimizers: {names}", hint=Remedy(instead=remedies)
        )
    if optimizers and owners[0] is not None:
        text = (
            f"{printable(optimizers[0].name)}, belongs to {printable(owners[0].name)}, which is not"
        )
        hint = Remedy(note=_HINT_MODEL_ONLY, instead=remedies)
        raise MatchError(f"the only optimizer, {text} the chosen model", hint=hint)
    text = "the file has no optimizer state"
    folder = os.path.dirname(file) or "."
    files = _list_optimizer_files(folder) if file else []
    if files:
        hint_text = f"use load_into(model, {folder!r}, optimizer=...) to load it from there"
        raise MatchError(f"{text}, but its folder has {listed(files)}", hint=hint_text)
    raise MatchError(text, hint=_HINT_SEPARATE_FILE)


class _LiveOptimizer:
    """The parameters of the live optimizer, numbered as in its state dict, with model keys."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, target: ModelTarget
    ) -> None:
        """Name the parameters by the model's keys; those of other models by their number."""
        self.optimizer = optimizer
        groups = optimizer.param_groups
        self.parameters: list[torch.Tensor] = [
            parameter for group in groups for parameter in group["params"]
        ]
        """The parameters of all groups, in order. The position is the number of a parameter."""
        self.number_by_id = {
            id(parameter): number for number, parameter in enumerate(self.parameters)
        }
        self.group_sizes = [len(group["params"]) for group in groups]
        """The number of parameters in each group."""
        self.group_indexes = [index for index, group in enumerate(groups) for _ in group["params"]]
        """For each parameter, the index of its group."""
        self._full_shapes = {name: slot.shape for name, slot in target.slots.items()}
        """By model key, the shape of the tensor over all ranks."""
        named = {remove_hidden_parts(name): tensor for name, tensor in model.named_parameters()}
        # The flat parameters of FSDP 1 are not entries.
        self.model_tensors = {**named, **target.entries}
        """By key, the live parameters and buffers of the model."""
        first_name_by_id = {
            id(tensor): name for name, tensor in reversed(self.model_tensors.items())
        }
        self.are_named = all(id(parameter) in first_name_by_id for parameter in self.parameters)
        """True if the model has all parameters of the optimizer."""
        self.names = [
            first_name_by_id.get(id(parameter), f"parameter {number}")
            for number, parameter in enumerate(self.parameters)
        ]
        """For each parameter, its key in the model, or a description."""

    def refuse_unloadable(self) -> None:
        """Refuse parameters that FSDP 1 has sharded, and an optimizer of another model."""
        for parameter, name in zip(self.parameters, self.names, strict=True):
            full, shape = self._full_shapes.get(name), shape_of(parameter)
            if getattr(parameter, "_is_flat_param", False) or (full and shape and full != shape):
                raise MatchError(
                    f"the optimizer's {printable(name)} is sharded by FSDP: each rank has one part",
                    hint=_HINT_LOAD_SHARDED,
                )
        if self.parameters and not {*self.names} & self.model_tensors.keys():
            raise MatchError(
                "the model has none of the optimizer's parameters",
                hint="build the optimizer from the parameters of this model",
            )


def _match_by_names(
    saved: _SavedOptimizer, live: _LiveOptimizer, state: StateDict, plan: LoadPlan, *, partial: bool
) -> list[int | None]:
    """Return the number of the live parameter for each parameter name in the file's optimizer.

    The names are matched with the keys of the model in the file, which `plan` matches with the live
    model. Names that differ are an error; with `partial`, their number is None.
    """
    names = list_names(saved.section)
    fits_by_order = saved.group_sizes == live.group_sizes
    remedy = _HINT_BY_ORDER if fits_by_order else _HINT_MODEL_ONLY
    if len({*names}) != len(names) or not names:
        raise MatchError(_NO_PROOF, hint=remedy)
    # By model key in the file, the number of the live parameter; None: not in the optimizer.
    number_by_key: dict[str, int | None] = {}
    for name, file_key in {**plan.pairs, **plan.undecided}.items():
        if number_by_key.get(file_key) is None:  # One key of the file may fill several tensors.
            number_by_key[file_key] = live.number_by_id.get(id(live.model_tensors.get(name)))
    shapes = (infer_shape(saved.state_of(key)) for _, key in saved.parameter_keys)
    report = match_keys(
        {name: Slot(shape) for name, shape in zip(names, shapes, strict=True)},
        {file_key: Slot(state.slots[file_key].shape) for file_key in number_by_key},
    )
    key_by_name = {name: file_key for file_key, name in report.pairs.items()}
    key_by_name |= {row.own: row.name for row in report.report.mismatched}
    number_of_each = [number_by_key.get(key_by_name.get(name, "")) for name in names]
    numbers = [number for number in number_of_each if number is not None]
    if len({*numbers}) == len(names) == len(live.names):
        return number_of_each
    if partial and numbers and len({*numbers}) == len(numbers):
        return number_of_each
    only_in_file = [
        name for name, number in zip(names, number_of_each, strict=True) if number is None
    ]
    only_live = [name for number, name in enumerate(live.names) if number not in numbers]
    difference = " and ".join(
        f"only the {owner} has {printable(side_names[0])}"
        for side_names, owner in ((only_in_file, "file"), (only_live, "optimizer"))
        if side_names
    )
    if numbers and not partial:
        remedy = _HINT_PARTIAL
        if fits_by_order:
            remedy = _HINT_PARTIAL._replace(instead=(_HINT_BY_ORDER,))
    raise MatchError(_describe_misfit(saved, live, difference), hint=remedy)


def _refuse_uncertain_order(
    saved: _SavedOptimizer,
    live: _LiveOptimizer,
    model: torch.nn.Module,
    state: StateDict,
    file_parameters: Mapping[str, torch.Tensor | None],
) -> None:
    """Refuse positions that do not prove which state belongs to which parameter.

    The hint proposes to match by position anyway, unless that is impossible.
    """
    keys = [key for _, key in saved.parameter_keys]
    if saved.group_sizes == live.group_sizes:
        doubt = find_doubt(saved.section, keys, live.optimizer, model, state, file_parameters)
    else:
        doubt = _describe_misfit(saved, live)
    if doubt:
        is_ordered = is_in_model_order(state.tree, list(state.slots), state.metadata)
        hint: Remedy | str = _HINT_MODEL_ONLY
        if len(keys) == len(live.names):
            hint = _HINT_BY_ORDER
        elif is_ordered and len(file_parameters) == len(keys):  # the model gives the names
            hint = _HINT_BY_ORDER_PARTIAL
        raise MatchError(
            f'{_NO_PROOF}: {doubt}; optimizer_order="position" loads it in the order of the file',
            hint=hint,
        )


def _match_by_position(
    saved: _SavedOptimizer,
    live: _LiveOptimizer,
    state: StateDict,
    file_parameters: Mapping[str, torch.Tensor | None],
    *,
    partial: bool,
) -> tuple[list[str], list[int | None]]:
    """Return a name and the live parameter's number for each position in the file's optimizer.

    If both optimizers have the same parameters, position and number are equal, and no names are
    returned. With `partial`, they may have some in common: then the model in the file names the
    positions, and a number is None if the live optimizer does not have the parameter. This needs
    the original order of the file's model, and states with the shapes of its parameters.
    """
    keys = [key for _, key in saved.parameter_keys]
    numbers = [live.number_by_id.get(id(tensor)) for tensor in file_parameters.values()]
    shapes = (state.slots[name].shape for name in file_parameters)
    if (
        partial
        and {*numbers} != {*live.number_by_id.values()}
        and {*numbers} != {None}
        and len(file_parameters) == len(keys)
        and is_in_model_order(state.tree, list(state.slots), state.metadata)
        and all(
            infer_shape(saved.state_of(key)) in (None, shape)
            for key, shape in zip(keys, shapes, strict=True)
        )
    ):
        return [*file_parameters], numbers
    if len(keys) != len(live.number_by_id):
        raise MatchError(_describe_misfit(saved, live))
    return [], [*range(len(keys))]


def _warn_of_schedulers(saved: _SavedOptimizer, state: StateDict) -> Iterator[str]:
    """Yield a note for each scheduler in the file with a learning rate for each group.

    Its rates do not fit the live optimizer, which keeps its own groups.
    """
    for section in list_distinct_sections((*state.tree.sections, *saved.tree.sections)):
        nodes = walk_everything(section.node) if section.kind == "scheduler" else ()
        if any(isinstance(node, dict) and "base_lrs" in node for node in nodes):
            yield (
                f"{printable(section.name)} has base_lrs for the groups in the file: build this "
                "scheduler for the groups of the optimizer"
            )


def _describe_partial(
    names: Sequence[str], live: _LiveOptimizer, live_numbers: Sequence[int | None]
) -> Iterator[str]:
    """Yield notes about parameters without state, and about state that is left out."""
    with_state = {*live_numbers}
    without_state = [name for number, name in enumerate(live.names) if number not in with_state]
    left_out = [name for name, number in zip(names, live_numbers, strict=False) if number is None]
    if without_state:
        yield f"{counted(len(without_state), 'parameter')} without state: {listed(without_state)}"
    if left_out:
        yield f"left out the state of {counted(len(left_out), 'parameter')}: {listed(left_out)}"


def _describe_misfit(saved: _SavedOptimizer, live: _LiveOptimizer, difference: str = "") -> str:
    """Return the message that the groups or parameters of the two optimizers differ.

    `difference` is an example, such as "only the file has bias".
    """
    file_group_sizes, live_group_sizes = saved.group_sizes, live.group_sizes
    if file_group_sizes == live_group_sizes:
        return f"the optimizer in the file has other parameters: {difference}"
    text = (
        f"the optimizer in the file has {counted(sum(file_group_sizes), 'parameter')} in groups of "
        f"{listed(map(str, file_group_sizes))}, but the live one has {sum(live_group_sizes):,} in "
        f"{listed(map(str, live_group_sizes))}"
    )
    return f"{text}; first difference: {difference}" if difference else text


def _match_groups(
    saved: _SavedOptimizer, live: _LiveOptimizer, live_numbers: Sequence[int | None]
) -> list[int]:
    """Return the index of the file's group for each live group.

    Groups match by the parameters in both. The other groups of the file follow in order, for live
    groups without such parameters.

    Raises:
        MatchError: if a live group has parameters of several groups of the file, or the reverse.
    """
    file_group_of: dict[int, int] = {}  # by live group
    for number, (group, _) in zip(live_numbers, saved.parameter_keys, strict=True):
        if number is None:
            continue
        live_group = live.group_indexes[number]
        if file_group_of.setdefault(live_group, group) != group:
            raise MatchError(
                f"{printable(live.names[number])} is in group {group} of the file, but "
                "other parameters "
                f"of group {live_group} of the optimizer are in group {file_group_of[live_group]}",
                hint=_HINT_PARTIAL if list_names(saved.section) else None,
            )
    unused = [index for index in range(len(saved.groups)) if index not in file_group_of.values()]
    if len({*file_group_of.values()}) != len(file_group_of) or len(saved.groups) != len(
        live.group_sizes
    ):
        raise MatchError(_describe_misfit(saved, live))
    return [
        file_group_of[index] if index in file_group_of else unused.pop(0)
        for index in range(len(live.group_sizes))
    ]


def _check_kind(saved: _SavedOptimizer, optimizer: torch.optim.Optimizer) -> None:
    """Refuse state of another kind of optimizer: torch accepts it, but then `step()` fails.

    Kinds are compared by the names of their options, so Adam, RAdam and SparseAdam are one kind.
    """
    *_, inner = (layer for layer in iterate_layers(optimizer) if hasattr(layer, "param_groups"))
    file_options, defaults = find_options(saved.section), {*getattr(inner, "defaults", ())}
    live_options = defaults & {*OPTIONS}
    if saved.groups and defaults and live_options != file_options:
        words = [
            ("has", sorted(file_options - live_options)),
            ("does not have", sorted(live_options - file_options)),
        ]
        details = " and ".join(f"{verb} {listed(names, 3)}" for verb, names in words if names)
        raise MatchError(f"the optimizer in the file is not {type(inner).__name__}: it {details}")


def _check_state(
    saved: _SavedOptimizer, live: _LiveOptimizer, key_by_number: Mapping[int, Any]
) -> None:
    """Refuse state of another shape, and state that cannot be created or distributed over ranks."""
    for number, key in key_by_number.items():
        parameter, state = live.parameters[number], saved.state_of(key)
        shape, live_shape = infer_shape(state), shape_of(parameter)
        if shape is not None and live_shape is not None and shape != live_shape:
            raise MatchError(
                f"the state of {printable(live.names[number])} has shape {list(shape)}, "
                f"but the parameter has shape {list(live_shape)}"
            )
        for path, leaf in walk(state):
            problem = describe_opaque(leaf)
            if isinstance(leaf, TensorRef) and is_one_part(leaf):
                problem = "one rank's part of a tensor"
            elif is_dtensor(parameter) and getattr(leaf, "shape", ()) not in ((), live_shape):
                problem = f"of shape {list(leaf.shape)}, unlike its DTensor"
            if problem:
                shown = printable(saved.path_of(key, *path))
                raise MatchError(f"{shown} is {problem}, which cannot be loaded from a file")


def _describe_kept_objects(saved: _SavedOptimizer) -> Iterator[str]:
    """Yield notes about options that stay unchanged because the file has objects for them."""
    for number, group in enumerate(saved.groups):
        objects = [str(key) for key, node in group.items() if describe_opaque(node)]
        if objects:
            yield f"kept {listed(objects)} of group {number}, because the file has objects there"


def _list_casts(
    optimizer: Any, saved: _SavedOptimizer, live: _LiveOptimizer, key_by_number: Mapping[int, Any]
) -> Iterator[DtypeChange]:
    """Yield the casts of torch's `load_state_dict`: to the parameter's dtype, except for `step`.

    An optimizer with its own `load_state_dict` decides itself, so nothing is yielded.
    """
    import torch

    *_, inner = iterate_layers(optimizer)
    if type(inner).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    for number, key in key_by_number.items():
        parameter, name = live.parameters[number], live.names[number]
        after = dtype_name(parameter)
        for path, leaf in walk(saved.state_of(key)) if parameter.is_floating_point() else ():
            if isinstance(leaf, TensorRef) and leaf.dtype != after and path[-1:] != ("step",):
                path_in_file, is_lossy = (
                    saved.path_of(key, *path),
                    not is_exact_cast(after, leaf.dtype),
                )
                yield DtypeChange(name_of((name, *path)), path_in_file, leaf.dtype, after, is_lossy)


def _refuse_lossy_casts(casts: Sequence[DtypeChange], allowance: Allowance) -> None:
    """Refuse casts that may lose values, unless the user allows them."""
    lossy = [
        cast
        for cast in casts
        if cast.lossy and not allowance.allows_cast(cast.name, cast.name.partition("/")[0])
    ]
    if lossy:
        first, kinds = lossy[0], dict.fromkeys(cast.name.partition("/")[2] for cast in lossy)
        more = f", and {counted(len(lossy) - 1, 'more tensor')}" if len(lossy) > 1 else ""
        globs = tuple(f"*/{escaped_glob(kind)}" for kind in kinds)
        raise MatchError(
            f"casting {first.before} -> {first.after} would change the optimizer state "
            f"{printable(first.name)}{more}",
            hint=Remedy((("allow_lossy_cast", globs),)),
        )


class _StateDictMaker(NamedTuple):
    """Creates the state dict for the optimizer's own `load_state_dict`."""

    state: StateDict
    """The state dict of the model, which reads the nodes of the file."""
    saved: _SavedOptimizer
    live: _LiveOptimizer
    key_by_number: Mapping[int, Any]
    """By number of a live parameter, the key of its state in the file."""
    file_groups: Sequence[int] | None
    """For each live group, the index of the file's group; None if it keeps its own options."""

    def make_state_dict(self, optimizer: Any) -> dict[str, Any]:
        """Create the state dict on the CPU: torch moves the state to the parameters' devices."""
        node = self.saved.section.node
        other_entries = {
            key: entry for key, entry in node.items() if key not in ("state", "param_groups")
        }
        # State with a text key belongs to no parameter, except with FSDP: there these are names.
        shared = {key: entry for key, entry in node["state"].items() if isinstance(key, str)}
        if any(isinstance(key, str) for _, key in self.saved.parameter_keys):
            shared = {}
        state_by_number = {
            number: self._make_parameter_state(number, key)
            for number, key in self.key_by_number.items()
        }
        return {
            **self._make_entries(other_entries),
            "state": {**state_by_number, **self._make_entries(shared)},
            "param_groups": list(self._make_groups(optimizer)),
        }

    def _make_parameter_state(self, number: int, key: Any) -> Any:
        """Create the state of a parameter; for a DTensor, this rank's part."""
        parameter, state = self.live.parameters[number], self._make_copy(self.saved.state_of(key))
        if is_dtensor(parameter):
            for word, value in state.items():
                if getattr(value, "shape", None) == parameter.shape:
                    state[word] = distribute_like(parameter, value)
        return state

    def _make_entries(self, nodes: Mapping[Any, Any]) -> dict[Any, Any]:
        """Create the entries without objects; the optimizer keeps its own objects."""
        return {
            key: self._make_copy(node) for key, node in nodes.items() if not describe_opaque(node)
        }

    def _make_copy(self, node: Any) -> Any:
        """Create a node; tensors in memory are copied, because optimizer steps change them."""
        new = self.state.make_node(node)
        if not self.saved.tree.in_memory:
            return new
        tensors = (leaf for _, leaf in walk(new) if hasattr(leaf, "detach"))
        return copy.deepcopy(new, {id(tensor): tensor.detach().clone() for tensor in tensors})

    def _make_groups(self, optimizer: Any) -> Iterator[dict[str, Any]]:
        """Yield the groups with the options of the file, and live options that it lacks.

        Tensor options move to the live device. Parameters get names if the file has them.
        """
        bare = map_to_bare_names(self.live.names)
        names = [bare[name] for name in self.live.names]
        numbers = iter(range(len(names)))
        saved_groups: list[Mapping[Any, Any]] = [{}] * len(optimizer.param_groups)
        if self.file_groups is not None:
            saved_groups = [self.saved.groups[index] for index in self.file_groups]
        for live_group, saved_group in zip(optimizer.param_groups, saved_groups, strict=True):
            saved_options = {key: option for key, option in saved_group.items() if key != "params"}
            is_named = bool(saved_options.pop("param_names", ())) and self.live.are_named
            options = self._make_entries(saved_options)
            for key, value in options.items():
                if hasattr(value, "to") and hasattr(live_group.get(key), "device"):
                    options[key] = value.to(live_group[key].device)  # a learning rate
            params = list(islice(numbers, len(live_group["params"])))
            group = {**live_group, **options, "params": params}
            if is_named:
                group.setdefault("param_names", [names[number] for number in params])
            yield group
