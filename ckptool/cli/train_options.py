"""The options of `train`, made of the fields of `TrainConfig`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from types import MappingProxyType
from typing import Any

import click

from ckptool.cli.options import Listed, Sectioned
from ckptool.errors import UsageError
from ckptool.trainer.config import CHOICES, TrainConfig
from ckptool.trainer.launching import recorded

__all__ = ["ARGUMENTS", "TrainCommand", "as_option", "config_options", "rank"]

ARGUMENTS = "ckptool.train.arguments"
"""The key of the arguments of `train` in the `meta` of its context."""

_BEGINS = {
    "out": "What is trained",
    "epochs": "How",
    "strategy": "Where",
    "save": "Checkpoints",
    "trace_batches": "Output",
    "nproc": "Where",
    "as_json": "Output",
}
"""The options with which the sections of the help begin, or go on."""
_DEFAULTS = {"batch_size": "30 for --data random, 32 otherwise"}
"""The help's words for a default that depends on another option."""


def rank() -> int | None:
    """Return the rank that a launcher has given this process; None without a launcher."""
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() else None


def as_option(name: str, value: Any) -> str:
    """Return an option as it is typed: `--batch-size 0`."""
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return option
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"{option} {text}" if text.isprintable() and text else f"{option} {text!r}"


class TrainCommand(Sectioned):
    """A command that keeps its arguments for the processes that it starts."""

    begins = MappingProxyType(_BEGINS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; a worker leaves an error to its launcher."""
        from ckptool.cli.console import in_words

        ctx.meta[ARGUMENTS] = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            message, hint = in_words(error)
            with recorded(in_words):
                raise UsageError(message, hint=hint) from error


def config_options(command: Any) -> Any:
    """Add an option to the command for each field of `TrainConfig`."""
    texts = _texts()
    for field in reversed(fields(TrainConfig)):
        command = _option(field, texts)(command)
    return command


def _option(field: Field[Any], texts: Mapping[str, str]) -> Any:
    name = field.name.replace("_", "-")
    default = None if field.name in _DEFAULTS or field.default is MISSING else field.default
    given: dict[str, Any] = {"default": default, "help": texts.get(field.name, "")}
    if field.name in _DEFAULTS:
        given["show_default"] = _DEFAULTS[field.name]
    elif default not in (None, ()) and field.type != "bool":
        given["show_default"] = True
    if field.type == "bool":
        words = f"--{name}/--no-{name}" if default else f"--{name}"
        return click.option(words, field.name, is_flag=True, **given)
    return click.option(f"--{name}", field.name, type=_type(field), **given)


def _type(field: Field[Any]) -> Any:
    if field.name in CHOICES:
        return click.Choice(CHOICES[field.name])
    kind = str(field.type)
    if kind.startswith("tuple"):
        return Listed(int if "int" in kind else str)
    return {"int": int, "float": float}.get(kind.partition(" ")[0], str)


def _texts() -> dict[str, str]:
    """Return the text of each field in the docstring, with `lr` spelled as `--lr`."""
    told = (TrainConfig.__doc__ or "").partition("Attributes:\n")[2]  # none with python -OO
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {9,}.*)*)", told, re.MULTILINE)
    names = {name for name, _ in found}

    def spelled(word: re.Match[str]) -> str:
        return f"--{word[1].replace('_', '-')}" if word[1] in names else word[1]

    return {name: re.sub(r"`([^`]*)`", spelled, " ".join(text.split())) for name, text in found}
