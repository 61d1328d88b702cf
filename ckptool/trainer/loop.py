"""The loop: epochs of steps, an evaluation after each, checkpoints between; for every strategy."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ckptool.trainer.batches import Batches
from ckptool.trainer.checkpoints import Checkpoints
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.events import EpochEnded, Observer, Stepped
from ckptool.trainer.metrics import Metrics
from ckptool.trainer.progress import Progress
from ckptool.trainer.signals import Signals
from ckptool.trainer.strategies.base import Step, StepResult, Strategy

__all__ = ["Loop"]


class Loop:
    """One run from where `progress` stands to its end.

    What ends it early (a signal, no better epoch for too long) is decided from numbers that all
    processes have summed, so that all of them end at the same step.
    """

    def __init__(
        self,
        config: TrainConfig,
        strategy: Strategy,
        batches: Batches,
        progress: Progress,
        checkpoints: Checkpoints,
        observer: Observer,
        signals: Signals,
    ) -> None:
        """Nothing happens yet."""
        self._config, self._strategy, self._batches = config, strategy, batches
        self._progress, self._checkpoints = progress, checkpoints
        self._observer, self._signals = observer, signals
        self._metrics = Metrics(config.out)
        self.stopped: int | None = None
        """The signal that ended it, if one did."""

    def run(self) -> None:
        """Go through the epochs that are left."""
        if self._strategy.world.is_first:
            self._metrics.cut(self._progress.epoch)
        while not self._is_over():
            if not self._epoch():
                break

    def _is_over(self) -> bool:
        patience = self._config.patience
        return (
            self._progress.epoch >= self._config.epochs
            or self._is_at_last_step()
            or (patience is not None and self._progress.since_best >= patience)
        )

    def _is_at_last_step(self) -> bool:
        limit = self._config.max_steps
        return limit is not None and self._progress.step >= limit

    def _epoch(self) -> bool:
        """The rest of an epoch; False: a signal has ended it in the middle."""
        progress = self._progress
        began = time.monotonic() - progress.seconds
        self._strategy.model.train()
        rate, number = self._strategy.tuning.rate, progress.step
        for rows in self._batches.of_epoch(progress.epoch, progress.position):
            if self._config.max_steps is not None and number >= self._config.max_steps:
                break
            number += 1
            rate = self._strategy.tuning.rate
            votes = [*self._signals.votes, float(self._votes_for_saving())]
            done = self._strategy.step(Step(number, rows, votes))
            self._take(done)
            progress.seconds = time.monotonic() - began
            if not self._between(done, number):
                return False
        self._take(self._strategy.settled())
        progress.seconds = time.monotonic() - began
        self._end_epoch(rate)
        return True

    def _votes_for_saving(self) -> bool:
        return self._strategy.world.is_first and self._checkpoints.is_due

    def _take(self, results: Iterable[StepResult]) -> None:
        for result in results:
            self._progress.take(result)
            loss = result.loss_sum / result.samples
            self._observer.tell(
                Stepped(self._progress.epoch + 1, self._progress.step, loss, result.samples)
            )

    def _between(self, done: list[StepResult], number: int) -> bool:
        """Between two steps: save where it is time to; False where a signal asks for the end."""
        votes = done[-1].votes if done else []
        asked = Signals.asked(votes)
        every = self._config.save_every
        is_due = (every is not None and number % every == 0) or any(votes[2:])
        if asked is None and not is_due:
            return True
        self._take(self._strategy.settled())
        if asked is not None:
            self._checkpoints.last(self._progress)
            self.stopped = asked
            return False
        self._checkpoints.numbered(self._progress)
        return True

    def _end_epoch(self, rate: float) -> None:
        progress = self._progress
        train_loss = progress.loss_sum / progress.samples
        val_loss = self._strategy.validated()
        speed = progress.samples / max(progress.seconds, 1e-9)
        is_best = progress.end_epoch(train_loss if val_loss is None else val_loss)
        ended = EpochEnded(progress.epoch, progress.step, train_loss, val_loss, rate, speed)
        if self._strategy.world.is_first:
            self._metrics.add(ended)
        self._observer.tell(ended)
        if is_best:
            self._checkpoints.best(progress)
        self._checkpoints.last(progress)
