"""Going on from a checkpoint: weights, optimizer, counters, random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckptool.trainer.config import TrainConfig
from ckptool.trainer.events import Resumed
from ckptool.trainer.progress import Progress
from ckptool.trainer.randomness import restore_random_state
from ckptool.trainer.strategies.base import Strategy

__all__ = ["resumed"]


def resumed(config: TrainConfig, strategy: Strategy) -> tuple[Progress, Resumed | None]:
    """Fill the strategy's model and tuning from `config.resume`; where the run then stands.

    Raises:
        FileMissing: the named file is not there.
        MatchError: it is of another architecture.
    """
    import ckptool

    path = strategy.world.told(_found(config))
    if path is None:
        return Progress(), None
    held: dict[str, Any] = ckptool.load(path)
    strategy.load(path, strategy.tuning.optimizer)
    without = strategy.tuning.restore(held)
    progress = Progress.of(held["progress"])
    states = held.get("rng", [])
    if len(states) == strategy.world.size:
        restore_random_state(states[strategy.world.rank])
    else:
        without.append("rng")
    return progress, Resumed(path, progress.epoch, progress.step, tuple(without))


def _found(config: TrainConfig) -> str | None:
    """The checkpoint that is meant; of `auto` the one of the latest step."""
    if config.resume != "auto":
        return config.resume
    last = Path(config.out) / "last.pth"
    return str(last) if last.exists() else None
