"""`ckptool train`."""

from __future__ import annotations

import gc
import math
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from types import MappingProxyType
from typing import Any

import click
from click.core import ParameterSource

from ckptool.cli.console import WORDS, Screen, in_words, print_document, print_lines, settle
from ckptool.cli.options import Listed, Sectioned, flag, screen_options, verb
from ckptool.errors import UsageError
from ckptool.render.training import device_lines, gpus_line
from ckptool.tensors.materialise import require_torch
from ckptool.trainer.config import (
    CHOICES,
    SPREAD,
    TrainConfig,
    check,
    require_shared,
    usual_batch_size,
)
from ckptool.trainer.devices import VISIBLE, devices_here, require_visible, seen_as, show_only
from ckptool.trainer.launching import is_again, launch, recorded
from ckptool.words import clean

__all__ = ["command"]

SCHEMA = "ckptool.train/1"
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


class _Train(Sectioned):
    begins = MappingProxyType(
        {
            "out": "What is trained",
            "epochs": "How",
            "strategy": "Where",
            "save": "Checkpoints",
            "trace_batches": "Output",
            "nproc": "Where",
            "as_json": "Output",
        }
    )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; a worker leaves an error to its launcher."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            message, hint = in_words(error)
            with recorded(in_words):
                raise UsageError(message, hint=hint) from error


def _config_options(command: Any) -> Any:
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


@verb(
    "train",
    "ckptool train --out run",
    "ckptool train --out run --resume auto --epochs 20",
    "ckptool train --out run --data csv:housing.csv --target price --model mlp:16,32 --amp bf16",
    "ckptool train --out run --strategy dp --data random --model linear --trace-batches",
    "ckptool train --out run --strategy ddp --nproc 2 --save wrapped",
    "ckptool train --list-devices",
    ended="130 and 143 interrupted by Ctrl-C and SIGTERM, saved before where it was under way",
    cls=_Train,
)
@_config_options
@click.option(
    "--nproc", type=click.IntRange(min=1), help="Start this many processes, without torchrun."
)
@click.option(
    "--port", type=click.IntRange(1, 65535), help="Their port [default: one that is free]."
)
@click.option("--gpus", metavar="0,2", help="Use only these GPUs; the first becomes cuda:0.")
@flag("--list-devices", "List the devices that can train, and exit.")
@screen_options()
def command(
    nproc: int | None,
    port: int | None,
    gpus: str | None,
    list_devices: bool,
    screen: Screen,
    **given: Any,
) -> None:
    """Train a model on one or many devices, and save checkpoints.

    All strategies share one loop, and their losses agree to rounding. OUT gets last.pth, best.pth,
    metrics.jsonl and what other options ask for; a run that one strategy saved resumes under any
    other. Under torchrun the strategy is ddp unless another is given, and a restarted run
    (--max-restarts) resumes from its newest checkpoint.
    """
    with recorded(in_words):
        before = os.environ.get(VISIBLE)
        if gpus is not None:
            show_only(gpus)
        config = None if list_devices else _config(given)
        is_launched = config is not None and _is_launched(config, nproc, port)
        require_torch()
        if gpus is not None:
            _tell_choice(before, screen)
        if config is None and screen.as_json:
            print_document({"schema": "ckptool.devices/1", **devices_here().to_dict()})
        elif config is None:
            print_lines(device_lines(devices_here(), screen.look))
        elif is_launched:
            _train(config, screen)
        else:
            _launch(config, nproc, port)


def _tell_choice(before: str | None, screen: Screen) -> None:
    """Print which of the machine's GPUs are used; `before` is the variable's earlier value."""
    require_visible()
    now = os.environ[VISIBLE]
    if rank() is not None and (rank() or before == now):
        return  # the launcher, or rank 0, has printed it
    if before not in (None, now):
        screen.say([f"note: {VISIBLE} was {clean(before or '')}, and is {now} now"])
    screen.say([gpus_line(seen_as())])


def _config(given: dict[str, Any]) -> TrainConfig:
    """Return the configuration of the run that the options ask for."""
    if given["out"] is None:
        raise UsageError("Missing option '--out'.", hint="ckptool train --help")
    if given["batch_size"] is None:
        given["batch_size"] = usual_batch_size(given["data"])
    is_named = (
        click.get_current_context().get_parameter_source("strategy") != ParameterSource.DEFAULT
    )
    if not is_named and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        given["strategy"] = "ddp"
    if given["resume"] is None and is_again():
        given["resume"] = "auto"
    check(given, as_option)
    return TrainConfig(**{field.name: given[field.name] for field in fields(TrainConfig)})


def _is_launched(config: TrainConfig, nproc: int | None, port: int | None) -> bool:
    """Return True if this process trains, False if it is to start the processes that train."""
    strategy = as_option("strategy", config.strategy)
    if config.strategy in SPREAD:
        if rank() is None and nproc is None:
            raise UsageError(f"{strategy} needs several processes", hint="--nproc 2, or torchrun")
        return rank() is not None
    for name, value in (("nproc", nproc), ("port", port)):
        if value is not None:
            raise UsageError(
                f"{as_option(name, value)} needs --strategy {' or '.join(SPREAD)}, not {strategy}"
            )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"{strategy} runs in one process, but a launcher started {os.environ['WORLD_SIZE']}",
            hint=as_option("strategy", "ddp"),
        )
    return True


def _launch(config: TrainConfig, nproc: int | None, port: int | None) -> None:
    """Start the processes, after a check that the data can be read and `out` can be written."""
    from ckptool.trainer.checkpoints import one_run_in, require_one_run, require_writable
    from ckptool.trainer.data import data_of

    with one_run_in(config.out):  # as it is asked of the processes again
        require_writable(config.out)
        if config.resume is None and not config.overwrite:
            require_one_run(config.out, origin=None, step=0)
    data_of(config)
    if config.strategy != "parameter-server":  # a worker has batches of its own
        require_shared(config.batch_size, nproc or 1)
    settle(launch(click.get_current_context().meta[WORDS], nproc=nproc or 1, port=port))


def _train(config: TrainConfig, screen: Screen) -> None:
    from ckptool.cli.training import Teller
    from ckptool.trainer import Trainer

    gc.enable()  # off where a file is read; steps leave cycles behind
    teller = Teller(config, screen, rank=rank())
    result = Trainer(config, observer=teller).fit()
    if result.stopped is not None:
        settle(128 + result.stopped)
    if screen.as_json and not rank():
        best = result.best if math.isfinite(result.best) else None  # before the first epoch's end
        told = {**teller.document(), **result.to_dict(), "best": best, "gpus": seen_as()}
        print_document({"schema": SCHEMA, **told})
    teller.end(result)
