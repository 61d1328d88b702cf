"""Complaints about bytes, values and devices: damage, waste, shared storages, device tags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckptool.diagnosis.complaint import (
    Choice,
    Complaint,
    Found,
    Patient,
    Severity,
    names_of,
    quoted_names,
    tensors_of,
)
from ckptool.files.source import Progress
from ckptool.formats import format_of
from ckptool.formats.base import Problem
from ckptool.formats.safetensors import overlapping_names
from ckptool.inspection.obstacles import ANYWHERE, restored_devices
from ckptool.limits import Limits
from ckptool.transforms.compacting import storage_use
from ckptool.transforms.devices import CARRIED
from ckptool.tree import name_of, ties
from ckptool.words import counted, listed, printable

__all__ = ["damage", "memory", "placement"]


_DAMAGE = frozenset({"checksum", "corrupt", "truncated", "missing", "limit"})
"""Kinds of problem after which nothing that loads can be trusted."""
_AROUND: tuple[tuple[str, Severity, frozenset[str], str], ...] = (
    (
        "offsets",
        "misleads",
        frozenset({"offsets"}),
        "torch.load(map_location='meta') and FakeTensorMode take other bytes, without an error",
    ),
    (
        "container",
        "misleads",
        frozenset({"header", "end"}),
        "torch.load reads over it; another program may refuse the file, or read other bytes",
    ),
    (
        "remains",
        "note",
        frozenset({"trailing", "padding", "total-size"}),
        "torch.load does not look at it, and a rewrite does not carry it over",
    ),
)
"""What may be wrong around the tensors, which leaves them right: kind, kinds of problem, why."""
_MASK = re.compile(r"mask[^./]*$", re.IGNORECASE)
"""A name whose last part says so; a mask of -inf is one that is added to attention scores."""
_NEVER_INFINITE = frozenset({"weight", "bias", "running_mean", "running_var"})
_LEAST_UNSEEN = 1 << 10
_LEAST_DEAD = 1 << 16
"""Less than this many bytes is no waste: every edit in place leaves a header behind."""
_SHARE = 20
"""Waste is one part in so many, or more."""
_NAMED = ("hpu", "xpu", "mtia")
"""Kinds of device for which torch's error is worded as for cuda."""
_FIRST = {"cuda": "cuda:0"}


def damage(patient: Patient, limits: Limits, progress: Progress | None) -> Iterator[Found]:
    """Yield what is wrong with the bytes, all of which are read."""
    from ckptool.inspection.verify import verify  # reading takes more than a header

    path = patient.checkpoint.path
    problems = verify(path, values=True, progress=progress, limits=limits).problems
    wrong = [one for one in problems if one.kind in _DAMAGE]
    if wrong:
        yield _of_bytes(
            wrong,
            "damaged",
            "fails",
            "it is damaged: ",
            "torch.load checks no checksum: it loads wrong numbers, or fails",
            "download or copy it again; ckptool verify lists every damaged record",
        )
    nan = [one for one in problems if one.kind == "nan" and _counts(patient, one.place)]
    if nan:
        yield _not_numbers("nan", "NaN", nan)
    yield from _infinite(patient, problems)
    for kind, severity, kinds, why in _AROUND:
        found = [one for one in problems if one.kind in kinds]
        if found:
            yield _of_bytes(found, kind, severity, "", why)


def _of_bytes(
    found: Sequence[Problem], kind: str, severity: Severity, front: str, why: str, remedy: str = ""
) -> Found:
    more = f", and {counted(len(found) - 1, 'problem')} more" if len(found) > 1 else ""
    complaint = Complaint(
        kind, severity, f"{front}{found[0].text}{more}", _places(found), why, remedy=remedy
    )
    return Found(complaint, None if remedy else {})


def _not_numbers(kind: str, word: str, problems: Sequence[Problem]) -> Found:
    complaint = Complaint(
        kind,
        "misleads",
        f"{counted(len(problems), 'tensor')} with {word}: {problems[0].text}",
        _places(problems),
        "it loads without an error, and the model computes NaN",
        remedy="no command restores the numbers: take an earlier checkpoint",
    )
    return Found(complaint)


def _infinite(patient: Patient, problems: Sequence[Problem]) -> Iterator[Found]:
    """Yield infinities in weights, and apart from them buffers that look like masks."""
    from ckptool.tensors.nonfinite import is_infinity_or_zero

    found = [one for one in problems if one.kind == "inf" and _counts(patient, one.place)]
    found = [one for one in found if not _MASK.search(one.place)]
    buffers = {
        name_of(path): tensor
        for part in (patient.models if found else ())
        for path, tensor in part.tensors()
        if str(path[-1]).rpartition(".")[2] not in _NEVER_INFINITE
    }
    places = {one.place for one in found} & buffers.keys()
    meant = {place for place in places if is_infinity_or_zero(buffers[place])}
    wrong = [one for one in found if one.place not in meant]
    if wrong:
        yield _not_numbers("infinite", "infinite values", wrong)
    if meant:
        complaint = Complaint(
            "infinite",
            "note",
            f"{counted(len(meant), 'buffer')} of infinities and zeros alone",
            names_of(one.place for one in found if one.place in meant),
            "that is right for an attention mask, and for an observer that has seen no data yet; "
            "in any other buffer it makes the model compute NaN",
        )
        yield Found(complaint)


def _counts(patient: Patient, name: str) -> bool:
    """Return True for a tensor of a model or optimizer: another one (best loss) may be infinite."""
    parts = [part.name for part in (*patient.models, *patient.optimizers)]
    return not parts or any(not part or name.startswith(f"{part}/") for part in parts)


def _places(problems: Sequence[Problem]) -> tuple[str, ...]:
    return names_of(dict.fromkeys(one.place for one in problems if one.place))


def memory(patient: Patient) -> Iterator[Found]:
    """Yield what takes more bytes than it should, or shares them."""
    if format_of(patient.checkpoint.format).tensors_only:
        yield from _aliases(patient)
        return
    yield from _bloat(patient)
    yield from _not_for_safetensors(patient)


def _bloat(patient: Patient) -> Iterator[Found]:
    details = patient.checkpoint.details
    held, reached = storage_use(patient.checkpoint.root)
    unseen, dead = held - reached, details.dead_bytes
    facts = []
    if unseen >= _LEAST_UNSEEN and unseen * _SHARE >= held:
        facts.append(f"no tensor uses {unseen:,} of the {held:,} bytes of its storages")
    if dead >= _LEAST_DEAD and dead * _SHARE >= details.size:
        facts.append(f"{dead:,} of the {details.size:,} bytes of the file are dead")
    if facts:
        views = (
            name_of(path)
            for path, one in patient.checkpoint.tensors()
            if one.storage is not None and one.storage.nbytes - one.nbytes >= _LEAST_UNSEEN
        )
        complaint = Complaint(
            "bloat",
            "misleads",
            " and ".join(facts),
            names_of(views),
            "torch.save writes the whole storage of a view (big[:10] takes as much space as big), "
            "and torch.load reads all of it into memory",
        )
        yield Found(complaint, {"compact": True})


def _aliases(patient: Patient) -> Iterator[Found]:
    """Yield a complaint about names that a safetensors file has only as ties in its metadata."""
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
            f"{counted(len(kept), 'tied name')} stored only in the metadata of the file",
            names_of(f"{printable(name)} = {printable(other)}" for name, other in kept.items()),
            "load_state_dict(safetensors.torch.load_file(FILE)) says: Missing key(s) in "
            f"state_dict: {quoted_names(kept)}; safetensors.torch.load_model knows of them",
        )
        yield Found(complaint, {"format": "torch-zip"}, (Choice({"ties": "copy"}),))


def _not_for_safetensors(patient: Patient) -> Iterator[Found]:
    """Yield complaints about weights that `safetensors.torch.save_file` refuses."""
    model = patient.model
    if model is None:
        return
    tensors = {name: one for name, one in tensors_of(model).items() if one.has_content}
    tied = ties(((name,), one) for name, one in tensors.items())
    keyed = {"key": model.name} if model.path and patient.key is not None else {}
    choices = (Choice({**keyed, **({"ties": "copy"} if tied else {})}),)
    if tied:
        complaint = Complaint(
            "ties",
            "note",
            "tied weights: one tensor has several names",
            names_of(" = ".join(map(printable, names)) for names in tied),
            "torch.load keeps the tie; safetensors.torch.save_file says: Some tensors share "
            "memory, this will lead to duplicate memory on disk and potential differences when "
            "loading them again",
        )
        yield Found(complaint, None, choices)
    several = {name for names in tied for name in names}
    scattered = [name for name, one in tensors.items() if not one.is_contiguous]
    shared = [name for name in overlapping_names(tensors) if name not in several]
    if scattered or shared:
        texts = ["some are not contiguous"] * bool(scattered)
        texts += ["some share bytes with others"] * bool(shared)
        complaint = Complaint(
            "views",
            "note",
            f"tensors are views: {', '.join(texts)}",
            names_of(dict.fromkeys((*scattered, *shared))),
            "torch.load keeps them as they are; safetensors.torch.save_file refuses them",
        )
        yield Found(complaint, None, choices)


def placement(patient: Patient) -> Iterator[Found]:
    """Yield what is wrong with where the tensors are to be restored.

    The texts are those of torch/serialization.py (`_deserialize`, `validate_cuda_device`).
    """
    if format_of(patient.checkpoint.format).tensors_only:
        return
    tags = [tag for tag in restored_devices(patient.checkpoint.root) if tag not in ANYWHERE]
    missing = [tag for tag in tags if _FIRST.get(tag, tag) not in patient.devices]
    if missing:
        names = _names(patient, missing)
        gpus = sum(tag.startswith("cuda:") for tag in patient.devices)
        complaint = Complaint(
            "device",
            "fails",
            f"{counted(len(names), 'tensor')} on {listed(missing)}: this machine has "
            f"{listed(patient.devices)}",
            names_of(names),
            f"torch.load says: {_error(missing[0], gpus)}",
        )
        yield Found(complaint, {"to": "cpu"})
    wide = [
        name_of(path)
        for path, one in patient.checkpoint.tensors()
        if one.dtype in ("float64", "complex128")
    ]
    if wide and "mps" in patient.devices:
        complaint = Complaint(
            "device",
            "note",
            f"{counted(len(wide), 'tensor')} of float64, which mps does not have",
            names_of(wide),
            "torch.load(FILE, map_location='mps') says: Cannot convert a MPS Tensor to float64 "
            "dtype as the MPS framework doesn't support float64. Please use float32 instead.",
            remedy="ckptool cast FILE --dtype float32",
        )
        yield Found(complaint)
    if len(tags) == 1 and tags[0].partition(":")[0] == "cuda":
        tag = printable(tags[0])
        complaint = Complaint(
            "one-gpu",
            "misleads",
            f"all tensors are on {tag}",
            names_of(_names(patient, tags)),
            f"without map_location every rank of a DDP run loads the file onto {tag}, which then "
            "runs out of memory (CUDA out of memory after a resume)",
        )
        yield Found(complaint, {"to": "cpu"})


def _names(patient: Patient, tags: list[str]) -> list[str]:
    return [name_of(path) for path, one in patient.checkpoint.tensors() if one.device in tags]


def _error(tag: str, gpus: int) -> str:
    """Return torch's error for a device tag that this machine lacks."""
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
    if kind in CARRIED:
        return (
            "Could not run 'aten::empty.memory_format' with arguments from the "
            f"'{word}' backend; map_location='cpu' or a dict helps, a function does not"
        )
    return (
        "don't know how to restore data location of torch.storage.UntypedStorage (tagged with "
        f"{printable(tag)})"
    )
