"""Complaints about bytes: more than the tensors need, shared, scattered, somebody else's."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.formats.safetensors_content import overlapping_names
from ckptool.inspection.doctor.complaint import (
    Choice,
    Complaint,
    Found,
    Need,
    names_of,
    quoted_names,
)
from ckptool.inspection.doctor.patient import Patient, tensors_of
from ckptool.inspection.usage import distinct, storage_use, ties
from ckptool.model import Path, TensorRef
from ckptool.paths import name_of
from ckptool.words import counted, printable

__all__ = ["dead_is_much", "memory", "unseen_is_much"]

_LEAST_UNSEEN = 1 << 10
_LEAST_DEAD = 1 << 16
"""Less than this many bytes is no waste: every edit in place leaves a header behind."""
_SHARE = 20
"""Waste is one part in so many, or more."""
_LARGE_STATE = 4
"""A training state is worth a note from one byte in so many on."""


def unseen_is_much(held: int, reached: int) -> bool:
    """Whether the bytes of storages that no tensor reaches are worth a complaint."""
    unseen = held - reached
    return unseen >= _LEAST_UNSEEN and unseen * _SHARE >= held


def dead_is_much(dead: int, size: int) -> bool:
    """Whether the bytes of a file that nothing refers to are worth a complaint."""
    return dead >= _LEAST_DEAD and dead * _SHARE >= size


def memory(patient: Patient) -> Iterator[Found]:
    """What takes more bytes than it should, or shares them."""
    yield from _bloat(patient)
    yield from _training_state(patient)
    if patient.checkpoint.format.startswith("safetensors"):
        yield from _aliases(patient)
    else:
        yield from _not_for_safetensors(patient)


def _bloat(patient: Patient) -> Iterator[Found]:
    details = patient.checkpoint.details
    held, reached = storage_use(patient.checkpoint.root)
    facts = []
    if unseen_is_much(held, reached):
        facts.append(f"{held - reached:,} of the {held:,} bytes of its storages no tensor sees")
    if dead_is_much(details.dead_bytes, details.size):
        facts.append(f"{details.dead_bytes:,} of the {details.size:,} bytes of the file are dead")
    if facts:
        complaint = Complaint(
            "bloat",
            "misleads",
            " and ".join(facts),
            names_of(_views(patient)),
            "torch.save writes the whole storage of a view (big[:10] takes what big takes), and "
            "torch.load reads all of it into memory",
        )
        yield Found(complaint, (Need("compact"),))


def _views(patient: Patient) -> Iterator[str]:
    """Tensors that are a small part of what their storage holds."""
    for path, tensor in patient.checkpoint.tensors():
        if tensor.storage is not None and tensor.storage.nbytes - tensor.nbytes >= _LEAST_UNSEEN:
            yield name_of(path)


def _training_state(patient: Patient) -> Iterator[Found]:
    """Optimizers, and copies of the weights, beside a model: where they are much of the file."""
    parts = [*patient.optimizers, *(patient.models if len(patient.models) > 1 else ())]
    every = distinct(list(patient.checkpoint.tensors()))
    total = sum(tensor.nbytes for _, tensor in every)
    shares = {part.name: _share(part.path, every) for part in parts}
    large = {name: held for name, held in shares.items() if held * _LARGE_STATE >= total > 0}
    if not patient.models or not large:
        return
    shown = ", ".join(f"{held:,} in {printable(name)}" for name, held in large.items())
    yield Found(
        Complaint(
            "training-state",
            "note",
            f"of the {total:,} bytes of its tensors {shown}",
            names_of(large),
            "the state of an optimizer is needed to go on with the training and for nothing else, "
            "raw weights beside averaged ones the same; torch.load reads all of it",
            remedy="" if patient.model is not None else "ckptool extract --key NAME takes one part",
        ),
        (Need("select"),) if patient.model is not None else (),
    )


def _share(path: Path, every: list[tuple[Path, TensorRef]]) -> int:
    """Bytes of the tensors below a path."""
    return sum(tensor.nbytes for at, tensor in every if at[: len(path)] == path)


def _aliases(patient: Patient) -> Iterator[Found]:
    """Names that the file mentions as tied to another, and has no tensor under."""
    kept = {
        name: str(one.storage.key)
        for section in patient.models
        for name, one in tensors_of(section).items()
        if one.storage is not None and one.storage.key != name
    }
    if kept:
        complaint = Complaint(
            "aliases",
            "fails",
            f"{counted(len(kept), 'name')} stored only as tied to another",
            names_of(f"{printable(name)} = {printable(other)}" for name, other in kept.items()),
            "load_state_dict(safetensors.torch.load_file(FILE)) says: Missing key(s) in "
            f"state_dict: {quoted_names(kept)}; safetensors.torch.load_model knows of them",
        )
        yield Found(complaint, (Need("torch"),), (_as_safetensors(patient, tied=True),))


def _not_for_safetensors(patient: Patient) -> Iterator[Found]:
    """What `safetensors.torch.save_file` refuses of the weights."""
    model = patient.model
    if model is None:
        return
    tensors = {name: one for name, one in tensors_of(model).items() if one.has_content}
    tied = list(ties(((name,), one) for name, one in tensors.items()))
    choices = (_as_safetensors(patient, tied=bool(tied)),)
    if tied:
        yield Found(
            Complaint(
                "ties",
                "note",
                "names are tied: one tensor under several",
                names_of(" = ".join(map(printable, names)) for names in tied),
                "torch.load keeps the tie; safetensors.torch.save_file says: Some tensors share "
                "memory, this will lead to duplicate memory on disk and potential differences when "
                "loading them again; save_model keeps one name of each, and load_file then lacks "
                "the others",
            ),
            choices=choices,
        )
    yield from _views_of(tensors, {name for names in tied for name in names}, choices)


def _as_safetensors(patient: Patient, *, tied: bool) -> Choice:
    """What writes the weights as a safetensors file, in which every name has its tensor."""
    model = patient.model
    keyed = model is not None and model.path and patient.key is not None
    here = ("--key", model.name) if keyed and model is not None else ()
    return Choice(("convert", *here, *(("--ties", "copy") if tied else ())))


def _views_of(
    tensors: dict[str, TensorRef], tied: set[str], choices: tuple[Choice, ...]
) -> Iterator[Found]:
    scattered = [name for name, one in tensors.items() if not one.is_contiguous]
    shared = [name for name in overlapping_names(tensors) if name not in tied]
    if not scattered and not shared:
        return
    texts = [
        *(("some are not contiguous",) if scattered else ()),
        *(("some share bytes with others",) if shared else ()),
    ]
    yield Found(
        Complaint(
            "views",
            "note",
            f"tensors are views: {', '.join(texts)}",
            names_of(dict.fromkeys((*scattered, *shared))),
            "torch.load keeps them as they are; safetensors.torch.save_file says: You are trying "
            "to save a non contiguous tensor, or: Some tensors share memory",
        ),
        choices=choices,
    )
