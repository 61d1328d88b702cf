"""The figures of each epoch, in `metrics.jsonl` and in event files of TensorBoard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckptool.files.atomic import open_atomic_output
from ckptool.files.system import convert_os_errors
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.events import EpochEnded


class Metrics:
    """The figures of a run, in `folder/metrics.jsonl`; only rank 0 writes them."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Store the path; nothing is written."""
        self._path = Path(folder) / "metrics.jsonl"

    def truncate(self, epochs: int) -> None:
        """Remove the lines after the first `epochs`, which a resumed run writes again.

        Raises:
            WriteError: the file cannot be written.
        """
        content = "".join(line for line, epoch in self.read_lines() if epoch <= epochs).encode()
        with open_atomic_output(self._path, len(content), overwrite=True) as output:
            output.write(content)

    def read_lines(self) -> Iterator[tuple[str, int]]:
        """Yield the complete lines with their epochs: a kill may leave half a line."""
        if not self._path.is_file():
            return
        with convert_os_errors(str(self._path)):
            text = self._path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines(keepends=True):
            try:
                epoch = json.loads(line)["epoch"]
            except (ValueError, TypeError, KeyError):
                continue
            if line.endswith("\n") and isinstance(epoch, int):
                yield line, epoch

    def add(self, epoch: EpochEnded) -> None:
        """Append the line of an epoch, and sync the file.

        Raises:
            WriteError: the file cannot be written.
        """
        with convert_os_errors(str(self._path)), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(epoch.to_dict(), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


class Scalars:
    """The figures of each epoch in `out/tensorboard/<strategy>`, a curve for each strategy."""

    def __init__(self, config: TrainConfig, *, step: int, is_wanted: bool) -> None:
        """Start after `step`; later steps of an earlier run are hidden."""
        self._writer: Any = None
        if is_wanted and config.tensorboard and find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            folder = os.path.join(config.out, "tensorboard", config.strategy)
            self._writer = SummaryWriter(folder, purge_step=step + 1)

    def add(self, ended: EpochEnded) -> None:
        """Add the figures of an epoch at its last step; nothing without a writer."""
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
        """Write the remaining figures, and close the file."""
        if self._writer is not None:
            self._writer.close()
