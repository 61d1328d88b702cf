"""`Trainer`: a model, data and a loss, trained as a `TrainConfig` says."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckptool.errors import UsageError
from ckptool.trainer.checkpoints import Checkpoints, Progress, Resuming
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.data import Batches, Dataset, Loss, TrainData, data_of
from ckptool.trainer.devices import seen_as
from ckptool.trainer.events import Observer, Started
from ckptool.trainer.launching import Signals
from ckptool.trainer.loop import Loop
from ckptool.trainer.models import model_of
from ckptool.trainer.strategies import Strategy, strategy_of
from ckptool.trainer.tuning import Tuning, seed_all

__all__ = ["TrainResult", "Trainer"]


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        epoch: Epochs that are over.
        step: Steps of the optimizer that are done.
        skipped: Of those, the ones whose gradients overflowed in fp16, which changed nothing.
        best: The lowest validation loss of an epoch (training loss where there is no validation).
        stopped: The number of the signal that ended it; None where it came to its end.
        out: Its folder.
    """

    epoch: int
    step: int
    skipped: int
    best: float
    stopped: int | None
    out: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


class Trainer:
    """One run; the same calls in every process of it."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: nn.Module | None = None,
        data: TrainData | Dataset | None = None,
        loss: Loss | str | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Take what is given, and the rest from the configuration.

        Args:
            config: What is to be done.
            model: Any module; its weights are the same in every process. None: `config.model`.
            data: Training and validation samples, or a dataset to learn from. None: `config.data`.
            loss: Outputs and targets to the mean over samples; or a name in `torch.nn.functional`.
            observer: Told of everything that happens.
        """
        self._config = config
        self._model, self._data, self._loss = model, data, loss
        self._observer = observer or Observer()

    def fit(self) -> TrainResult:
        """Train, from the checkpoint that `resume` names if it does; all processes return the same.

        Raises:
            TrainingError: it cannot begin, the loss is no number any more, or every step was
                skipped, as its gradients overflowed.
            MatchError: the checkpoint to go on from is of another model.
            FileBusy: another run is under way in `out`.
            WriteError: a checkpoint cannot be written; before the first step one is tried.
            UnreadableFile: the checkpoint to go on from is not there, or damaged.
        """
        config = self._config
        strategy = strategy_of(config, self._observer)
        signals = Signals()
        with strategy.opened(), signals.watched():
            seed_all(config.seed)
            data = self._data_given()
            batches = Batches(len(data.train), config.batch_size, config.accumulate, config.seed)
            self._attend(strategy, data, batches)
            if not strategy.takes_steps:
                result: TrainResult = strategy.serve(lambda: signals.votes)
                return replace(result, out=config.out)  # each process has its own words for it
            seed_all(config.seed + strategy.world.rank)  # dropout differs from process to process
            values = {"config": config.to_dict(), "data": dict(data.statistics), "gpus": seen_as()}
            checkpoints = Checkpoints(config, strategy, batches, self._observer, values)
            with checkpoints.alone():
                checkpoints.require_writable()
                resuming = Resuming(config, strategy, batches, self._observer)
                origin = resuming.found()
                progress = Progress() if origin is None else resuming.restored(origin)
                checkpoints.begin(progress, origin)
                self._observer.tell(
                    Started(
                        strategy.name,
                        tuple(str(device) for device in strategy.devices),
                        strategy.processes,
                        sum(one.numel() for one in strategy.module.parameters()),
                        batches.samples,
                        batches.steps,
                        config.epochs,
                    )
                )
                loop = Loop(
                    config, strategy, batches, progress, checkpoints, self._observer, signals
                )
                signal = loop.run()
            told = progress.epoch, progress.step, progress.skipped, progress.best
            result = TrainResult(*told, signal, config.out)
            strategy.end(result)
        return result

    def _data_given(self) -> TrainData:
        if self._data is None:
            data = data_of(self._config)
        elif isinstance(self._data, TrainData):
            data = self._data
        elif (self._loss or self._config.loss) is None:
            raise UsageError("data are given, and no loss: loss=torch.nn.functional.mse_loss")
        else:
            data = TrainData(self._data, None, self._loss or self._config.loss or "")
        loss = self._loss or self._config.loss
        return data if loss is None else replace(data, loss=loss)

    def _attend(self, strategy: Strategy, data: TrainData, batches: Batches) -> None:
        config = self._config
        model = self._model if self._model is not None else model_of(config, data)
        _require_module(model)
        if config.compile:
            model.compile()
        strategy.wrap(model.to(getattr(torch, config.dtype)))
        strategy.tuning = Tuning(
            config,
            strategy.module,
            steps=min(config.epochs * batches.steps, config.max_steps or 1 << 62),
            epoch=batches.steps,
        )
        strategy.attend(data.train, data.validation, data.mean_loss)


def _require_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        what = f"the class {name}" if isinstance(model, type) else f"a {name}"
        raise UsageError(f"model is {what}, and no torch.nn.Module", hint="model=Net(), made")
    lazy = [name for name, one in model.named_parameters() if is_lazy(one)]
    if lazy:
        raise UsageError(
            f"{lazy[0]} of the model has no size yet: its layer learns it from a first batch",
            hint="call the model with one batch before",
        )
    for name, one in model.named_parameters():
        if one.is_meta or one.is_complex():
            what = "has no values yet: it is on meta" if one.is_meta else "is complex"
            raise UsageError(
                f"{name} of the model {what}", hint="a model of real numbers that is made"
            )
