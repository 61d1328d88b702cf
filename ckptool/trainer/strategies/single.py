"""One process on one device, without a wrapper."""

from __future__ import annotations

from typing import ClassVar

import torch

from ckptool.trainer.devices import device_of
from ckptool.trainer.strategies.base import Strategy

__all__ = ["Single"]


class Single(Strategy):
    """`--device cpu`, `cuda:1`, `mps`; names are the model's own, tags those of the device."""

    name: ClassVar[str] = "single"

    @property
    def device(self) -> torch.device:
        """The device of the configuration."""
        return device_of(self.config.device)
