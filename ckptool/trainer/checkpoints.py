"""The checkpoints of a run: which there are, what is in them, how long they stay."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from ckptool.errors import TrainingError, WriteError
from ckptool.loading.ranks import Ranks, default_group
from ckptool.trainer import folder, saving
from ckptool.trainer.batches import Batches
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.events import Observer, Saved
from ckptool.trainer.progress import Progress
from ckptool.trainer.randomness import random_state
from ckptool.trainer.strategies.base import DIVERGED, Strategy

__all__ = ["Checkpoints"]


class Checkpoints:
    """`last.pth`, `best.pth`, `step-%08d.pth` in the folder of a run.

    All processes make the same calls; what goes wrong in rank 0 is raised in all of them.
    """

    def __init__(
        self,
        config: TrainConfig,
        strategy: Strategy,
        batches: Batches,
        observer: Observer,
        belongings: dict[str, Any],
    ) -> None:
        """`belongings` goes into every checkpoint that has room for more than weights."""
        self._config, self._strategy, self._observer = config, strategy, observer
        self._batches, self._belongings = batches, belongings
        self._ranks = Ranks(
            default_group(), error=WriteError, undone="training cannot go on", call="Trainer.fit"
        )
        self._saved_at = time.monotonic()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Make the folder, which is this run's until the end: rank 0 holds it.

        Raises:
            FileBusy: another run is under way there.
            WriteError: it cannot be made, or is a file.
        """
        with ExitStack() as held:
            self._ranks.first(lambda: held.enter_context(folder.one_run_in(self._config.out)))
            yield

    def require_writable(self) -> None:
        """Write a file of the size of a checkpoint, and remove it.

        Raises:
            WriteError: it cannot be written.
            TrainingError: the module is to be pickled, and cannot be.
        """
        if self._config.save == "module":
            saving.require_picklable(self._strategy)
        size = saving.expected_size(self._strategy)
        name = f"last{self._suffix or '.trial'}"
        self._ranks.first(lambda: folder.require_writable(self._config.out, name, size))

    def begin(self, progress: Progress, origin: str | None) -> None:
        """Have no other run in the folder than that which led to `progress`, by way of `origin`.

        Raises:
            TrainingError: there is another, and it is not to be overwritten.
        """
        out = self._config.out
        is_auto = self._config.resume == "auto"  # what is there has led to `origin`
        if self._config.overwrite and not (is_auto and origin):
            self._ranks.first(lambda: folder.remove(out, origin=origin, step=progress.step))
        elif not is_auto:
            self._ranks.first(lambda: folder.refuse_earlier(out, origin=origin, step=progress.step))

    @property
    def is_due(self) -> bool:
        """Whether `save_seconds` have passed, on the clock of this process."""
        seconds = self._config.save_seconds
        return seconds is not None and time.monotonic() - self._saved_at >= seconds

    def last(self, progress: Progress) -> None:
        """Write `last.pth`, from which a run goes on."""
        self._write("last", progress)

    def best(self, progress: Progress) -> None:
        """Write `best.pth`."""
        self._write("best", progress)

    @property
    def has_best(self) -> bool:
        """Whether `best.pth` is there."""
        return os.path.lexists(self._path("best"))

    def numbered(self, progress: Progress) -> None:
        """Write that of this step, and remove those that are too many."""
        self._write(f"step-{progress.step:08d}", progress)
        self._saved_at = time.monotonic()
        self._ranks.first(lambda: folder.remove_numbered(self._config.out, self._config.keep))

    @property
    def _suffix(self) -> str:
        return "" if self._config.sharded else ".pth"

    def _path(self, name: str) -> str:
        return os.path.join(self._config.out, name + self._suffix)

    def _write(self, name: str, progress: Progress) -> None:
        """Write one; what it was before, a folder of parts or one file, goes once this is there.

        Raises:
            TrainingError: weights are infinite, or NaN: nothing goes on from such.
        """
        path = self._path(name)
        if not all(self._ranks.all(self._strategy.tuning.has_finite_weights)):
            raise TrainingError(
                f"a weight is no number after step {progress.step}: {name} is not written",
                hint=DIVERGED,
            )
        values = {
            "epoch": progress.epoch,
            "step": progress.step,
            **self._strategy.tuning.state(),
            "rng": self._strategy.world.gather(random_state()),
            "sampler": {**asdict(self._batches), "position": progress.position},
            "progress": progress.to_dict(),
            **self._belongings,
        }
        saving.save(self._config.save, path, self._strategy, values)
        other = os.path.join(self._config.out, name + ("" if self._suffix else ".pth"))
        self._ranks.first(lambda: folder.remove_checkpoint(other))
        self._observer.tell(Saved(path, progress.epoch, progress.step))
