"""The options of a training run, and their rules; torch is not imported."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import Any

from ckptool.errors import TrainingError, UsageError
from ckptool.factories import FACTORY

_DATA = ("random", "friedman", "digits")
_MLP = re.compile(r"mlp(?::([1-9]\d{0,8}(?:,[1-9]\d{0,8})*))?", re.ASCII)


def parse_csv_path(data: str) -> str | None:
    """Return the path in `csv:PATH`, maybe empty; None for data of another kind."""
    return data.removeprefix("csv:") if data.startswith("csv:") else None


def parse_hidden_widths(model: str) -> list[int] | None:
    """Return the widths of the hidden layers of `mlp:16,32`, or None for a model of another kind.

    A plain `mlp` has these two layers.
    """
    match = _MLP.fullmatch(model)
    if match is None:
        return None
    widths = match[1] or "16,32"
    return [int(width) for width in widths.split(",")]


def _is_data(data: str) -> bool:
    """Return True if `--data` names built-in data, a CSV file or a factory."""
    csv_path = parse_csv_path(data)
    if csv_path is not None:
        return bool(csv_path)  # `csv:` alone names no file
    return data in _DATA or FACTORY.fullmatch(data) is not None


def _is_model(model: str) -> bool:
    """Return True if `--model` names a built-in model or a factory."""
    return model in ("linear", "cnn") or bool(
        parse_hidden_widths(model) or FACTORY.fullmatch(model)
    )


STRATEGIES = ("single", "dp", "ddp", "model-parallel", "fsdp", "parameter-server", "xla")
SPREAD = ("ddp", "fsdp", "parameter-server")
"""Strategies that run in several processes."""
SAVES = ("full", "wrapped", "unwrapped", "module")
CHOICES: dict[str, tuple[str, ...]] = {
    "strategy": STRATEGIES,
    "save": SAVES,
    "optimizer": ("adam", "adamw", "sgd"),
    "schedule": ("constant", "cosine", "linear", "step"),
    "updates": ("asynchronous", "synchronous"),
    "dtype": ("float32", "float64"),
    "amp": ("bf16", "fp16"),
}
_FLOAT32_MAX = 3.4e38
_COUNTS = (
    *("epochs", "max_steps", "batch_size", "accumulate"),
    *("step_size", "keep", "save_every", "patience"),
)
_RULES: dict[str, tuple[Callable[[Any], object], str]] = {
    **{name: (words.__contains__, f"one of {', '.join(words)}") for name, words in CHOICES.items()},
    **dict.fromkeys(_COUNTS, (lambda value: value >= 1, "at least 1")),
    **dict.fromkeys(("lr", "clip", "save_seconds"), (lambda value: value > 0, "above 0")),
    **dict.fromkeys(
        ("weight_decay", "gamma", "warmup", "staleness", "output_device", "workers"),
        (lambda value: value >= 0, "at least 0"),
    ),
    **dict.fromkeys(("ema", "momentum"), (lambda value: 0 <= value < 1, "from 0 to below 1")),
    "seed": (lambda value: -(2**63) <= value < 2**63, "from -2**63 to below 2**63"),
    "resume": (bool, "a checkpoint, a folder or auto"),
    "out": (bool, "a folder"),
    "data": (_is_data, f"{', '.join(_DATA)}, csv:PATH or module:factory"),
    "model": (_is_model, "linear, cnn, mlp:16,32 (widths from 1) or module:factory"),
    "loss": (
        lambda loss: loss.isidentifier() or FACTORY.fullmatch(loss),
        "a name in torch.nn.functional or module:function",
    ),
}
"""The rule for each option: a test, and its description after `must be`."""
_ONLY_WITH = {
    "sharded": {"strategy": "fsdp", "save": "full"},
    "ema": {"save": "full"},
    "momentum": {"optimizer": "sgd"},
    "step_size": {"schedule": "step"},
    "gamma": {"schedule": "step"},
    "updates": {"strategy": "parameter-server"},
    "staleness": {"strategy": "parameter-server", "updates": "asynchronous"},
    "sync_batchnorm": {"strategy": "ddp"},
    "devices": {"strategy": "model-parallel"},
    "device_ids": {"strategy": "dp"},
    "output_device": {"strategy": "dp"},
    "target": {"data": "csv:PATH"},
}
"""Options that need another option; their defaults are always allowed."""
_NOT_WITH = {"workers": ("parameter-server",), "compile": ("dp", "xla")}
"""Options that a strategy cannot use: the workers of a server do not know which batch is next,
replicas share no compiled code, and XLA compiles everything itself."""
_TYPES: dict[str, Any] = {"int": Integral, "float": Real, "bool": bool, "str": str}

Spelling = Callable[[str, Any], str]
"""A function that formats an option and its value as the user wrote them."""


def default_batch_size(data: str) -> int:
    """Return the default batch size: 30 for `random`, as in the tutorial of DataParallel."""
    return 30 if data == "random" else 32


def require_enough_samples(batch_size: int, processes: int) -> None:
    """Check that every process has a sample of a batch.

    Raises:
        TrainingError: there are more processes than samples.
    """
    if batch_size < processes:
        raise TrainingError(
            f"a batch of {batch_size} sample{'s' * (batch_size > 1)} cannot be split over "
            f"{processes} processes",
            hint=f"use --batch-size {processes} or more, or fewer processes",
        )


def format_argument(name: str, value: Any) -> str:
    """Return an option as in Python code: `batch_size=0`."""
    return f"{name}={value!r}"


def check_options(values: Mapping[str, Any], spell: Spelling = format_argument) -> None:
    """Check the options of a run, each by itself and together with the others.

    Args:
        values: The value of each field of `TrainConfig`, by name.
        spell: Formats an option for a message.

    Raises:
        UsageError: if a value is wrong, or has no effect with the other options.
    """
    field_by_name = {field.name: field for field in fields(TrainConfig)}
    for name, value in values.items():
        type_name = str(field_by_name[name].type)
        if _has_type(value, type_name):
            broken_rule = _find_broken_rule(name, value)
        else:
            broken_rule = f"of type {type_name}"
        if broken_rule is not None:
            raise UsageError(f"{spell(name, value)} must be {broken_rule}")
    options = dict(values)
    if parse_csv_path(options["data"]):
        options["data"] = "csv:PATH"  # any path, as in the table of conditions
    defaults = {name: field.default for name, field in field_by_name.items()}
    for name, conditions in _ONLY_WITH.items():
        for other, required in conditions.items():
            if options[name] != defaults[name] and options[other] != required:
                raise UsageError(
                    f"{spell(name, options[name])} needs {spell(other, required)}, not "
                    f"{spell(other, options[other])}"
                )
    for name, strategies in _NOT_WITH.items():
        if options[name] and options["strategy"] in strategies:
            strategy = spell("strategy", options["strategy"])
            raise UsageError(f"{spell(name, options[name])} does not work with {strategy}")
    has_interval = options["save_every"] or options["save_seconds"]
    if options["keep"] != defaults["keep"] and not has_interval:
        example = spell("save_every", 100)
        raise UsageError(f"{spell('keep', options['keep'])} needs an interval such as {example}")


def _has_type(value: Any, annotation: str) -> bool:
    """Return True if a value has a type such as "int", "str | None" or "tuple[int, ...]"."""
    type_name, _, none = annotation.partition(" | ")
    if value is None:
        return bool(none)
    if type_name.startswith("tuple["):
        item_type = type_name.removeprefix("tuple[").removesuffix(", ...]")
        return isinstance(value, (tuple, list)) and all(
            _has_type(item, item_type) for item in value
        )
    if isinstance(value, bool):  # which Python also counts as an int
        return type_name == "bool"
    return isinstance(value, _TYPES[type_name])


def _find_broken_rule(name: str, value: Any) -> str | None:
    """Return the rule that a value of this option breaks, as text after "must be", or None."""
    if value is None:
        return None
    if isinstance(value, (int, float)) and not abs(value) <= _FLOAT32_MAX:  # NaN too
        return "a finite float32 number"
    if name not in _RULES:
        return None
    is_valid, rule = _RULES[name]
    return None if is_valid(value) else rule


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of a training run, with the same names as in `ckptool train`.

    `Trainer` ignores `data` and `target` if data is given, and `model` if a model is given.

    Attributes:
        out: Save checkpoints and metrics in this folder.
        data: Train on `random`, `friedman`, `digits`, `csv:PATH` or `module:factory`.
        target: Predict this CSV column. [default: the last]
        model: Train `linear`, `mlp:16,32`, `cnn` or `module:factory`.
        loss: Use this loss: a function in `torch.nn.functional`, or `module:function`.
            [default: depends on the data]
        dtype: Use this dtype for weights and features.
        seed: Seed the weights, the order of the samples and dropout.
        epochs: Go through the data this many times.
        max_steps: Stop after this many optimizer steps.
        batch_size: Use this many samples per batch, over all devices together.
        workers: Prepare batches in this many processes, in pinned memory for a GPU.
        accumulate: Accumulate gradients over this many batches.
        optimizer: Use this optimizer.
        lr: Set the learning rate, before the schedule.
        momentum: Set the momentum of `sgd`.
        weight_decay: Set the weight decay of the optimizer.
        schedule: Change the learning rate over time; `cosine` and `linear` end at 0.
        step_size: With the `step` schedule, change the rate after this many epochs.
        gamma: With the `step` schedule, multiply the rate by this at each change.
        warmup: Increase the rate linearly over this many steps, before the schedule.
        amp: Use automatic mixed precision: `bf16`, or `fp16` with a gradient scaler.
        clip: Clip the total norm of the gradients to this value.
        ema: Keep a moving average of the weights with this decay, for example 0.999.
        patience: Stop after this many epochs without a lower validation loss.
        compile: Compile the model with `torch.compile`.
        strategy: Distribute the training over devices in this way.
        device: Train on `cpu`, `cuda`, `cuda:1` or `mps`; `auto` prefers an accelerator.
        device_ids: Put replicas on these GPUs, with `dp`. [default: all]
        output_device: Gather the outputs on this GPU, with `dp`. [default: the first]
        devices: Put the layers on these devices in order, with `model-parallel`.
        updates: With `parameter-server`, apply gradients as they arrive, one batch per worker
            (`asynchronous`), or once per batch, split over all workers (`synchronous`).
        staleness: Let the weights of a worker lag this many updates, with `parameter-server`.
        sync_batchnorm: Compute batch norm over the whole batch, not per process, with `ddp`.
        save: Save this content in checkpoints; only `full` resumes exactly.
        sharded: Save a torch.distributed.checkpoint folder instead of one file, with `fsdp`.
        save_every: Save `step-%08d.pth` after this many steps.
        save_seconds: Save `step-%08d.pth` after this many seconds.
        keep: Keep this many `step-%08d.pth` files.
        resume: Resume from this checkpoint or run folder; `auto` uses the newest in `out`.
        overwrite: Remove the checkpoints of an earlier run from `out`.
        trace_batches: Print the input and output shapes of each replica.
        tensorboard: Also write TensorBoard event files, if tensorboard is installed.
    """

    out: str
    data: str = "friedman"
    target: str | None = None
    model: str = "mlp:16,32"
    loss: str | None = None
    dtype: str = "float32"
    seed: int = 0
    epochs: int = 10
    max_steps: int | None = None
    batch_size: int = 32
    workers: int = 0
    accumulate: int = 1
    optimizer: str = "adam"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"
    step_size: int = 10
    gamma: float = 0.1
    warmup: int = 0
    amp: str | None = None
    clip: float | None = None
    ema: float | None = None
    patience: int | None = None
    compile: bool = False
    strategy: str = "single"
    device: str = "auto"
    device_ids: tuple[int, ...] = ()
    output_device: int | None = None
    devices: tuple[str, ...] = ()
    updates: str = "asynchronous"
    staleness: int = 1
    sync_batchnorm: bool = False
    save: str = "full"
    sharded: bool = False
    save_every: int | None = None
    save_seconds: float | None = None
    keep: int = 3
    resume: str | None = None
    overwrite: bool = False
    trace_batches: bool = False
    tensorboard: bool = True

    def __post_init__(self) -> None:
        """Check every option by itself and together with the others.

        Raises:
            UsageError: if a value is wrong, or has no effect with the other options.
        """
        for name in ("out", "resume"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        check_options(vars(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain data, as stored in checkpoints."""
        return asdict(self)
