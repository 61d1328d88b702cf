"""What turns gradients into weights: optimizer, learning rate, scaler, moving average."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ckptool.trainer.averaging import Average
from ckptool.trainer.config import TrainConfig

__all__ = ["Tuning", "rate_factor"]


class Tuning:
    """All that changes with every step, of one model.

    Attributes:
        optimizer: Over the model's parameters.
        schedule: Its learning rate, by step.
        scaler: Of `amp="fp16"`; else one that does nothing.
        average: The moving average of the weights; None without `ema`.
    """

    def __init__(self, config: TrainConfig, module: nn.Module, *, steps: int, epoch: int) -> None:
        """Over the parameters of `module`, for `steps` in all, of which `epoch` make an epoch."""
        self.config = config
        self.optimizer = _optimizer(config, module)
        self.schedule = LambdaLR(
            self.optimizer, lambda done: rate_factor(config, done, steps=steps, epoch=epoch)
        )
        device = next((one.device.type for one in module.parameters()), "cpu")
        self.scaler = torch.amp.GradScaler(device, enabled=config.amp == "fp16")
        self.average = None if config.ema is None else Average(module, config.ema)

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """Around the forward pass: the lower precision of `amp`, or nothing."""
        dtype = torch.float16 if self.config.amp == "fp16" else torch.bfloat16
        return torch.autocast(device_type, dtype=dtype, enabled=self.config.amp is not None)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call backward of."""
        return self.scaler.scale(loss)

    def step(self, clip: Callable[[float], None]) -> None:
        """Take the gradients that are there into the weights, and forget them."""
        if self.config.clip is not None:
            self.scaler.unscale_(self.optimizer)
            clip(self.config.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        if self.average is not None:
            self.average.update()

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the optimizer's own state, as plain data and tensors."""
        state: dict[str, Any] = {"scheduler": self.schedule.state_dict()}
        if self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        if self.average is not None:
            state["ema"] = self.average.state()
        return state

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Go on from what `state` gave; returned are the names of what it does not hold."""
        without = []
        for name, wanted, take in (
            ("scheduler", True, self.schedule.load_state_dict),
            ("scaler", self.scaler.is_enabled(), self.scaler.load_state_dict),
            ("ema", self.average is not None, self._restore_average),
        ):
            if wanted and name in state:
                take(dict(state[name]))
            elif wanted:
                without.append(name)
        return without

    def _restore_average(self, state: dict[str, Any]) -> None:
        if self.average is not None:
            self.average.restore(state)


def rate_factor(config: TrainConfig, done: int, *, steps: int, epoch: int) -> float:
    """What the learning rate is multiplied with after `done` of `steps` steps."""
    if done < config.warmup:
        return (done + 1) / (config.warmup + 1)
    if config.schedule == "step":
        return config.gamma ** (done // (config.step_size * epoch))
    share = min(1.0, (done - config.warmup) / max(1, steps - config.warmup))
    if config.schedule == "cosine":
        return (1 + math.cos(math.pi * share)) / 2
    return 1 - share if config.schedule == "linear" else 1.0


def _optimizer(config: TrainConfig, module: nn.Module) -> torch.optim.Optimizer:
    parameters = [one for one in module.parameters() if one.requires_grad]
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=config.momentum, **options)
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, **options)
