"""The optimizers of a file beside its models, and beside those of a reference."""

from __future__ import annotations

from ckptool.errors import NameCollision
from ckptool.inspection.doctor.buffers import INTEGERS, is_floating
from ckptool.inspection.doctor.patient import Patient, unwrapped
from ckptool.inspection.summary import BUFFER_NAMES
from ckptool.inspection.usage import distinct
from ckptool.model import Shape, TensorRef
from ckptool.optimizers import model_of, owner
from ckptool.statedict import Section

__all__ = ["parameters", "reference_of", "trained"]


def trained(patient: Patient, section: Section) -> Section | None:
    """The model that an optimizer is of; None where that is not certain.

    With a model chosen, that one or none.
    """
    found = model_of(section, patient.models, patient.optimizers)
    if found is None or patient.model is None or patient.model.holder is found.holder:
        return found
    return None


def reference_of(patient: Patient, section: Section) -> Section | None:
    """The reference's optimizer that one is to be held against: the only ones, or of one name."""
    if patient.reference is None:
        return None
    found = Patient(patient.reference).optimizers
    if len(found) != 1 or len(patient.optimizers) == 1:
        return found[0] if len(found) == 1 else None
    alike = [one for one in patient.optimizers if owner(one) == owner(found[0])]
    return found[0] if alike == [section] else None


def parameters(model: Section) -> dict[str, Shape] | None:
    """Name and shape of the model's parameters, ties once; None where names collide.

    What has no fractions is no parameter, nor what is called as known buffers are.
    """
    try:
        names = unwrapped(model)
    except NameCollision:
        return None
    once = distinct(
        ((name,), value)
        for name, value in model.node.items()
        if isinstance(name, str) and isinstance(value, TensorRef)
    )
    return {
        names.get(str(path[0]), str(path[0])): tensor.shape
        for path, tensor in once
        if is_floating(tensor.dtype)
        and str(path[0]).rpartition(".")[2] not in BUFFER_NAMES | INTEGERS
    }
