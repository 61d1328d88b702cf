"""Complaints about buffers and versions: what loads and is not what it was."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ckptool.inspection.doctor.complaint import Complaint, Found, Severity, names_of
from ckptool.inspection.doctor.patient import Patient, metadata_of, tensors_of
from ckptool.model import OrderedMap
from ckptool.paths import everything
from ckptool.statedict import Section

__all__ = ["INTEGERS", "buffers", "is_floating"]

INTEGERS = frozenset(
    {
        "num_batches_tracked",
        "n_averaged",
        "position_ids",
        "token_type_ids",
        "relative_position_index",
    }
)
"""Last name parts of buffers that count or index."""

_MASK = re.compile(r"(^|[._])masks?$")
_NARROW = ("float16", "bfloat16", "float8")


def is_floating(dtype: str) -> bool:
    """Whether it is a type of real or complex numbers with a fraction."""
    return "float" in dtype or "complex" in dtype


def buffers(patient: Patient) -> Iterator[Found]:
    """What is wrong with the buffers of the models, as far as names and types tell."""
    for section in patient.models:
        yield from _cast(section)
        if section.kind == "state_dict":
            yield from _versions(patient, section)
    yield from _quantised(patient)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _cast(section: Section) -> Iterator[Found]:
    tensors = tensors_of(section)
    counters = [n for n, t in tensors.items() if _last(n) in INTEGERS and is_floating(t.dtype)]
    if counters:
        kinds = dict.fromkeys(tensors[name].dtype for name in counters)
        yield Found(
            Complaint(
                "cast-buffers",
                "misleads",
                f"buffers that count or index were cast to {', '.join(kinds)}",
                names_of(counters),
                "load_state_dict copies them into the model's integer buffers without a word: a "
                "float16 counts to 2048, bfloat16 to 256, a fraction is cut off, inf becomes the "
                "smallest integer",
                remedy="in code: state[name] = state[name].long(); whoever cast the file should "
                "leave them out (ckptool cast does)",
            )
        )
    masks = [n for n, t in tensors.items() if _MASK.search(n) and t.dtype.startswith(_NARROW)]
    if masks:
        yield Found(
            Complaint(
                "cast-masks",
                "note",
                "masks are in half precision: they may have been boolean",
                names_of(masks),
                "load_state_dict copies them into the model's type without a word; an additive "
                "mask of -1e9 is -inf in float16",
                remedy="compare with the model: ckptool doctor FILE --like REFERENCE",
            )
        )


def _versions(patient: Patient, section: Section) -> Iterator[Found]:
    """A state dict that lost its `_metadata`, where BatchNorm asks for it."""
    if metadata_of(section):
        return
    tensors = tensors_of(section)
    norms = [name.rpartition(".")[0] for name in tensors if _last(name) == "running_mean"]
    uncounted = [path for path in norms if _below(path, "num_batches_tracked") not in tensors]
    if uncounted:
        yield _lost(
            "misleads",
            (_below(path, "running_mean") for path in uncounted),
            "BatchNorm takes the state for that of torch before 0.4.1: a missing "
            "num_batches_tracked is no error then, the model keeps the counter that it has",
        )
    elif norms and patient.checkpoint.format.startswith("torch-"):
        yield _lost(
            "note",
            (_below(path, "running_mean") for path in norms),
            "BatchNorm takes the state for that of torch before 0.4.1, which here changes nothing; "
            "a module with versions of its own may load wrong defaults",
        )


def _quantised(patient: Patient) -> Iterator[Found]:
    """The same of quantised layers, whose weights are in tuples: their dict may be no section."""
    names = [
        key
        for node in everything(patient.checkpoint.root)
        if isinstance(node, dict) and not (isinstance(node, OrderedMap) and node.metadata)
        for key, value in node.items()
        if isinstance(key, str) and _last(key) == "_packed_params" and not isinstance(value, dict)
    ]
    if names:
        yield _lost(
            "fails",
            names,
            "a quantised layer takes the state for the oldest one and says: KeyError: 'weight'",
        )


def _lost(severity: Severity, names: Iterable[str], why: str) -> Found:
    return Found(
        Complaint(
            "metadata",
            severity,
            "the state dict has lost its _metadata, the versions of its modules",
            names_of(names),
            f"{{k: v for k, v in state.items()}} and safetensors drop it; {why}",
            remedy="save model.state_dict() as it is, where the model was made",
        )
    )


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
