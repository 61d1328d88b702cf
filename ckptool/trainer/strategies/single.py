"""One process, one device: nothing is wrapped, every sample is its own."""

from __future__ import annotations

from typing import ClassVar

import torch

from ckptool.trainer.devices import device_of
from ckptool.trainer.strategies.base import Strategy

__all__ = ["Single"]


class Single(Strategy):
    """`--device cpu`, `cuda:1`, `mps`; names as the model has them, tags as the device."""

    name: ClassVar[str] = "single"

    @property
    def device(self) -> torch.device:
        """The one that the configuration names."""
        return device_of(self.config.device)
