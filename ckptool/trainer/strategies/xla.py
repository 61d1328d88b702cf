"""One TPU core, or whatever torch_xla computes on: operations are collected, then run as one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

import torch

from ckptool.errors import TrainingError
from ckptool.trainer.strategies.base import Step, StepResult, Strategy
from ckptool.trainer.trees import moved

__all__ = ["Xla"]

_CPU = torch.device("cpu")
_INSTALL = (
    "pip install 'torch_xla[tpu]==2.9.0' torch==2.9.0, where there is a TPU: each release is for "
    "the torch of its own number"
)


class Xla(Strategy):
    """One process on one device; what it saves is moved to the CPU, as `xm.save` does it.

    Nothing is computed before a value is asked for or `mark_step` is called. Shapes that are new
    are compiled: the smaller last batch of an epoch is one.
    """

    name: ClassVar[str] = "xla"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Have torch_xla choose the device.

        Raises:
            TrainingError: it is not installed, or finds no device.
        """
        try:
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
        try:
            self._device: torch.device = self._xm.xla_device()
        except RuntimeError as error:
            said = str(error).strip().partition("\n")[0]
            raise TrainingError(
                f"torch_xla finds no device: {said}", hint="PJRT_DEVICE=TPU, or CPU to try it"
            ) from error
        self._xm.set_rng_state(self.config.seed, str(self._device))
        yield

    @property
    def device(self) -> torch.device:
        """The one that torch_xla has chosen."""
        return self._device

    def update(self, step: Step, loss_sum: float) -> StepResult:
        """Take the gradients, and have all that was collected run."""
        result = super().update(step, loss_sum)
        self._xm.mark_step()
        return result

    def wrapped_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """On the CPU: a file with tensors of a TPU is of no use elsewhere."""
        model, optimizer = super().wrapped_state()
        return moved(model, _CPU), moved(optimizer, _CPU)
