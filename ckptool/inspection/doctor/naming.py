"""Complaints about the names of a state dict: wrappers, prefixes, near doubles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ckptool.errors import NameCollision
from ckptool.inspection.doctor.complaint import (
    Choice,
    Complaint,
    Found,
    Need,
    names_of,
    quoted_names,
)
from ckptool.inspection.doctor.patient import Patient, tensors_of, unwrapped
from ckptool.statedict import Section, wrapped_names
from ckptool.words import counted, listed, printable
from ckptool.wrappers import counts, strip_names, wrapped_in_part

__all__ = ["LORA", "naming"]

LORA = "base_model.model."
_ADAPTER = re.compile(r"(^|\.)(lora_|hada_|lokr_|ia3_|adapter_)", re.IGNORECASE)
_FLAT = re.compile(r"(^|\.)_?flat_param(_\d+)?$")
_LIGHTNING = "pytorch-lightning_version"


def naming(patient: Patient) -> Iterator[Found]:
    """What is wrong with the names."""
    yield from _wrappers(patient)
    yield from _unwrapped(patient)
    for section in patient.models:
        yield from _submodules(patient, section)
        yield from _in_part(section)
        yield from _adapters(patient, section)
        yield from _flat(section)
        yield from _nearly_equal(section)
    yield from _lightning(patient)


def _wrappers(patient: Patient) -> Iterator[Found]:
    sections = [one for one in patient.models if one.wrappers and patient.wrapping_of(one).strip]
    if not sections:
        return
    kinds = dict.fromkeys(word for section in sections for word in section.wrappers)
    names = [name for section in sections for name in wrapped_names(section.node) if counts(name)]
    collision = _collision(sections)
    complaint = Complaint(
        "wrappers",
        "fails",
        f"names carry the wrapper{'s' if len(kinds) > 1 else ''} "
        f"{' '.join(f'{word}.' for word in kinds)} of "
        f"{listed(section.name or 'the root' for section in sections)}",
        names_of(names),
        "load_state_dict into the bare model says: Missing key(s) in state_dict ... Unexpected "
        f"key(s) in state_dict: {quoted_names(names)}; with strict=False it loads nothing of it, "
        "without an error",
        remedy=collision,
    )
    yield Found(complaint, (Need("strip"),))


def _in_part(section: Section) -> Iterator[Found]:
    """A `module.` before most names, which may be a wrapper's though not all have it."""
    within, others = wrapped_in_part(_names(section))
    if within:
        complaint = Complaint(
            "wrapped-in-part",
            "note",
            f"module. is before {counted(len(within), 'name')}, and not before "
            f"{printable(others[0])}",
            names_of(within),
            "strip-module leaves it there, as it may be a layer of that name",
            remedy="where it is a wrapper's: ckptool rename with --prefix module.=",
        )
        yield Found(complaint)


def _collision(sections: Iterable[Section]) -> str:
    """Why the wrappers cannot come off, where they cannot."""
    try:
        for section in sections:
            strip_names(wrapped_names(section.node))
    except NameCollision as error:
        return f"{error.message}: load the one that is meant by itself (ckptool extract --include)"
    return ""


def _submodules(patient: Patient, section: Section) -> Iterator[Found]:
    """Submodules that look wrapped; not those that are so in the reference as well."""
    for path in patient.wrapping_of(section).at:
        own = [name for name in _names(section) if name.startswith(f"{path}.module.")]
        complaint = Complaint(
            "submodule-wrapper",
            "fails",
            f"below {printable(path)} there is nothing but module.: DataParallel around a part of "
            "the model",
            names_of(own),
            "load_state_dict into the bare model says: Unexpected key(s) in state_dict: "
            f"{quoted_names(own)} (a model that has a layer of that name loads it: --like "
            "REFERENCE tells)",
        )
        yield Found(complaint, (Need("strip-at", path),))


def _names(section: Section) -> list[str]:
    """The names of a state dict without wrappers, or as they are where those cannot come off."""
    try:
        return list(unwrapped(section).values())
    except NameCollision:
        return wrapped_names(section.node)


def _unwrapped(patient: Patient) -> Iterator[Found]:
    """Wrappers that the reference has and the file has not."""
    if patient.model is None or not patient.wrapping.add:
        return
    add = patient.wrapping.add
    before = ".".join((*add, ""))
    new = [name for name in patient.wrapping.names.values() if counts(name)]
    complaint = Complaint(
        "wrapper-missing",
        "fails",
        f"names lack the wrapper{'s' if len(add) > 1 else ''} "
        f"{' '.join(f'{word}.' for word in add)} that those of the reference carry",
        names_of(name.removeprefix(before) for name in new),
        "load_state_dict into the wrapped model says: Missing key(s) in state_dict: "
        f"{quoted_names(new)}; with strict=False it loads nothing of it, without an error",
        remedy="or load it into the model inside the wrapper: wrapped.module",
    )
    needs = [Need("add", ".".join(add[at:])) for at in range(len(add))]
    yield Found(complaint, tuple(reversed(needs)))


def _adapters(patient: Patient, section: Section) -> Iterator[Found]:
    """What PEFT puts before the names of the model that it adapts."""
    names = [name for name in wrapped_names(section.node) if name.startswith(LORA)]
    if not names or _as_wanted(patient, LORA):
        return
    adapted = [name for name in names if _ADAPTER.search(name)]
    own = bool(adapted) or len(names) < len(wrapped_names(section.node))
    complaint = Complaint(
        "adapter",
        "note" if own else "fails",
        f"names begin with {LORA}, as PEFT saves "
        f"{'adapters (LoRA): weights beside those of a model' if own else 'a merged model'}",
        names_of(adapted or names),
        "load_state_dict into the model says: Unexpected key(s) in state_dict: "
        f"{quoted_names(adapted or names)}; with strict=False an adapter is not applied, without "
        "an error",
        remedy="load it with peft (PeftModel.from_pretrained) over its base model" if own else "",
    )
    yield Found(complaint, () if own else (Need("prefix", f"{LORA}="),))


def _as_wanted(patient: Patient, prefix: str) -> bool:
    """Whether the names of the reference begin with that as well."""
    return patient.wanted is not None and any(n.startswith(prefix) for n in _names(patient.wanted))


def _flat(section: Section) -> Iterator[Found]:
    """Parameters of FSDP that were saved flattened."""
    names = [name for name in tensors_of(section) if _FLAT.search(name)]
    if names:
        yield Found(
            Complaint(
                "flat-parameters",
                "fails",
                "FSDP saved its flat parameters: the model's own names and shapes are gone",
                names_of(names),
                f"load_state_dict says: Unexpected key(s) in state_dict: {quoted_names(names)}; "
                "with strict=False it changes nothing",
                remedy="save it again with StateDictType.FULL_STATE_DICT where it was trained",
            )
        )


def _nearly_equal(section: Section) -> Iterator[Found]:
    """Names that differ in nothing but upper and lower case."""
    first: dict[str, str] = {}
    doubles: list[str] = []
    for name in wrapped_names(section.node):
        other = first.setdefault(name.casefold(), name)
        if other != name:
            doubles.append(f"{other} and {name}")
    if doubles:
        yield Found(
            Complaint(
                "case",
                "note",
                "names differ only in upper and lower case",
                names_of(doubles),
                "they are two parameters to torch; tools that write a file for each, and people, "
                "take them for one",
                remedy="if it is a slip: ckptool rename --map 'OLD=>NEW'",
            )
        )


def _lightning(patient: Patient) -> Iterator[Found]:
    """A LightningModule's own attribute before every name; which one, only its class says."""
    root, model = patient.checkpoint.root, patient.model
    if not isinstance(root, dict) or _LIGHTNING not in root or model is None:
        return
    names = list(unwrapped(model).values()) if not _collision([model]) else []
    parts = {name.partition(".")[0] for name in names}
    if len(parts) == 1 and all("." in name for name in names):
        prefix = f"{parts.pop()}."
        if _as_wanted(patient, prefix):
            return
        yield Found(
            Complaint(
                "lightning",
                "note",
                f"every name begins with {printable(prefix)}, the attribute of the LightningModule "
                "that holds the model",
                names_of(names),
                "it loads into that LightningModule; load_state_dict into the model alone says: "
                f"Unexpected key(s) in state_dict: {quoted_names(names)}",
            ),
            choices=(Choice(("rename", "--prefix", f"{prefix}="), "renamed"),),
        )
