"""The commands that results propose, as text."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable
from itertools import compress
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Path, TensorRef
from ckptool.core.sections import MODEL_KINDS, find_sections
from ckptool.transforms import Step
from ckptool.words import are, as_argument, counted

TRAINING = ("optimizer", "epoch", "schedule")
"""The training state that is saved next to the model."""


def ema_command(checkpoint: Checkpoint) -> str:
    """Return the command that writes the averaged weights."""
    return _format_command("extract", as_argument(checkpoint.path), "--ema")


def list_training_state(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the items of `TRAINING` that the file has."""
    kinds = {section.kind for section in checkpoint.sections}
    has_epoch = isinstance(checkpoint.root, dict) and "epoch" in checkpoint.root
    presence = ("optimizer" in kinds, has_epoch, "scheduler" in kinds)  # in TRAINING's order
    return tuple(compress(TRAINING, presence))


def convert_command(
    file: str, target: str, steps: Iterable[Step], *, format: str | None = None
) -> str:
    """Return the shell command of a conversion with these steps."""
    words = [word for step in steps for word in step.words()]
    format_option = () if format is None else ("--format", format)
    return _format_command(
        "convert", as_argument(file), as_argument(target), *format_option, *words
    )


def _format_command(*words: str) -> str:
    """Return a ckptool command with its words quoted for a shell."""
    return shlex.join(["ckptool", *words])


def collect_weights(
    root: Any, kinds: Collection[str] = MODEL_KINDS
) -> list[tuple[Path, TensorRef]]:
    """Return path and tensor of all sections of these kinds."""
    parts = (part for part in find_sections(root) if part.kind in kinds)
    return [pair for part in parts for pair in part.tensors()]


def describe_waste(file: str, unused: int, dead: int) -> tuple[str, ...]:
    """Return the note on the bytes that `compact` would drop: unused and dead ones."""
    facts = [
        f"{counted(count, 'byte')} {prefix}{are(count)} {state}"
        for count, prefix, state in ((unused, "of tensor data ", "unused"), (dead, "", "dead"))
        if count > 0
    ]
    in_place = ["--in-place"] if file.endswith(".json") else []  # shards have no other target
    command = _format_command("compact", as_argument(file), *in_place)
    return (f"{' and '.join(facts)}; {command} drops them",) if facts else ()
