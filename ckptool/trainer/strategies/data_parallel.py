"""`nn.DataParallel` and `nn.parallel.DistributedDataParallel`: a replica on each device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch import nn

from ckptool.errors import TrainingError, UsageError
from ckptool.trainer.data import Dataset, Loss
from ckptool.trainer.devices import resolve_device
from ckptool.trainer.events import Note
from ckptool.trainer.processes import connect_processes, read_local_rank
from ckptool.trainer.strategies.base import Strategy
from ckptool.trainer.tuning import get_random_state, restore_random_state

_TRIAL = 2
"""The number of samples of a trial; normalization over a batch needs more than one."""


class DataParallel(Strategy):
    """Each batch is split over the replicas, as by `torch.chunk`; names begin with `module.`.

    The model is on the first GPU; every forward pass copies it to the others and gathers their
    outputs on `output_device`. Without GPUs the wrapper only calls the model.
    """

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of the replicas: `device_ids`, or all GPUs, or the CPU.

        Raises:
            TrainingError: there is no such GPU.
            UsageError: `device` is not a GPU, or a GPU is named twice.
        """
        ids, first = self.config.device_ids, resolve_device(self.config.device)
        if ids and self.config.device == "auto":
            first = resolve_device(f"cuda:{ids[0]}")
        if first.type != "cuda":
            if ids or self.config.output_device is not None:
                raise UsageError(f"device_ids and output_device need GPUs, but device is {first}")
            return (first,)
        if not ids and first.index != 0:  # the device is this one; cuda and cuda:0 mean all GPUs
            ids = (first.index,)
        devices = tuple(
            resolve_device(f"cuda:{index}") for index in ids or range(torch.cuda.device_count())
        )
        if len(set(devices)) < len(devices):
            raise UsageError(f"device_ids {', '.join(map(str, ids))} has a GPU twice")
        return devices

    def wrap(self, model: nn.Module) -> None:
        """Wrap the model in `nn.DataParallel`, with a replica on each GPU; on the CPU with none.

        Raises:
            TrainingError: there is no replica on `output_device`.
        """
        super().wrap(model)
        if self.device.type == "cuda":
            ids, output = [device.index for device in self.devices], self.config.output_device
            if output not in (None, *ids):
                raise TrainingError(
                    f"outputs cannot be gathered on cuda:{output}, which has no replica",
                    hint="choose --output-device from --device-ids",
                )
            self.model = nn.DataParallel(self.module, ids, output)
            return
        # Made with the module, the wrapper would use every GPU that torch sees, although the CPU is
        # requested. Without devices it only calls the module.
        self.model = wrapper = nn.DataParallel[nn.Module](nn.Identity())
        wrapper.module, wrapper.device_ids = self.module, []


class Distributed(Strategy):
    """One process for each device, with a part of each batch; a wrapper averages gradients."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The GPU with the number of this process on the machine, or the CPU."""
        return (resolve_device(self.config.device, local_rank=read_local_rank()),)

    @contextmanager
    def connect(self) -> Iterator[None]:
        """Connect the processes that the launcher started."""
        with connect_processes(self.device) as self.world:
            self.processes = self.world.size
            yield


class DistributedDataParallel(Distributed):
    """Every process has the whole model and a part of each batch; names begin with `module.`."""

    def wrap(self, model: nn.Module) -> None:
        """Move the model to the device, with SyncBatchNorm if `sync_batchnorm` is set.

        Raises:
            TrainingError: SyncBatchNorm does not work on the CPU.
        """
        if self.config.sync_batchnorm:
            if self.device.type == "cpu":
                raise TrainingError(
                    "torch's SyncBatchNorm only works on GPUs",
                    hint="use --strategy single for batch norm over the whole batch",
                )
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        super().wrap(model)
        if self.world.size > 1 and any(map(_is_local_batch_norm, model.modules())):
            self.observer.tell(
                Note(
                    "batch norm uses only the part of the batch in its own process; to use the "
                    "whole batch on GPUs, add --sync-batchnorm"
                )
            )

    def set_data(self, dataset: Dataset, validation: Dataset | None, loss: Loss) -> None:
        """Wrap the model after a trial backward pass, and do one trial pass with the wrapper.

        DDP sums gradients in buckets, whose layout it changes after its first backward pass. A sum
        of three addends or more depends on the place in the bucket; with a trial pass all steps of
        a run, resumed or not, have the same layout. The trial before shows whether parameters have
        no gradient, which DDP must then search for in each step.
        """
        super().set_data(dataset, validation, loss)
        rows = range(min(_TRIAL, len(dataset)))

        def run_trial() -> None:
            """Pass the first samples forward and backward through `self.model`."""
            batch = next(self._load_batches(dataset, [rows]))
            self._loss_of_batch(batch, rows).backward()  # type: ignore[no-untyped-call]

        with _preserve_state(self.module):
            run_trial()
            trained = [
                parameter for parameter in self.module.parameters() if parameter.requires_grad
            ]
            has_unused = any(parameter.grad is None for parameter in trained)
            self.module.zero_grad()
            self.model = nn.parallel.DistributedDataParallel(
                self.module,
                device_ids=[self.device.index] if self.device.type == "cuda" else None,
                find_unused_parameters=has_unused,
            )
            run_trial()
            self.module.zero_grad()

    def accumulate(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Let gradients stay in this process until the last batch of a step."""
        wrapper = cast("nn.parallel.DistributedDataParallel", self.model)
        return nullcontext() if is_last else wrapper.no_sync()


def _is_local_batch_norm(module: nn.Module) -> bool:
    """Return True for batch norm that uses only the samples of its own process."""
    is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
    return is_norm and not isinstance(module, nn.SyncBatchNorm)


@contextmanager
def _preserve_state(module: nn.Module) -> Iterator[None]:
    """Restore buffers, such as running statistics, and the random state at the end."""
    buffers = [(tensor, tensor.clone()) for tensor in module.buffers()]
    state = get_random_state()
    try:
        yield
    finally:
        restore_random_state(state)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
