"""`nn.parallel.DistributedDataParallel`: a process a device, gradients averaged between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar, cast

import torch
from torch import nn

from ckptool.trainer.devices import device_of
from ckptool.trainer.processes import connected, local_rank
from ckptool.trainer.strategies.base import Strategy

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(Strategy):
    """Every process has the whole model, and a share of each batch; names begin with `module.`."""

    name: ClassVar[str] = "ddp"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Connect the processes that the launcher has started."""
        with connected(self.device) as self.world:
            yield

    @property
    def device(self) -> torch.device:
        """That of this process: the GPU of its number on this machine, or the CPU."""
        return device_of(self.config.device, local_rank=local_rank())

    def wrap(self, model: nn.Module) -> None:
        """Wrap the model; a hook on each gradient starts the exchange as soon as it is there.

        With `find_unused_parameters` torch keeps the order in which gradients lie in its buffers:
        a run that goes on from a checkpoint adds them up as the one that was never stopped did.
        """
        super().wrap(model)
        ids = [self.device.index] if self.device.type == "cuda" else None
        self.model = nn.parallel.DistributedDataParallel(
            self.module, device_ids=ids, find_unused_parameters=True
        )

    @property
    def gradient_scale(self) -> float:
        """DDP divides the sum of gradients by the number of processes."""
        return float(self.world.size)

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients stay in this process until the last batch of a step."""
        wrapper = cast("nn.parallel.DistributedDataParallel", self.model)
        return nullcontext() if is_last else wrapper.no_sync()
