"""Complaints about device tags: devices that are not here, one GPU for all ranks, no bytes at all.

The texts are those of torch/serialization.py (`_deserialize`, `validate_cuda_device`).
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.inspection.doctor.complaint import Complaint, Found, Need, names_of
from ckptool.inspection.doctor.patient import Patient
from ckptool.inspection.obstacles import restored_devices
from ckptool.paths import counted, listed, name_of, printable

__all__ = ["ANYWHERE", "placement"]

ANYWHERE = frozenset({"cpu", "meta"})
"""Tags that load on every machine."""

_NAMED = ("hpu", "xpu", "mtia")
"""Kinds of device for which torch's error is worded as for cuda."""
_WITHOUT_STORAGE = ("xla", "maia", "ort")


def placement(patient: Patient) -> Iterator[Found]:
    """What is wrong with where the tensors are to be restored."""
    tags = [tag for tag in restored_devices(patient.checkpoint.root) if tag not in ANYWHERE]
    missing = [tag for tag in tags if _device_of(tag) not in patient.devices]
    if missing:
        yield _missing(patient, missing)
    gpus = [tag for tag in tags if tag.partition(":")[0] == "cuda"]
    if len(gpus) == 1 and len(tags) == 1:
        yield _one_gpu(patient, gpus[0])
    yield from _meta(patient)


def _device_of(tag: str) -> str:
    return f"{tag}:0" if tag == "cuda" else tag


def _names(patient: Patient, tags: list[str]) -> list[str]:
    return [name_of(path) for path, one in patient.checkpoint.tensors() if one.device in tags]


def _missing(patient: Patient, missing: list[str]) -> Found:
    names = _names(patient, missing)
    here = [tag for tag in patient.devices if tag.startswith("cuda:")]
    complaint = Complaint(
        "device",
        "fails",
        f"{counted(len(names), 'tensor')} on {listed(missing)}: this machine has "
        f"{listed(patient.devices)}",
        names_of(names),
        f"torch.load says: {_error(missing[0], len(here))}",
    )
    return Found(complaint, (Need("cpu"),))


def _error(tag: str, gpus: int) -> str:
    """What torch says about a tag for which there is no device."""
    kind, _, index = tag.partition(":")
    word = kind.upper()
    if kind == "cuda" and gpus:
        return (
            f"Attempting to deserialize object on CUDA device {index or 0} but "
            f"torch.cuda.device_count() is {gpus}. Please use torch.load with map_location to map "
            "your storages to an existing device."
        )
    if kind == "cuda" or kind in _NAMED:
        return (
            f"Attempting to deserialize object on a {word} device but torch.{kind}.is_available() "
            "is False. If you are running on a CPU-only machine, please use torch.load with "
            "map_location=torch.device('cpu') to map your storages to the CPU."
        )
    if kind == "mps":
        return "torch.UntypedStorage(): Storage device not recognized: mps"
    if kind in _WITHOUT_STORAGE:
        return (
            "Could not run 'aten::empty.memory_format' with arguments from the "
            f"'{word}' backend. map_location='cpu' or a dict helps, a function does not"
        )
    return (
        "don't know how to restore data location of torch.storage.UntypedStorage (tagged with "
        f"{printable(tag)})"
    )


def _one_gpu(patient: Patient, tag: str) -> Found:
    names = _names(patient, [tag])
    complaint = Complaint(
        "one-gpu",
        "misleads",
        f"everything is on {printable(tag)}",
        names_of(names),
        f"without map_location every rank of a DDP run restores the file onto {printable(tag)}: "
        "its memory runs full (CUDA out of memory after a resume), the others' do not",
    )
    return Found(complaint, (Need("cpu"),))


def _meta(patient: Patient) -> Iterator[Found]:
    names = _names(patient, ["meta"])
    if names:
        yield Found(
            Complaint(
                "meta",
                "misleads",
                f"{counted(len(names), 'tensor')} on the meta device: shapes without values",
                names_of(names),
                "torch.load succeeds; load_state_dict then copies nothing into these parameters, "
                "with no more than a warning",
                remedy="save it again from a model whose tensors have values",
            )
        )
