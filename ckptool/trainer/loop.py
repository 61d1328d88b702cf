"""The loop: epochs of steps, an evaluation after each, checkpoints between; for every strategy."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from ckptool.errors import TrainingError
from ckptool.trainer.checkpoints import Checkpoints, Progress
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.data import Batches
from ckptool.trainer.events import EpochEnded, Note, Observer, Stepped
from ckptool.trainer.launching import Signals
from ckptool.trainer.metrics import Metrics, Scalars
from ckptool.trainer.processes import ranks
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
        """Do nothing yet."""
        self._config, self._strategy, self._batches = config, strategy, batches
        self._progress, self._checkpoints = progress, checkpoints
        self._observer, self._signals = observer, signals
        self._metrics = Metrics(config.out)
        self._ranks = ranks("training cannot go on", TrainingError)
        self.stopped: int | None = None
        """The signal that ended it, if one did."""

    def run(self) -> None:
        """Go through the epochs that are left.

        Raises:
            TrainingError: a loss is no number any more; or no step has changed anything.
        """
        progress = self._progress
        self._ranks.first(lambda: self._metrics.cut(progress.epoch))
        is_first = self._strategy.world.is_first
        self._scalars = Scalars(self._config, step=progress.step, is_wanted=is_first)
        try:
            if (why := self._over) is not None:
                self._observer.tell(Note(f"nothing is left to train: {why}"))
            while self._over is None:
                self._train_epoch()
                if self.stopped is not None:
                    return
                if progress.position == self._batches.steps:
                    self._end_epoch()
            if progress.position:
                self._end_within_epoch()
            self._require_a_step()
            best = progress.best
            if math.isfinite(best) and not self._checkpoints.has_best:  # it is in another folder
                self._observer.tell(
                    Note(
                        f"no epoch came below the loss of {best:g} that was reached before: "
                        "best.pth is in the folder from which the run goes on"
                    )
                )
        finally:
            self._scalars.close()

    def _require_a_step(self) -> None:
        progress = self._progress
        if progress.step and progress.skipped == progress.step:
            raise TrainingError(
                f"all {progress.step} steps were skipped, as their gradients overflowed in fp16: "
                "nothing was learned",
                hint="--amp bf16, a lower --lr, or data that are standardised",
            )

    @property
    def _over(self) -> str | None:
        """Why nothing comes any more; None: something does."""
        config, progress = self._config, self._progress
        if progress.epoch >= config.epochs:
            return f"epoch {config.epochs} is over"
        is_within = progress.position < self._batches.steps
        if config.max_steps is not None and progress.step >= config.max_steps and is_within:
            return f"step {config.max_steps} is done"
        if config.patience is not None and progress.since_best >= config.patience:
            bound = "finite" if math.isinf(progress.best) else "lower"
            than = f" than {progress.best:g}" if bound == "lower" else ""
            return f"{progress.since_best} epochs have brought no {bound} loss{than}"
        return None

    def _train_epoch(self) -> None:
        """Take the steps that are left of an epoch, and save between them when it is time."""
        config, strategy, progress = self._config, self._strategy, self._progress
        first, began = progress.position, time.monotonic() - progress.seconds
        steps = list(self._batches.of_epoch(progress.epoch, first))
        if config.max_steps is not None:
            steps = steps[: max(0, config.max_steps - progress.step)]
        strategy.model.train()
        with strategy.feeding(steps, epoch=progress.epoch, first=first):
            for number, batches in enumerate(steps, progress.step + 1):
                progress.rate = strategy.tuning.rate
                done = strategy.step(Step(number, batches, self._votes))  # forward and backward too
                self._count(done)
                progress.seconds = time.monotonic() - began
                votes = done[-1].votes if done else []
                self.stopped = Signals.asked(votes)
                is_due = config.save_every is not None and number % config.save_every == 0
                if self.stopped is not None:
                    self._count(strategy.settled())
                    self._checkpoints.write("last", progress)
                    return
                if is_due or any(votes[2:]):
                    self._count(strategy.settled())
                    self._checkpoints.numbered(progress)
        self._count(strategy.settled())
        progress.seconds = time.monotonic() - began

    @property
    def _votes(self) -> list[float]:
        """What this process knows of signals, and rank 0 of the time to save."""
        is_due = self._strategy.world.is_first and self._checkpoints.is_due
        return [*self._signals.votes, float(is_due)]

    def _count(self, results: Iterable[StepResult]) -> None:
        for result in results:
            self._progress.take(result)
            loss = result.loss_sum / result.samples
            epoch, step = self._progress.epoch + 1, self._progress.step
            self._observer.tell(Stepped(epoch, step, loss, result.samples, result.staleness))

    def _end_epoch(self) -> None:
        """Evaluate, write the figures, save: what a kill leaves undone is done again."""
        ended, loss = self._evaluated()
        if self._progress.end_epoch(loss):
            self._checkpoints.write("best", self._progress)
        self._checkpoints.write("last", self._progress)
        if self._over is not None and self._progress.epoch < self._config.epochs:
            self._observer.tell(Note(f"training ends after epoch {ended.epoch}: {self._over}"))

    def _end_within_epoch(self) -> None:
        """End with a step inside an epoch: save first, as a resumed run may go on with the epoch.

        A resumed run knows nothing of this loss: it is the best one only where there is no other.
        """
        self._checkpoints.write("last", self._progress)
        _, loss = self._evaluated()
        if math.isinf(self._progress.best) and math.isfinite(loss):
            self._progress.best = loss
            self._checkpoints.write("best", self._progress)

    def _evaluated(self) -> tuple[EpochEnded, float]:
        """Report and write the figures, and return them and the loss that chooses the best epoch.

        That is the one over the validation samples, or else the training ones.
        """
        progress = self._progress
        train_loss = progress.loss_sum / progress.samples
        val_loss = self._strategy.validated()
        speed = progress.samples / max(progress.seconds, 1e-9)
        ended = EpochEnded(
            progress.epoch + 1, progress.step, train_loss, val_loss, progress.rate, speed
        )
        self._ranks.first(lambda: self._metrics.add(ended))
        self._scalars.add(ended)
        self._observer.tell(ended)
        if val_loss is not None and not math.isfinite(val_loss):
            self._observer.tell(Note(f"the validation loss of epoch {ended.epoch} is {val_loss}"))
        if progress.skipped_here:
            self._observer.tell(
                Note(
                    f"{progress.skipped_here} of {progress.position} steps of epoch {ended.epoch} "
                    "were skipped: their gradients overflowed in fp16"
                )
            )
        return ended, train_loss if val_loss is None else val_loss
