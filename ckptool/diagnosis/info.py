"""Summary of a checkpoint on one screen: format, sections, and why it does not load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptool._lazy import Result
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Path, TensorRef
from ckptool.core.names import BUFFER_NAMES
from ckptool.core.optimizers import has_training_weights
from ckptool.core.sections import (
    MODEL_KINDS,
    Section,
    choose_only_model,
    find_likely_models,
    get_named_tensors,
)
from ckptool.core.tree import drop_ties, find_ties, name_of
from ckptool.core.values import is_value, summarize, to_document, to_json_path
from ckptool.diagnosis.complaint import Subject
from ckptool.diagnosis.diagnose import Diagnosis, diagnose
from ckptool.errors import without_query
from ckptool.formats import Source, load_format, open_or_reuse
from ckptool.inspection.blockers import (
    ANYWHERE,
    describe_wrong_extension,
    detect_missing_weights,
    find_layout_blockers,
    find_outdated_names,
    find_unpickling_calls,
    is_format_entry_missing,
    list_restored_devices,
    suggest_import,
)
from ckptool.inspection.commands import (
    TRAINING,
    convert_command,
    describe_waste,
    ema_command,
    list_training_state,
)
from ckptool.inspection.neighbors import describe_neighbors
from ckptool.inspection.quantization import quantizations
from ckptool.symbolic.encoder import find_blockers
from ckptool.transforms.casting import Cast
from ckptool.transforms.compacting import measure_storages
from ckptool.words import listed, printable
from ckptool.writing.target import make_default_target


@dataclass(frozen=True, slots=True)
class SectionInfo:
    """A section of a checkpoint. `parameters` and `nbytes` count tied tensors once.

    `parameters` counts the elements of a module's `Parameter`s. A state dict does not mark its
    buffers. There it counts every tensor whose key does not end in one of `BUFFER_NAMES`. It is
    0 elsewhere.
    """

    path: tuple[str | int, ...]
    name: str
    kind: str
    wrappers: tuple[str, ...]
    tensors: int
    parameters: int
    nbytes: int
    values: str = ""
    """The first plain values of the section `values`, for example `epoch=3`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `ckptool.info/1`."""
        return to_document(self, "name", "values")


@dataclass(frozen=True, slots=True, repr=False)
class Info(Result):
    """The facts that `ckptool info` shows.

    `file`, `format`, `writer`, `torch_version`, `byteorder`, `protocol`, `globals`, `notes`,
    `storage_bytes` and `dead_bytes` are as in `Checkpoint` and `Details`. `dtypes` counts tensors
    by dtype, `sections` lists the sections, `ties` the groups of keys that share one tensor.
    """

    file: str
    format: str
    size: int
    """Bytes on disk."""
    writer: str
    torch_version: str | None
    byteorder: str
    protocol: int | None
    sections: tuple[SectionInfo, ...]
    devices: Mapping[str, int]
    """The number of tensors on each device."""
    dtypes: Mapping[str, int]
    globals: tuple[str, ...]
    blockers: tuple[str, ...]
    """Reasons why `torch.load(weights_only=True)` rejects it; empty if it loads."""
    storage_bytes: int
    reachable_bytes: int
    """Bytes of storages between the first and last element of some tensor."""
    dead_bytes: int
    ties: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    commands: Mapping[str, str]
    """Shell commands that make it load, by machine (`one_gpu`, `cpu`), and the command that
    keeps the training state (`resume`)."""
    would_run: tuple[str, ...] = ()
    """The calls that unpickling would make, as Python, except known constructors of data."""
    training: tuple[str, ...] = TRAINING
    """The items of `TRAINING` that the file has."""
    part: str = ""
    """The part of a model in this file, if other files have the rest."""
    alternatives: tuple[str, ...] = ()
    """Commands to choose from, if it is not clear what to load."""
    obstacle: str = ""
    """The first problem that keeps it from loading, if no command fixes it."""
    reader: str = ""
    """The library that reads the file as is, if not torch."""

    @property
    def weights_only(self) -> bool:
        """True if `torch.load(weights_only=True)` loads it."""
        return not self.blockers

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.info/1`."""
        left_out = () if self.torch_version else ("torch_version",)
        return {
            "schema": "ckptool.info/1",
            **to_document(self, "blockers", "part", "training", "obstacle", *left_out),
            "weights_only": self.weights_only,
            "weights_only_blockers": list(self.blockers),
        }


def info(source: Source) -> Info:
    """Summarize a checkpoint from its header: sections, wrappers, devices, `weights_only`.

    Args:
        source: A path, or an open checkpoint.

    Raises:
        UnreadableFile, LimitExceeded: the path cannot be opened as a checkpoint.
    """
    with open_or_reuse(source) as checkpoint:
        return _summarize(checkpoint, _DiagnosisCache(checkpoint))


def summarize_and_diagnose(
    checkpoint: Checkpoint, devices: tuple[str, ...]
) -> tuple[Info, Diagnosis]:
    """Return the result of `info`, and the diagnosis of the header for `devices`."""
    diagnoses = _DiagnosisCache(checkpoint)
    return _summarize(checkpoint, diagnoses), diagnoses.diagnose_for(devices)


def _summarize(checkpoint: Checkpoint, diagnoses: _DiagnosisCache) -> Info:
    """Return the summary of a checkpoint, with the commands of its diagnoses."""
    tensors = list(checkpoint.tensors())
    details, sections = checkpoint.details, checkpoint.sections
    devices = Counter(tensor.device for _, tensor in tensors)
    total, used = measure_storages(checkpoint.root)
    object_blockers = find_blockers(checkpoint.root)
    layout_blockers = (
        *find_layout_blockers(checkpoint),
        *find_outdated_names(checkpoint, object_blockers),
    )
    missing = detect_missing_weights(checkpoint)
    by_machine = diagnoses.diagnose_by_machine()
    on_cpu = by_machine["cpu"]  # has all problems of a machine with a GPU, and those of devices
    is_fixable = any(diagnosis.commands for diagnosis in by_machine.values())
    notes = [] if missing is None else [f"{missing.text}; {missing.hint}"]
    notes += _describe_extension(checkpoint, layout_blockers)
    notes += details.notes
    notes += describe_neighbors(checkpoint)
    notes += load_format(checkpoint.format).describe_layout(checkpoint)
    notes += (*details.left_behind, *details.unreferenced)
    notes += describe_waste(checkpoint.path, total - used, details.dead_bytes)
    # Without a command that removes the objects, importing their classes may be the way.
    if object_blockers and not is_fixable and (text := suggest_import(object_blockers)):
        notes.append(text)
    notes += _describe_quantizations(checkpoint)
    notes += _suggest_recipe(checkpoint, choose_only_model(find_likely_models(checkpoint)))
    notes += _describe_training_weights(checkpoint)
    for section in sections:
        notes += (f"a state dict made from this would lack {text}" for text in section.unread)
    return Info(
        file=without_query(checkpoint.path),
        format=checkpoint.format,
        size=details.size,
        writer=details.writer,
        torch_version=details.torch_version,
        byteorder=details.byteorder,
        protocol=details.protocol,
        sections=tuple(map(_summarize_section, sections)),
        devices=devices,
        dtypes=Counter(tensor.dtype for _, tensor in tensors),
        globals=details.globals,
        blockers=(*layout_blockers, *object_blockers),
        storage_bytes=details.storage_bytes,
        # A bare pickle contains its tensor data: all of it is used.
        reachable_bytes=details.storage_bytes if load_format(checkpoint.format).inline else used,
        dead_bytes=details.dead_bytes,
        ties=tuple(find_ties(tensors)),
        notes=tuple(notes),
        commands=_collect_commands(by_machine),
        would_run=find_unpickling_calls(checkpoint),
        training=list_training_state(checkpoint),
        # A note is only a guess from the file name.
        part=missing.text if missing is not None and missing.severity == "fails" else "",
        alternatives=_collect_alternatives(on_cpu),
        obstacle=_find_obstacle(on_cpu),
        reader=on_cpu.reader,
    )


def _describe_extension(checkpoint: Checkpoint, known_blockers: Collection[str]) -> Iterator[str]:
    """Yield a note on a wrong extension that is not a known blocker, or a missing `format: pt`."""
    text = describe_wrong_extension(checkpoint)
    if text is not None:
        if text not in known_blockers:
            yield text
    elif is_format_entry_missing(checkpoint):
        target = make_default_target(checkpoint.path, "named")
        command = convert_command(checkpoint.path, target, [])
        yield f"its header lacks format: pt, which transformers and mlx require; {command} adds it"


def _describe_quantizations(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a note on each kind of quantization, with the command that dequantizes it if known."""
    for quantization in quantizations(checkpoint):
        target = make_default_target(checkpoint.path, "plain")
        command = convert_command(checkpoint.path, target, (Cast(dequantize="bfloat16"),))
        them = "it" if len(quantization.names) == 1 else "them"
        advice = f"; {command} dequantizes {them}" if quantization.is_known else ""
        yield f"{quantization}{advice}"


def _describe_training_weights(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a note on each schedule-free optimizer that was saved in train mode."""
    for section in checkpoint.sections:
        if section.kind == "optimizer" and has_training_weights(section):
            yield (
                f"{printable(section.name) or 'the optimizer'} is schedule-free and in train mode, "
                f"so the model has training weights; {ema_command(checkpoint)} writes the "
                "weights for evaluation"
            )


def _suggest_recipe(checkpoint: Checkpoint, model: Section | None) -> Iterator[str]:
    """Yield a note on the recipe for the keys of the only model.

    Without exactly one model, the paths of all tensors count as its keys.
    """
    from ckptool.recipes import guess_layout  # it reads all recipes

    if model is None:
        keys = [name_of(path) for path, _ in checkpoint.tensors()]
    else:
        keys = [*get_named_tensors(model.node)]
    if keys and (recipe := guess_layout(keys)):  # NAME, or NAME --reverse
        side = "target" if recipe.endswith("--reverse") else "source"
        yield f"this looks like the {side} of a recipe for another library: --recipe {recipe}"


class _DiagnosisCache:
    """The diagnoses of the header of one checkpoint, made once for each machine."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Start without diagnoses; values that are read late are read now."""
        self._checkpoint = checkpoint.with_late_values()
        self._by_devices: dict[tuple[str, ...], Diagnosis] = {}

    def diagnose_for(self, devices: tuple[str, ...]) -> Diagnosis:
        """Return the diagnosis for a machine with these devices."""
        if devices not in self._by_devices:
            self._by_devices[devices] = diagnose(Subject(self._checkpoint, devices=devices))
        return self._by_devices[devices]

    def diagnose_by_machine(self) -> dict[str, Diagnosis]:
        """Return the diagnoses for a machine with one GPU (`one_gpu`) and one without (`cpu`).

        They are the same if no tensor was saved on a device.
        """
        without_gpu = self.diagnose_for(("cpu",))
        if set(list_restored_devices(self._checkpoint.root)) <= ANYWHERE:
            return {"one_gpu": without_gpu, "cpu": without_gpu}
        return {"one_gpu": self.diagnose_for(("cpu", "cuda:0")), "cpu": without_gpu}


def _collect_commands(by_machine: Mapping[str, Diagnosis]) -> dict[str, str]:
    """Return the command that makes the file load, by machine, and under `resume` to resume.

    A machine on which the file loads as is has none.
    """
    failing = {machine: diagnosis for machine, diagnosis in by_machine.items() if not diagnosis.ok}
    commands = {machine: diagnosis.all_at_once for machine, diagnosis in failing.items()}
    resume_commands = (diagnosis.resume for diagnosis in failing.values())
    commands["resume"] = next(filter(None, resume_commands), None)
    return {name: command for name, command in commands.items() if command is not None}


def _collect_alternatives(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return the alternative commands against errors and warnings."""
    unfixed = (
        complaint
        for complaint in diagnosis.complaints
        if complaint.severity != "note" and not complaint.commands
    )
    return tuple(
        dict.fromkeys(command for complaint in unfixed for command in complaint.alternatives)
    )


def _find_obstacle(diagnosis: Diagnosis) -> str:
    """Return the first error or warning of a file that no plan fixes."""
    texts = (complaint.text for complaint in diagnosis.complaints if complaint.severity != "note")
    return "" if diagnosis.commands else next(texts, "")


def _summarize_section(section: Section) -> SectionInfo:
    """Return the kind, counts and bytes of a section, tied tensors counted once."""
    tensors = section.tensors()
    distinct_tensors = drop_ties(tensors)
    return SectionInfo(
        path=to_json_path(section.path),
        name=section.name,
        kind=section.kind,
        wrappers=section.wrappers,
        tensors=len(tensors),
        parameters=_count_parameters(section.kind, distinct_tensors),
        nbytes=sum(map(_count_local_bytes, (tensor for _, tensor in distinct_tensors))),
        values=_format_values(section) if section.kind == "values" else "",
    )


def _format_values(section: Section) -> str:
    """Return `epoch=3, lr=0.1, and 2 more`; an object is a key without a value."""
    leaves = ((name_of(path), leaf) for path, leaf in section.node.items())
    texts = (
        f"{printable(name)}={summarize(leaf, 20)}" if is_value(leaf) else printable(name)
        for name, leaf in leaves
        if not isinstance(leaf, TensorRef)
    )
    return listed(texts, most=2)


def _count_local_bytes(tensor: TensorRef) -> int:
    """Return the bytes of a tensor in this file.

    A tensor made of others (sparse, quantized) has theirs. One that is spread over several ranks
    has those of this rank.
    """
    if tensor.storage is not None or not tensor.parts:
        return tensor.nbytes
    if tensor.is_spread:
        return tensor.local.nbytes if tensor.local else 0
    return sum(part.nbytes for part in tensor.tensors_inside())


def _count_parameters(kind: str, tensors: list[tuple[Path, TensorRef]]) -> int:
    """Return the number of parameters in a section of this kind; 0 if it is not a model.

    A state dict does not distinguish them from buffers, which are recognized by their names.
    """
    if kind not in MODEL_KINDS:
        return 0
    if kind == "module":
        return sum(tensor.numel for _, tensor in tensors if tensor.is_parameter)
    return sum(
        tensor.numel
        for path, tensor in tensors
        if str(path[-1] if path else "").rpartition(".")[2] not in BUFFER_NAMES
    )
