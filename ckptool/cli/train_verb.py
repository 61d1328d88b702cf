"""`ckptool train`."""

from __future__ import annotations

import gc
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from ckptool.cli.console import (
    ARGUMENTS,
    Screen,
    describe_error,
    flush,
    print_document,
    print_lines,
    set_exit_code,
)
from ckptool.cli.options import Listed, Sectioned, flag, screen_options, verb
from ckptool.errors import UsageError
from ckptool.render.training import (
    device_lines,
    end_lines,
    epoch_line,
    event_line,
    gpus_line,
    heading,
    progress_text,
    stopped_line,
    trace_line,
    validating_text,
)
from ckptool.tensors.storages import require_torch
from ckptool.trainer.config import (
    CHOICES,
    SPREAD,
    TrainConfig,
    check_options,
    default_batch_size,
    require_enough_samples,
)
from ckptool.trainer.devices import (
    VISIBLE,
    detect_devices,
    list_visible_gpus,
    require_visible_gpus,
    restrict_gpus,
)
from ckptool.trainer.events import (
    EpochEnded,
    Note,
    Observer,
    Resumed,
    Saved,
    Started,
    Stepped,
    Traced,
    Validating,
)
from ckptool.trainer.launching import is_restarted, launch, record_errors
from ckptool.words import clean

if TYPE_CHECKING:
    from ckptool.trainer import TrainResult

SCHEMA = "ckptool.train/1"
_DEFAULT_DESCRIPTIONS = {"batch_size": "30 for --data random, 32 otherwise"}
"""How the help describes a default that depends on another option."""


def read_rank() -> int | None:
    """Return the rank of this process as set by a launcher, or None without a launcher."""
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() else None


def format_option(name: str, value: Any) -> str:
    """Format an option as typed: `--batch-size 0`."""
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return option
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"{option} {text}" if text.isprintable() and text else f"{option} {text!r}"


class _Train(Sectioned):
    most_used = frozenset(
        {
            "out", "data", "model", "epochs", "batch_size", "optimizer", "lr", "strategy", "device",
            "nproc", "resume", "overwrite", "seed", "as_json",
        }
    )  # fmt: skip
    begins = MappingProxyType(
        {
            "out": "Data and model",
            "epochs": "Training",
            "strategy": "Devices",
            "save": "Checkpoints",
            "trace_batches": "Output",
            "nproc": "Devices",
            "as_json": "Output",
        }
    )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; a worker passes an error to its launcher."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            message, hint = describe_error(error)
            with record_errors(describe_error):
                raise UsageError(message, hint=hint) from error


def _add_config_options(command: Any) -> Any:
    """Add an option to the command for each field of `TrainConfig`."""
    texts = _read_help_texts()
    for field in reversed(fields(TrainConfig)):  # the help lists the option added last first
        command = _make_option(field, texts)(command)
    return command


def _make_option(field: Field[Any], texts: Mapping[str, str]) -> Any:
    """Return the option of a field, with its default and its help text.

    A flag has no default in the help, but `--no-` if its default is True.
    """
    # The other verbs overwrite with `--force`.
    name = "force" if field.name == "overwrite" else field.name.replace("_", "-")
    settings: dict[str, Any] = {"default": None, "help": texts.get(field.name, "")}
    default = None
    if field.name in _DEFAULT_DESCRIPTIONS:
        settings["show_default"] = _DEFAULT_DESCRIPTIONS[field.name]
    elif field.default is not MISSING:
        settings["default"] = default = field.default
        if default not in (None, ()) and field.type != "bool":
            settings["show_default"] = True
    if field.type == "bool":
        words = f"--{name}/--no-{name}" if default else f"--{name}"
        return click.option(words, field.name, is_flag=True, **settings)
    return click.option(f"--{name}", field.name, type=_option_type(field), **settings)


def _option_type(field: Field[Any]) -> Any:
    """Return the click type of a field, from its choices or its annotation."""
    if field.name in CHOICES:
        return click.Choice(CHOICES[field.name])
    kind = str(field.type)  # such as "tuple[int, ...]" or "float | None"
    if kind.startswith("tuple"):
        return Listed(int if "int" in kind else str)
    return {"int": int, "float": float}.get(kind.partition(" ")[0], str)


def _read_help_texts() -> dict[str, str]:
    """Return the text of each field of `TrainConfig` from its docstring, with `lr` as `--lr`."""
    attributes = (TrainConfig.__doc__ or "").partition("Attributes:\n")[2]  # empty with python -OO
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {9,}.*)*)", attributes, re.MULTILINE)
    names = {name for name, _ in entries}

    def format_name(match: re.Match[str]) -> str:
        """Return a quoted name without its quotes, and as an option if it is one."""
        return f"--{match[1].replace('_', '-')}" if match[1] in names else match[1]

    return {
        name: re.sub(r"`([^`]*)`", format_name, " ".join(text.split())) for name, text in entries
    }


@verb(
    "train",
    "ckptool train --out run",
    "ckptool train --out run --resume auto --epochs 20",
    "ckptool train --out run --data csv:housing.csv --target price --model mlp:16,32 --amp bf16",
    "ckptool train --out run --strategy dp --data random --model linear --trace-batches",
    "ckptool train --out run --strategy ddp --nproc 2 --save wrapped",
    "ckptool train --list-devices",
    interrupted="130 or 143 interrupted by Ctrl-C or SIGTERM (training saves a checkpoint first)",
    cls=_Train,
)
@_add_config_options
@click.option(
    "--nproc", type=click.IntRange(min=1), help="Start this many processes, without torchrun."
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Connect the processes at this port. [default: a free port]",
)
@click.option("--gpus", metavar="0,2", help="Use only these GPUs; the first becomes cuda:0.")
@flag("--list-devices", "List the devices that can train.")
@screen_options()
def command(
    nproc: int | None,
    port: int | None,
    gpus: str | None,
    list_devices: bool,
    screen: Screen,
    **options: Any,
) -> None:
    """Train a model on one or more devices, and save checkpoints.

    All strategies share one loop, and their losses agree up to rounding. OUT receives last.pth,
    best.pth, metrics.jsonl and files that other options add. A run saved by one strategy resumes
    with any other. Under torchrun, the default strategy is ddp, and a restarted run
    (--max-restarts) resumes from its newest checkpoint.
    """
    with record_errors(describe_error):
        before = os.environ.get(VISIBLE)
        if gpus is not None:
            restrict_gpus(gpus)
        config = None if list_devices else _make_config(options)
        is_worker = config is not None and _is_worker(config, nproc, port)
        require_torch()
        if gpus is not None:
            _print_gpus(before, screen)
        if config is None and screen.as_json:
            print_document({"schema": "ckptool.devices/1", **detect_devices().to_dict()})
        elif config is None:
            print_lines(device_lines(detect_devices(), screen.look))
        elif is_worker:
            _train(config, screen)
        else:
            _launch(config, nproc, port)


def _print_gpus(before: str | None, screen: Screen) -> None:
    """Check and print which GPUs of the machine are used, in one process.

    `before` is CUDA_VISIBLE_DEVICES before `--gpus` changed it.
    """
    require_visible_gpus()
    now, rank = os.environ[VISIBLE], read_rank()
    if rank is not None and (rank > 0 or before == now):
        return  # rank 0, or the launcher that changed it before, has printed it
    if before not in (None, now):
        screen.say([f"note: changed {VISIBLE} from {clean(before or '')} to {now}"])
    screen.say([gpus_line(list_visible_gpus())])


def _make_config(options: dict[str, Any]) -> TrainConfig:
    """Return the configuration of the run from the options of the verb.

    Defaults that depend on others: the batch size on the data, `ddp` under a launcher of several
    processes, and `--resume auto` for a run that the launcher restarted.

    Raises:
        UsageError: if `--out` is missing, or an option is invalid.
    """
    if options["out"] is None:
        raise UsageError("Missing option '--out'.", hint="ckptool train --help")
    if options["batch_size"] is None:
        options["batch_size"] = default_batch_size(options["data"])
    has_strategy = (
        click.get_current_context().get_parameter_source("strategy") != ParameterSource.DEFAULT
    )
    if not has_strategy and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        options["strategy"] = "ddp"
    if options["resume"] is None and is_restarted():
        options["resume"] = "auto"
    check_options(options, format_option)
    return TrainConfig(**{field.name: options[field.name] for field in fields(TrainConfig)})


def _is_worker(config: TrainConfig, nproc: int | None, port: int | None) -> bool:
    """Return True if this process trains, False if it starts the processes that train.

    Raises:
        UsageError: if the strategy does not fit the number of processes or these options.
    """
    strategy = format_option("strategy", config.strategy)
    if config.strategy in SPREAD:
        if read_rank() is None and nproc is None:
            raise UsageError(
                f"{strategy} needs several processes", hint="add --nproc 2, or use torchrun"
            )
        return read_rank() is not None
    for name, number in (("nproc", nproc), ("port", port)):
        if number is not None:
            raise UsageError(
                f"{format_option(name, number)} needs --strategy {' or '.join(SPREAD)}, "
                f"not {strategy}"
            )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            f"{strategy} runs in one process, but a launcher started {os.environ['WORLD_SIZE']}",
            hint=f"use {format_option('strategy', 'ddp')}",
        )
    return True


def _launch(config: TrainConfig, nproc: int | None, port: int | None) -> None:
    """Start the processes, if the data can be read, and `out` is writable and has no other run."""
    from ckptool.trainer.checkpoints import hold_run_folder, require_one_run, require_writable
    from ckptool.trainer.data import make_data

    with hold_run_folder(config.out):  # the processes check this again
        require_writable(config.out)
        if config.resume is None and not config.overwrite:
            require_one_run(config.out, origin=None, step=0)
    make_data(config)
    if config.strategy != "parameter-server":  # each worker has its own batches
        require_enough_samples(config.batch_size, nproc or 1)
    set_exit_code(launch(click.get_current_context().meta[ARGUMENTS], nproc=nproc or 1, port=port))


def _train(config: TrainConfig, screen: Screen) -> None:
    """Train in this process, and print the events and the result."""
    from ckptool.trainer import Trainer

    gc.enable()  # run() disables it, but training steps leave reference cycles
    printer = EventPrinter(config, screen, rank=read_rank())
    result = Trainer(config, observer=printer).fit()
    if result.stopped is not None:
        set_exit_code(128 + result.stopped)  # the number of a signal, as in shells
    if screen.as_json and not read_rank():
        # It is infinite before the end of the first epoch.
        best = result.best if math.isfinite(result.best) else None
        fields = {
            **printer.to_document(),
            **result.to_dict(),
            "best": best,
            "gpus": list_visible_gpus(),
        }
        print_document({"schema": SCHEMA, **fields})
    printer.finish(result)


Event = TypeVar("Event")


class EventPrinter(Observer):
    """Prints the events in rank 0, and in every process the shapes in its replica."""

    def __init__(self, config: TrainConfig, screen: Screen, *, rank: int | None) -> None:
        """Store the options; `rank` is None without a launcher."""
        self._config, self._screen, self._rank = config, screen, rank
        self._bar = screen.progress()
        self._events: list[Any] = []
        """All events except steps, shapes and progress of validation, for the document."""
        self._started: Started | None = None
        """The event of the start, which has the numbers of epochs and steps."""
        self._first_step: tuple[float, int] | None = None
        """The time of the first step of this process and its number, to estimate the time left."""

    def tell(self, event: Any) -> None:
        """Print an event, and store it for the document.

        Ranks other than 0 print only shapes. Steps and validation only move the progress bar.
        """
        if isinstance(event, Traced):
            self._print_shapes(event)
        elif self._rank:
            return
        elif isinstance(event, Stepped):
            self._bar(event.step, self._total_steps, self._format_progress(event))
        elif isinstance(event, Validating):
            self._bar(event.done, event.samples, validating_text(event))
        else:
            self._bar.wipe()
            if isinstance(event, Started):
                self._started = event
            if isinstance(event, EpochEnded) and not self._screen.as_json:
                is_first = not any(isinstance(stored, EpochEnded) for stored in self._events)
                lines = [heading(self._screen.look)] if is_first else []
                self._print([*lines, epoch_line(event)])
            elif isinstance(event, (Started, Resumed, Note)):
                self._screen.say([event_line(event)])
            self._events.append(event)

    def _format_progress(self, event: Stepped) -> str:
        """Return the text after the bar: epoch, step, loss and time left."""
        now, total = time.monotonic(), self._total_steps
        if self._first_step is None:
            self._first_step = now, event.step
        start_time, start_step = self._first_step
        seconds_left = None
        if event.step > start_step:
            seconds_per_step = (now - start_time) / (event.step - start_step)
            seconds_left = seconds_per_step * (total - event.step)
        epochs = self._started.epochs if self._started else 0
        return progress_text(event, total, epochs, seconds_left)

    def _events_of(self, kind: type[Event]) -> list[Event]:
        """Return the stored events of one class."""
        return [event for event in self._events if isinstance(event, kind)]

    def _print_shapes(self, traced: Traced) -> None:
        """Print shapes to stdout, as the tutorials do, or to stderr with `--json`."""
        self._bar.wipe()
        lines = [trace_line(traced, self._rank)]
        if self._screen.as_json:
            self._screen.say(lines)
        else:
            self._print(lines)

    @staticmethod
    def _print(lines: list[str]) -> None:
        """Print and flush lines: the next may be minutes away."""
        print_lines(lines)
        flush()

    @property
    def _total_steps(self) -> int:
        """The number of steps in the whole run; 0 before it starts."""
        steps = self._started.steps * self._started.epochs if self._started else 0
        return min(steps, self._config.max_steps or steps)

    @property
    def _existing_checkpoints(self) -> list[Saved]:
        """The checkpoints that still exist, the newest last."""
        saved = self._events_of(Saved)
        # A later `last.pth` or `best.pth` replaces the file of an earlier one.
        last_by_path = {checkpoint.path: checkpoint for checkpoint in saved}
        return [
            checkpoint
            for checkpoint in saved
            if checkpoint is last_by_path[checkpoint.path] and os.path.exists(checkpoint.path)
        ]

    def finish(self, result: TrainResult) -> None:
        """Print the outcome of the run and its checkpoints."""
        self._bar.wipe()
        if self._rank:
            return
        checkpoints = self._existing_checkpoints
        if result.stopped is not None and checkpoints:
            self._screen.say([stopped_line(checkpoints[-1])])
        elif not self._screen.as_json:
            print_lines(end_lines(checkpoints, result))

    def to_document(self) -> dict[str, Any]:
        """Return the events as plain data."""
        return {
            **(self._started.to_dict() if self._started else {}),
            "resumed": next((event.to_dict() for event in self._events_of(Resumed)), None),
            "history": [event.to_dict() for event in self._events_of(EpochEnded)],
            "checkpoints": [event.to_dict() for event in self._existing_checkpoints],
            "notes": [note.text for note in self._events_of(Note)],
        }
