"""The base class of the strategies, and the parts of a model that some of them divide."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ckptool.errors import TrainingError
from ckptool.trainer.config import TrainConfig, require_shared
from ckptool.trainer.data import Dataset, Loss, device_in, load_batches, moved, shape, share, sum_of
from ckptool.trainer.devices import device_of
from ckptool.trainer.events import Observer, Traced, Validating
from ckptool.trainer.processes import World
from ckptool.words import a_class

if TYPE_CHECKING:
    from ckptool.trainer.tuning import Tuning

DIVERGED = "use a lower --lr, --clip 1 or standardized data; earlier checkpoints are unchanged"
"""The hint for losses, gradients and weights that are not finite."""


@dataclass(frozen=True)
class TrainingStep:
    """A step of the optimizer to take.

    Attributes:
        number: The number of the step, from 1, over all epochs.
        batches: The row numbers of the batches whose gradients are accumulated.
        votes: Numbers of this process, which the step sums over all processes.
    """

    number: int
    batches: Sequence[Sequence[int]]
    votes: Sequence[float] = ()

    @property
    def samples(self) -> int:
        """The number of samples in the step."""
        return sum(len(rows) for rows in self.batches)


@dataclass(frozen=True)
class StepResult:
    """A finished step.

    Attributes:
        loss_sum: The sum of the losses of its samples, over all processes.
        samples: The number of its samples.
        votes: The votes, summed over all processes.
        staleness: The number of updates between the weights of its gradients and its own update.
        is_skipped: Whether no weight changed, as the gradients overflowed in half precision.
    """

    loss_sum: float
    samples: int
    votes: Sequence[float] = ()
    staleness: int = 0
    is_skipped: bool = False


class Strategy:
    """One process on one device; other strategies override what they do differently.

    The calls come in this order: `opened`, around all others; `wrap`; `tuning` is set; `attend`;
    `step` and `validated`.

    Attributes:
        model: The model in its wrapper, which is called with a batch.
        module: The model without wrapper.
        tuning: The optimizer, and the other objects that change the weights in a step.
        processes: The number of processes in the run.
        takes_steps: Whether this process runs the loop; False: it serves another process that does.
    """

    model: nn.Module
    module: nn.Module
    tuning: Tuning

    def __init__(self, config: TrainConfig, observer: Observer) -> None:
        """Store the configuration and the observer."""
        self.config, self.observer = config, observer
        self.world = World()
        self.processes, self.takes_steps = 1, True
        self._feed: Iterator[tuple[Any, Any]] | None = None

    # The processes and devices.

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Connect the processes until the end of the block.

        Raises:
            TrainingError: there is no such device, or the other processes cannot be reached.
        """
        yield

    @property
    def device(self) -> torch.device:
        """The device of the inputs and of the loss."""
        return self.devices[0]

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that this process computes on."""
        return (device_of(self.config.device),)

    def serve(self, votes: Callable[[], Sequence[float]]) -> Any:
        """Work for the process that runs the loop, and return what that process gives to `end`.

        `votes` returns the votes of this process, which a step sums over all processes.
        """
        raise NotImplementedError

    def end(self, outcome: Any) -> None:
        """Give `outcome` to the processes that `serve` this one, after the last step."""

    # The model.

    def wrap(self, model: nn.Module) -> None:
        """Move the model to the device and wrap it; every process gives the same model."""
        self.module = model.to(self.device)
        self.model = self.module

    def whole_module(self) -> nn.Module:
        """Return the model in its wrapper, to be pickled; all processes call it.

        Raises:
            TrainingError: the wrapper cannot be pickled.
        """
        return self.model

    def wrapped_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the whole state dicts of the model in its wrapper and of the optimizer.

        All processes call it.
        """
        return self.model.state_dict(), self.tuning.optimizer.state_dict()

    # A step.

    def share(self, rows: Sequence[int]) -> list[int]:
        """Return the rows of a batch that this process computes."""
        return share(rows, self.world.rank, self.world.size)

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one batch: only the last batch of a step exchanges gradients."""
        return nullcontext()

    def step(self, step: TrainingStep) -> list[StepResult]:
        """Do the forward pass, the backward pass and the optimizer's step for some batches.

        Return the steps that are finished: this one, or for a parameter server maybe earlier ones.

        Raises:
            TrainingError: a loss or gradient is not finite; the weights are unchanged.
        """
        return [self.update(step, self.backward(step))]

    def backward(self, step: TrainingStep) -> float:
        """Compute the gradients of this process's rows, and return the sum of their losses."""
        loss_sum = 0.0
        for position, rows in enumerate(step.batches):
            mine = self.share(rows)
            with self.accumulating(is_last=position == len(step.batches) - 1):
                loss = self.loss(mine)
                # The wrapper of several processes divides the sum of gradients by their number.
                weight = len(mine) / step.samples * self.world.size
                self.tuning.scaler.scale(loss * weight).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item() * len(mine)
        return loss_sum

    def update(self, step: TrainingStep, loss_sum: float) -> StepResult:
        """Apply the gradients, and sum losses and votes over the processes.

        Raises:
            TrainingError: the weights would become infinite or NaN.
        """
        broken = float(not self.tuning.has_finite_gradients)
        loss_sum, broken, *votes = self.world.sums([loss_sum, broken, *step.votes])
        is_loss = not math.isfinite(loss_sum)
        if is_loss or broken:
            self.tuning.optimizer.zero_grad()
            fault = (
                f"the loss is {loss_sum / step.samples}" if is_loss else "a gradient is not finite"
            )
            raise TrainingError(f"{fault} at step {step.number}", hint=DIVERGED)
        is_taken = self.tuning.step()
        return StepResult(loss_sum, step.samples, votes, is_skipped=not is_taken)

    def finished_steps(self) -> list[StepResult]:
        """Wait for the steps that are handed out, and return them if `step` did not."""
        return []

    # Losses.

    def attend(self, dataset: Dataset, validation: Dataset | None, loss: Loss) -> None:
        """Store the data and the loss; called once, after `wrap`.

        Raises:
            TrainingError: there are more processes than samples in a batch.
        """
        require_shared(self.config.batch_size, self.world.size)
        self._train, self._validation, self._loss = dataset, validation, loss

    @contextmanager
    def feeding(
        self, steps: Sequence[Sequence[Sequence[int]]], *, epoch: int, first: int
    ) -> Iterator[None]:
        """Prepare the batches of an epoch from step `first` on, ahead if there are workers."""
        rows = [self.share(one) for step in steps for one in step]
        self._feed = self._load_batches(self._train, rows, epoch, first * self.config.accumulate)
        try:
            yield
        finally:
            self._feed = None  # ends the workers

    def _load_batches(
        self, dataset: Dataset, rows: Sequence[Sequence[int]], epoch: int = 0, first: int = 0
    ) -> Iterator[tuple[Any, Any]]:
        """Load the batches of these rows; the seed differs by epoch, rank and first batch."""
        seed = self.config.seed ^ epoch << 44 ^ self.world.rank << 32
        return load_batches(
            dataset,
            rows,
            getattr(torch, self.config.dtype),
            workers=min(self.config.workers, len(rows)),
            seed=(seed + first) & (1 << 63) - 1,
            is_pinned=self.device.type == "cuda",
        )

    def loss(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the mean loss of some samples; without samples 0, with gradients of zeros."""
        batch = next(self._feed or self._load_batches(self._train, [rows]))
        return self._loss_of(batch, rows, trace=self.config.trace_batches)

    def placed(self, batch: Any) -> Any:
        """Return inputs and targets on the device of this process."""
        return moved(batch, self.device)

    def validated(self) -> float | None:
        """Return the mean loss of the validation samples, or None if there are none."""
        if self._validation is None or len(self._validation) == 0:
            return None
        was_training = self.model.training
        self.model.train(False)
        loss_sum, size, samples = 0.0, self.config.batch_size, len(self._validation)
        starts = range(0, samples, size)
        shares = [self.share(range(start, min(start + size, samples))) for start in starts]
        with torch.no_grad():
            batches = self._load_batches(self._validation, shares)
            for start, rows, batch in zip(starts, shares, batches, strict=True):
                self.observer.tell(Validating(start, samples))
                loss_sum += self._loss_of(batch, rows).item() * len(rows)
        self.model.train(was_training)
        return self.world.sums([loss_sum])[0] / samples

    def _loss_of(
        self, batch: tuple[Any, Any], rows: Sequence[int], *, trace: bool = False
    ) -> torch.Tensor:
        inputs, targets = self.placed(batch)
        if not rows:  # an empty batch of the right types: the other processes wait for this one
            inputs, targets = tree_map_only(torch.Tensor, lambda one: one[:0], (inputs, targets))
        with self.tuning.autocast(self.device.type):
            with self.tracing() if trace else nullcontext():
                outputs = self.model(inputs)
            if trace:
                self.observer.tell(Traced(True, str(self.device), shape(inputs), shape(outputs)))
            if isinstance(outputs, torch.Tensor):
                targets = moved(targets, outputs.device)
            return _scalar(self._loss(outputs, targets)) if rows else 0 * sum_of(outputs)

    def tracing(self) -> AbstractContextManager[Any]:
        """Report the inputs and outputs of the model, or of each replica, in a forward pass.

        Replicas have the hooks of their model, and each calls them in a thread of its own.
        """

        def tell(_: nn.Module, inputs: Any, outputs: Any) -> None:
            self.observer.tell(Traced(False, device_in(inputs), shape(inputs), shape(outputs)))

        return self.module.register_forward_hook(tell)


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        fault = f"{a_class(loss)}, expected a tensor"
    elif loss.numel() != 1:
        fault = f"a tensor of shape {tuple(loss.shape)}, expected a single number"
    elif torch.is_grad_enabled() and not loss.requires_grad:
        fault = "a tensor without a gradient, which does not depend on any weight"
    else:
        return loss
    raise TrainingError(
        f"the loss returned {fault}",
        hint="return the mean over samples, computed by torch from the model's outputs",
    )


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that are called one after the other, each once, in order.

    These are the children of the model, and the layers of a child that is a list of layers. A model
    with only one child has the blocks of this child; a model without children is one block.
    """
    children = list(_children(model))
    while len(children) == 1 and any(True for _ in children[0].children()):
        children = list(_children(children[0]))
    return children or [model]


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _children(child)
        else:
            yield child


def tied(blocks: list[nn.Module]) -> set[int]:
    """Return the `id` of every parameter that two blocks or more share, as embedding and head."""
    uses = Counter(number for block in blocks for number in {id(one) for one in block.parameters()})
    return {number for number, times in uses.items() if times > 1}
