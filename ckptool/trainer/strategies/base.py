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
from ckptool.trainer.config import TrainConfig, require_enough_samples
from ckptool.trainer.data import (
    Dataset,
    Loss,
    first_device,
    first_shape,
    load_batches,
    move_tensors,
    select_share,
    sum_outputs,
)
from ckptool.trainer.devices import resolve_device
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
        is_skipped: True if no weight changed, because the gradients overflowed in half precision.
    """

    loss_sum: float
    samples: int
    votes: Sequence[float] = ()
    staleness: int = 0
    is_skipped: bool = False


class Strategy:
    """One process on one device; other strategies override some methods.

    The calls come in this order: `connect`, around all others; `wrap`; `tuning` is set; `set_data`;
    `step` and `validate`.

    Attributes:
        model: The model in its wrapper, which is called with a batch.
        module: The model without wrapper.
        tuning: The optimizer, and the other objects that change the weights in a step.
        processes: The number of processes in the run.
        takes_steps: True if this process runs the loop; False if it serves another one that does.
    """

    model: nn.Module
    module: nn.Module
    tuning: Tuning

    def __init__(self, config: TrainConfig, observer: Observer) -> None:
        """Store the configuration and the observer."""
        self.config, self.observer = config, observer
        self.world = World()
        self.processes, self.takes_steps = 1, True
        self._prefetched_batches: Iterator[tuple[Any, Any]] | None = None

    # The processes and devices.

    @contextmanager
    def connect(self) -> Iterator[None]:
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
        return (resolve_device(self.config.device),)

    def serve(self, votes: Callable[[], Sequence[float]]) -> Any:
        """Work for the process that runs the loop; return the outcome that it passes to `finish`.

        `votes` returns the votes of this process, which a step sums over all processes.
        """
        raise NotImplementedError

    def finish(self, outcome: Any) -> None:
        """Send `outcome` to the processes that `serve` this one, after the last step."""

    # The model.

    def wrap(self, model: nn.Module) -> None:
        """Move the model to the device and wrap it; every process gives the same model."""
        self.module = model.to(self.device)
        self.model = self.module

    def gather_module(self) -> nn.Module:
        """Return the model in its wrapper with all weights, to be pickled; all processes call it.

        Raises:
            TrainingError: the wrapper cannot be pickled.
        """
        return self.model

    def gather_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the whole state dicts of the model in its wrapper and of the optimizer.

        All processes call it.
        """
        return self.model.state_dict(), self.tuning.optimizer.state_dict()

    # A step.

    def select_rows(self, rows: Sequence[int]) -> list[int]:
        """Return the rows of a batch that this process computes."""
        return select_share(rows, self.world.rank, self.world.size)

    def accumulate(self, *, is_last: bool) -> AbstractContextManager[None]:
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
            own_rows = self.select_rows(rows)
            with self.accumulate(is_last=position == len(step.batches) - 1):
                loss = self.compute_loss(own_rows)
                # The wrapper of several processes divides the sum of gradients by their number.
                weight = len(own_rows) / step.samples * self.world.size
                self.tuning.scaler.scale(loss * weight).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item() * len(own_rows)
        return loss_sum

    def update(self, step: TrainingStep, loss_sum: float) -> StepResult:
        """Apply the gradients, and sum losses and votes over the processes.

        Raises:
            TrainingError: the weights would become infinite or NaN.
        """
        own_faults = float(not self.tuning.has_finite_gradients)
        loss_sum, faults, *votes = self.world.sum_over_ranks([loss_sum, own_faults, *step.votes])
        fault = "a gradient is not finite" if faults else None
        if not math.isfinite(loss_sum):
            fault = f"the loss is {loss_sum / step.samples}"
        if fault is not None:
            self.tuning.optimizer.zero_grad()
            raise TrainingError(f"{fault} at step {step.number}", hint=DIVERGED)
        is_taken = self.tuning.step()
        return StepResult(loss_sum, step.samples, votes, is_skipped=not is_taken)

    def collect_finished_steps(self) -> list[StepResult]:
        """Wait for the steps that other processes still compute, and return them; here none."""
        return []

    # Losses.

    def set_data(self, dataset: Dataset, validation: Dataset | None, loss: Loss) -> None:
        """Store the data and the loss; called once, after `wrap`.

        Raises:
            TrainingError: there are more processes than samples in a batch.
        """
        require_enough_samples(self.config.batch_size, self.world.size)
        self._train, self._validation, self._loss = dataset, validation, loss

    @contextmanager
    def prefetch_batches(
        self, steps: Sequence[Sequence[Sequence[int]]], *, epoch: int, first: int
    ) -> Iterator[None]:
        """Prepare the batches of an epoch from step `first` on, ahead if there are workers."""
        # `steps` begins with step `first`; the numbers of the batches count from the epoch's start.
        rows = [self.select_rows(batch) for step in steps for batch in step]
        first_batch = first * self.config.accumulate
        self._prefetched_batches = self._load_batches(self._train, rows, epoch, first_batch)
        try:
            yield
        finally:
            self._prefetched_batches = None  # ends the workers

    def _load_batches(
        self, dataset: Dataset, rows: Sequence[Sequence[int]], epoch: int = 0, first: int = 0
    ) -> Iterator[tuple[Any, Any]]:
        """Load the batches of these rows, of which the first has the number `first` in its epoch.

        Workers seed each batch by its number; epoch and rank are above it, in bits of their own.
        """
        seed = (self.config.seed ^ (epoch << 44) ^ (self.world.rank << 32)) + first
        return load_batches(
            dataset,
            rows,
            getattr(torch, self.config.dtype),
            workers=min(self.config.workers, len(rows)),
            seed=seed % 2**63,  # torch's seeds are integers of 64 bits with a sign
            is_pinned=self.device.type == "cuda",
        )

    def compute_loss(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the mean loss of the samples `rows`; without samples 0, with gradients of zeros.

        Inside `prefetch_batches` the next prefetched batch has the same rows; else they are loaded.
        """
        batches = self._prefetched_batches
        if batches is None:
            batches = self._load_batches(self._train, [rows])
        batch = next(batches)
        return self._loss_of_batch(batch, rows, trace=self.config.trace_batches)

    def place_batch(self, batch: Any) -> Any:
        """Return inputs and targets on the device of this process."""
        return move_tensors(batch, self.device)

    def validate(self) -> float | None:
        """Return the mean loss of the validation samples, or None if there are none."""
        if self._validation is None or len(self._validation) == 0:
            return None
        was_training = self.model.training
        self.model.train(False)
        loss_sum, size, samples = 0.0, self.config.batch_size, len(self._validation)
        starts = range(0, samples, size)
        shares = [self.select_rows(range(start, min(start + size, samples))) for start in starts]
        with torch.no_grad():
            batches = self._load_batches(self._validation, shares)
            for start, rows, batch in zip(starts, shares, batches, strict=True):
                self.observer.tell(Validating(start, samples))
                loss_sum += self._loss_of_batch(batch, rows).item() * len(rows)
        self.model.train(was_training)
        return self.world.sum_over_ranks([loss_sum])[0] / samples

    def _loss_of_batch(
        self, batch: tuple[Any, Any], rows: Sequence[int], *, trace: bool = False
    ) -> torch.Tensor:
        """Return the mean loss of one batch; for no rows 0, with gradients of zeros."""
        inputs, targets = self.place_batch(batch)
        if not rows:
            # The batch has one sample in place of none: remove it. Call the model nevertheless:
            # the other processes wait for this one in their own calls.
            inputs, targets = tree_map_only(
                torch.Tensor, lambda tensor: tensor[:0], (inputs, targets)
            )
        with self.tuning.autocast(self.device.type):
            with self.trace_shapes() if trace else nullcontext():
                outputs = self.model(inputs)
            if trace:
                self.observer.tell(
                    Traced(
                        outside=True,
                        device=str(self.device),
                        inputs=first_shape(inputs),
                        outputs=first_shape(outputs),
                    )
                )
            if not rows:
                return 0 * sum_outputs(outputs)
            if isinstance(outputs, torch.Tensor):  # a divided model has them on its last device
                targets = move_tensors(targets, outputs.device)
            return _require_scalar(self._loss(outputs, targets))

    def trace_shapes(self) -> AbstractContextManager[Any]:
        """Report the inputs and outputs of the model, or of each replica, in a forward pass.

        Replicas have the hooks of their model, and each calls them in a thread of its own.
        """

        def report(_: nn.Module, inputs: Any, outputs: Any) -> None:
            """Report the shapes and the device of one forward pass."""
            self.observer.tell(
                Traced(
                    outside=False,
                    device=first_device(inputs),
                    inputs=first_shape(inputs),
                    outputs=first_shape(outputs),
                )
            )

        return self.module.register_forward_hook(report)


def _require_scalar(loss: Any) -> torch.Tensor:
    """Return the loss if it is a tensor of one number that depends on the weights.

    Raises:
        TrainingError: it is something else.
    """
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


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that are called in sequence, each once, in order.

    These are the children of the model, and the layers of a child that is a list of layers. A model
    with only one child has the blocks of this child; a model without children is one block.
    """
    children = list(_iterate_children(model))
    while len(children) == 1 and list(children[0].children()):
        children = list(_iterate_children(children[0]))
    return children or [model]


def _iterate_children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module, with lists of layers replaced by their layers."""
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _iterate_children(child)
        else:
            yield child


def find_tied_parameters(blocks: list[nn.Module]) -> set[int]:
    """Return the `id` of every parameter that several blocks share, for example an embedding."""
    uses = Counter(
        identity
        for block in blocks
        for identity in {id(parameter) for parameter in block.parameters()}
    )
    return {identity for identity, count in uses.items() if count > 1}
