"""How far a run has come: counters and sums, which a checkpoint keeps and a run goes on from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ckptool.trainer.strategies.base import StepResult

__all__ = ["Progress"]


@dataclass
class Progress:
    """Where the next step begins.

    Attributes:
        epoch: Epochs that are over, evaluation and all.
        step: Steps of the optimizer that are done.
        skipped: Of those, the ones whose gradients overflowed, which changed nothing.
        position: Of those, the ones of the epoch that is under way (the sampler's position).
        loss_sum: Of the samples of that epoch, so far.
        samples: How many those are.
        skipped_here: Of the steps of that epoch, those that were skipped.
        seconds: What they took.
        rate: The learning rate of the last step.
        best: The lowest loss after which an epoch was the best one; infinite before the first.
        since_best: Epochs since then.
    """

    epoch: int = 0
    step: int = 0
    skipped: int = 0
    position: int = 0
    loss_sum: float = 0.0
    samples: int = 0
    skipped_here: int = 0
    seconds: float = 0.0
    rate: float = 0.0
    best: float = math.inf
    since_best: int = 0

    def take(self, result: StepResult) -> None:
        """Count a step that is done."""
        self.step += 1
        self.position += 1
        self.skipped += result.is_skipped
        self.skipped_here += result.is_skipped
        self.loss_sum += result.loss_sum
        self.samples += result.samples

    def end_epoch(self, loss: float) -> bool:
        """Count an epoch that ended with that loss; whether it is the best one so far."""
        self.epoch += 1
        self.begin_epoch()
        is_best = loss < self.best
        if is_best:
            self.best = loss  # never NaN, than which nothing is lower
        self.since_best = 0 if is_best else self.since_best + 1
        return is_best

    def begin_epoch(self) -> None:
        """Count nothing of the epoch that is under way."""
        self.position, self.loss_sum, self.samples, self.seconds = 0, 0.0, 0, 0.0
        self.skipped_here = 0

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def of(cls, held: Mapping[str, Any]) -> Progress:
        """What `to_dict` gave."""
        return cls(**{field.name: held[field.name] for field in fields(cls) if field.name in held})
