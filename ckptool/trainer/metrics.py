"""`metrics.jsonl`: one line an epoch, cut back where a run goes on from an earlier one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from ckptool.trainer.events import EpochEnded

__all__ = ["Metrics"]


class Metrics:
    """The figures of a run, in `folder/metrics.jsonl`; only rank 0 has one."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Nothing is written yet."""
        self._path = Path(folder) / "metrics.jsonl"

    def cut(self, epochs: int) -> None:
        """Keep the lines of the first `epochs`: what came after them is going to come again."""
        kept = [line for line in self._lines() if json.loads(line)["epoch"] <= epochs]
        beside = self._path.with_suffix(".jsonl.tmp")
        beside.write_text("".join(kept), encoding="utf-8")
        beside.replace(self._path)

    def _lines(self) -> Iterator[str]:
        """Those that are whole: a kill may leave half of the last one."""
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("}\n"):
                    yield line

    def add(self, epoch: EpochEnded) -> None:
        """Append the line of one epoch, and have it on the disk."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(epoch.to_dict()) + "\n")
            file.flush()
            os.fsync(file.fileno())
