"""Complaints about optimizers: state that does not belong to the parameters at hand.

`Optimizer.load_state_dict` maps by position, and checks nothing but the number and sizes of the
groups (torch/optim/optimizer.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ckptool.inspection.doctor.complaint import Complaint, Found, Need, names_of
from ckptool.inspection.doctor.optimizers import parameters, reference_of, trained
from ckptool.inspection.doctor.patient import Patient
from ckptool.model import Shape
from ckptool.optimizers import groups_of, kept_by, names_in, options_of, shapes_in
from ckptool.statedict import Section
from ckptool.words import counted, listed, printable

__all__ = ["training"]

_ANEW = "without the optimizer the weights load; its state starts anew"
_OTHER_NUMBER = "loaded state dict has a different number of parameter groups"
_OTHER_SIZE = (
    "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
)
_ONLY_IF_ASKED = frozenset({"max_exp_avg_sq", "momentum_buffer", "grad_avg"})
"""Kept only with some option, which comes from the file as well."""


def training(patient: Patient) -> Iterator[Found]:
    """What of the optimizers' state would go to another parameter, or to none."""
    for section in patient.optimizers:
        for complaint in _complaints(patient, section):
            # mended by going on without it, where it can be told which model that is
            yield Found(complaint, (Need("select"),) if patient.model is not None else ())


def _complaints(patient: Patient, section: Section) -> Iterator[Complaint]:
    if not section.node["param_groups"]:
        yield _other_groups(section, "no parameter group", _OTHER_NUMBER)
        return
    yield from _left_over(section)
    model = trained(patient, section)
    weights = parameters(model) if model is not None else None
    if weights is not None:
        yield from _against_model(section, weights)
    wanted = reference_of(patient, section)
    if wanted is not None:
        yield from _against_reference(section, wanted)


def _where(section: Section) -> str:
    return printable(section.name) or "the root"


def _left_over(section: Section) -> Iterator[Complaint]:
    """State of parameters that no group has."""
    known = {key for group in groups_of(section) for key in group}
    gone = [key for key in section.node["state"] if key not in known]
    if gone:
        yield Complaint(
            "optimizer-leftover",
            "misleads",
            f"the optimizer keeps the state of {counted(len(gone), 'parameter')} that none of "
            "its groups has",
            names_of(f"{_where(section)}/state/{key}" for key in gone),
            "load_state_dict of the optimizer takes it without a word, and nobody ever uses it",
            remedy=_ANEW,
        )


def _against_model(section: Section, weights: dict[str, Shape]) -> Iterator[Complaint]:
    """The optimizer beside the model that it is said to have trained."""
    order = [key for group in groups_of(section) for key in group]
    states = shapes_in(section)
    foreign = Counter(states.values()) - Counter(weights.values())
    if len(order) > len(weights):
        yield _misfit(
            section,
            f"the optimizer was saved for {counted(len(order), 'parameter')}, and the model has "
            f"{len(weights):,}",
        )
    elif foreign:
        text = "of the optimizer have shapes that no parameter of the model has"
        yield _misfit(section, f"{_states(foreign.total())} {text}")
    elif len(order) == len(weights) and len(section.node["param_groups"]) == 1:
        yield from _in_order(section, weights, order, states)


def _in_order(
    section: Section, weights: dict[str, Shape], order: list[Any], states: dict[Any, Shape]
) -> Iterator[Complaint]:
    names = names_in(section)
    if names and set(names) != set(weights):
        return
    shapes = [weights[name] for name in names] if names else list(weights.values())
    wrong = [
        at
        for at, (key, shape) in enumerate(zip(order, shapes, strict=True))
        if states.get(key, shape) != shape
    ]
    if wrong:
        yield _permuted(section, wrong, names or list(weights), _other_shapes(len(wrong), "model"))


def _states(count: int) -> str:
    return counted(count, "state")


def _other_shapes(count: int, whose: str) -> str:
    return (
        f"the optimizer has its parameters in another order than the {whose}: "
        f"{_states(count)} of other shapes than the parameters in their place"
    )


def _misfit(section: Section, what: str) -> Complaint:
    return Complaint(
        "optimizer-size",
        "fails",
        what,
        (_where(section),),
        f"load_state_dict of the optimizer says: {_OTHER_SIZE}; or step() fails on a size",
        remedy=_ANEW,
    )


def _permuted(section: Section, wrong: list[int], names: Sequence[str], what: str) -> Complaint:
    shown = names or [f"{_where(section)}/state/{at}" for at in range(max(wrong) + 1)]
    return Complaint(
        "optimizer-order",
        "misleads",
        what,
        names_of(shown[at] for at in wrong),
        "load_state_dict of the optimizer maps by position and checks no shape: parameters get "
        "each other's moments, and step() fails or, where shapes are equal, goes on with them",
        remedy="build the optimizer with its parameters in the order that it was saved in; without "
        "the optimizer the weights load",
    )


def _against_reference(section: Section, wanted: Section) -> Iterator[Complaint]:
    """The optimizer beside that of the reference."""
    sizes, others = ([len(group) for group in groups_of(one)] for one in (section, wanted))
    if len(sizes) != len(others):
        text = f"{counted(len(sizes), 'group')}, and the reference has {len(others)}"
        yield _other_groups(section, text, _OTHER_NUMBER)
    elif sizes != others:
        text = f"groups of {_plus(sizes)} parameters, and the reference of {_plus(others)}"
        yield _other_groups(section, text, _OTHER_SIZE)
    elif lacking := _lacking(section, wanted):
        yield _other_kind(section, lacking)
    else:
        yield from _other_order(section, wanted)


def _other_groups(section: Section, text: str, says: str) -> Complaint:
    return Complaint(
        "optimizer-groups",
        "fails",
        f"the optimizer has {text}",
        (f"{_where(section)}/param_groups",),
        f"load_state_dict of the optimizer says: {says}",
        remedy=_ANEW,
    )


def _plus(sizes: list[int]) -> str:
    return " + ".join(map(str, sizes))


def _lacking(section: Section, wanted: Section) -> list[str]:
    """Options and kinds of state that an optimizer as the reference's asks for, and finds none."""
    options = options_of(wanted) - options_of(section)
    mine, theirs = kept_by(section), kept_by(wanted) - _ONLY_IF_ASKED
    lacking = theirs - mine if mine else set()
    return [*sorted(options), *sorted(lacking)]


def _other_kind(section: Section, lacking: list[str]) -> Complaint:
    return Complaint(
        "optimizer-kind",
        "fails",
        "the optimizer is of another kind than the reference's: it has no "
        f"{', '.join(map(printable, lacking[:3]))}",
        (_where(section),),
        "load_state_dict of the optimizer takes it, options of its groups and all; that or the "
        f"first step() ends with a KeyError: {listed(repr(printable(name)) for name in lacking)}",
        remedy=_ANEW,
    )


def _other_order(section: Section, wanted: Section) -> Iterator[Complaint]:
    names, others = names_in(section), names_in(wanted)
    moved = [at for at, (a, b) in enumerate(zip(names, others, strict=False)) if a != b]
    if moved and set(names) == set(others):
        what = (
            "the optimizer has its parameters in another order than the reference's: "
            f"{len(moved):,} of {len(names):,} names stand elsewhere"
        )
        yield _permuted(section, moved, names, what)
        return
    mine, theirs = shapes_in(section), shapes_in(wanted)
    keys = zip(
        (key for group in groups_of(section) for key in group),
        (key for group in groups_of(wanted) for key in group),
        strict=True,
    )
    shapes = [(mine[a], theirs[b]) if a in mine and b in theirs else None for a, b in keys]
    wrong = [at for at, both in enumerate(shapes) if both is not None and both[0] != both[1]]
    if not wrong:
        return
    known = [both for both in shapes if both is not None]
    if Counter(a for a, _ in known) == Counter(b for _, b in known):
        what = _other_shapes(len(wrong), "reference's")
        yield _permuted(section, wrong, names, what)
    else:
        text = "of the optimizer are of other sizes than in the reference"
        yield _misfit(section, f"{_states(len(wrong))} {text}")
