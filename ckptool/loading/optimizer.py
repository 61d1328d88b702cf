"""The state of an optimizer: matched with the live parameters, and loaded.

`Optimizer.load_state_dict` goes by position only: parameters of one shape in another order get
each other's moments, and torch reports nothing. Here names decide, or positions if they prove the
owner of each state, or the user, who vouches for the order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape as escaped_glob
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.core.model import TensorRef
from ckptool.core.names import map_to_bare_names
from ckptool.core.optimizers import (
    OPTIONS,
    find_options,
    infer_shape,
    list_names,
)
from ckptool.core.sections import (
    list_optimizer_names,
)
from ckptool.core.tree import name_of, walk, walk_everything
from ckptool.errors import MatchError, UsageError
from ckptool.loading.fill import check_bytes, check_pickles
from ckptool.loading.plan import LoadPlan, describe_opaque
from ckptool.loading.positions import find_doubt, list_file_parameters
from ckptool.loading.ranks import distribute_like, is_dtensor, remove_hidden_parts
from ckptool.loading.saved_optimizer import HINT_MODEL_ONLY, SavedOptimizer, find_optimizer
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

_NO_PROOF_MESSAGE = (
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
    instead=(Remedy(note=HINT_MODEL_ONLY),),
)
_HINT_LOAD_SHARDED = (
    "load it by name with torch.distributed.checkpoint.state_dict.set_optimizer_state_dict and "
    "full_state_dict=True"
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
        if self._maker is None:  # the state does not fit
            raise MatchError("; ".join(self.report.problems), hint=self.report.remedy or None)
        saved = self._maker.saved
        check_bytes(
            (name_of((*saved.section.path, *path)), leaf)
            for path, leaf in walk(saved.section.node)
            if isinstance(leaf, TensorRef)
        )
        check_pickles(saved.tree.sources)
        self.optimizer.load_state_dict(self._maker.make_state_dict(self.optimizer))
        for source in saved.tree.sources:
            source.check_unchanged()


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
    the folder. An optimizer that does not fit gives a plan with `problems` in its report.

    Raises:
        UsageError: if `optimizer` is not an optimizer.
        NotFound, AmbiguousName: if `key` matches nothing, or several entries.
    """
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "load_state_dict")):
        raise UsageError(f"optimizer is {a_class(optimizer)}, expected an optimizer")
    live = _LiveOptimizer(optimizer, model, target)
    report = OptimizerReport("names", 0, len(live.parameters))
    try:
        saved = find_optimizer(state, key)
        report = replace(report, notes=(*saved.notes, *_describe_kept_objects(saved)))
        _check_kind(saved, optimizer)
        live.refuse_unloadable()
        try:
            matched = _match_by_names(saved, live, state, plan, partial=partial)
        except MatchError:
            if order is None and list_optimizer_names(saved.section.node):
                raise  # other names prove that the parameters differ
            report = replace(report, by="position")
            file_parameters = list_file_parameters(state, target, plan, live.model_tensors)
            if order is None:
                _refuse_uncertain_order(saved, live, model, state, file_parameters)
            matched = _match_by_position(saved, live, state, file_parameters, partial=partial)
        file_groups, group_notes = _choose_file_groups(
            saved, live, matched, state, can_keep_options=partial or order is not None
        )
        notes = (*report.notes, *_describe_partial(matched, live), *group_notes)
        report = replace(report, notes=notes)
        key_by_number = {  # without the parameters that have no state in the file
            number: key
            for number, (_, key) in zip(matched.live_numbers, saved.parameter_keys, strict=True)
            if number is not None and saved.state_of(key) is not None
        }
        _refuse_shared_state(saved, live, matched)
        _check_state(saved, live, key_by_number)
        casts = tuple(_list_casts(optimizer, saved, live, key_by_number))
        report = replace(report, matched=len(key_by_number), cast=casts)
        _refuse_lossy_casts(casts, allowance)
    except MatchError as refused:
        remedy = refused.remedy or refused.hint or HINT_MODEL_ONLY
        return OptimizerPlan(optimizer, replace(report, problems=(refused.message,), remedy=remedy))
    return OptimizerPlan(
        optimizer, report, _StateDictMaker(state, saved, live, key_by_number, file_groups)
    )


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
        """Refuse parameters that FSDP 1 has sharded, and an optimizer of another model.

        A sharded one is marked as flat, or has another shape than in the full model.
        """
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


class _MatchedParameters(NamedTuple):
    """The live parameter for each parameter of the file's optimizer, in the order of its groups."""

    names: Sequence[str]
    """For each parameter, its name; empty if positions match and no parameter is left out."""
    live_numbers: Sequence[int | None]
    """For each parameter, the number of the live one; None if the live optimizer has none."""


def _match_by_names(
    saved: SavedOptimizer, live: _LiveOptimizer, state: StateDict, plan: LoadPlan, *, partial: bool
) -> _MatchedParameters:
    """Match the parameter names in the file's optimizer with the live parameters.

    Raises:
        MatchError: if the file has no names or repeats one, if two names match one parameter, or if
            a parameter of one side has no match. With `partial`, one match is enough.
    """
    names = list_names(saved.section)
    fits_by_order = saved.group_sizes == live.group_sizes
    remedy = _HINT_BY_ORDER if fits_by_order else HINT_MODEL_ONLY
    if not names or len({*names}) != len(names):
        raise MatchError(_NO_PROOF_MESSAGE, hint=remedy)
    live_numbers = _find_live_numbers(names, saved, live, state, plan)
    numbers = [number for number in live_numbers if number is not None]
    are_all_matched = len({*numbers}) == len(names) == len(live.names)
    can_load_part = partial and bool(numbers) and len({*numbers}) == len(numbers)
    if are_all_matched or can_load_part:
        return _MatchedParameters(names, live_numbers)
    only_in_file = [
        name for name, number in zip(names, live_numbers, strict=True) if number is None
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


def _find_live_numbers(
    names: Sequence[str],
    saved: SavedOptimizer,
    live: _LiveOptimizer,
    state: StateDict,
    plan: LoadPlan,
) -> list[int | None]:
    """Return the number of the live parameter for each name in the file's optimizer, or None.

    The names are matched with the keys of the model in the file, which `plan` matches with the live
    model.
    """
    number_by_file_key: dict[str, int | None] = {}  # None: the live optimizer does not have it
    for model_key, file_key in {**plan.pairs, **plan.undecided}.items():
        if number_by_file_key.get(file_key) is None:  # one key of the file may fill several tensors
            tensor = live.model_tensors.get(model_key)
            number_by_file_key[file_key] = live.number_by_id.get(id(tensor))
    shapes = (infer_shape(saved.state_of(key)) for _, key in saved.parameter_keys)
    match = match_keys(
        {name: Slot(shape) for name, shape in zip(names, shapes, strict=True)},
        {file_key: Slot(state.slots[file_key].shape) for file_key in number_by_file_key},
    )
    file_key_by_name = {name: file_key for file_key, name in match.pairs.items()}
    # Another shape is still the same parameter: `_check_state` reports it.
    file_key_by_name |= {row.own: row.name for row in match.report.mismatched}
    return [number_by_file_key.get(file_key_by_name.get(name, "")) for name in names]


def _refuse_uncertain_order(
    saved: SavedOptimizer,
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
    if not doubt:
        return
    hint: Remedy | str
    if len(keys) == len(live.names):
        hint = _HINT_BY_ORDER
    elif len(file_parameters) == len(keys) and is_in_model_order(
        state.tree, list(state.slots), state.metadata
    ):  # the model in the file names the positions
        hint = _HINT_BY_ORDER_PARTIAL
    else:
        hint = HINT_MODEL_ONLY
    raise MatchError(
        f"{_NO_PROOF_MESSAGE}: {doubt}; "
        'optimizer_order="position" loads it in the order of the file',
        hint=hint,
    )


def _match_by_position(
    saved: SavedOptimizer,
    live: _LiveOptimizer,
    state: StateDict,
    file_parameters: Mapping[str, torch.Tensor | None],
    *,
    partial: bool,
) -> _MatchedParameters:
    """Match the parameters of the file's optimizer with the live ones by position.

    If both optimizers have the same parameters, the position in the file is the number of the live
    parameter, and no names are returned. With `partial`, they may have only some in common: then
    the model in the file names the positions.

    Raises:
        MatchError: if the numbers of parameters differ, and the model cannot name the positions.
    """
    saved_count = len(saved.parameter_keys)
    live_numbers = [live.number_by_id.get(id(tensor)) for tensor in file_parameters.values()]
    have_same_parameters = {*live_numbers} == {*live.number_by_id.values()}
    have_none_in_common = {*live_numbers} == {None}
    if (
        partial
        and not (have_same_parameters or have_none_in_common)
        and _can_name_positions(saved, state, file_parameters)
    ):
        return _MatchedParameters([*file_parameters], live_numbers)
    if saved_count != len(live.number_by_id):
        raise MatchError(_describe_misfit(saved, live))
    return _MatchedParameters([], range(saved_count))


def _can_name_positions(
    saved: SavedOptimizer, state: StateDict, file_parameters: Mapping[str, torch.Tensor | None]
) -> bool:
    """Return True if the model in the file has its original order, and the optimizer fits it.

    That is, it has as many parameters, and no state with another shape.
    """
    keys = [key for _, key in saved.parameter_keys]
    if len(file_parameters) != len(keys) or not is_in_model_order(
        state.tree, list(state.slots), state.metadata
    ):
        return False
    shapes = (state.slots[name].shape for name in file_parameters)
    return all(
        infer_shape(saved.state_of(key)) in (None, shape)
        for key, shape in zip(keys, shapes, strict=True)
    )


def _describe_schedulers(saved: SavedOptimizer, state: StateDict) -> Iterator[str]:
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


def _describe_partial(matched: _MatchedParameters, live: _LiveOptimizer) -> Iterator[str]:
    """Yield notes about live parameters without state, and about state that is left out."""
    with_state = {*matched.live_numbers}
    without_state = [name for number, name in enumerate(live.names) if number not in with_state]
    # Not strict: without names, no state is left out.
    names_and_numbers = zip(matched.names, matched.live_numbers, strict=False)
    left_out = [name for name, number in names_and_numbers if number is None]
    if without_state:
        yield f"{counted(len(without_state), 'parameter')} without state: {listed(without_state)}"
    if left_out:
        yield f"left out the state of {counted(len(left_out), 'parameter')}: {listed(left_out)}"


def _describe_misfit(saved: SavedOptimizer, live: _LiveOptimizer, difference: str = "") -> str:
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


def _choose_file_groups(
    saved: SavedOptimizer,
    live: _LiveOptimizer,
    matched: _MatchedParameters,
    state: StateDict,
    *,
    can_keep_options: bool,
) -> tuple[list[int] | None, list[str]]:
    """Return the index of the file's group for each live group, and notes for the report.

    Groups that do not match are an error, unless `can_keep_options`: then None is returned for the
    indexes, and the live groups keep their own options.
    """
    try:
        return _match_groups(saved, live, matched), []
    except MatchError:
        if not can_keep_options:
            raise
    note = (
        "kept the learning rates and options of the groups, because the file has different groups"
    )
    return None, [note, *_describe_schedulers(saved, state)]


def _match_groups(
    saved: SavedOptimizer, live: _LiveOptimizer, matched: _MatchedParameters
) -> list[int]:
    """Return the index of the file's group for each live group.

    Groups match by the parameters in both. The other groups of the file follow in order, for live
    groups without such parameters.

    Raises:
        MatchError: if a live group has parameters of several groups of the file, or the reverse, or
            if one side has more groups.
    """
    file_group_by_live: dict[int, int] = {}
    for number, (file_group, _) in zip(matched.live_numbers, saved.parameter_keys, strict=True):
        if number is None:
            continue
        live_group = live.group_indexes[number]
        first_file_group = file_group_by_live.setdefault(live_group, file_group)
        if first_file_group != file_group:
            raise MatchError(
                f"{printable(live.names[number])} is in group {file_group} of the file, but "
                f"other parameters of group {live_group} of the optimizer are in group "
                f"{first_file_group}",
                # A partial load matches the parameters by name.
                hint=_HINT_PARTIAL if list_names(saved.section) else None,
            )
    used_file_groups = {*file_group_by_live.values()}
    is_one_to_one = len(used_file_groups) == len(file_group_by_live)
    if not is_one_to_one or len(saved.groups) != len(live.group_sizes):
        raise MatchError(_describe_misfit(saved, live))
    unused = (index for index in range(len(saved.groups)) if index not in used_file_groups)
    return [
        file_group_by_live[index] if index in file_group_by_live else next(unused)
        for index in range(len(live.group_sizes))
    ]


def _check_kind(saved: SavedOptimizer, optimizer: torch.optim.Optimizer) -> None:
    """Refuse state of another kind of optimizer: torch accepts it, but then `step()` fails.

    Kinds are compared by the names of options that only some of torch's optimizers have, so Adam,
    RAdam and SparseAdam are one kind. State without groups, and an optimizer without default
    options, are accepted.
    """
    layers = [layer for layer in iterate_layers(optimizer) if hasattr(layer, "param_groups")]
    innermost = layers[-1]  # wrappers have no options of their own
    file_options, defaults = find_options(saved.section), {*getattr(innermost, "defaults", ())}
    live_options = defaults & {*OPTIONS}
    if saved.groups and defaults and live_options != file_options:
        options_by_verb = {
            "has": sorted(file_options - live_options),
            "does not have": sorted(live_options - file_options),
        }
        details = " and ".join(
            f"{verb} {listed(options, 3)}" for verb, options in options_by_verb.items() if options
        )
        name = type(innermost).__name__
        raise MatchError(f"the optimizer in the file is not {name}: it {details}")


def _refuse_shared_state(
    saved: SavedOptimizer, live: _LiveOptimizer, matched: _MatchedParameters
) -> None:
    """Refuse a state of LBFGS, which is one vector of all parameters, if their order differs."""
    is_same_order = [*matched.live_numbers] == [*range(len(live.names))]
    paths = (path for path, _ in walk(saved.section.node["state"]))
    # Only the state of LBFGS has a path with one of these keys.
    if not is_same_order and any(map(_LBFGS_KEYS.intersection, paths)):
        raise MatchError("the optimizer has one state for all parameters, and their order differs")


def _check_state(
    saved: SavedOptimizer, live: _LiveOptimizer, key_by_number: Mapping[int, Any]
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
            # Only scalars and tensors of the whole shape can be distributed like the parameter.
            elif is_dtensor(parameter) and getattr(leaf, "shape", ()) not in ((), live_shape):
                problem = f"of shape {list(leaf.shape)}, unlike its DTensor"
            if problem:
                shown = printable(saved.path_of(key, *path))
                raise MatchError(f"{shown} is {problem}, which cannot be loaded from a file")


def _describe_kept_objects(saved: SavedOptimizer) -> Iterator[str]:
    """Yield notes about options that stay unchanged because the file has objects for them."""
    for number, group in enumerate(saved.groups):
        objects = [str(key) for key, node in group.items() if describe_opaque(node)]
        if objects:
            yield f"kept {listed(objects)} of group {number}, because the file has objects there"


def _list_casts(
    optimizer: Any, saved: SavedOptimizer, live: _LiveOptimizer, key_by_number: Mapping[int, Any]
) -> Iterator[DtypeChange]:
    """Yield the casts of torch's `load_state_dict`: to the parameter's dtype, except for `step`.

    An optimizer with its own `load_state_dict` decides itself, so nothing is yielded.
    """
    import torch

    *_, innermost = iterate_layers(optimizer)  # inside of wrappers
    if type(innermost).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return
    for number, key in key_by_number.items():
        parameter, name = live.parameters[number], live.names[number]
        if not parameter.is_floating_point():  # torch casts no state of other parameters
            continue
        live_dtype = dtype_name(parameter)
        for path, leaf in walk(saved.state_of(key)):
            if isinstance(leaf, TensorRef) and leaf.dtype != live_dtype and path[-1:] != ("step",):
                yield DtypeChange(
                    name_of((name, *path)),
                    saved.path_of(key, *path),
                    leaf.dtype,
                    live_dtype,
                    lossy=not is_exact_cast(live_dtype, leaf.dtype),
                )


def _refuse_lossy_casts(casts: Sequence[DtypeChange], allowance: Allowance) -> None:
    """Refuse casts that may lose values, unless the user allows them.

    A cast's name is "PARAMETER/ENTRY", for example "fc.weight/exp_avg". The user may allow either
    the name or the parameter; the hint allows the entry in all parameters.
    """
    refused = []
    for cast in casts:
        parameter_name = cast.name.partition("/")[0]
        if cast.lossy and not allowance.allows_cast(cast.name, parameter_name):
            refused.append(cast)
    if not refused:
        return
    first = refused[0]
    more = f", and {counted(len(refused) - 1, 'more tensor')}" if len(refused) > 1 else ""
    entries = dict.fromkeys(cast.name.partition("/")[2] for cast in refused)
    globs = tuple(f"*/{escaped_glob(entry)}" for entry in entries)
    raise MatchError(
        f"casting {first.before} -> {first.after} would change the optimizer state "
        f"{printable(first.name)}{more}",
        hint=Remedy((("allow_lossy_cast", globs),)),
    )


class _StateDictMaker(NamedTuple):
    """Creates the state dict for the optimizer's own `load_state_dict`."""

    state: StateDict
    """The state dict of the model, which reads the nodes of the file."""
    saved: SavedOptimizer
    live: _LiveOptimizer
    key_by_number: Mapping[int, Any]
    """By number of a live parameter, the key of its state in the file."""
    file_groups: Sequence[int] | None
    """For each live group, the index of the file's group; None if it keeps its own options."""

    def make_state_dict(self, optimizer: Any) -> dict[str, Any]:
        """Create the state dict on the CPU: torch moves the state to the parameters' devices.

        The entries that are neither state of a parameter nor groups are those of the file.
        """
        node = self.saved.section.node
        other_entries = {
            key: entry for key, entry in node.items() if key not in ("state", "param_groups")
        }
        # With FSDP, text keys are parameter names. Otherwise they belong to no parameter.
        has_names_as_keys = any(isinstance(key, str) for _, key in self.saved.parameter_keys)
        global_state = {
            key: entry
            for key, entry in node["state"].items()
            if isinstance(key, str) and not has_names_as_keys
        }
        state_by_number = {
            number: self._make_parameter_state(number, key)
            for number, key in self.key_by_number.items()
        }
        return {
            **self._make_entries(other_entries),
            "state": {**state_by_number, **self._make_entries(global_state)},
            "param_groups": list(self._make_groups(optimizer)),
        }

    def _make_parameter_state(self, number: int, key: Any) -> Any:
        """Create the state of a parameter; for a DTensor, this rank's part."""
        parameter, state = self.live.parameters[number], self._make_copy(self.saved.state_of(key))
        if is_dtensor(parameter):
            for word, value in state.items():
                # Values for each element are sharded like the parameter; a step count is not.
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
        # `deepcopy` refuses tensors that are results, so its memo already has their copies.
        clone_by_id = {id(tensor): tensor.detach().clone() for tensor in tensors}
        return copy.deepcopy(new, clone_by_id)

    def _make_groups(self, optimizer: Any) -> Iterator[dict[str, Any]]:
        """Yield the live groups with the options of the file, and live options that it lacks.

        If `file_groups` is None, all options are the live ones. Tensor options move to the live
        device. Parameters get names if the file and the live model have them.
        """
        bare_by_name = map_to_bare_names(self.live.names)
        numbers = iter(range(len(self.live.names)))
        saved_groups: list[Mapping[Any, Any]] = [{}] * len(optimizer.param_groups)
        if self.file_groups is not None:
            saved_groups = [self.saved.groups[index] for index in self.file_groups]
        for live_group, saved_group in zip(optimizer.param_groups, saved_groups, strict=True):
            saved_options = {key: option for key, option in saved_group.items() if key != "params"}
            is_named = bool(saved_options.pop("param_names", ())) and self.live.are_named
            options = self._make_entries(saved_options)
            for key, value in options.items():  # a tensor is usually the learning rate
                if hasattr(value, "to") and hasattr(live_group.get(key), "device"):
                    options[key] = value.to(live_group[key].device)
            params = list(islice(numbers, len(live_group["params"])))
            group = {**live_group, **options, "params": params}
            if is_named:  # names that the live group already has stay
                names = [bare_by_name[self.live.names[number]] for number in params]
                group.setdefault("param_names", names)
            yield group
