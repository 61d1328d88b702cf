"""The commands that make a checkpoint load where it is wanted: only those that are needed."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptool.words import are, as_argument, counted, listed

__all__ = ["CHOICE", "Needs", "choice_notes", "format_notes", "load_commands", "waste_notes"]

CHOICE = "NAME"

_INDEX = re.compile(r"(\.[^./]+)?\.index(\.[^./]+)?\.json$")

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
    """Options that make plain data of all there is, where a training saved it to resume."""


def load_commands(needs: Needs) -> dict[str, str]:
    """Shell commands for a machine with one GPU (`one_gpu`) and without (`cpu`), and to `resume`.

    A machine that needs no command is left out.
    """
    commands: dict[str, str] = {}
    for machine, allowed in (("one_gpu", _ONE_GPU), ("cpu", _ANYWHERE)):
        away = [tag for tag in needs.devices if tag not in allowed]
        rules = ["*=cpu"] if machine == "cpu" else _to_first_gpu(away)
        arguments = _arguments(needs, rules if away else [])
        if arguments:
            commands[machine] = shlex.join(["ckptool", *arguments])
    if needs.resume:
        target = _target(needs.file, "resume")
        words = ["ckptool", "convert", as_argument(needs.file), target, *needs.resume]
        commands["resume"] = shlex.join(words)
    return commands


def format_notes(file: str) -> tuple[str, ...]:
    """What names the format in the header of a safetensors file, which some libraries ask for."""
    stem = os.path.splitext(as_argument(file))[0]
    words = ["ckptool", "convert", as_argument(file), f"{stem}.named.safetensors"]
    return (
        "its header does not say format: pt, which transformers and mlx ask for: "
        f"{shlex.join(words)} adds it",
    )


def choice_notes(needs: Needs) -> tuple[str, ...]:
    """What `NAME` stands for in the commands, where the user has to choose."""
    if not needs.model_only or not needs.choices:
        return ()
    return (f"several state dicts; {CHOICE} is the one to go on with: {listed(needs.choices)}",)


def waste_notes(file: str, unseen: int, dead: int) -> tuple[str, ...]:
    """What `compact` would leave out: bytes that no tensor reaches, and dead ones."""
    facts = [f"{_bytes_are('of the storages', unseen)} seen by no tensor"] if unseen > 0 else []
    facts += [f"{_bytes_are('', dead)} dead"] if dead > 0 else []
    in_place = ["--in-place"] if _INDEX.search(file) else []  # shards have no other target
    command = shlex.join(["ckptool", "compact", as_argument(file), *in_place])
    return (f"{' and '.join(facts)}: {command} leaves them out",) if facts else ()


def _bytes_are(whose: str, count: int) -> str:
    words = (counted(count, "byte"), whose, are(count))
    return " ".join(filter(None, words))


def _to_first_gpu(tags: Sequence[str]) -> list[str]:
    gpus = [tag for tag in tags if tag.startswith("cuda:")]
    others = [f"{tag}=cuda:0" for tag in tags if not tag.startswith("cuda:")]
    named = ["cuda:*=cuda:0"] if len(gpus) > 1 else [f"{tag}=cuda:0" for tag in gpus]
    return [*named, *others]


def _arguments(needs: Needs, rules: Iterable[str]) -> list[str]:
    """The one command that does all of it."""
    file = as_argument(needs.file)
    rules = list(rules)
    to_cpu = rules == ["*=cpu"]
    together = needs.averaged or (needs.strip and bool(rules))
    if needs.rewrite or needs.model_only or needs.plain or together:
        options = ["--wrappers", "strip"] if needs.strip else []
        options += ["--exclude", "*n_averaged"] if needs.averaged else []
        options += ["--to", "cpu"] if to_cpu else _repeated("--device-map", rules)
        options += ["--model-only"] if needs.model_only else []
        options += ["--plain", "--drop-objects"] if needs.plain else []
        options += ["--key", CHOICE] if needs.model_only and needs.choices else []
        return [
            "convert",
            file,
            _target(file, "cpu" if to_cpu else "cuda0" if rules else "plain"),
            *options,
        ]
    if rules:
        return ["remap", *(["--to", "cpu"] if to_cpu else _repeated("--map", rules)), file]
    return ["strip-module", file] if needs.strip else []


def _repeated(option: str, rules: Iterable[str]) -> list[str]:
    return [word for rule in rules for word in (option, rule)]


def _target(file: str, word: str) -> str:
    stem = _INDEX.sub("", file) if _INDEX.search(file) else os.path.splitext(file.rstrip("/"))[0]
    return f"{stem}.{word}.pth"
