"""All cores of a TPU, or other devices of torch_xla: one program, partitioned by SPMD."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ckptool.errors import TrainingError, UsageError
from ckptool.trainer.data import move_tensors
from ckptool.trainer.events import Note
from ckptool.trainer.strategies.base import StepResult, Strategy, TrainingStep

_CPU = torch.device("cpu")


class Xla(Strategy):
    """One process on all devices of this machine; tensors are moved to the CPU to be saved.

    Each device has all weights and a part of the batch; XLA's partitioner sums the gradients. For
    torch these are one device, `xla:0`, and every number is that of the whole batch.

    XLA computes when a value is read or `torch_xla.sync` is called, and compiles for every new
    shape, such as the smaller last batch of an epoch.
    """

    @contextmanager
    def connect(self) -> Iterator[None]:
        """Import torch_xla, and find its devices.

        Raises:
            TrainingError: torch_xla is not installed, or finds no device.
        """
        try:
            self._xla = import_module("torch_xla")
            self._spmd = import_module("torch_xla.distributed.spmd")
            self._runtime = import_module("torch_xla.runtime")
        except ImportError as error:
            raise TrainingError(
                f"strategy 'xla' needs torch_xla, which cannot be imported: {error}",
                hint="install it on a TPU with pip install 'torch_xla[tpu]==2.9.0' "
                "torch==2.9.1; each release "
                "needs one minor version of torch",
            ) from error
        if self.config.amp == "fp16":
            raise TrainingError("a TPU cannot compute in float16", hint="use --amp bf16")
        word = self.config.device
        if word != "auto" and torch.device(word).type != "xla":
            raise UsageError(
                f"strategy 'xla' uses torch_xla devices, not {word}",
                hint="use --device xla, or leave out --device; PJRT_DEVICE=CPU computes on the CPU",
            )
        try:
            if not self._runtime.is_spmd():
                self._runtime.use_spmd()
            self._device: torch.device = self._xla.device()
            self._count: int = self._runtime.addressable_runtime_device_count()
            total = self._runtime.global_runtime_device_count()
        except (RuntimeError, OSError) as error:  # OSError: there is no libtpu
            message = str(error).strip().partition("\n")[0]
            raise TrainingError(
                f"torch_xla found no device: {message}",
                hint="install the TPU library with pip install 'torch_xla[tpu]', or set "
                "PJRT_DEVICE=CPU, which "
                "needs none",
            ) from error
        if total != self._count:
            raise TrainingError(
                f"strategy 'xla' needs one machine, but this one has {self._count} of {total} "
                "XLA devices",
                hint="use a slice with one host, for example v5litepod-8",
            )
        kind = self._runtime.device_type()
        if kind != "TPU":
            self.observer.tell(Note(f"no TPU found: torch_xla uses {self._count} x {kind}"))
        yield

    @property
    def device(self) -> torch.device:
        """The single device that torch sees."""
        return self._device

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that torch_xla finds on this machine."""
        return tuple(torch.device("xla", number) for number in range(self._count))

    def place_batch(self, batch: Any) -> Any:
        """Return the batch with its samples sharded over the devices.

        If the devices cannot share the samples evenly, groups of devices do (30 samples, 8 devices:
        2 groups of 4), and each device of a group has all samples of the group.
        """
        batch = super().place_batch(batch)
        for tensor in tree_leaves(batch):
            if isinstance(tensor, torch.Tensor):
                groups = math.gcd(len(tensor), self._count)
                shape = (groups, self._count // groups)
                mesh = self._spmd.Mesh(list(range(self._count)), shape, ("group", "copy"))
                unsharded_axes = [None] * (tensor.dim() - 1)  # all but the axis of the samples
                self._spmd.mark_sharding(tensor, mesh, ("group", *unsharded_axes))
        return batch

    @contextmanager
    def accumulate(self, *, is_last: bool) -> Iterator[None]:
        """Run both passes of a batch as one program; otherwise each value read runs them again."""
        yield
        self._xla.sync()

    def update(self, step: TrainingStep, loss_sum: float) -> StepResult:
        """Apply the gradients, and run the program."""
        result = super().update(step, loss_sum)
        self._xla.sync()
        return result

    def gather_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return both state dicts on the CPU: other machines cannot load tensors of a TPU."""
        model, optimizer = super().gather_state()
        return move_tensors(model, _CPU), move_tensors(optimizer, _CPU)

    def gather_module(self) -> nn.Module:
        """Return a copy of the model on the CPU."""
        return copy.deepcopy(self.model).to(_CPU)
