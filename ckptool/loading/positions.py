"""What the position of a parameter in a saved optimizer proves.

torch numbers the parameters of an optimizer in the order in which they were given to it. Where an
optimizer has every parameter of its model, that is the model's order, and a file that keeps the
order of its keys has the name of each. All that could make this untrue is a doubt here.
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
from ckptool.transforms.schedule_free import keeps_order
from ckptool.words import counted, printable

if TYPE_CHECKING:
    import torch

_NOT_COMPARED = frozenset(("params", "param_names", "lr"))
"""Options of a group that need not be the same: schedules change the learning rate."""
_MISSING = "not set"


def parameters_in(
    state: StateDict, target: ModelTarget, plan: LoadPlan, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Return the parameters of a file's model by key, in its order, with those of the live model.

    Ties are there once. None: the live model has none, or one of another shape. Of a key that only
    the file has, its last part decides whether it is a parameter.
    """
    pairs = {own: name for name, own in reversed([*plan.pairs.items(), *plan.undecided.items()])}
    misshapen = {one.own: one.name for one in plan.report.mismatched}
    found: dict[str, torch.Tensor | None] = {}
    seen: set[Hashable] = set()
    for own, slot in state.slots.items():
        name = pairs.get(own, misshapen.get(own))
        is_buffer = own.rpartition(".")[2] in STATISTICS
        if slot.kind == "extra" or (
            is_buffer if name is None else target.slots[name].kind != "parameter"
        ):
            continue
        tensor = tensors.get(pairs.get(own, ""))
        places = {("live", id(tensor)) if tensor is not None else own, ("file", slot.tie or own)}
        if seen.isdisjoint(places):
            found[own] = tensor
        seen |= places
    return found


def doubt_of(
    saved: Section,
    keys: Sequence[Any],
    optimizer: Any,
    model: torch.nn.Module,
    state: StateDict,
    held: Mapping[str, torch.Tensor | None],
) -> str:
    """Return why positions do not prove which state belongs to which parameter; "": they do.

    Args:
        saved: The state of an optimizer in the file, with as many parameters in each group.
        keys: The keys of its parameters, in the order of the groups.
        optimizer: The one to fill.
        model: The one that is loaded.
        state: The state dict of the file's model.
        held: The parameters in that, as `parameters_in` returns them.
    """
    order = {id(one): at for at, one in enumerate(model.parameters())}
    groups: list[Mapping[str, Any]] = optimizer.param_groups
    own = [one for group in groups for one in group["params"]]
    if not keeps_order(state.tree, list(state.slots), state.metadata):
        return "the model's file is sorted by key, so the original order of parameters is lost"
    if len(held) != len(keys):
        many = counted(len(held), "parameter")
        return f"the model in the file has {many}, and its optimizer has {len(keys):,}"
    ranks = [order.get(id(one)) for one in held.values()]
    if ranks != [*range(len(order))]:
        names = (name for at, name in enumerate(held) if ranks[at] != at)
        first = f", starting at {printable(name)}" if (name := next(names, "")) else ""
        return (
            f"the model in the file has other parameters than your model, or another order{first}"
        )
    if {*map(id, own)} != order.keys():
        return "the optimizer does not have every parameter of the model"
    for key, parameter in zip(keys, own, strict=True):
        if not fits_shape(saved.node["state"].get(key), shape_of(parameter)):
            return (
                f"the state of parameter {printable(str(key))} does not have the shape of "
                "that parameter"
            )
    telling = [*_telling(saved.node["param_groups"], groups)]
    for option, there, here in telling:
        if there != here:
            return f"the groups of the file have {option} {there}, the optimizer {here}"
    alike: dict[tuple[str, ...], list[int]] = {}
    for at, group in enumerate(groups):
        kind = tuple(here[at] for _, _, here in telling)
        alike.setdefault(kind, []).extend(order[id(one)] for one in group["params"])
    if any(numbers != sorted(numbers) for numbers in alike.values()):
        return "the optimizer does not have its parameters in the order of the model"
    rates = [[_rate(group) for group in some] for some in (saved.node["param_groups"], groups)]
    if _are_swapped([tuple(map(shape_of, group["params"])) for group in groups], *rates):
        return f"the groups of the file have lr {rates[0]}, the optimizer {rates[1]}"
    return ""


def _rate(group: Mapping[Any, Any]) -> float:
    """Return the learning rate of a group; 0 if it is no plain number, and says nothing."""
    rate = group.get("lr")
    return float(rate) if isinstance(rate, (int, float)) else 0.0


def _are_swapped(
    shapes: Sequence[tuple[Any, ...]], there: Sequence[float], here: Sequence[float]
) -> bool:
    """Return whether of two groups with the same shapes the other one has the larger rate now.

    Schedules change rates, and keep which of two groups has the larger one.
    """
    alike: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for shape, file, own in zip(shapes, there, here, strict=True):
        alike.setdefault(shape, []).append((file, own))
    rates = ([own for _, own in sorted(pairs)] for pairs in alike.values())
    return any(some != sorted(some) for some in rates)


def _telling(
    there: Sequence[Mapping[Any, Any]], here: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the options by which groups differ, and their values in the groups of both sides."""
    keys = [{key for group in groups for key in group} for groups in (there, here)]
    for key in sorted((keys[0] & keys[1]) - _NOT_COMPARED, key=str):
        file, own = ([_plain(group.get(key, _MISSING)) for group in some] for some in (there, here))
        if len({*file}) > 1 or len({*own}) > 1:
            yield str(key), file, own


def _plain(value: Any) -> str:
    """Return an option as text that is equal for equal numbers; a tensor is only a tensor."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, (bool, str)) or value is None:
        return repr(value)
    is_number = isinstance(value, (int, float))
    return repr(float(value)) if is_number else "tensor" if hasattr(value, "dtype") else "object"
