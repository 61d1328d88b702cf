"""`nn.DataParallel`: one process, a replica of the model on each of several GPUs."""

from __future__ import annotations

import torch
from torch import nn

from ckptool.errors import TrainingError, UsageError
from ckptool.trainer.devices import device_of
from ckptool.trainer.strategies.base import Strategy

__all__ = ["DataParallel"]


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
        ids, first = self.config.device_ids, device_of(self.config.device)
        if ids and self.config.device == "auto":
            first = device_of(f"cuda:{ids[0]}")
        if first.type != "cuda":
            if ids or self.config.output_device is not None:
                raise UsageError(f"device_ids and output_device are GPUs, but device is {first}")
            return (first,)
        if first.index and not ids:
            ids = (first.index,)  # --device cuda:1 without --device-ids
        found = tuple(device_of(f"cuda:{one}") for one in ids or range(torch.cuda.device_count()))
        if len(set(found)) < len(found):
            raise UsageError(f"device_ids {', '.join(map(str, ids))} name a GPU twice")
        return found

    def wrap(self, model: nn.Module) -> None:
        """Wrap the model.

        Raises:
            TrainingError: there is no replica on `output_device`.
        """
        super().wrap(model)
        if self.device.type == "cuda":
            ids, output = [one.index for one in self.devices], self.config.output_device
            if output not in (None, *ids):
                raise TrainingError(
                    f"outputs cannot be gathered on cuda:{output}: it has no replica",
                    hint="--output-device is one of --device-ids",
                )
            self.model = nn.DataParallel(self.module, ids, output)
            return
        # With the module it would take every GPU that torch sees, though the CPU was asked for.
        self.model = wrapper = nn.DataParallel[nn.Module](nn.Identity())
        wrapper.module, wrapper.device_ids = self.module, []
