"""Decide whether the positions of parameters in a saved optimizer identify them.

torch numbers the parameters of an optimizer in the order in which they were passed to it. If an
optimizer has every parameter of its model, that is the order of the model, and a file that keeps
the order of its keys has the name of each. Each reason against this is a doubt here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptool.core.names import STATISTICS
from ckptool.core.optimizers import fits_shape
from ckptool.core.sections import Section
from ckptool.loading.plan import LoadPlan
from ckptool.loading.source import StateDict
from ckptool.loading.target import ModelTarget
from ckptool.tensors.live import shape_of
from ckptool.transforms.schedule_free import is_in_model_order
from ckptool.words import counted, printable

if TYPE_CHECKING:
    import torch

_NOT_COMPARED = frozenset(("params", "param_names", "lr"))
"""Options of a group that need not be the same: schedules change the learning rate."""
_NOT_SET = "not set"


def list_file_parameters(
    state: StateDict, target: ModelTarget, plan: LoadPlan, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Return the parameters of the model in a file by key, in its order, with the live tensors.

    Parameters that are tied, in the file or in the live model, are listed once. The tensor is None
    if the live model does not have it, or has another shape. If only the file has a key, its last
    part decides whether it is a parameter: names such as `running_mean` are buffers.
    """
    # In reverse, so that the first name of a file key with several stays.
    name_by_file_key = {
        file_key: name
        for name, file_key in reversed([*plan.pairs.items(), *plan.undecided.items()])
    }
    mismatched_name_by_file_key = {row.own: row.name for row in plan.report.mismatched}
    parameters: dict[str, torch.Tensor | None] = {}
    seen: set[Hashable] = set()
    for file_key, slot in state.slots.items():
        if slot.kind == "extra":
            continue
        name = name_by_file_key.get(file_key, mismatched_name_by_file_key.get(file_key))
        if name is None:
            is_parameter = file_key.rpartition(".")[2] not in STATISTICS
        else:
            is_parameter = target.slots[name].kind == "parameter"
        if not is_parameter:
            continue
        tensor = tensors.get(name_by_file_key.get(file_key, ""))
        # Keys that are tied have one of these in common: the tensor of the model, or of the file.
        identities: set[Hashable] = {("file", slot.tie or file_key)}
        if tensor is not None:
            identities.add(("live", id(tensor)))
        if seen.isdisjoint(identities):
            parameters[file_key] = tensor
        seen |= identities
    return parameters


def find_doubt(
    saved: Section,
    keys: Sequence[Any],
    optimizer: Any,
    model: torch.nn.Module,
    state: StateDict,
    file_parameters: Mapping[str, torch.Tensor | None],
) -> str:
    """Return the reason why positions do not prove the owner of each state, or "" if they do.

    Args:
        saved: The state of an optimizer in the file, with as many parameters in each group.
        keys: The keys of its parameters, in the order of the groups.
        optimizer: The live optimizer.
        model: The live model.
        state: The state dict of the model in the file.
        file_parameters: By key in `state`, the parameter of the live model that is loaded from it,
            or None if the model has none.
    """
    if not is_in_model_order(state.tree, list(state.slots), state.metadata):
        return "the model's file is sorted by key, so the original order of parameters is lost"
    if len(file_parameters) != len(keys):
        count = counted(len(file_parameters), "parameter")
        return f"the model in the file has {count}, and its optimizer has {len(keys):,}"
    position_by_id = {
        id(parameter): position for position, parameter in enumerate(model.parameters())
    }
    live_positions = [position_by_id.get(id(tensor)) for tensor in file_parameters.values()]
    if live_positions != [*range(len(position_by_id))]:
        moved = (
            name
            for position, name in enumerate(file_parameters)
            if live_positions[position] != position
        )
        first_moved = next(moved, "")  # none if only the model has more at the end
        start = f", starting at {printable(first_moved)}" if first_moved else ""
        return (
            f"the model in the file has other parameters than your model, or another order{start}"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if {*map(id, parameters)} != position_by_id.keys():
        return "the optimizer does not have every parameter of the model"
    for key, parameter in zip(keys, parameters, strict=True):
        if not fits_shape(saved.node["state"].get(key), shape_of(parameter)):
            return (
                f"the state of parameter {printable(str(key))} does not have the shape of "
                "that parameter"
            )
    return _find_doubt_in_groups(saved.node["param_groups"], optimizer.param_groups, position_by_id)


def _find_doubt_in_groups(
    file_groups: Sequence[Mapping[Any, Any]],
    live_groups: Sequence[Mapping[str, Any]],
    position_by_id: Mapping[int, int],
) -> str:
    """Return the reason why the groups may have other parameters than in the file, or "".

    Both have as many groups, of the same sizes. `position_by_id` gives the position in the model of
    each live parameter. Groups with different options, such as decay and no decay, divide the
    parameters of a model; within the same options, a script keeps the order of the model.
    """
    differing_options = [*_find_differing_options(file_groups, live_groups)]
    for option, file_values, live_values in differing_options:
        if file_values != live_values:
            return (
                f"the groups of the file have {option} {file_values}, the optimizer {live_values}"
            )
    positions_by_options: dict[tuple[str, ...], list[int]] = {}
    for index, group in enumerate(live_groups):
        options = tuple(live_values[index] for _, _, live_values in differing_options)
        positions_by_options.setdefault(options, []).extend(
            position_by_id[id(parameter)] for parameter in group["params"]
        )
    if any(positions != sorted(positions) for positions in positions_by_options.values()):
        return "the optimizer does not have its parameters in the order of the model"
    file_rates = [_read_rate(group) for group in file_groups]
    live_rates = [_read_rate(group) for group in live_groups]
    shapes = [tuple(map(shape_of, group["params"])) for group in live_groups]
    if _are_rates_swapped(shapes, file_rates, live_rates):
        return f"the groups of the file have lr {file_rates}, the optimizer {live_rates}"
    return ""


def _read_rate(group: Mapping[Any, Any]) -> float:
    """Return the learning rate of a group, or 0 if it is not a plain number."""
    rate = group.get("lr")
    return float(rate) if isinstance(rate, (int, float)) else 0.0


def _are_rates_swapped(
    shapes: Sequence[tuple[Any, ...]], file_rates: Sequence[float], live_rates: Sequence[float]
) -> bool:
    """Return True if the learning rates of groups with the same shapes changed their order.

    Schedules scale the rates of all groups, so the group with the larger rate in the file should
    also have the larger live rate. If it has not, the groups are probably in another order.
    """
    rates_by_shapes: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for shape, file, live in zip(shapes, file_rates, live_rates, strict=True):
        rates_by_shapes.setdefault(shape, []).append((file, live))
    live_by_file_rate = ([live for _, live in sorted(pairs)] for pairs in rates_by_shapes.values())
    return any(live != sorted(live) for live in live_by_file_rate)


def _find_differing_options(
    file_groups: Sequence[Mapping[Any, Any]], live_groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each option in which groups differ, with its values in the file's and the live groups.

    Learning rates are excluded, because schedules change them.
    """
    file_options = {option for group in file_groups for option in group}
    live_options = {option for group in live_groups for option in group}
    for option in sorted((file_options & live_options) - _NOT_COMPARED, key=str):
        file_values = [_to_comparable(group.get(option, _NOT_SET)) for group in file_groups]
        live_values = [_to_comparable(group.get(option, _NOT_SET)) for group in live_groups]
        if len({*file_values}) > 1 or len({*live_values}) > 1:
            yield str(option), file_values, live_values


def _to_comparable(value: Any) -> str:
    """Return the value of an option as text, which is equal for equal numbers: 1 -> "1.0".

    Every tensor is "tensor", and every other object "object": their values are not compared.
    """
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_to_comparable, value))}]"
    if isinstance(value, (bool, str)) or value is None:
        return repr(value)
    if isinstance(value, (int, float)):
        return repr(float(value))
    return "tensor" if hasattr(value, "dtype") else "object"
