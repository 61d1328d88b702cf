"""The commands that make a checkpoint load where it is wanted: only those that are needed."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptool.model import Path, TensorRef
from ckptool.statedict import MODEL_KINDS, sections
from ckptool.words import are, as_argument, counted, listed
from ckptool.writing.target import DEFAULT, default_target

__all__ = [
    "CHOICE",
    "Needs",
    "choice_notes",
    "convert_command",
    "format_notes",
    "load_commands",
    "waste_notes",
    "weights",
]

CHOICE = "NAME"

_ANYWHERE = frozenset({"cpu", "meta"})
_ONE_GPU = _ANYWHERE | {"cuda", "cuda:0"}


@dataclass(frozen=True, slots=True)
class Needs:
    """What stands between a file and a bare `torch.load` into an unwrapped model."""

    file: str
    devices: tuple[str, ...]
    """Device tags of what `torch.load` would restore."""
    strip: bool
    """Names carry wrappers."""
    rewrite: bool
    """The layout itself does not load with `weights_only=True`."""
    model_only: bool
    """Objects block `weights_only=True`, and there is a model state dict to go on with."""
    choices: tuple[str, ...] = ()
    """The model state dicts, where there are several: which to take is the user's to say."""
    plain: bool = False
    """Objects block `weights_only=True`, and there is no model."""
    averaged: bool = False
    """The counter of an `AveragedModel` stands beside the names, wrapped or not."""
    resume: tuple[str, ...] = ()
    """Options of `Conversion` that make plain data of all, where a training saved it to resume."""


def load_commands(needs: Needs) -> dict[str, str]:
    """Return shell commands for a machine with one GPU (`one_gpu`), without (`cpu`), to `resume`.

    A machine that needs no command is left out.
    """
    commands: dict[str, str] = {}
    for machine, allowed in (("one_gpu", _ONE_GPU), ("cpu", _ANYWHERE)):
        away = [tag for tag in needs.devices if tag not in allowed]
        rules = ["*=cpu"] if machine == "cpu" else _to_first_gpu(away)
        commands[machine] = _command(needs, rules if away else [])
    if needs.resume:
        commands["resume"] = _conversion(needs.file, "resume", dict.fromkeys(needs.resume, True))
    return {machine: command for machine, command in commands.items() if command}


def convert_command(file: str, target: str, options: Mapping[str, Any]) -> str:
    """Return the shell command of a conversion with these arguments of `ckptool.convert`."""
    return _joined("convert", as_argument(file), as_argument(target), *_words(options))


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        for one in value if isinstance(value, tuple) else (value,):
            if one:
                yield f"--{name.replace('_', '-')}"
                yield from () if one is True else (str(one),)


def _joined(*words: str) -> str:
    return shlex.join(["ckptool", *words])


def weights(root: Any, kinds: Collection[str] = MODEL_KINDS) -> list[tuple[Path, TensorRef]]:
    """Return the tensors of all sections of these kinds."""
    parts = (part for part in sections(root) if part.kind in kinds)
    return [pair for part in parts for pair in part.tensors()]


def format_notes(file: str) -> tuple[str, ...]:
    """Return the note of a safetensors header without `format`, which some libraries ask for."""
    command = convert_command(file, default_target(file, "named"), {})
    return (
        "its header does not say format: pt, which transformers and mlx ask for: "
        f"{command} adds it",
    )


def choice_notes(needs: Needs) -> tuple[str, ...]:
    """Return the note that says which names can stand for `NAME` in the commands."""
    if not needs.model_only or not needs.choices:
        return ()
    return (f"several state dicts; {CHOICE} is the one to go on with: {listed(needs.choices)}",)


def waste_notes(file: str, unseen: int, dead: int) -> tuple[str, ...]:
    """Return the note on the bytes that `compact` would drop: unused and dead ones."""
    facts = [f"{_bytes_are('of the storages', unseen)} seen by no tensor"] if unseen > 0 else []
    facts += [f"{_bytes_are('', dead)} dead"] if dead > 0 else []
    in_place = ["--in-place"] if file.endswith(".json") else []  # shards have no other target
    command = _joined("compact", as_argument(file), *in_place)
    return (f"{' and '.join(facts)}: {command} leaves them out",) if facts else ()


def _bytes_are(whose: str, count: int) -> str:
    words = (counted(count, "byte"), whose, are(count))
    return " ".join(filter(None, words))


def _to_first_gpu(tags: Sequence[str]) -> list[str]:
    gpus = [tag for tag in tags if tag.startswith("cuda:")]
    others = [f"{tag}=cuda:0" for tag in tags if not tag.startswith("cuda:")]
    named = ["cuda:*=cuda:0"] if len(gpus) > 1 else [f"{tag}=cuda:0" for tag in gpus]
    return [*named, *others]


def _command(needs: Needs, rules: Sequence[str]) -> str:
    """Return the one command that does all of it; an empty text if nothing is to do."""
    to, maps = ("cpu", ()) if rules == ["*=cpu"] else (None, tuple(rules))
    together = needs.averaged or (needs.strip and bool(rules))
    if needs.rewrite or needs.model_only or needs.plain or together:
        options = {
            "wrappers": needs.strip and "strip",
            "exclude": needs.averaged and "*n_averaged",
            "to": to,
            "device_map": maps,
            "model_only": needs.model_only,
            "plain": needs.plain,
            "drop_objects": needs.plain,
            "key": needs.model_only and bool(needs.choices) and CHOICE,
        }
        word = (to or "cuda0") if rules else "plain"
        return _conversion(needs.file, word, options)
    if rules:
        return _joined("remap", *_words({"map": maps, "to": to}), as_argument(needs.file))
    return _joined("strip-module", as_argument(needs.file)) if needs.strip else ""


def _conversion(file: str, word: str, options: Mapping[str, Any]) -> str:
    target = default_target(file, word, DEFAULT, sharded=True)
    return convert_command(file, target, options)
