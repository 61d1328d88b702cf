"""What a way of spreading a run over devices decides; all else is the same for all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from ckptool.errors import TrainingError
from ckptool.trainer import sharded
from ckptool.trainer.config import TrainConfig, require_shared
from ckptool.trainer.data import (
    Dataset,
    Loss,
    device_in,
    emptied,
    moved,
    prepared,
    shape,
    share,
    sum_of,
)
from ckptool.trainer.events import Observer, Traced, Validating
from ckptool.trainer.processes import World

if TYPE_CHECKING:
    from ckptool.loading.source import Source
    from ckptool.trainer.tuning import Tuning

__all__ = ["DIVERGED", "Step", "StepResult", "Strategy", "blocks_of", "tied"]


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that are called one after the other, each once, in its order.

    Those are its children, and for a list of layers the layers; of a model with one child alone
    that child's. A model without children is one block.
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
    """Return the `id` of every parameter that more than one block has, as embedding and head."""
    uses = Counter(number for block in blocks for number in {id(one) for one in block.parameters()})
    return {number for number, times in uses.items() if times > 1}


DIVERGED = (
    "a lower --lr, --clip 1, or data that are standardised; the checkpoints of earlier steps are "
    "as they were"
)
"""What helps where numbers grow beyond what can be computed with."""


@dataclass(frozen=True)
class Step:
    """One step of the optimizer that is asked for.

    Attributes:
        number: From 1, over all epochs.
        batches: Row numbers of the global batches whose gradients make it.
        votes: Numbers of this process that are summed over all of them on the way.
    """

    number: int
    batches: Sequence[Sequence[int]]
    votes: Sequence[float] = ()

    @property
    def samples(self) -> int:
        """How many there are in all of it."""
        return sum(len(rows) for rows in self.batches)


@dataclass(frozen=True)
class StepResult:
    """A step that is done: the sum of the samples' losses, and of the votes, over all processes.

    `staleness` is how many updates came between the weights of its gradients and those it changed.
    `is_skipped`: it changed none, as its gradients overflowed in half precision.
    """

    number: int
    loss_sum: float
    samples: int
    votes: Sequence[float] = ()
    staleness: int = 0
    is_skipped: bool = False


class Strategy:
    """One process on one device; the others change what they do otherwise.

    In this order: `opened`, around all else; `wrap`, `tuning` set, `attend`; steps.

    Attributes:
        name: The word of `--strategy`.
        model: What is called with a batch: the module inside its wrapper.
        module: The bare module.
    """

    name: ClassVar[str]

    model: nn.Module
    module: nn.Module
    tuning: Tuning

    def __init__(self, config: TrainConfig, observer: Observer) -> None:
        """Open nothing yet."""
        self.config, self.observer = config, observer
        self.world = World()
        self._feed: Iterator[tuple[Any, Any]] | None = None

    # What it opens.

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Connect the processes and choose the device; undone at the end.

        Raises:
            TrainingError: there is no such device, or the other processes cannot be reached.
        """
        yield

    @property
    def device(self) -> torch.device:
        """Where inputs go, and where losses are made."""
        raise NotImplementedError

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All that this process computes on."""
        return (self.device,)

    @property
    def takes_steps(self) -> bool:
        """Whether this process goes through the epochs; False: it serves one that does."""
        return True

    def serve(self, votes: Callable[[], Sequence[float]]) -> Any:
        """Work for the process that goes through the epochs, and return what it gives to `end`.

        `votes` gives those of this process, which are summed with the others'.
        """
        raise NotImplementedError

    def end(self, outcome: Any) -> None:
        """Give `outcome` to the processes that `serve` this one: no step comes any more."""

    @property
    def processes(self) -> int:
        """How many there are in the run."""
        return self.world.size

    # The model.

    def wrap(self, model: nn.Module) -> None:
        """Take the model, the same in every process; move and wrap it."""
        self.module = model.to(self.device)
        self.model = self.module

    def load(
        self,
        source: Source,
        optimizer: torch.optim.Optimizer | None,
        *,
        order: str | None = None,
    ) -> None:
        """Fill the model, and the optimizer, from a file, a folder of parts, or a state dict.

        All processes call it, and where the model is spread each takes its parts.

        `order="position"`: the optimizer's state is of the same parameters in the same order, as
        torch takes it; None: of those that the file names.

        Raises:
            MatchError: it is another architecture's; the report says how it differs.
        """
        if sharded.is_sharded(source):
            sharded.load_model(str(source), self.module)
            if optimizer is not None:
                sharded.load_optimizer(str(source), self.module, optimizer)
            return
        import ckptool

        ckptool.load_into(self.module, source, optimizer=optimizer, optimizer_order=order)

    def save(self, path: str, values: Mapping[str, Any]) -> None:
        """Write the model, the optimizer and `values`; all processes call it, rank 0 writes.

        Raises:
            WriteError: nothing is written; what was there is there.
        """
        import ckptool

        ckptool.save(path, model=self.model, optimizer=self.tuning.optimizer, **values)

    def values(self, path: str) -> dict[str, Any]:
        """Return the values that were given to `save`; of any other file nothing.

        Raises:
            UnreadableFile: it cannot be opened as a checkpoint.
        """
        if sharded.is_sharded(path):
            average = self.tuning.average
            return sharded.load_values(path, {} if average is None else average.state())
        import ckptool

        with ckptool.open(path) as held:
            if not isinstance(held.root, dict) or "progress" not in held.root:
                return {}
            rest = {
                key: one for key, one in held.root.items() if key not in ("state_dict", "optimizer")
            }
            return cast("dict[str, Any]", ckptool.load(held.with_root(rest)))

    def whole_module(self) -> nn.Module:
        """Return the model inside its wrapper, to be pickled; all processes call it.

        Raises:
            TrainingError: such a wrapper cannot be pickled.
        """
        return self.model

    def wrapped_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state dicts of model, with its wrapper's names, and optimizer, whole.

        All processes call it.
        """
        return self.model.state_dict(), self.tuning.optimizer.state_dict()

    # A step.

    def share(self, rows: Sequence[int]) -> list[int]:
        """Return the rows of a global batch that this process computes."""
        return share(rows, self.world.rank, self.world.size)

    @property
    def gradient_scale(self) -> float:
        """What a loss is multiplied with so that gradients are summed over the processes.

        Wrappers that average gradients divide by the number of processes.
        """
        return 1.0

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Wrap one batch of a step: gradients are exchanged in the last alone."""
        return nullcontext()

    def step(self, step: Step) -> list[StepResult]:
        """Take one step, or hand it out, and return the steps done by now, in order.

        Raises:
            TrainingError: the loss is no number any more; the weights are those before the step.
        """
        return [self.update(step, self.backward(step))]

    def backward(self, step: Step) -> float:
        """Compute the gradients of this process's share, and return the sum of its losses."""
        loss_sum = 0.0
        for position, rows in enumerate(step.batches):
            mine = self.share(rows)
            with self.accumulating(is_last=position == len(step.batches) - 1):
                loss = self.loss(mine)
                weight = len(mine) / step.samples * self.gradient_scale
                self.tuning.scaled(loss * weight).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.item() * len(mine)
        return loss_sum

    def update(self, step: Step, loss_sum: float) -> StepResult:
        """Apply the gradients; `loss_sum` is this process's."""
        broken = float(not self.tuning.has_finite_gradients)
        loss_sum, broken, *votes = self.world.sums([loss_sum, broken, *step.votes])
        self.require_finite(loss_sum, step, broken=bool(broken))
        is_taken = self.tuning.step(self.clip)
        return StepResult(step.number, loss_sum, step.samples, votes, is_skipped=not is_taken)

    def settled(self) -> list[StepResult]:
        """Wait for the steps that are handed out, and return those that `step` has not returned."""
        return []

    def clip(self, limit: float) -> None:
        """Scale the gradients down to a norm of `limit` over all of them together."""
        nn.utils.clip_grad_norm_(self.module.parameters(), limit)

    def require_finite(self, loss_sum: float, step: Step, *, broken: bool = False) -> None:
        """Stop before a loss that is no number, or gradients that are `broken`, reach the weights.

        Raises:
            TrainingError: there is such a thing.
        """
        if math.isfinite(loss_sum) and not broken:
            return
        self.tuning.optimizer.zero_grad()
        is_loss = not math.isfinite(loss_sum)
        what = f"the loss is {loss_sum / step.samples}" if is_loss else "a gradient is no number"
        raise TrainingError(
            f"{what} at step {step.number}",
            hint=DIVERGED,
        )

    # Losses.

    def attend(self, dataset: Dataset, validation: Dataset | None, loss: Loss) -> None:
        """Take the data of the steps; called once, after `wrap`.

        Raises:
            TrainingError: there are more processes than a batch has samples.
        """
        require_shared(self.config.batch_size, self.world.size)
        self._train, self._validation, self._loss = dataset, validation, loss

    @contextmanager
    def feeding(
        self, steps: Sequence[Sequence[Sequence[int]]], *, epoch: int, first: int
    ) -> Iterator[None]:
        """Prepare the batches of an epoch ahead, from step `first` on."""
        rows = [self.share(one) for step in steps for one in step]
        self._feed = self._batches(self._train, rows, epoch, first * self.config.accumulate)
        try:
            yield
        finally:
            self._feed = None  # the processes behind it end

    def _batches(
        self, dataset: Dataset, rows: Sequence[Sequence[int]], epoch: int = 0, first: int = 0
    ) -> Iterator[tuple[Any, Any]]:
        seed = self.config.seed ^ epoch << 44 ^ self.world.rank << 32
        return prepared(
            dataset,
            rows,
            getattr(torch, self.config.dtype),
            workers=min(self.config.workers, len(rows)),
            seed=(seed + first) & (1 << 63) - 1,
            is_pinned=self.device.type == "cuda",
        )

    def loss(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the mean loss of some samples; of none it is 0, with zeros as gradients."""
        batch = next(self._feed or self._batches(self._train, [rows]))
        return self._loss_of(batch, rows, trace=self.config.trace_batches)

    def placed(self, batch: Any) -> Any:
        """Return inputs and targets on the device that computes them."""
        return moved(batch, self.device)

    def validated(self) -> float | None:
        """Return the mean loss of the validation samples, in evaluation mode; None without any."""
        if self._validation is None or len(self._validation) == 0:
            return None
        was_training = self.model.training
        self.model.train(False)
        loss_sum, size, samples = 0.0, self.config.batch_size, len(self._validation)
        starts = range(0, samples, size)
        shares = [self.share(range(start, min(start + size, samples))) for start in starts]
        with torch.no_grad():
            batches = self._batches(self._validation, shares)
            for start, rows, batch in zip(starts, shares, batches, strict=True):
                self.observer.tell(Validating(start, samples))
                loss_sum += self._loss_of(batch, rows).item() * len(rows)
        self.model.train(was_training)
        return self.world.sums([loss_sum])[0] / samples

    def _loss_of(
        self, batch: tuple[Any, Any], rows: Sequence[int], *, trace: bool = False
    ) -> torch.Tensor:
        inputs, targets = self.placed(batch)
        if not rows:  # no sample, and the right types: the other processes wait for this one
            inputs, targets = emptied(inputs), emptied(targets)
        with self.tuning.autocast(self.device.type):
            with self.tracing() if trace else nullcontext():
                outputs = self.model(inputs)
            if trace:
                self.observer.tell(Traced(True, str(self.device), shape(inputs), shape(outputs)))
            if isinstance(outputs, torch.Tensor):
                targets = moved(targets, outputs.device)
            return _scalar(self._loss(outputs, targets)) if rows else 0 * sum_of(outputs)

    def tracing(self) -> AbstractContextManager[Any]:
        """Report inputs and outputs of the model, or of each replica, in a forward pass.

        Replicas have the hooks of their model, and each calls them in a thread of its own.
        """

        def tell(_: nn.Module, inputs: Any, outputs: Any) -> None:
            self.observer.tell(Traced(False, device_in(inputs), shape(inputs), shape(outputs)))

        return self.module.register_forward_hook(tell)


def _scalar(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        fault = f"a {type(loss).__name__}, and no tensor"
    elif loss.numel() != 1:
        fault = f"a tensor of shape {tuple(loss.shape)}, and no single number"
    elif torch.is_grad_enabled() and not loss.requires_grad:
        fault = "a tensor without a gradient, which no weight has led to"
    else:
        return loss
    raise TrainingError(
        f"the loss gave {fault}",
        hint="it returns the mean over samples, computed by torch from the model's outputs",
    )
