"""Going on from a checkpoint: weights, optimizer, counters, random numbers."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import ckptool
from ckptool.errors import CheckpointError, MatchError, NotFound, TrainingError
from ckptool.loading.ranks import Ranks, default_group
from ckptool.trainer.batches import Batches
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.events import Note, Observer, Resumed
from ckptool.trainer.folder import Kept, kept
from ckptool.trainer.progress import Progress
from ckptool.trainer.randomness import restore_random_state, seed_all
from ckptool.trainer.strategies.base import Strategy

__all__ = ["Resuming"]

_TELLING = (
    "data",
    "target",
    "model",
    "dtype",
    "seed",
    "batch_size",
    "accumulate",
    "optimizer",
    "lr",
    "momentum",
    "weight_decay",
    "schedule",
    "warmup",
    "amp",
    "clip",
    "ema",
)
"""The options that make another run of one; the others say where it runs, and how long."""
_SHAPING = ("model", "data", "dtype")
"""The options that decide which weights there are."""
_OF_SCHEDULES = {
    "constant": (),
    "step": ("step_size", "gamma"),
    "linear": ("epochs", "max_steps"),
    "cosine": ("epochs", "max_steps"),
}


class Resuming:
    """The checkpoint that a run goes on from, if it does; all processes make the same calls."""

    def __init__(
        self, config: TrainConfig, strategy: Strategy, batches: Batches, observer: Observer
    ) -> None:
        """Nothing is read yet."""
        self._config, self._strategy = config, strategy
        self._batches, self._observer = batches, observer
        self._ranks = Ranks(
            default_group(),
            error=TrainingError,
            undone="training does not begin",
            call="Trainer.fit",
        )

    def found(self) -> str | None:
        """The checkpoint that is meant; of a run's folder the newest that is whole.

        `auto` is the folder of this run, and may hold none.

        Raises:
            TrainingError: of those that are there none is.
        """
        named = self._config.resume
        if named is None:
            return None
        path, notes = self._ranks.first(lambda: self._meant(named))
        for note in notes:
            self._observer.tell(Note(note))
        return path

    def _meant(self, named: str) -> tuple[str | None, list[str]]:
        is_auto = named == "auto"
        out = self._config.out if is_auto else named
        there = kept(out)
        return self._newest(out, there) if there or is_auto else (named, [])

    def _newest(self, out: str, there: Sequence[Kept]) -> tuple[str | None, list[str]]:
        damaged: list[str] = []
        for one in there:
            damage = _damage(one.path)
            if damage is None:
                return one.path, [f"{said}: passed over" for said in damaged]
            damaged.append(damage)
        if damaged and not (self._config.overwrite and self._config.resume == "auto"):
            raise TrainingError(
                f"no checkpoint in {out} can be read: {damaged[0]}",
                hint="ckptool recover takes out what is left; --overwrite begins anew",
            )
        return None, [f"{out} holds no checkpoint to go on from: training begins anew"]

    def restored(self, path: str) -> Progress:
        """Fill the strategy's model and tuning from `path`; where the run then stands.

        Of files that are no `full` checkpoint the weights are taken, and the optimizer's state
        where it fits: the next epoch begins with its first step.

        Raises:
            FileMissing: there is no such file.
            UnreadableFile: it is damaged, or no checkpoint.
            MatchError: it is of another architecture; model and optimizer are as they were.
        """
        with self._ranks.reached():
            values = self._strategy.values(path)
            without = self._fill(path, values)
            progress = _progress_of(values, path, self._batches)
        without += self._strategy.tuning.restore(values, step=progress.step)
        without += self._reseed(values, progress)
        if "progress" not in values:
            without.append("progress")
        self._observer.tell(Resumed(path, progress.epoch, progress.step, tuple(without)))
        self._tell_differences(values, progress)
        return progress

    def _fill(self, path: str, values: Mapping[str, Any]) -> list[str]:
        """Load what the file has; returned is `optimizer` where its state is not in it."""
        orders = (None,) if values else (None, "position")
        for order in orders:
            try:
                self._strategy.load(path, self._strategy.tuning.optimizer, order=order)
            except (MatchError, NotFound):  # said again below where it is the model's
                continue
            if order is not None:
                self._observer.tell(
                    Note(f"{path} does not name the optimizer's parameters: their order is trusted")
                )
            return []
        try:
            self._strategy.load(path, None)
        except MatchError as error:
            self._advise(error, path, values.get("config", {}))
            raise
        return ["optimizer"]

    def _advise(self, error: MatchError, path: str, then: Mapping[str, Any]) -> None:
        """Say in one line how a checkpoint does not fit, and which options would make it fit."""
        error.message = "; ".join(error.message.splitlines())
        error.args = (error.message,)
        now, report = self._config.to_dict(), error.report
        differs = {name: then[name] for name in _SHAPING if then.get(name, now[name]) != now[name]}
        if report and not (report.missing_keys or report.unexpected_keys or report.mismatched):
            differs = {"dtype": "float64"}  # numbers would be rounded, and nothing else
        if differs:
            words = [f"--{name} {shlex.quote(value)}" for name, value in differs.items()]
            error.advise(f"{' '.join(words)}, as the checkpoint has it")
        else:
            error.advise(
                f"it is of another model: ckptool match {shlex.quote(path)} --like module:factory "
                "shows how it differs"
            )

    def _reseed(self, values: Mapping[str, Any], progress: Progress) -> list[str]:
        """Go on with the random numbers of each process; those of other processes are of no use.

        Then they begin anew, and not as the run began: what it drew would come again.
        """
        world = self._strategy.world
        states = values.get("rng", [])
        if len(states) == world.size:
            restore_random_state(states[world.rank])
            return []
        seed_all(self._config.seed + world.rank + world.size * progress.step)
        return ["rng"]

    def _tell_differences(self, values: Mapping[str, Any], progress: Progress) -> None:
        """What the two runs do otherwise; an epoch of other batches cannot go on in its middle."""
        names = [*_TELLING, *_OF_SCHEDULES[self._config.schedule]]
        now, then = self._config.to_dict(), values.get("config", {})
        others = [name for name in names if name in then and then[name] != now[name]]
        if others:
            was = ", ".join(f"{name} {_shown(then[name])}" for name in others)
            told = ", ".join(f"{name} {_shown(now[name])}" for name in others)
            self._observer.tell(Note(f"the checkpoint is of a run with {was}; this one has {told}"))
        sampler = values.get("sampler", {})
        if progress.position and not asdict(self._batches).items() <= sampler.items():
            progress.begin_epoch()
            self._observer.tell(
                Note(f"epoch {progress.epoch + 1} begins anew: its batches are others now")
            )


def _progress_of(values: Mapping[str, Any], path: str, batches: Batches) -> Progress:
    """Where the run stands; of a file that says no more than its epoch, that is over."""
    if "progress" in values:
        return Progress.of(values["progress"])
    with ckptool.open(path) as held:
        epoch = held.root.get("epoch") if isinstance(held.root, dict) else None
    over = epoch if type(epoch) is int and epoch >= 0 else 0
    return Progress(epoch=over, step=over * batches.steps)


def _damage(path: str) -> str | None:
    """What is wrong with a checkpoint, as a sentence; None: it is whole."""
    if os.path.isdir(path):
        from ckptool.trainer import sharded  # seldom needed

        return sharded.damage(path)
    try:
        problems = ckptool.verify(path).problems
    except CheckpointError as error:
        return str(error)
    return f"{path}: {problems[0].text}" if problems else None


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
