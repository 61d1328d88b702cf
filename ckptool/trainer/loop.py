"""The training loop: epochs of steps, validation after each epoch, checkpoints in between.

It is the same for every strategy: `Strategy.step` (`strategies/base.py`) does the forward pass, the
backward pass and the step of the optimizer.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import closing

from ckptool.errors import TrainingError
from ckptool.trainer.checkpoints import Checkpoints, TrainingProgress
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.data import Batches
from ckptool.trainer.events import EpochEnded, Note, Observer, Stepped
from ckptool.trainer.launching import STOP_SIGNALS, Signals
from ckptool.trainer.metrics import Metrics, Scalars
from ckptool.trainer.strategies.base import StepResult, Strategy, TrainingStep


class Loop:
    """The epochs of one run, from `progress` to the end.

    All processes end at the same step: the reasons to end early (a signal, `patience`) follow from
    numbers that are summed over the processes.
    """

    def __init__(
        self,
        config: TrainConfig,
        strategy: Strategy,
        batches: Batches,
        progress: TrainingProgress,
        checkpoints: Checkpoints,
        observer: Observer,
        signals: Signals,
    ) -> None:
        """Store the parts of the run."""
        self._config, self._strategy, self._batches = config, strategy, batches
        self._progress, self._checkpoints = progress, checkpoints
        self._observer, self._signals = observer, signals
        self._metrics = Metrics(config.out)
        self._ranks = strategy.world.ranks

    def run(self) -> int | None:
        """Train until the end, and return the signal that ended the run early, or None.

        Raises:
            TrainingError: a loss, gradient or weight is not finite, or fp16 skipped every step.
        """
        strategy, progress, checkpoints = self._strategy, self._progress, self._checkpoints
        self._prepare_metrics()
        with closing(self._scalars):
            while self._end_reason is None:
                strategy.model.train()
                for step in self._iterate_steps():
                    results = strategy.step(step)  # forward pass, backward pass, optimizer
                    self._count_steps(results)
                    signal, is_due = self._read_votes(step, results)
                    if signal is not None or is_due:  # a checkpoint has every step handed out
                        self._count_steps(strategy.collect_finished_steps())
                    if signal is not None:
                        checkpoints.write("last", progress)
                        return signal
                    if is_due:
                        checkpoints.write_numbered(progress)
                self._count_steps(strategy.collect_finished_steps())
                if progress.position == self._batches.steps:
                    self._end_epoch()  # validation, figures, checkpoints
            if progress.position:
                self._end_within_epoch()
            self._check_result()
        return None

    def _prepare_metrics(self) -> None:
        """Prepare the metric files, and note a run that is already finished."""
        progress, is_first = self._progress, self._strategy.world.rank == 0
        self._ranks.run_on_first(lambda: self._metrics.truncate(progress.epoch))
        self._scalars = Scalars(self._config, step=progress.step, is_wanted=is_first)
        if self._end_reason is not None:
            self._note(f"nothing left to train: {self._end_reason}")

    @property
    def _end_reason(self) -> str | None:
        """The reason why the run is at its end, or None."""
        config, progress = self._config, self._progress
        if progress.epoch >= config.epochs:
            return f"epoch {config.epochs} is finished"
        # After all of its steps an epoch, also a resumed one, is still to be validated and saved.
        is_ending_epoch = progress.position >= self._batches.steps
        has_all_steps = config.max_steps is not None and progress.step >= config.max_steps
        if has_all_steps and not is_ending_epoch:
            return f"step {config.max_steps} is finished"
        if config.patience is not None and progress.since_best >= config.patience:
            kind = "finite" if math.isinf(progress.best) else "lower"
            than = f" than {progress.best:g}" if kind == "lower" else ""
            return f"no {kind} loss{than} in {progress.since_best} epochs"
        return None

    def _iterate_steps(self) -> Iterator[TrainingStep]:
        """Yield the steps left in the epoch; workers prepare their batches ahead."""
        progress, limit = self._progress, self._config.max_steps
        steps = list(self._batches.iterate_epoch(progress.epoch, progress.position))
        if limit is not None:
            steps = steps[: max(0, limit - progress.step)]
        self._counted_at = time.monotonic()  # validation after an epoch does not count
        with self._strategy.prefetch_batches(steps, epoch=progress.epoch, first=progress.position):
            for number, batches in enumerate(steps, progress.step + 1):
                progress.rate = self._strategy.tuning.rate
                yield TrainingStep(number, batches, self._votes)

    @property
    def _votes(self) -> list[float]:
        """The votes of this process, 1.0 or 0.0: one for each of `STOP_SIGNALS`, and one to save.

        Only rank 0 votes to save, if `save_seconds` have passed.
        """
        is_due = self._strategy.world.rank == 0 and self._checkpoints.is_due
        return [*self._signals.votes, float(is_due)]

    def _read_votes(self, step: TrainingStep, results: list[StepResult]) -> tuple[int | None, bool]:
        """Return the signal that a process got, or None, and True if a checkpoint is due.

        The newest result has the sums of `_votes` over the processes.
        """
        votes = results[-1].votes if results else []
        votes_to_save = votes[len(STOP_SIGNALS) :]
        interval = self._config.save_every
        is_due = interval is not None and step.number % interval == 0
        return Signals.find_requested(votes), is_due or any(votes_to_save)

    def _count_steps(self, results: Iterable[StepResult]) -> None:
        """Add finished steps, and the time since the last call, to the progress; report them."""
        progress, counted_before = self._progress, self._counted_at
        self._counted_at = time.monotonic()
        progress.seconds += self._counted_at - counted_before
        for result in results:
            progress.count_step(result)
            loss = result.loss_sum / result.samples
            epoch, step = progress.epoch + 1, progress.step
            self._observer.tell(Stepped(epoch, step, loss, result.samples, result.staleness))

    def _end_epoch(self) -> None:
        """Validate, write the metrics and save. An interrupted end is repeated as a whole."""
        epoch, loss = self._validate()
        if self._progress.end_epoch(loss):
            self._checkpoints.write("best", self._progress)
        self._checkpoints.write("last", self._progress)
        if self._end_reason is not None and self._progress.epoch < self._config.epochs:
            self._note(f"training stopped after epoch {epoch}: {self._end_reason}")

    def _end_within_epoch(self) -> None:
        """Save and validate after `max_steps` inside an epoch.

        A resumed run continues inside the epoch and does not know this loss. So `last` is saved
        before, and `best` is only written if it does not exist.
        """
        self._checkpoints.write("last", self._progress)
        _, loss = self._validate()
        has_best = not math.isinf(self._progress.best)
        if not has_best and math.isfinite(loss):
            self._progress.best = loss
            self._checkpoints.write("best", self._progress)

    def _validate(self) -> tuple[int, float]:
        """Validate, write and report the metrics; return the epoch and the loss to compare.

        The loss is the validation loss, or the training loss if there is no validation data.
        """
        progress = self._progress
        train_loss = progress.loss_sum / progress.samples
        val_loss = self._strategy.validate()
        epoch, speed = progress.epoch + 1, progress.samples / max(progress.seconds, 1e-9)
        ended = EpochEnded(epoch, progress.step, train_loss, val_loss, progress.rate, speed)
        self._ranks.run_on_first(lambda: self._metrics.add(ended))
        self._scalars.add(ended)
        self._observer.tell(ended)
        if val_loss is not None and not math.isfinite(val_loss):
            self._note(f"the validation loss of epoch {epoch} is {val_loss}")
        if progress.skipped_here:
            self._note(
                f"{progress.skipped_here} of {progress.position} steps of epoch {epoch} were "
                "skipped, because their gradients overflowed in fp16"
            )
        return epoch, train_loss if val_loss is None else val_loss

    def _check_result(self) -> None:
        """Refuse a run with only skipped steps; note if `best.pth` is only in another folder.

        It is there if the run resumed from a checkpoint of that folder, and did not get better.
        """
        progress = self._progress
        if progress.step and progress.skipped == progress.step:
            raise TrainingError(
                f"all {progress.step} steps were skipped, because their gradients overflowed "
                "in fp16",
                hint="use --amp bf16, a lower --lr, or standardized data",
            )
        if math.isfinite(progress.best) and not os.path.lexists(self._checkpoints.path("best")):
            self._note(
                f"no epoch of this run had a lower loss than {progress.best:g}; best.pth is only "
                "in the original run folder"
            )

    def _note(self, text: str) -> None:
        self._observer.tell(Note(text))
