"""`nn.parallel.DistributedDataParallel`: a process a device, gradients averaged between them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar, cast

import torch
from torch import nn

from ckptool.errors import TrainingError
from ckptool.trainer.data import Dataset, Loss
from ckptool.trainer.devices import device_of
from ckptool.trainer.events import Note
from ckptool.trainer.processes import connected, local_rank
from ckptool.trainer.strategies.base import Strategy
from ckptool.trainer.tuning import random_state, restore_random_state

__all__ = ["Distributed", "DistributedDataParallel"]

_TRIAL = 2
"""Samples of a trial: normalisation over a batch takes no single one."""


class Distributed(Strategy):
    """A process a device, each with a share of each batch; torch's wrapper averages gradients."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Connect the processes that the launcher has started."""
        with connected(self.device) as self.world:
            yield

    @property
    def device(self) -> torch.device:
        """That of this process: the GPU of its number on this machine, or the CPU."""
        return device_of(self.config.device, local_rank=local_rank())

    @property
    def gradient_scale(self) -> float:
        """The wrapper divides the sum of gradients by the number of processes."""
        return float(self.world.size)


class DistributedDataParallel(Distributed):
    """Every process has the whole model, and a share of each batch; names begin with `module.`."""

    name: ClassVar[str] = "ddp"

    def wrap(self, model: nn.Module) -> None:
        """Take the model; batch norm is of each process's share, or of all with SyncBatchNorm.

        Raises:
            TrainingError: that is asked for on a CPU, where torch has none.
        """
        if self.config.sync_batchnorm:
            if self.device.type == "cpu":
                raise TrainingError(
                    "torch's SyncBatchNorm computes on GPUs alone, and this is the CPU",
                    hint="--strategy single takes batch norm of the whole batch",
                )
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        super().wrap(model)
        if self.world.size > 1 and any(map(_is_of_a_share, model.modules())):
            self.observer.tell(
                Note(
                    "batch norm takes its figures of each process's share alone, and trains "
                    "otherwise than in one process: on GPUs --sync-batchnorm takes the whole batch"
                )
            )

    def attend(self, dataset: Dataset, validation: Dataset | None, loss: Loss) -> None:
        """Wrap the model, in the order in which gradients of the first samples come.

        DDP gathers gradients into buckets, which are summed as soon as they are full, and lays
        them out anew after its first backward pass. A sum of three addends or more depends on where
        in its bucket it lies; so that pass is a trial, in a run that goes on from a checkpoint too,
        and all steps of both are summed alike. The trial also shows whether there are parameters
        without a gradient, which DDP is to look for in each step, and otherwise had better not.
        """
        super().attend(dataset, validation, loss)
        rows = range(min(_TRIAL, len(dataset)))
        with _unchanged(self.module):
            self._loss_of(next(self._batches(dataset, [rows])), rows).backward()  # type: ignore[no-untyped-call]
            trained = [one for one in self.module.parameters() if one.requires_grad]
            is_partial = any(one.grad is None for one in trained)
            self.module.zero_grad()
            self.model = nn.parallel.DistributedDataParallel(
                self.module,
                device_ids=[self.device.index] if self.device.type == "cuda" else None,
                find_unused_parameters=is_partial,
            )
            self._loss_of(next(self._batches(dataset, [rows])), rows).backward()  # type: ignore[no-untyped-call]
            self.module.zero_grad()

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Keep gradients in this process until the last batch of a step."""
        wrapper = cast("nn.parallel.DistributedDataParallel", self.model)
        return nullcontext() if is_last else wrapper.no_sync()


def _is_of_a_share(module: nn.Module) -> bool:
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_norm and not isinstance(module, nn.SyncBatchNorm)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Leave buffers, as running statistics are, and random numbers as they were."""
    buffers = [(one, one.clone()) for one in module.buffers()]
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
