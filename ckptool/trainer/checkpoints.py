"""The checkpoints of a run: which there are, what is in them, how long they stay."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ckptool.trainer.config import TrainConfig
from ckptool.trainer.events import Observer, Saved
from ckptool.trainer.progress import Progress
from ckptool.trainer.randomness import random_state
from ckptool.trainer.strategies.base import Strategy

__all__ = ["Checkpoints"]


class Checkpoints:
    """`last.pth`, `best.pth`, `step-%08d.pth` in the folder of a run.

    All processes make the same calls.
    """

    def __init__(
        self,
        config: TrainConfig,
        strategy: Strategy,
        observer: Observer,
        belongings: dict[str, Any],
    ) -> None:
        """`belongings` goes into every checkpoint that has room for more than weights."""
        self._config, self._strategy, self._observer = config, strategy, observer
        self._belongings = belongings
        self._folder = Path(config.out)
        self._saved_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether `save_seconds` have passed, on the clock of this process."""
        seconds = self._config.save_seconds
        return seconds is not None and time.monotonic() - self._saved_at >= seconds

    def last(self, progress: Progress) -> None:
        """Write `last.pth`, from which a run goes on."""
        self._write("last.pth", progress)

    def best(self, progress: Progress) -> None:
        """Write `best.pth`."""
        self._write("best.pth", progress)

    def numbered(self, progress: Progress) -> None:
        """Write that of this step, and remove those that are too many."""
        self._write(f"step-{progress.step:08d}.pth", progress)
        self._saved_at = time.monotonic()
        if self._strategy.world.is_first:
            for old in sorted(self._folder.glob("step-*.pth"))[: -self._config.keep]:
                old.unlink(missing_ok=True)

    def _write(self, name: str, progress: Progress) -> None:
        path = str(self._folder / name)
        world = self._strategy.world
        values = {
            "epoch": progress.epoch,
            "step": progress.step,
            **self._strategy.tuning.state(),
            "rng": world.gather(random_state()),
            "progress": progress.to_dict(),
            **self._belongings,
        }
        self._strategy.save(path, values)
        self._observer.tell(Saved(path, progress.epoch, progress.step))
