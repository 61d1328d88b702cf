"""A checkpoint on one screen: what it is, what is in it, and what keeps it from loading."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from ckptool._lazy import Result
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Path, TensorRef
from ckptool.core.names import BUFFER_NAMES, N_AVERAGED
from ckptool.core.optimizers import has_training_weights
from ckptool.core.sections import MODEL_KINDS, Section, likely_models, only_model, sections
from ckptool.core.tree import distinct, ties
from ckptool.core.values import documented, json_path
from ckptool.errors import CheckpointError, without_query
from ckptool.formats import Source, format_of, opened
from ckptool.inspection.blockers import (
    ANYWHERE,
    layout_blockers,
    misnamed,
    missing_weights,
    needed_import,
    outdated_names,
    restored_devices,
    unnamed,
    would_run,
)
from ckptool.inspection.quantization import quantizations
from ckptool.symbolic.encoder import blockers
from ckptool.transforms import Plain, Remap, Step, Strip, Take
from ckptool.transforms.compacting import storage_use
from ckptool.transforms.extraction import plain_state_dict
from ckptool.words import are, as_argument, counted, listed, printable
from ckptool.writing.target import DEFAULT, default_target


@dataclass(frozen=True, slots=True)
class SectionInfo:
    """One named part. `parameters` and `nbytes` count ties once.

    `parameters` counts the elements of a module's `Parameter`s. A state dict does not tell them
    from buffers: there, of every tensor whose last name part is not one of `BUFFER_NAMES`. It is
    0 elsewhere.
    """

    path: tuple[str | int, ...]
    name: str
    kind: str
    wrappers: tuple[str, ...]
    tensors: int
    parameters: int
    nbytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `ckptool.info/1`."""
        return documented(self, "name")


TRAINING = ("optimizer", "epoch", "schedule")
"""What a training saves beside the model, in words."""


@dataclass(frozen=True, slots=True, repr=False)
class Info(Result):
    """What `ckptool info` says of a file.

    `file`, `format`, `writer`, `torch_version`, `byteorder`, `protocol`, `globals`, `notes`,
    `storage_bytes` and `dead_bytes` are as in `Checkpoint` and `Details`. `dtypes` has tensors by
    their type, `sections` the named parts, `ties` the names that are one tensor.
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
    """Tensors on each device tag."""
    dtypes: Mapping[str, int]
    globals: tuple[str, ...]
    blockers: tuple[str, ...]
    """What keeps `torch.load(weights_only=True)` from loading it; empty when nothing does."""
    storage_bytes: int
    reachable_bytes: int
    """Bytes of the storages that some tensor reaches, from its first to its last element."""
    dead_bytes: int
    ties: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    commands: Mapping[str, str]
    """Shell commands that make it load, by machine: `one_gpu`, `cpu`; and for all that a training
    needs to resume: `resume`."""
    would_run: tuple[str, ...] = ()
    """The calls that unpickling it would make, as Python, beyond known constructors of data."""
    training: tuple[str, ...] = TRAINING
    """What a training needs to resume, of `TRAINING`, as far as the file has it."""
    part: str = ""
    """What the file holds instead of a model, where the weights are in other files too."""

    @property
    def weights_only(self) -> bool:
        """Whether `torch.load(weights_only=True)` loads it."""
        return not self.blockers

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.info/1`."""
        left_out = () if self.torch_version else ("torch_version",)
        return {
            "schema": "ckptool.info/1",
            **documented(self, "blockers", "part", "training", *left_out),
            "weights_only": self.weights_only,
            "weights_only_blockers": list(self.blockers),
        }


def info(source: Source) -> Info:
    """Summarise a checkpoint from its header: sections, wrappers, devices, `weights_only`.

    Args:
        source: A path, or an open checkpoint.

    Raises:
        UnreadableFile, LimitExceeded: the path cannot be opened as a checkpoint.
    """
    with opened(source) as checkpoint:
        return _summary(checkpoint)


def _summary(checkpoint: Checkpoint) -> Info:
    tensors = list(checkpoint.tensors())
    details, sections = checkpoint.details, checkpoint.sections
    known = format_of(checkpoint.format)
    devices = Counter(tensor.device for _, tensor in tensors)
    held, reached = storage_use(checkpoint.root)
    objects = blockers(checkpoint.root)
    layout = (*layout_blockers(checkpoint), *outdated_names(checkpoint, objects))
    name, part = misnamed(checkpoint), missing_weights(checkpoint)
    models = likely_models(checkpoint)
    # Leaving the rest behind helps only where nothing in a model itself is in the way.
    alone = bool(objects) and any(
        not blockers(plain_state_dict(checkpoint, model)) and not model.unread for model in models
    )
    plain = _plain(checkpoint) if objects else None
    choices = tuple(model.name for model in models) if models and not only_model(models) else ()
    stuck = bool(objects) and not alone and plain is None
    commands: dict[str, str] = {}
    if not (stuck or (part is not None and part.severity == "fails")):
        trains = not {"optimizer", "scheduler"}.isdisjoint(section.kind for section in sections)
        commands = load_commands(
            without_query(checkpoint.path),
            restored_devices(checkpoint.root),
            strip=any(section.wrappers for section in models),
            rewrite=bool(layout) or name is not None,
            model_only=alone,
            plain=not alone and plain is not None,
            choices=choices,
            averaged=any(N_AVERAGED in model.node and len(model.node) > 1 for model in models),
            resume=plain if alone and trains and known.resumes else None,
        )
    notes = [] if part is None else [f"{part.text}; {part.hint}"]
    if name is None and unnamed(checkpoint):
        command = convert_command(checkpoint.path, default_target(checkpoint.path, "named"), [])
        notes.append(
            "its header does not say format: pt, which transformers and mlx ask for: "
            f"{command} adds it"
        )
    elif name is not None and name not in layout:
        notes.append(name)
    notes += details.notes
    notes += format_of(checkpoint.format).layout_notes(checkpoint)
    notes += (*details.left_behind, *details.unreferenced)
    notes += waste_notes(checkpoint.path, held - reached, details.dead_bytes)
    if alone and choices:
        notes.append(f"several state dicts; {CHOICE} is the one to go on with: {listed(choices)}")
    if stuck and (text := needed_import(objects)):
        notes.append(text)
    notes += map(str, quantizations(checkpoint))
    for section in sections:
        if section.kind == "optimizer" and has_training_weights(section):
            notes.append(
                f"{printable(section.name) or 'the optimizer'} is schedule-free and in train mode: "
                f"the model has training weights; {ema_command(checkpoint)} writes those for "
                "evaluation"
            )
    for section in sections:
        notes += (f"a state dict made of this would lack {text}" for text in section.unread)
    return Info(
        file=without_query(checkpoint.path),
        format=checkpoint.format,
        size=details.size,
        writer=details.writer,
        torch_version=details.torch_version,
        byteorder=details.byteorder,
        protocol=details.protocol,
        sections=tuple(map(_section_info, sections)),
        devices=devices,
        dtypes=Counter(tensor.dtype for _, tensor in tensors),
        globals=details.globals,
        blockers=(*layout, *objects),
        storage_bytes=details.storage_bytes,
        # A bare pickle has its payloads in itself: all that it holds is reached.
        reachable_bytes=details.storage_bytes if format_of(checkpoint.format).inline else reached,
        dead_bytes=details.dead_bytes,
        ties=tuple(ties(tensors)),
        notes=tuple(notes),
        commands=commands,
        would_run=would_run(checkpoint),
        training=training_in(checkpoint),
        part=part.text if part is not None and part.severity == "fails" else "",
    )


def ema_command(checkpoint: Checkpoint) -> str:
    """Return the command that writes the averaged weights."""
    return _joined("extract", as_argument(checkpoint.path), "--ema")


def training_in(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return what a training needs to resume, of `TRAINING`, as far as the file has it."""
    kinds = {section.kind for section in checkpoint.sections}
    has_epoch = isinstance(checkpoint.root, dict) and "epoch" in checkpoint.root
    found = ("optimizer" in kinds, has_epoch, "scheduler" in kinds)
    return tuple(compress(TRAINING, found))


def _section_info(section: Section) -> SectionInfo:
    tensors = section.tensors()
    once = distinct(tensors)
    return SectionInfo(
        path=json_path(section.path),
        name=section.name,
        kind=section.kind,
        wrappers=section.wrappers,
        tensors=len(tensors),
        parameters=_parameters(section.kind, once),
        nbytes=sum(map(_bytes_here, (tensor for _, tensor in once))),
    )


def _bytes_here(tensor: TensorRef) -> int:
    """Return the bytes of a tensor in this file: of a distributed one, this rank's part."""
    if tensor.storage is not None or not tensor.parts:
        return tensor.nbytes
    if tensor.is_spread:
        return tensor.local.nbytes if tensor.local else 0
    return sum(part.nbytes for part in tensor.tensors_inside())


def _parameters(kind: str, tensors: list[tuple[Path, TensorRef]]) -> int:
    if kind not in MODEL_KINDS:
        return 0
    if kind == "module":
        return sum(tensor.numel for _, tensor in tensors if tensor.is_parameter)
    return sum(
        tensor.numel
        for path, tensor in tensors
        if str(path[-1] if path else "").rpartition(".")[2] not in BUFFER_NAMES
    )


def _plain(checkpoint: Checkpoint) -> Plain | None:
    """Return the step, tried on the header, that makes plain data and keeps all weights."""
    for step in (Plain(), Plain(drop_objects=True)):
        try:
            made = step(checkpoint)
        except CheckpointError:
            continue
        if len(weights(made.root)) >= len(weights(checkpoint.root)):
            return step
    return None


CHOICE = "NAME"

_ONE_GPU = ANYWHERE | {"cuda", "cuda:0"}


def load_commands(
    file: str,
    devices: Sequence[str],
    *,
    strip: bool = False,
    rewrite: bool = False,
    model_only: bool = False,
    choices: Sequence[str] = (),
    plain: bool = False,
    averaged: bool = False,
    resume: Plain | None = None,
) -> dict[str, str]:
    """Return shell commands for a machine with one GPU (`one_gpu`), without (`cpu`), to `resume`.

    A machine that needs no command is left out.

    Args:
        file: What is to load by a bare `torch.load`, into an unwrapped model.
        devices: Device tags of what `torch.load` would restore.
        strip: Keys carry wrapper prefixes.
        rewrite: The layout itself does not load with `weights_only=True`.
        model_only: Objects block `weights_only=True`, and there is a model state dict.
        choices: The model state dicts, where there are several: the user chooses.
        plain: Objects block `weights_only=True`, and there is no model.
        averaged: The counter of an `AveragedModel` is next to the keys, wrapped or not.
        resume: The step that makes plain data of all that a training saved.
    """
    commands: dict[str, str] = {}
    for machine, allowed in (("one_gpu", _ONE_GPU), ("cpu", ANYWHERE)):
        away = [tag for tag in devices if tag not in allowed]
        to = "cpu" if away and machine == "cpu" else None
        rules = _to_first_gpu(away) if machine == "one_gpu" else {}
        moves = [Remap(to, rules)] if away else []
        if rewrite or model_only or plain or averaged or (strip and away):
            steps = [
                *([Strip()] if strip else []),
                *([Take(exclude=["*n_averaged"])] if averaged else []),
                *moves,
                *([Take(model_only=True)] if model_only else []),
                *([Plain(drop_objects=True)] if plain else []),
                *([Take(CHOICE)] if model_only and choices else []),
            ]
            commands[machine] = _conversion(file, (to or "cuda0") if away else "plain", steps)
        elif away:
            words = moves[0].words()
            commands[machine] = _joined("remap", *words, as_argument(file))
        elif strip:
            commands[machine] = _joined("strip-module", as_argument(file))
    if resume is not None:
        commands["resume"] = _conversion(file, "resume", [resume])
    return commands


def convert_command(
    file: str, target: str, steps: Iterable[Step], *, format: str | None = None
) -> str:
    """Return the shell command of a conversion in some steps."""
    words = [word for step in steps for word in step.words()]
    chosen = () if format is None else ("--format", format)
    return _joined("convert", as_argument(file), as_argument(target), *chosen, *words)


def _joined(*words: str) -> str:
    return shlex.join(["ckptool", *words])


def weights(root: Any, kinds: Collection[str] = MODEL_KINDS) -> list[tuple[Path, TensorRef]]:
    """Return the tensors of all sections of these kinds."""
    parts = (part for part in sections(root) if part.kind in kinds)
    return [pair for part in parts for pair in part.tensors()]


def waste_notes(file: str, unseen: int, dead: int) -> tuple[str, ...]:
    """Return the note on the bytes that `compact` would drop: unused and dead ones."""
    facts = [
        f"{counted(count, 'byte')} {whose}{are(count)} {what}"
        for count, whose, what in (
            (unseen, "of the storages ", "seen by no tensor"),
            (dead, "", "dead"),
        )
        if count > 0
    ]
    in_place = ["--in-place"] if file.endswith(".json") else []  # shards have no other target
    command = _joined("compact", as_argument(file), *in_place)
    return (f"{' and '.join(facts)}: {command} leaves them out",) if facts else ()


def _to_first_gpu(tags: Sequence[str]) -> dict[str, str]:
    gpus = [tag for tag in tags if tag.startswith("cuda:")]
    others = [tag for tag in tags if not tag.startswith("cuda:")]
    return dict.fromkeys([*(["cuda:*"] if len(gpus) > 1 else gpus), *others], "cuda:0")


def _conversion(file: str, word: str, steps: Iterable[Step]) -> str:
    target = default_target(file, word, DEFAULT, sharded=True)
    return convert_command(file, target, steps)
