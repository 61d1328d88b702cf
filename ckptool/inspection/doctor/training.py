"""Complaints about optimizers: state that does not belong to the parameters at hand.

`Optimizer.load_state_dict` maps by position, and checks nothing but the number and sizes of the
groups (torch/optim/optimizer.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from ckptool.errors import NameCollision
from ckptool.inspection.doctor.complaint import Complaint, Found, Need, names_of
from ckptool.inspection.doctor.patient import Patient, unwrapped
from ckptool.inspection.summary import BUFFER_NAMES
from ckptool.inspection.usage import distinct
from ckptool.model import TensorRef
from ckptool.paths import counted, printable
from ckptool.statedict import Section

__all__ = ["training"]

_LIKE_PARAMETER = (
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta",
    "exp_inf", "grad_avg", "sum", "prev",
)  # fmt: skip
"""Keys of an optimizer's state whose tensors have the shape of the parameter."""

Shape = tuple[int | None, ...]


def training(patient: Patient) -> Iterator[Found]:
    """What of the optimizers' state would go to another parameter, or to none."""
    weights = _parameters(patient)
    wanted = _reference_optimizer(patient)
    for section in patient.optimizers:
        yield from _left_over(patient, section)
        if weights is not None:
            yield from _against_model(patient, section, weights)
        if wanted is not None:
            yield from _against_reference(patient, section, wanted)


def _found(patient: Patient, complaint: Complaint) -> Found:
    """An optimizer that does not fit is mended by going on without it, where that can be told."""
    return Found(complaint, (Need("select"),) if patient.model is not None else ())


def _where(section: Section) -> str:
    return printable(section.name) or "the root"


def _groups(section: Section) -> list[list[Any]]:
    """The numbers, or names, of the parameters of each group."""
    held = [group.get("params") for group in section.node["param_groups"]]
    return [list(map(_key, one)) if isinstance(one, (list, tuple)) else [] for one in held]


def _key(held: Any) -> Any:
    """What a group says of a parameter, as a key of `state`; anything odd is nobody's."""
    return held if isinstance(held, (int, str)) else ("?", id(held))


def _names(section: Section) -> list[str]:
    """The parameter names that the groups keep, in their order; none where they keep none."""
    names = [name for group in section.node["param_groups"] for name in _texts(group)]
    return names if len(names) == sum(map(len, _groups(section))) else []


def _texts(group: dict[Any, Any]) -> list[str]:
    held = group.get("param_names")
    return [one for one in held if isinstance(one, str)] if isinstance(held, (list, tuple)) else []


def _parameters(patient: Patient) -> dict[str, Shape] | None:
    """Name and shape of the model's parameters, ties once; None where it is not known which."""
    if patient.model is None:
        return None
    try:
        names = unwrapped(patient.model)
    except NameCollision:
        return None
    once = distinct(
        ((name,), value)
        for name, value in patient.model.node.items()
        if isinstance(name, str) and isinstance(value, TensorRef)
    )
    return {
        names.get(str(path[0]), str(path[0])): tensor.shape
        for path, tensor in once
        if str(path[0]).rpartition(".")[2] not in BUFFER_NAMES
    }


def _states(section: Section) -> dict[Any, Shape]:
    """The shape that each parameter had, by its number or name, as far as the state tells."""
    shapes: dict[Any, Shape] = {}
    for key, state in section.node["state"].items():
        for name in _LIKE_PARAMETER if isinstance(state, dict) else ():
            if isinstance(state.get(name), TensorRef):
                shapes[key] = state[name].shape
                break
    return shapes


def _left_over(patient: Patient, section: Section) -> Iterator[Found]:
    """State of parameters that no group has."""
    known = {key for group in _groups(section) for key in group}
    gone = [key for key in section.node["state"] if key not in known]
    if gone:
        yield _found(
            patient,
            Complaint(
                "optimizer-leftover",
                "misleads",
                f"the optimizer keeps the state of {counted(len(gone), 'parameter')} that none of "
                "its groups has",
                names_of(f"{_where(section)}/state/{key}" for key in gone),
                "load_state_dict of the optimizer takes it without a word, and nobody ever uses it",
                remedy="without the optimizer the weights load; its state starts anew",
            ),
        )


def _against_model(
    patient: Patient, section: Section, weights: dict[str, Shape]
) -> Iterator[Found]:
    """The optimizer beside the model that it is said to have trained."""
    order = [key for group in _groups(section) for key in group]
    states = _states(section)
    mine, theirs = Counter(weights.values()), Counter(states.values())
    if len(order) > len(weights) or theirs - mine:
        yield _found(patient, _misfit(section, order, weights))
        return
    if len(order) != len(weights) or len(section.node["param_groups"]) != 1:
        return
    names = _names(section) or [key for key in order if isinstance(key, str)]
    if names and set(names) != set(weights):
        return
    shapes = [weights[name] for name in names] if names else list(weights.values())
    wrong = [
        at
        for at, (key, shape) in enumerate(zip(order, shapes, strict=True))
        if states.get(key, shape) != shape
    ]
    if wrong:
        yield _found(patient, _permuted(section, wrong, list(weights), states))


def _misfit(section: Section, order: list[Any], weights: dict[str, Shape]) -> Complaint:
    return Complaint(
        "optimizer-size",
        "fails",
        f"the optimizer was saved for {counted(len(order), 'parameter')}, and the model has "
        f"{len(weights):,}, or other shapes",
        (_where(section),),
        "load_state_dict of the optimizer says: loaded state dict contains a parameter group that "
        "doesn't match the size of optimizer's group; or step() fails on a size",
        remedy="without the optimizer the weights load; its state starts anew",
    )


def _permuted(
    section: Section, wrong: list[int], names: list[str], states: dict[Any, Shape]
) -> Complaint:
    return Complaint(
        "optimizer-order",
        "misleads",
        "the optimizer has its parameters in another order than the model: "
        f"{counted(len(wrong), 'state')} of other shapes than the parameters in their place",
        names_of(names[at] for at in wrong),
        "load_state_dict of the optimizer maps by position and checks no shape: parameters get "
        "each other's moments, and step() fails or, where shapes are equal, goes on with them",
        remedy="build the optimizer with its parameters in the order that it was saved in; without "
        "the optimizer the weights load",
    )


def _reference_optimizer(patient: Patient) -> Section | None:
    if patient.reference is None:
        return None
    found = Patient(patient.reference).optimizers
    return found[0] if len(found) == 1 else None


def _against_reference(patient: Patient, section: Section, wanted: Section) -> Iterator[Found]:
    """The optimizer beside that of the reference."""
    sizes, others = ([len(group) for group in _groups(one)] for one in (section, wanted))
    if len(sizes) != len(others):
        says = "loaded state dict has a different number of parameter groups"
        text = f"{counted(len(sizes), 'group')}, and the reference has {len(others)}"
    elif sizes != others:
        says = (
            "loaded state dict contains a parameter group that doesn't match the size of "
            "optimizer's group"
        )
        text = f"groups of {_plus(sizes)} parameters, and the reference of {_plus(others)}"
    else:
        yield from _other_order(patient, section, wanted)
        return
    yield _found(
        patient,
        Complaint(
            "optimizer-groups",
            "fails",
            f"the optimizer has {text}",
            (f"{_where(section)}/param_groups",),
            f"load_state_dict of the optimizer says: {says}",
            remedy="without the optimizer the weights load; its state starts anew",
        ),
    )


def _plus(sizes: list[int]) -> str:
    return " + ".join(map(str, sizes))


def _other_order(patient: Patient, section: Section, wanted: Section) -> Iterator[Found]:
    names, others = _names(section), _names(wanted)
    mine, theirs = _states(section), _states(wanted)
    keys = zip(
        (key for group in _groups(section) for key in group),
        (key for group in _groups(wanted) for key in group),
        strict=True,
    )
    shapes = [
        at
        for at, (a, b) in enumerate(keys)
        if mine.get(a, theirs.get(b)) != theirs.get(b, mine.get(a))
    ]
    renamed = [at for at, (a, b) in enumerate(zip(names, others, strict=False)) if a != b]
    wrong = renamed or shapes
    if wrong:
        shown = names or [f"{_where(section)}/state/{at}" for at in range(max(wrong) + 1)]
        yield _found(patient, _permuted(section, wrong, shown, mine))
