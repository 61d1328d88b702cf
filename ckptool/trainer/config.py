"""What a run is to do: every option, checked when it is made. Torch is not needed for it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import Any

from ckptool.errors import TrainingError, UsageError
from ckptool.factories import FACTORY

__all__ = ["CHOICES", "SPREAD", "TrainConfig", "check", "require_shared", "usual_batch_size"]

_DATA = ("random", "friedman", "digits")
_MLP = re.compile(r"mlp(?::([1-9]\d{0,8}(?:,[1-9]\d{0,8})*))?", re.ASCII)
_USUAL = [16, 32]


def csv_path(data: str) -> str | None:
    """Return the path of `csv:PATH`; None: it is another word."""
    return data[4:] if data.startswith("csv:") else None


def data_fault(data: str) -> str | None:
    """Return what is wrong with a word for data; the file is looked for when it is read."""
    if data in _DATA or csv_path(data) or (data[:4] != "csv:" and FACTORY.fullmatch(data)):
        return None
    return f"is none of {', '.join(_DATA)}, csv:PATH, module:factory"


def loss_fault(loss: str) -> str | None:
    """Return what is wrong with a word for a loss; torch is asked for it later."""
    if loss.isidentifier() or FACTORY.fullmatch(loss):
        return None
    return "is neither a name in torch.nn.functional nor module:function"


def hidden_widths(model: str) -> list[int] | None:
    """Return the widths of the hidden layers of `mlp:16,32`; None: it is another word."""
    found = _MLP.fullmatch(model)
    if found is None:
        return None
    return [int(width) for width in found[1].split(",")] if found[1] else _USUAL


def model_fault(model: str) -> str | None:
    """Return what is wrong with a word for a model."""
    if model in ("linear", "cnn") or hidden_widths(model) or FACTORY.fullmatch(model):
        return None
    if model.startswith("mlp:"):
        return "has widths that are no whole numbers from 1 on, as in mlp:16,32"
    return "is none of linear, mlp:16,32, cnn, module:factory"


STRATEGIES = ("single", "dp", "ddp", "model-parallel", "fsdp", "parameter-server", "xla")
SPREAD = ("ddp", "fsdp", "parameter-server")
"""Those that run in several processes."""
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
"""What each option that is a word may be."""
_LARGEST = 3.4e38
_COUNTS = (
    *("epochs", "max_steps", "batch_size", "accumulate"),
    *("step_size", "keep", "save_every", "patience"),
)
_BOUNDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_COUNTS, (lambda value: value >= 1, "must be at least 1")),
    **dict.fromkeys(("lr", "clip", "save_seconds"), (lambda value: value > 0, "must be above 0")),
    **dict.fromkeys(
        ("weight_decay", "gamma", "warmup", "staleness", "output_device", "workers"),
        (lambda value: value >= 0, "must not be below 0"),
    ),
    **dict.fromkeys(
        ("ema", "momentum"), (lambda value: 0 <= value < 1, "must be from 0 to below 1")
    ),
    "seed": (lambda value: -(2**63) <= value < 2**63, "must be from -2**63 to below 2**63"),
    "resume": (bool, "must be a checkpoint, a folder or auto"),
    "out": (bool, "must be a folder"),
}
_WORDS = {"data": data_fault, "model": model_fault, "loss": loss_fault}
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
}
"""Options that mean something with another one alone; their defaults ask for nothing anywhere."""
_NOT_WITH = {"workers": ("parameter-server",), "compile": ("dp", "xla")}
"""Options that a strategy has no use for: a server's workers do not know which batch is next;
replicas share no compiled code, and XLA compiles everything itself."""

_KINDS: dict[str, tuple[Any, str]] = {
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
    "bool": (bool, "True or False"),
    "str": (str, "a text"),
    "tuple[str, ...]": ((tuple, list), "several texts"),
    "tuple[int, ...]": ((tuple, list), "several whole numbers"),
}
"""What each annotation below takes, and what that is called."""

Spelling = Callable[[str, Any], str]
"""How an option and its value are written where they were given."""


def usual_batch_size(data: str) -> int:
    """Return the default batch size: 30 for `random`, as in the tutorial of DataParallel."""
    return 30 if data == "random" else 32


def require_shared(batch_size: int, processes: int) -> None:
    """Check that every process has a sample of a batch.

    Raises:
        TrainingError: there are more processes than samples.
    """
    if batch_size < processes:
        raise TrainingError(
            f"a batch of {batch_size} sample{'s' * (batch_size > 1)} is not to be shared by "
            f"{processes} processes",
            hint=f"--batch-size {processes} or more, or fewer processes",
        )


def as_argument(name: str, value: Any) -> str:
    """Return an option as Python has it: `batch_size=0`."""
    return f"{name}={value!r}"


def check(values: Mapping[str, Any], spelled: Spelling = as_argument) -> None:
    """Check the options of a run, each by itself and beside the others.

    Args:
        values: All of `TrainConfig`, by name.
        spelled: How the message names them.

    Raises:
        UsageError: one is out of its range.
    """
    known = {field.name: field for field in fields(TrainConfig)}
    for name, value in values.items():
        fault = _unlike(value, str(known[name].type)) or (
            None if value is None else _fault(name, value)
        )
        if fault is not None:
            raise UsageError(f"{spelled(name, value)} {fault}")
    for name, others in _ONLY_WITH.items():
        for other, wanted in others.items():
            if values[name] != known[name].default and values[other] != wanted:
                raise UsageError(
                    f"{spelled(name, values[name])} is for {spelled(other, wanted)}, and this is "
                    f"{spelled(other, values[other])}"
                )
    for name, strategies in _NOT_WITH.items():
        if values[name] and values["strategy"] in strategies:
            raise UsageError(
                f"{spelled(name, values[name])} is not for "
                f"{spelled('strategy', values['strategy'])}"
            )
    if values["keep"] != known["keep"].default and not (
        values["save_every"] or values["save_seconds"]
    ):
        raise UsageError(
            f"{spelled('keep', values['keep'])} is for checkpoints by step, and none is asked for",
            hint=f"{spelled('save_every', 100)} writes one every 100 steps",
        )
    if values["target"] is not None and csv_path(values["data"]) is None:
        raise UsageError(
            f"{spelled('target', values['target'])} is for {spelled('data', 'csv:PATH')}, and this "
            f"is {spelled('data', values['data'])}"
        )


def _unlike(value: Any, kind: str) -> str | None:
    kind, _, none = kind.partition(" | ")
    types, said = _KINDS[kind]
    if value is None:
        return None if none else f"is not {said}"
    is_alike = isinstance(value, types) and (types is bool or not isinstance(value, bool))
    if is_alike and kind.startswith("tuple"):
        inside = kind.removeprefix("tuple[").removesuffix(", ...]")
        is_alike = all(_unlike(one, inside) is None for one in value)
    return None if is_alike else f"is not {said}"


def _fault(name: str, value: Any) -> str | None:
    if name in _WORDS:
        return _WORDS[name](value)
    if name in CHOICES and value not in CHOICES[name]:
        return f"is none of {', '.join(CHOICES[name])}"
    if isinstance(value, float) and not math.isfinite(value):
        return "is no finite number"
    if isinstance(value, (int, float)) and abs(value) > _LARGEST:
        return "is beyond what float32 holds"
    is_within, rule = _BOUNDS.get(name, (None, ""))
    return None if is_within is None or is_within(value) else rule


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run of `Trainer`; the options of `ckptool train` by the same names, with these texts.

    A `Trainer` that is given data or a model has no use for `data`, `target` or `model`.

    Attributes:
        out: The folder for checkpoints and figures of the run.
        strategy: How the training is spread over devices.
        data: `random`, `friedman`, `digits`, `csv:PATH` or `module:factory`.
        target: The column of a CSV to predict [default: the last].
        loss: The loss: a name in `torch.nn.functional`, or `module:function` [default: that of the
            data].
        model: `linear`, `mlp:16,32`, `cnn` or `module:factory`.
        compile: Compile the model with `torch.compile`.
        epochs: How many times to go through the data.
        max_steps: Stop after this many optimizer steps.
        batch_size: Samples in a batch, over all devices together.
        workers: Processes that prepare batches ahead, in pinned memory for a GPU.
        accumulate: How many batches to accumulate gradients over.
        seed: The seed of the weights, the order of the samples and dropout.
        dtype: The type of weights and features.
        optimizer: The optimizer.
        lr: The learning rate, before the schedule.
        momentum: The momentum of `sgd`.
        weight_decay: The weight decay of the optimizer.
        schedule: The learning rate over time; `cosine` and `linear` fall to 0 at the last step.
        step_size: With the schedule `step`: epochs between two changes of the rate.
        gamma: With the schedule `step`: the factor of each change.
        warmup: Steps in which the rate rises linearly, before the schedule.
        amp: Automatic mixed precision: `bf16`, or `fp16` with a gradient scaler.
        clip: The largest norm of all gradients together.
        ema: The decay of a moving average of the weights, for example 0.999.
        patience: Stop after this many epochs without a lower validation loss.
        save: What a checkpoint holds; only `full` resumes exactly.
        sharded: With `fsdp`: save a folder of torch.distributed.checkpoint instead of one file.
        save_every: Save `step-%08d.pth` after this many steps.
        save_seconds: Save `step-%08d.pth` after this many seconds.
        keep: How many files `step-%08d.pth` to keep.
        resume: The checkpoint or run folder to resume from; `auto`: the newest in `out`, if any.
        overwrite: Remove what an earlier run left in `out`; without it that is an error.
        sync_batchnorm: With `ddp`: batch norm over the whole batch, not per process.
        device: `cpu`, `cuda`, `cuda:1`, `mps`; `auto`: an accelerator if there is one.
        devices: With `model-parallel`: the devices of the layers, in order.
        device_ids: With `dp`: the GPUs of the replicas [default: all].
        output_device: With `dp`: the GPU that gathers the outputs [default: the first].
        updates: With `parameter-server`: `asynchronous` applies gradients as they arrive, a batch
            per worker; `synchronous` splits each batch over all workers and updates once.
        staleness: With `parameter-server`: how many updates the weights of a worker may lag behind.
        trace_batches: Print what each replica gets and returns.
        tensorboard: Write TensorBoard event files next to the figures, if it is installed.
    """

    out: str
    strategy: str = "single"
    data: str = "friedman"
    target: str | None = None
    loss: str | None = None
    model: str = "mlp:16,32"
    compile: bool = False
    epochs: int = 10
    max_steps: int | None = None
    batch_size: int = 32
    workers: int = 0
    accumulate: int = 1
    seed: int = 0
    dtype: str = "float32"
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
    save: str = "full"
    sharded: bool = False
    save_every: int | None = None
    save_seconds: float | None = None
    keep: int = 3
    resume: str | None = None
    overwrite: bool = False
    sync_batchnorm: bool = False
    device: str = "auto"
    devices: tuple[str, ...] = ()
    device_ids: tuple[int, ...] = ()
    output_device: int | None = None
    updates: str = "asynchronous"
    staleness: int = 1
    trace_batches: bool = False
    tensorboard: bool = True

    def __post_init__(self) -> None:
        """Check every value by itself and beside the others.

        Raises:
            UsageError: one is of another type, or out of its range.
        """
        for name in ("out", "resume"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        check(vars(self))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, which a checkpoint keeps."""
        return asdict(self)
