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
    name_by_file_key = {
        file_key: name
        for name, file_key in reversed([*plan.pairs.items(), *plan.undecided.items()])
    }
    mismatched_name_by_file_key = {row.own: row.name for row in plan.report.mismatched}
    parameters: dict[str, torch.Tensor | None] = {}
    seen: set[Hashable] = set()
    for file_key, slot in state.slots.items():
        name = name_by_file_key.get(file_key, mismatched_name_by_file_key.get(file_key))
        is_buffer = file_key.rpartition(".")[2] in STATISTICS
        if slot.kind == "extra" or (
            is_buffer if name is None else target.slots[name].kind != "parameter"
        ):
            continue
        tensor = tensors.get(name_by_file_key.get(file_key, ""))
        identities = {
            ("live", id(tensor)) if tensor is not None else file_key,
            ("file", slot.tie or file_key),
        }
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
        file_parameters: Its parameters, as `list_file_parameters` returns them.
    """
    position_by_id = {
        id(parameter): position for position, parameter in enumerate(model.parameters())
    }
    groups: list[Mapping[str, Any]] = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not is_in_model_order(state.tree, list(state.slots), state.metadata):
        return "the model's file is sorted by key, so the original order of parameters is lost"
    if len(file_parameters) != len(keys):
        count = counted(len(file_parameters), "parameter")
        return f"the model in the file has {count}, and its optimizer has {len(keys):,}"
    positions = [position_by_id.get(id(tensor)) for tensor in file_parameters.values()]
    if positions != [*range(len(position_by_id))]:
        names = (
            name for position, name in enumerate(file_parameters) if positions[position] != position
        )
        first = f", starting at {printable(name)}" if (name := next(names, "")) else ""
        return (
            f"the model in the file has other parameters than your model, or another order{first}"
        )
    if {*map(id, parameters)} != position_by_id.keys():
        return "the optimizer does not have every parameter of the model"
    for key, parameter in zip(keys, parameters, strict=True):
        if not fits_shape(saved.node["state"].get(key), shape_of(parameter)):
            return (
                f"the state of parameter {printable(str(key))} does not have the shape of "
                "that parameter"
            )
    differing_options = [*_find_differing_options(saved.node["param_groups"], groups)]
    for option, file_values, live_values in differing_options:
        if file_values != live_values:
            return (
                f"the groups of the file have {option} {file_values}, the optimizer {live_values}"
            )
    positions_by_options: dict[tuple[str, ...], list[int]] = {}
    for index, group in enumerate(groups):
        options = tuple(live_values[index] for _, _, live_values in differing_options)
        positions_by_options.setdefault(options, []).extend(
            position_by_id[id(parameter)] for parameter in group["params"]
        )
    if any(numbers != sorted(numbers) for numbers in positions_by_options.values()):
        return "the optimizer does not have its parameters in the order of the model"
    file_rates = [_read_rate(group) for group in saved.node["param_groups"]]
    live_rates = [_read_rate(group) for group in groups]
    shapes = [tuple(map(shape_of, group["params"])) for group in groups]
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
    keys = [{key for group in groups for key in group} for groups in (file_groups, live_groups)]
    for key in sorted((keys[0] & keys[1]) - _NOT_COMPARED, key=str):
        file, live = (
            [_normalize(group.get(key, _NOT_SET)) for group in some]
            for some in (file_groups, live_groups)
        )
        if len({*file}) > 1 or len({*live}) > 1:
            yield str(key), file, live


def _normalize(value: Any) -> str:
    """Return an option as text that is equal for equal numbers; every tensor is "tensor"."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_normalize, value))}]"
    if isinstance(value, (bool, str)) or value is None:
        return repr(value)
    is_number = isinstance(value, (int, float))
    return repr(float(value)) if is_number else "tensor" if hasattr(value, "dtype") else "object"
