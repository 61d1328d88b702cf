"""One TPU core, or whatever torch_xla computes on: operations are collected, then run as one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import nn

from ckptool.errors import TrainingError, UsageError
from ckptool.trainer.data import moved
from ckptool.trainer.events import Note
from ckptool.trainer.strategies.base import Step, StepResult, Strategy

__all__ = ["Xla"]

_CPU = torch.device("cpu")
_INSTALL = (
    "pip install 'torch_xla[tpu]==2.9.0' torch==2.9.0, where there is a TPU: each release is for "
    "the torch of its own number"
)


class Xla(Strategy):
    """One process on one device; what it saves is moved to the CPU, as `xm.save` does it.

    Nothing is computed before a value is asked for or `torch_xla.sync` is called. Shapes that are
    new are compiled: the smaller last batch of an epoch is one.
    """

    name: ClassVar[str] = "xla"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Have torch_xla choose the device.

        Raises:
            TrainingError: it is not installed, or finds no device.
        """
        try:
            self._xla = import_module("torch_xla")
            self._xm = import_module("torch_xla.core.xla_model")
        except ImportError as error:
            raise TrainingError(
                f"strategy 'xla' computes by torch_xla, which cannot be imported: {error}",
                hint=_INSTALL,
            ) from error
        if self.config.amp == "fp16":
            raise TrainingError(
                "a TPU has no float16 to compute in", hint="--amp bf16 needs no scaler"
            )
        if (
            torch.device(self.config.device if self.config.device != "auto" else "xla").type
            != "xla"
        ):
            raise UsageError(
                f"strategy 'xla' takes the device that torch_xla has, and not {self.config.device}",
                hint="--device xla, or none; PJRT_DEVICE=CPU has torch_xla compute on the CPU",
            )
        try:
            self._device: torch.device = self._xla.device()
        except (RuntimeError, OSError) as error:  # OSError: there is no libtpu
            said = str(error).strip().partition("\n")[0]
            raise TrainingError(
                f"torch_xla finds no device: {said}",
                hint="pip install 'torch_xla[tpu]' brings the library of TPUs; PJRT_DEVICE=CPU "
                "computes without one",
            ) from error
        kind = self._xm.xla_device_hw(self._device)
        if kind != "TPU":
            self.observer.tell(Note(f"there is no TPU: {self._device} is this machine's {kind}"))
        self._xm.set_rng_state(self.config.seed, str(self._device))
        yield

    @property
    def device(self) -> torch.device:
        """The one that torch_xla has chosen."""
        return self._device

    def update(self, step: Step, loss_sum: float) -> StepResult:
        """Take the gradients, and have all that was collected run."""
        result = super().update(step, loss_sum)
        self._xla.sync()
        return result

    def wrapped_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """On the CPU: a file with tensors of a TPU is of no use elsewhere."""
        model, optimizer = super().wrapped_state()
        return moved(model, _CPU), moved(optimizer, _CPU)

    def whole_module(self) -> nn.Module:
        """A copy on the CPU."""
        return copy.deepcopy(self.model).to(_CPU)
