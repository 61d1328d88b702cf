"""Complaints about where the state dict is: one level down, in several places, nowhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ckptool.errors import NameCollision
from ckptool.inspection.doctor.complaint import (
    Choice,
    Complaint,
    Found,
    Need,
    names_of,
    quoted_names,
)
from ckptool.inspection.doctor.patient import Patient, unwrapped
from ckptool.model import Opaque, TensorRef, find_tensors
from ckptool.statedict import Section, values_inside
from ckptool.transforms.refusals import class_of
from ckptool.words import counted, listed, printable
from ckptool.wrappers import N_AVERAGED

__all__ = ["level"]

_GATHER = "gather the weights with zero_to_fp32.py, which DeepSpeed writes into the run's folder"


def level(patient: Patient) -> Iterator[Found]:
    """What `load_state_dict(torch.load(FILE))` would not find, or find too much."""
    model = patient.model
    if model is None:
        yield _several(patient) if patient.models else _none(patient)
        return
    if model.path:
        yield _below(patient, model)
    yield from _values(model)
    yield from _averaged(model)


def _below(patient: Patient, model: Section) -> Found:
    root = patient.checkpoint.root
    keys = [str(key) for key in root] if isinstance(root, dict) else []
    way = "".join(f"[{key!r}]" for key in model.path)
    complaint = Complaint(
        "level",
        "fails",
        f"the weights are one level down, in {printable(model.name)}",
        (printable(model.name),),
        "load_state_dict(torch.load(FILE)) says: Missing key(s) in state_dict ... Unexpected "
        f"key(s) in state_dict: {quoted_names(keys)}; with strict=False it loads nothing, without "
        "an error",
        remedy=f"in code, where the rest is needed too: torch.load(FILE){printable(way)}",
    )
    return Found(complaint, (Need("select"),))


def _several(patient: Patient) -> Found:
    """Several candidates: averaged weights beside the raw ones are the user's to choose."""
    named = [section for section in patient.models if section.name]
    shown = [
        f"{section.name or 'the root'} ({counted(len(section.tensors()), 'tensor')})"
        for section in patient.models
    ]
    complaint = Complaint(
        "several-models",
        "fails",
        f"{len(shown)} state dicts are in it: which one to load is yours to say",
        names_of(shown, most=20),
        "load_state_dict(torch.load(FILE)) says: Missing key(s) in state_dict; and whoever takes "
        "the wrong one (raw weights for averaged ones) is not told",
        remedy="--key NAME chooses one, here and in ckptool convert",
    )
    choices = (
        Choice(("extract", "--key", section.name, "--model-only"), _word(section))
        for section in named
    )
    return Found(complaint, choices=tuple(choices))


def _word(section: Section) -> str:
    """What of a section's name fits into the name of a file."""
    return re.sub(r"[^\w-]+", "-", section.name, flags=re.ASCII).strip("-")[:40] or "extracted"


def _none(patient: Patient) -> Found:
    root = patient.checkpoint.root
    parts = [part for part in patient.sections if part.kind != "values"]
    kinds = [f"the {part.kind} {part.name or 'at the root'}" for part in parts]
    held = listed(kinds, most=4) if kinds else _held(root)
    says = (
        "Missing key(s) in state_dict ... Unexpected key(s) in state_dict"
        if isinstance(root, dict)
        else "Expected state_dict to be dict-like"
    )
    return Found(
        Complaint(
            "no-model",
            "note" if root == {} else "fails",  # what a model without parameters takes
            f"there is no state dict of a model in it, but {held}",
            names_of(f"the {part.kind} {part.name or 'at the root'}" for part in patient.sections),
            f"load_state_dict(torch.load(FILE)) says: {says}",
            remedy=_GATHER if _is_of_zero(patient) else "take the file that has the weights",
        )
    )


def _is_of_zero(patient: Patient) -> bool:
    """Whether it is one process's part of what DeepSpeed saved."""
    return any(name.startswith("deepspeed.") for name in patient.blocked)


def _held(root: Any) -> str:
    """What a file holds that has no part with a name of its own."""
    count = sum(1 for _ in find_tensors(root))
    if isinstance(root, TensorRef):
        return "one tensor"
    if isinstance(root, (dict, list, tuple)):
        kind = next(kind for kind in (dict, list, tuple) if isinstance(root, kind)).__name__
        entries = f"{len(root):,} entr{'y' if len(root) == 1 else 'ies'}"
        return f"a {kind} of {entries}, with {counted(count, 'tensor')}"
    if isinstance(root, Opaque):
        return f"an object of class {printable(class_of(root))}"
    return f"a value of type {type(root).__name__}"


def _values(model: Section) -> Iterator[Found]:
    """Entries of a state dict that no model has."""
    names = [str(name) for name in values_inside(model.node)]
    if names and model.kind == "state_dict":
        yield Found(
            Complaint(
                "values-inside",
                "fails",
                f"values stand among the tensors of the state dict: {listed(names)}",
                names_of(names),
                "load_state_dict says: Error(s) in loading state_dict: Unexpected key(s) in "
                f"state_dict: {quoted_names(names)}",
                remedy="ckptool.load_state_dict leaves them out, and so does a safetensors file",
            ),
            (Need("weights"),),
        )


def _averaged(model: Section) -> Iterator[Found]:
    """The counter of an `AveragedModel`, whose model has no such entry."""
    try:
        names = unwrapped(model)
    except NameCollision:
        return
    if N_AVERAGED in names and len(names) > 1:
        yield Found(
            Complaint(
                "averaged",
                "fails",
                f"{N_AVERAGED} says that an AveragedModel was saved",
                (N_AVERAGED,),
                "load_state_dict into the model says: Unexpected key(s) in state_dict: "
                f'"{N_AVERAGED}" (an AveragedModel loads it: with module. before the names)',
            ),
            (Need("exclude", N_AVERAGED),),
        )
