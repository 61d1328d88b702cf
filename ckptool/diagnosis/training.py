"""Complaints that compare: the weights with a reference, an optimizer with its parameters.

`Optimizer.load_state_dict` maps by position, and checks nothing but the number and sizes of the
groups (torch/optim/optimizer.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.conversion_like import compared
from ckptool.diagnosis.complaint import (
    Choice,
    Complaint,
    Found,
    Patient,
    names_of,
    quoted_names,
    tensors_of,
    unwrapped,
)
from ckptool.diagnosis.models import INTEGERS, is_floating
from ckptool.errors import AmbiguousName, NotFound, UsageError
from ckptool.inspection.summary import BUFFER_NAMES
from ckptool.inspection.usage import distinct
from ckptool.matching import Cast, MatchReport
from ckptool.model import Shape
from ckptool.optimizers import bare_names, groups_of, model_of, names_in, shapes_in
from ckptool.statedict import Section, model_state_dict
from ckptool.words import counted, listed, printable

__all__ = ["fit", "reference_model", "training"]

_HALF_LOADED = (
    "load_state_dict raises only at its end: what fits has been copied by then, so the model is "
    "half loaded"
)
_ANEW = "without the optimizer the weights load; its state starts anew"
_OTHER_NUMBER = "loaded state dict has a different number of parameter groups"
_OTHER_SIZE = (
    "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
)


def reference_model(reference: Checkpoint) -> Section:
    """Return the state dict of the reference, which must have one alone.

    Raises:
        UsageError: it has none, or several.
    """
    try:
        return model_state_dict(reference)
    except (NotFound, AmbiguousName) as error:
        raise UsageError(
            f"the reference is to hold one state dict: {error.message}",
            file=reference.path or None,
            hint=f"ckptool extract {reference.path} --key NAME -o reference.pth",
        ) from error


def fit(patient: Patient) -> Iterator[Found]:
    """Yield what the reference's architecture does not take of the state dict, or lacks."""
    if patient.reference is None or patient.model is None:
        return
    report = compared(patient.checkpoint, patient.model, patient.reference)
    like: dict[str, Any] = {"like": patient.reference}
    rest = {**like, "allow_missing": True, "allow_unexpected": True, "allow_mismatched": True}
    choices = (Choice(rest, "fitting"),)
    missing, unexpected = report.missing_keys, report.unexpected_keys
    yield from _renamed(report, like)
    if missing:
        total = report.names
        yield Found(
            Complaint(
                "missing",
                "fails",
                f"{counted(len(missing), 'tensor')} of the reference's {total:,} "
                f"{_are(len(missing))} not in it",
                names_of(missing),
                "load_state_dict says: Missing key(s) in state_dict: "
                f"{quoted_names(missing[:1])}; with strict=False they stay as they were "
                f"initialised. {_HALF_LOADED}",
                remedy="names that differ: ckptool match FILE --like REFERENCE shows "
                "the rules that it proposes",
            )
        )
    if unexpected:
        complaint = Complaint(
            "unexpected",
            "fails",
            f"{counted(len(unexpected), 'tensor')} in it {_are(len(unexpected))} not in the "
            "reference",
            names_of(unexpected),
            "load_state_dict says: Unexpected key(s) in state_dict: ... "
            f"{quoted_names(unexpected[:1])}; with strict=False they are left out. {_HALF_LOADED}",
        )
        if missing or report.mismatched:  # they may be the missing ones: the user's to say
            yield Found(complaint, None, choices)
        else:
            yield Found(complaint, {**like, "allow_unexpected": True})
    yield from _shapes(report, choices)
    yield from _types(report.cast)


def _renamed(report: MatchReport, like: dict[str, Any]) -> Iterator[Found]:
    """Names that the reference has otherwise, and by which rules they become its own."""
    pairs: dict[str, str] = {}
    texts = []
    for renaming in report.renamed:
        if renaming.kind == "known" and all(
            "parametrizations." in new for _, new in renaming.names
        ):
            continue  # torch's own loading takes the old form of weight_norm
        pairs.update(renaming.names)
        texts.append(printable(renaming.text))
    if not pairs:
        return
    kinds = {one.kind for one in report.renamed}
    complaint = Complaint(
        "wrappers" if kinds == {"wrapper"} else "renamed",
        "fails",
        f"names are not spelled as in the reference: {listed(texts, most=3)}",
        names_of(pairs),
        f"load_state_dict says: Missing key(s) in state_dict: ... "
        f"{quoted_names(list(pairs.values())[-1:])}; with strict=False they are left out, without "
        "an error",
    )
    yield Found(complaint, like)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _shapes(report: MatchReport, choices: tuple[Choice, ...]) -> Iterator[Found]:
    wrong = report.mismatched
    if not wrong:
        return
    first = wrong[0]
    shown = (f"{one.name} {list(one.shape)} for {list(one.wanted)}" for one in wrong)
    complaint = Complaint(
        "size-mismatch",
        "fails",
        f"{counted(len(wrong), 'tensor')} of another shape than in the reference: "
        f"{listed(shown, most=3)}",
        names_of(one.name for one in wrong),
        f"load_state_dict says: size mismatch for {first.name}: copying a param with shape "
        f"torch.Size({list(first.shape)}) from checkpoint, the shape in current model is "
        f"torch.Size({list(first.wanted)}); strict=False does not skip it. {_HALF_LOADED}",
        remedy="without these, load_state_dict(..., strict=False) takes the rest",
    )
    yield Found(complaint, None, choices)


def _types(casts: Sequence[Cast]) -> Iterator[Found]:
    truncated = [one for one in casts if is_floating(one.before) and not is_floating(one.after)]
    rounded = [one for one in casts if one not in truncated]
    if truncated:
        complaint = Complaint(
            "cast-to-integer",
            "misleads",
            f"{counted(len(truncated), 'tensor')} with fractions go into integer or boolean "
            f"buffers: {_kinds(truncated)}",
            names_of(one.name for one in truncated),
            "load_state_dict copies them without a word: 2.87 becomes 2, inf the smallest "
            "integer, anything but 0 True",
            remedy="in code: state[name] = state[name].long(), where the values are whole",
        )
        yield Found(complaint)
    if rounded:
        complaint = Complaint(
            "dtype",
            "note",
            f"{counted(len(rounded), 'tensor')} of another type than in the reference: "
            f"{_kinds(rounded)}",
            names_of(one.name for one in rounded),
            "load_state_dict casts into the model's type without a word; what is too large for it "
            "becomes inf (65,520 and more in float16)",
            remedy="ckptool cast counts what overflows, underflows and loses precision",
        )
        yield Found(complaint)


def _kinds(casts: Sequence[Cast]) -> str:
    return listed(dict.fromkeys(f"{one.before} for {one.after}" for one in casts), most=4)


def training(patient: Patient) -> Iterator[Found]:
    """Yield what of the optimizers' state would go to another parameter, or to none."""
    for section in patient.optimizers:
        for complaint in _complaints(patient, section):
            # mended by going on without it, where it is clear which model that is
            yield Found(complaint, {"model_only": True} if patient.model is not None else None)


def _complaints(patient: Patient, section: Section) -> Iterator[Complaint]:
    if not section.node["param_groups"]:
        yield _other_groups(section, "no parameter group", _OTHER_NUMBER)
        return
    known = {key for group in groups_of(section) for key in group}
    gone = [key for key in section.node["state"] if key not in known]
    if gone:
        yield Complaint(
            "optimizer-leftover",
            "misleads",
            f"the optimizer keeps the state of {counted(len(gone), 'parameter')} that its groups "
            "do not have",
            names_of(f"{_where(section)}/state/{key}" for key in gone),
            "load_state_dict of the optimizer takes it without a word, and nobody ever uses it",
            remedy=_ANEW,
        )
    model = model_of(section, patient.models, patient.optimizers)
    if model is not None and (patient.model is None or patient.model.holder is model.holder):
        yield from _against_model(section, _parameters(model))


def _parameters(model: Section) -> dict[str, Shape]:
    """Name and shape of the model's parameters, ties once.

    A tensor without fractions is no parameter, nor one with the name of a known buffer.
    """
    names = unwrapped(model)
    once = distinct(((name,), value) for name, value in tensors_of(model).items())
    return {
        names.get(str(path[0]), str(path[0])): tensor.shape
        for path, tensor in once
        if is_floating(tensor.dtype)
        and str(path[0]).rpartition(".")[2] not in BUFFER_NAMES | INTEGERS
    }


def _where(section: Section) -> str:
    return printable(section.name) or "the root"


def _against_model(section: Section, weights: dict[str, Shape]) -> Iterator[Complaint]:
    """The optimizer beside the model that it is said to have trained."""
    order = [key for group in groups_of(section) for key in group]
    states = shapes_in(section)
    foreign = Counter(states.values()) - Counter(weights.values())
    if len(order) > len(weights):
        text = f"the optimizer was saved for {counted(len(order), 'parameter')}"
        yield _misfit(section, f"{text}, and the model has {len(weights):,}")
    elif foreign:
        text = "of the optimizer have shapes that no parameter of the model has"
        yield _misfit(section, f"{counted(foreign.total(), 'state')} {text}")
    elif len(order) == len(weights) and len(section.node["param_groups"]) == 1:
        names = bare_names(names_in(section))
        if names and set(names) != set(weights):
            return
        shapes = [weights[name] for name in names] if names else list(weights.values())
        pairs = zip(order, shapes, strict=True)
        wrong = [at for at, (key, shape) in enumerate(pairs) if states.get(key, shape) != shape]
        if wrong:
            yield _permuted(wrong, names or list(weights))


def _misfit(section: Section, what: str) -> Complaint:
    return Complaint(
        "optimizer-size",
        "fails",
        what,
        (_where(section),),
        f"load_state_dict of the optimizer says: {_OTHER_SIZE}; or step() fails on a size",
        remedy=_ANEW,
    )


def _permuted(wrong: list[int], names: Sequence[str]) -> Complaint:
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


def _other_groups(section: Section, text: str, says: str) -> Complaint:
    return Complaint(
        "optimizer-groups",
        "fails",
        f"the optimizer has {text}",
        (f"{_where(section)}/param_groups",),
        f"load_state_dict of the optimizer says: {says}",
        remedy=_ANEW,
    )
