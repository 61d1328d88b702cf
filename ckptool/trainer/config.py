"""What a run is to do: every option, checked when it is made. Torch is not needed for it."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any

from ckptool.errors import UsageError

__all__ = ["OPTIMIZERS", "SAVES", "SCHEDULES", "STRATEGIES", "TrainConfig"]

STRATEGIES = ("single", "dp", "ddp", "model-parallel", "fsdp", "parameter-server", "xla")
SPREAD = ("ddp", "fsdp", "parameter-server")
"""Those that run in several processes."""
SAVES = ("full", "wrapped", "unwrapped", "module")
OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("constant", "cosine", "linear", "step")
_CHOICES = {
    "strategy": STRATEGIES,
    "save": SAVES,
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "dtype": ("float32", "float64"),
    "amp": (None, "bf16", "fp16"),
}
_AT_LEAST_ONE = ("epochs", "batch_size", "accumulate", "step_size", "keep")
_POSITIVE = ("lr", "clip", "save_seconds")
_NOT_NEGATIVE = ("weight_decay", "momentum", "warmup", "staleness", "max_steps")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run of `Trainer`; the options of `ckptool train` by the same names.

    Attributes:
        out: The folder of the run's checkpoints and figures.
        strategy: How it is spread over devices: one of `STRATEGIES`.
        data: `random`, `friedman`, `digits` or `csv:PATH`; not used where data are given.
        target: The column of a CSV that is predicted; None: the last.
        model: `linear`, `mlp:16,32`, `cnn` or `module:factory`; not used where a model is given.
        epochs: How many times the data are gone through.
        max_steps: The end after that many steps of the optimizer, if it comes first.
        batch_size: Samples of one batch over all devices.
        accumulate: Batches whose gradients make one step.
        seed: Of the weights, the order of the samples, and what is random in the model.
        dtype: Of weights and features: `float32` or `float64`.
        optimizer: `adam`, `adamw` or `sgd`.
        lr: Its learning rate, before the schedule.
        momentum: Of SGD.
        weight_decay: Of the optimizer.
        schedule: `constant`, `cosine` and `linear` (to 0 at the last step), or `step`.
        step_size: Epochs after which `step` multiplies the rate by `gamma`.
        gamma: See `step_size`.
        warmup: Steps over which the rate rises linearly to its own, before the schedule.
        amp: Automatic mixed precision: `bf16`, or `fp16` with a gradient scaler.
        clip: The largest norm of all gradients together.
        ema: The decay of a moving average of the weights, as 0.999.
        patience: Epochs without a lower validation loss after which training stops.
        save: What a checkpoint is: one of `SAVES`. Runs go on from `full` exactly.
        sharded: A folder of torch.distributed.checkpoint, of `fsdp`, instead of one file.
        save_every: Steps after which `step-%08d.pth` is written.
        save_seconds: Seconds after which it is.
        keep: How many of those are kept.
        resume: A checkpoint to go on from; `auto`: the newest of `out`, if there is one.
        device: `cpu`, `cuda`, `cuda:1`, `mps`; `auto`: an accelerator where there is one.
        devices: Of `model-parallel`: over which the layers are spread, in order.
        device_ids: Of `dp`: the GPUs of the replicas; empty: all.
        output_device: Of `dp`: where outputs are gathered; None: the first of `device_ids`.
        staleness: Of `parameter-server`: how many updates a worker's weights may lag behind.
        trace_batches: Tell what each replica sees and gives.
        tensorboard: Write TensorBoard's event files beside the figures, where it is installed.
    """

    out: str
    strategy: str = "single"
    data: str = "friedman"
    target: str | None = None
    model: str = "mlp:16,32"
    epochs: int = 10
    max_steps: int | None = None
    batch_size: int = 32
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
    device: str = "auto"
    devices: tuple[str, ...] = ()
    device_ids: tuple[int, ...] = ()
    output_device: int | None = None
    staleness: int = 1
    trace_batches: bool = False
    tensorboard: bool = True

    def __post_init__(self) -> None:
        """Check every value by itself and beside the others.

        Raises:
            UsageError: one is out of its range; the message names option and range.
        """
        object.__setattr__(self, "out", os.fspath(self.out))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                words = ", ".join(str(word) for word in choices if word is not None)
                raise UsageError(f"{name} is {getattr(self, name)!r}, and not one of {words}")
        self._check_numbers()
        self._check_together()

    def _check_numbers(self) -> None:
        for name in (*_AT_LEAST_ONE, *_POSITIVE, *_NOT_NEGATIVE, "save_every", "patience", "ema"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{name} is {value}, which is no finite number")
            if name in (*_AT_LEAST_ONE, "save_every", "patience") and value < 1:
                raise UsageError(f"{name} is {value}, and must be at least 1")
            if name in _POSITIVE and value <= 0:
                raise UsageError(f"{name} is {value}, and must be above 0")
            if name in _NOT_NEGATIVE and value < 0:
                raise UsageError(f"{name} is {value}, and must not be below 0")
            if name == "ema" and not 0 <= value < 1:
                raise UsageError(f"ema is {value}, and must be from 0 to below 1")

    def _check_together(self) -> None:
        if self.sharded and (self.strategy != "fsdp" or self.save != "full"):
            raise UsageError("sharded is for strategy 'fsdp' and save 'full'")
        if self.momentum and self.optimizer != "sgd":
            raise UsageError(f"momentum is for optimizer 'sgd', and this is {self.optimizer!r}")
        for name, strategy in (
            ("devices", "model-parallel"),
            ("device_ids", "dp"),
            ("output_device", "dp"),
        ):
            if getattr(self, name) not in ((), None) and self.strategy != strategy:
                raise UsageError(f"{name} is for strategy {strategy!r}, not {self.strategy!r}")

    def to_dict(self) -> dict[str, Any]:
        """As plain data, which a checkpoint keeps."""
        return asdict(self)
