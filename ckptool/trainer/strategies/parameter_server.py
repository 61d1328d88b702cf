"""A parameter server: one process has the weights, the others compute gradients for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any, ClassVar

import torch

from ckptool.trainer.batches import share
from ckptool.trainer.devices import device_of
from ckptool.trainer.processes import local_rank
from ckptool.trainer.randomness import seed_all
from ckptool.trainer.strategies.base import Step, StepResult, Strategy
from ckptool.trainer.strategies.remote import Answer, Service, Task, Workers, launched_as
from ckptool.trainer.strategies.staleness import InFlight

__all__ = ["ParameterServer"]


class ParameterServer(Strategy):
    """Rank 0 hands out batches with the weights of now, and applies the gradients.

    Synchronous updates split each batch over all workers, wait for the slowest, and are applied
    once, the gradients added up in the order of the workers: the step of one process. Running
    statistics are those of the first worker.

    Asynchronous ones are applied as they arrive.

    A gradient may be for weights that have changed meanwhile, `config.staleness` times at most: so
    many workers, and one more, have something to do. With a staleness of 0, or one worker, steps
    follow each other as in one process, and give the same numbers; otherwise the order of arrival
    decides. Each batch is computed by one worker as a whole, and so are all those of one step.
    Running statistics are those of the worker that answered last.

    The server computes on the CPU, where evaluation and optimizer are; tensors cross as those of
    the CPU.
    """

    name: ClassVar[str] = "parameter-server"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Connect the server with the workers; whoever fails, all of them end."""
        self._rank, self._size = launched_as()
        self._part = 0, 1
        if self.takes_steps:
            is_split = self.config.updates == "synchronous"
            self._parts = self._size - 1 if is_split else 1
            self._in_flight = InFlight(0 if is_split else self.config.staleness)
            self._handed_out: dict[int, tuple[Step, float, list[Answer]]] = {}
            with Workers.connected(self._size) as self._workers:
                yield
        else:
            with Service.connected(self._rank, self._size) as self._service:
                yield

    @property
    def takes_steps(self) -> bool:
        """Rank 0 does."""
        return self._rank == 0

    @property
    def processes(self) -> int:
        """The server and its workers."""
        return self._size

    @property
    def device(self) -> torch.device:
        """The server's is the CPU; a worker's the CPU, or the GPU of its number on the machine."""
        if self.takes_steps:
            return torch.device("cpu")
        is_beside_server = os.environ.get("GROUP_RANK", "0") == "0"
        return device_of(self.config.device, local_rank=local_rank() - is_beside_server)

    def share(self, rows: Sequence[int]) -> list[int]:
        """All of them, or in a worker those of the part that it was handed."""
        return share(rows, *self._part)

    # The server.

    def step(self, step: Step) -> list[StepResult]:
        """Hand out the step, and wait until there may be another one.

        Raises:
            TrainingError: a loss is no number any more.
            PeerLost: a worker has failed, or is gone.
        """
        scaler = self.tuning.scaler
        self.tuning.scaled(torch.zeros(()))  # a scaler begins to be one with its first loss
        self._in_flight.begin(step.number)
        self._handed_out[step.number] = step, scaler.get_scale(), []
        state = [one.detach().clone() for one in self._state()]  # the next update is in place
        # The votes are of this process, and stay in it.
        task = Task(replace(step, votes=()), state, scaler.state_dict())
        for part in range(self._parts):
            self._workers.hand_out(replace(task, part=(part, self._parts)))
        return self._collected(lambda: bool(self._in_flight.has_room and self._workers.free))

    def settled(self) -> list[StepResult]:
        """Wait until nothing is in flight any more."""
        return self._collected(lambda: not len(self._in_flight))

    def end(self, outcome: Any) -> None:
        """Have the workers be told it when they are let go."""
        self._workers.outcome = outcome

    def _collected(self, is_enough: Callable[[], bool]) -> list[StepResult]:
        """Apply what has arrived, and what arrives until it is enough."""
        results = []
        while (answer := self._workers.next(waits=not is_enough())) is not None:
            answers = self._handed_out[answer.number][2]
            answers.append(answer)
            if len(answers) == self._parts:
                results.append(self._applied(_added(answers)))
        return results

    def _applied(self, answer: Answer) -> StepResult:
        step, scale, _ = self._handed_out.pop(answer.number)
        rescale = self.tuning.scaler.get_scale() / scale  # it may have changed on the way
        for parameter, gradient in zip(self.module.parameters(), answer.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.mul_(rescale)
        _fill(list(self.module.buffers()), answer.buffers)
        both = zip_longest(step.votes, answer.votes, fillvalue=0.0)
        result = self.update(replace(step, votes=[sum(votes) for votes in both]), answer.loss_sum)
        return replace(result, staleness=self._in_flight.end(answer.number))

    # A worker.

    def serve(self, votes: Callable[[], Sequence[float]]) -> Any:
        """Compute gradients until the server needs no more; what it says that the run came to.

        Raises:
            PeerLost: the server is gone.
            CheckpointError: it could not go on, for this reason.
        """
        self.model.train()
        for task, answer in self._service.tasks():
            answer(self._computed(task, votes()))
        return self._service.outcome

    def _computed(self, task: Task, votes: Sequence[float]) -> Answer:
        self._part = part, _ = task.part
        seed = self.config.seed * 1_000_003 + task.step.number  # whichever worker it is
        seed_all(seed + part * 7_919_000_000)
        _fill(self._state(), task.state)
        self.tuning.scaler.load_state_dict(dict(task.scaler))
        self.module.zero_grad()
        loss_sum = self.backward(task.step)
        return Answer(
            task.step.number,
            part,
            loss_sum,
            [None if one.grad is None else one.grad.cpu() for one in self.module.parameters()],
            [one.detach().cpu() for one in self.module.buffers()],
            list(votes),
        )

    # Both.

    def _state(self) -> list[torch.Tensor]:
        return [*self.module.parameters(), *self.module.buffers()]


def _added(answers: Sequence[Answer]) -> Answer:
    """What all parts of a step come to, in their own order, whichever came first."""
    first, *others = sorted(answers, key=lambda one: one.part)
    for other in others:
        gradients = [
            one if two is None else two if one is None else one + two
            for one, two in zip(first.gradients, other.gradients, strict=True)
        ]
        both = zip_longest(first.votes, other.votes, fillvalue=0.0)
        loss_sum, votes = first.loss_sum + other.loss_sum, [sum(one) for one in both]
        first = replace(first, loss_sum=loss_sum, gradients=gradients, votes=votes)
    return first


@torch.no_grad()
def _fill(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
