"""`Trainer`: trains a model on data with the options of a `TrainConfig`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ckptool.errors import UsageError
from ckptool.trainer.checkpoints import Checkpoints
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.data import Batches, Dataset, Loss, TrainData, make_data
from ckptool.trainer.devices import list_visible_gpus
from ckptool.trainer.events import Observer, Started
from ckptool.trainer.launching import Signals
from ckptool.trainer.loop import Loop
from ckptool.trainer.models import make_model
from ckptool.trainer.strategies import make_strategy
from ckptool.trainer.strategies.base import Strategy
from ckptool.trainer.tuning import Tuning, seed_all
from ckptool.words import a_class


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        epoch: Finished epochs.
        step: Steps of the optimizer.
        skipped: Steps without effect, because their gradients overflowed in fp16.
        best: The lowest validation loss of an epoch, or training loss without validation data.
        stopped: The number of the signal that ended the run, or None.
        out: The folder of the run.
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
    """A training run. All processes of the run make the same calls."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: nn.Module | None = None,
        data: TrainData | Dataset | None = None,
        loss: Loss | str | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Store the parts of the run; parts that are not given follow from the configuration.

        Args:
            config: The options of the run.
            model: A module, with the same weights in every process; None: `config.model`.
            data: Training and validation samples, or a training dataset; None: `config.data`.
            loss: A function of outputs and targets that returns the mean over samples, or a name in
                `torch.nn.functional`; None: the loss of the data.
            observer: An object that receives every event of the run.
        """
        self._config = config
        self._model, self._data, self._loss = model, data, loss
        self._observer = observer or Observer()

    def fit(self) -> TrainResult:
        """Train, or resume from the checkpoint `resume`; every process returns the result.

        Raises:
            TrainingError: if the run cannot start, a loss is not finite, or fp16 skipped all steps.
            MatchError: if the checkpoint to resume from has another model.
            FileBusy: if another run uses `out`.
            WriteError: if a checkpoint cannot be written; this is checked before the first step.
            UnreadableFile: if the checkpoint to resume from is missing or damaged.
        """
        config = self._config
        strategy = make_strategy(config, self._observer)
        signals = Signals()
        with strategy.connect(), signals.watch():
            seed_all(config.seed)
            data = self._resolve_data()
            batches = Batches(len(data.train), config.batch_size, config.accumulate, config.seed)
            self._prepare(strategy, data, batches)
            if not strategy.takes_steps:
                result: TrainResult = strategy.serve(lambda: signals.votes)
                return replace(result, out=config.out)  # the path may differ between machines
            seed_all(config.seed + strategy.world.rank)  # dropout differs from process to process
            values = {
                "config": config.to_dict(),
                "data": dict(data.statistics),
                "gpus": list_visible_gpus(),
            }
            checkpoints = Checkpoints(config, strategy, batches, self._observer, values)
            with checkpoints.begin_run() as progress:
                self._observer.tell(_make_start_event(strategy, batches))
                parts = config, strategy, batches, progress, checkpoints, self._observer, signals
                signal = Loop(*parts).run()
            result = TrainResult(
                epoch=progress.epoch,
                step=progress.step,
                skipped=progress.skipped,
                best=progress.best,
                stopped=signal,
                out=config.out,
            )
            strategy.finish(result)
        return result

    def _resolve_data(self) -> TrainData:
        """Return the given data, else that of the configuration, with the loss to use."""
        loss = self._loss or self._config.loss
        data = make_data(self._config) if self._data is None else self._data
        if not isinstance(data, TrainData):
            if loss is None:
                raise UsageError(
                    "the data has no loss",
                    hint="use loss=torch.nn.functional.mse_loss, for example",
                )
            return TrainData(data, None, loss)
        return data if loss is None else replace(data, loss=loss)

    def _prepare(self, strategy: Strategy, data: TrainData, batches: Batches) -> None:
        """Make the model, wrap it, and give the strategy its tuning and data."""
        config = self._config
        model = self._model if self._model is not None else make_model(config, data)
        _require_module(model)
        if config.compile:
            model.compile()
        strategy.wrap(model.to(getattr(torch, config.dtype)))
        steps = config.epochs * batches.steps
        if config.max_steps is not None:
            steps = min(steps, config.max_steps)
        strategy.tuning = Tuning(
            config, strategy.module, steps=steps, steps_per_epoch=batches.steps
        )
        strategy.set_data(data.train, data.validation, data.mean_loss)


def _make_start_event(strategy: Strategy, batches: Batches) -> Started:
    """Return the event of a run that begins with this model and data."""
    config = strategy.config
    return Started(
        strategy=config.strategy,
        devices=tuple(map(str, strategy.devices)),
        processes=strategy.processes,
        parameters=sum(parameter.numel() for parameter in strategy.module.parameters()),
        samples=batches.samples,
        steps=batches.steps,
        epochs=config.epochs,
    )


def _require_module(model: Any) -> None:
    """Check that a model is a module whose parameters can be trained."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model is {a_class(model)}, expected a torch.nn.Module", hint="use model=Net()"
        )
    parameters: dict[str, Any] = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise UsageError(
                f"parameter {name} is not initialized: call the model with a batch first"
            )
        if parameter.is_complex():
            raise UsageError(f"parameter {name} is complex")
        if parameter.is_meta:
            raise UsageError(f"parameter {name} is on the meta device")
