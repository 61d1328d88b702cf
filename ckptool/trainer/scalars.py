"""TensorBoard's event files, where TensorBoard is installed (`pip install ckptool[trainer]`)."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from ckptool.trainer.config import TrainConfig
from ckptool.trainer.events import EpochEnded

__all__ = ["Scalars"]


class Scalars:
    """The figures of each epoch, in `out/tensorboard/<strategy>`: a curve of its own for each."""

    def __init__(self, config: TrainConfig, *, step: int, is_wanted: bool) -> None:
        """Begin after `step`: what an earlier run has shown of later steps is hidden."""
        self._writer: Any = None
        if is_wanted and config.tensorboard and find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            folder = os.path.join(config.out, "tensorboard", config.strategy)
            self._writer = SummaryWriter(folder, purge_step=step + 1)

    def add(self, ended: EpochEnded) -> None:
        """Show one epoch, by its last step."""
        if self._writer is None:
            return
        for tag, value in (
            ("loss/train", ended.train_loss),
            ("loss/validation", ended.val_loss),
            ("lr", ended.lr),
            ("samples_per_s", ended.samples_per_s),
        ):
            if value is not None:
                self._writer.add_scalar(tag, value, ended.step)

    def close(self) -> None:
        """Have all of it on the disk."""
        if self._writer is not None:
            self._writer.close()
