"""A parameter server: one process has the weights, the others compute gradients, over rpc."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.distributed import rpc
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from ckptool.errors import CheckpointError, PeerLost, TrainingError
from ckptool.loading.ranks import to_sendable
from ckptool.trainer.data import select_share
from ckptool.trainer.devices import resolve_device
from ckptool.trainer.launching import connection_error
from ckptool.trainer.processes import TIMEOUT, open_store, read_launcher_rank, read_local_rank
from ckptool.trainer.strategies.base import StepResult, Strategy, TrainingStep
from ckptool.trainer.tuning import seed_all

_SERVER = "server"  # torch's shutdown is led by the first name in alphabetical order
_SCHEME = "ckptool"
_PATIENCE = 10.0
"""Seconds in which a running process answers a short message."""
_Failure = CheckpointError | str
"""The cause of a failure as it is sent: an error of ckptool, or the text of another error."""


class InFlight:
    """The steps that are handed out and not applied yet.

    The age of a gradient is the number of updates between the weights that it was computed with
    and the weights that it is applied to (Q. Ho et al.: More effective distributed ML via a stale
    synchronous parallel parameter server, 2013, bounds the age of whole workers).

    Attributes:
        applied: The number of updates so far.
    """

    def __init__(self, limit: int) -> None:
        """Start without steps; no gradient may be older than `limit` when it is applied."""
        self._limit = limit
        self._applied_before: dict[int, int] = {}
        """The number of updates before a step was handed out, by the number of the step."""
        self.applied = 0

    def __len__(self) -> int:
        """Return the number of steps in flight."""
        return len(self._applied_before)

    @property
    def has_room(self) -> bool:
        """True if one more step keeps the limit for any order in which the gradients arrive."""
        if not len(self):
            return True
        oldest_age = self.applied - min(self._applied_before.values())
        # In the worst case the oldest is applied after all the others and the new one.
        updates_before_oldest = len(self)
        return oldest_age + updates_before_oldest <= self._limit

    def begin(self, number: int) -> None:
        """Record that step `number` is handed out with the current weights."""
        self._applied_before[number] = self.applied

    def finish(self, number: int) -> int:
        """Count the gradient of step `number` as applied, and return its age."""
        age = self.applied - self._applied_before.pop(number)
        self.applied += 1
        return age


@dataclass(frozen=True)
class Task:
    """The part of one step that a worker computes, with the current weights and scaler.

    `part` is the number of the part, and how many parts each batch has.
    """

    step: TrainingStep
    state: Sequence[torch.Tensor]
    scaler: Mapping[str, Any]
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Answer:
    """The result of a task: the sum of the losses, and tensors in the order of the model.

    A gradient is None if the loss does not depend on the parameter. `votes` are the worker's.
    """

    number: int
    loss_sum: float
    gradients: Sequence[torch.Tensor | None]
    buffers: Sequence[torch.Tensor]
    votes: Sequence[float]


@dataclass(frozen=True)
class _OpenStep:
    """A step that is handed out: the scale of its loss, and its answers so far by worker rank."""

    step: TrainingStep
    loss_scale: float
    answers: dict[int, Answer] = field(default_factory=dict)


@dataclass(frozen=True)
class _RunEnd:
    """The end of the run: its outcome, or why it failed."""

    outcome: Any = None
    failure: _Failure | None = None


_inbox: SimpleQueue[Any] = SimpleQueue()
"""The messages to this process. The server gets `(rank, Answer | _Failure)`; a worker gets
`(Task, send_answer)`, and in the end `_RunEnd`, or a `_Failure` of the connection."""
_run_end: Future[_RunEnd] = Future()
"""The end of the run, in the server."""


# Functions that other processes call.


@async_execution  # type: ignore[untyped-decorator]
def _submit_task(task: Task) -> Future[Answer]:
    """Pass a task to the main thread of this worker; the future gets its answer."""
    answer: Future[Answer] = Future()
    _inbox.put((task, answer.set_result))
    return answer


def _receive(message: Any) -> None:
    """Put a message into the inbox of this process."""
    _inbox.put(message)


@async_execution  # type: ignore[untyped-decorator]
def _wait_for_end() -> Future[_RunEnd]:
    """Return the future end of the run, for a worker; its call fails if the server is lost."""
    return _run_end


# The beginning and the end of the connection.


def _worker_name(rank: int) -> str:
    """Return the rpc name of a process; rank 0 is the server."""
    return f"worker-{rank}" if rank else _SERVER


def _connect(rank: int, size: int) -> None:
    """Start rpc in this process, over the launcher's store, with an empty inbox."""
    global _inbox, _run_end
    _inbox, _run_end = SimpleQueue(), Future()
    # For an address of this scheme torch gets its store from `_yield_store`.
    with suppress(RuntimeError):  # it is registered already
        register_rendezvous_handler(_SCHEME, _yield_store)  # type: ignore[no-untyped-call]
    options = rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=TIMEOUT.total_seconds(), init_method=f"{_SCHEME}://"
    )
    try:
        with warnings.catch_warnings():  # torch warns of its own use of its own process group
            warnings.simplefilter("ignore", UserWarning)
            rpc.init_rpc(  # type: ignore[no-untyped-call]
                _worker_name(rank), rank=rank, world_size=size, rpc_backend_options=options
            )
    except (RuntimeError, ValueError) as error:
        raise connection_error(
            error, os.environ["MASTER_PORT"], os.environ["MASTER_ADDR"]
        ) from error


def _yield_store(_: str, **__: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield the launcher's store, rank and number of processes, as torch's rendezvous asks."""
    yield open_store()


def _release_workers(size: int, end: _RunEnd) -> None:
    """Send the end of the run to all workers, also to their `_wait_for_end`; shut rpc down."""
    calls = [
        rpc.rpc_async(_worker_name(rank), _receive, args=(end,), timeout=_PATIENCE)
        for rank in range(1, size)
    ]
    for call in calls:
        with suppress(RuntimeError):  # this worker is gone
            call.wait()
    _run_end.set_result(end)
    _shut_down_rpc(end)


def _shut_down_rpc(end: _RunEnd | None) -> None:
    """Shut rpc down; after a failure without waiting for the others, which may be gone."""
    is_graceful = end is not None and end.failure is None
    with suppress(RuntimeError):
        rpc.shutdown(graceful=is_graceful, timeout=_PATIENCE)


def _result_or_failure(call: Future[Any]) -> Any:
    """Return the result of a call in another process, or text on the failed connection."""
    try:
        return call.value()
    except Exception as error:
        reason, _, _ = str(error).partition(" (this error")  # originated at tensorpipe/...
        return f"the connection was closed ({reason})"


class ParameterServer(Strategy):
    """Rank 0 hands out batches with the current weights, and applies the gradients.

    Synchronous updates split each batch over all workers, wait for the slowest, and are applied
    once, the gradients added up in the order of the workers: the step of one process. Running
    statistics are those of the first worker.

    Asynchronous updates are applied as they arrive. The weights may change `config.staleness` times
    between the computation of a gradient and its update, so that `staleness + 1` workers are busy.
    With a staleness of 0, or one worker, the result is that of one process; otherwise it depends on
    the order of arrival. One worker computes all batches of a step. Running statistics are those of
    the worker that answered last.

    The server validates and updates on the CPU; tensors are sent as CPU tensors.
    """

    @contextmanager
    def connect(self) -> Iterator[None]:
        """Connect the server and the workers; if one of them fails, all of them end.

        Raises:
            TrainingError: there is only one process, or torch has no rpc.
        """
        self._rank, self.processes = read_launcher_rank()
        self.takes_steps = self._rank == 0  # the server
        if self.processes < 2:
            raise TrainingError(
                "a parameter server needs at least 2 processes",
                hint="use --nproc 3 for a server and two workers",
            )
        if not rpc.is_available():
            raise TrainingError(
                "this torch has no torch.distributed.rpc", hint="use --strategy ddp"
            )
        self._part = 0, 1  # part 0 of 1, the whole batch; in a worker, each task sets its part
        self._end: _RunEnd | None = None  # in a worker, as soon as the server has sent it
        _connect(self._rank, self.processes)
        with self._lead_workers() if self.takes_steps else self._watch_server():
            yield

    @contextmanager
    def _lead_workers(self) -> Iterator[None]:
        """Prepare the server to hand out steps; the workers end with the block.

        They get the outcome of `finish`, or the error of the block.
        """
        workers = range(1, self.processes)
        is_split = self.config.updates == "synchronous"
        self._parts = len(workers) if is_split else 1  # per batch
        self._in_flight = InFlight(0 if is_split else self.config.staleness)
        self._open_steps: dict[int, _OpenStep] = {}  # by number
        self._free_workers = set(workers)
        self._outcome: Any = None
        failure = None
        try:
            yield
        except BaseException as error:
            failure = to_sendable(error)
            raise
        finally:
            _release_workers(self.processes, _RunEnd(self._outcome, failure))

    @contextmanager
    def _watch_server(self) -> Iterator[None]:
        """Watch the server from a worker, and send it any error of the block.

        Its end, or a lost connection, goes to the inbox: the server answers a call when it ends.
        """
        end_call: Future[_RunEnd] = rpc.rpc_async(_SERVER, _wait_for_end, timeout=0)
        end_call.add_done_callback(lambda call: _inbox.put(_result_or_failure(call)))
        try:
            yield
        except BaseException as error:
            if self._end is None:  # the server has not ended: it waits for this worker
                message = self._rank, to_sendable(error)
                with suppress(RuntimeError):  # the server is gone, or ends
                    rpc.rpc_sync(_SERVER, _receive, args=(message,), timeout=_PATIENCE)
            raise
        finally:
            _shut_down_rpc(self._end)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The CPU for the server; for a worker the GPU of its number on the machine, or the CPU."""
        if self.takes_steps:
            return (torch.device("cpu"),)
        local_rank = read_local_rank()
        is_on_machine_of_server = os.environ.get("GROUP_RANK", "0") == "0"
        if is_on_machine_of_server:  # there the server is number 0, and needs no GPU
            local_rank -= 1
        return (resolve_device(self.config.device, local_rank=local_rank),)

    def select_rows(self, rows: Sequence[int]) -> list[int]:
        """Return all rows, or in a worker the rows of its part of the batch."""
        number, count = self._part
        return select_share(rows, number, count)

    # The server.

    def step(self, step: TrainingStep) -> list[StepResult]:
        """Hand out a step, wait until another one can be handed out, and return the finished ones.

        Raises:
            TrainingError: a loss is not finite.
            PeerLost: a worker has failed, or is gone.
        """
        scaler = self.tuning.scaler
        scaler.scale(torch.zeros(()))  # the scaler initializes its scale with the first loss
        self._in_flight.begin(step.number)
        self._open_steps[step.number] = _OpenStep(step, scaler.get_scale())
        # Copies: the next update changes the tensors in place.
        state = [tensor.detach().clone() for tensor in self._state_tensors()]
        # The votes are of this process, and stay in it.
        task = Task(replace(step, votes=()), state, scaler.state_dict())
        for part in range(self._parts):
            self._hand_out_task(replace(task, part=(part, self._parts)))
        return self._collect_answers(lambda: self._in_flight.has_room and bool(self._free_workers))

    def collect_finished_steps(self) -> list[StepResult]:
        """Wait until no step is in flight, and return the steps that were."""
        return self._collect_answers(lambda: len(self._in_flight) == 0)

    def finish(self, outcome: Any) -> None:
        """Store the outcome, which the workers get when they are released."""
        self._outcome = outcome

    def _hand_out_task(self, task: Task) -> None:
        """Send a task to the first free worker, without a time limit; the inbox gets its answer."""
        rank = min(self._free_workers)
        self._free_workers.remove(rank)
        answer: Future[Answer] = rpc.rpc_async(
            _worker_name(rank), _submit_task, args=(task,), timeout=0
        )
        answer.add_done_callback(lambda call: _inbox.put((rank, _result_or_failure(call))))

    def _collect_answers(self, is_enough: Callable[[], bool]) -> list[StepResult]:
        """Apply the answers that have arrived, and wait for more until `is_enough()` is True.

        A step is applied when all of its parts are answered; return the results of these steps.
        """
        results: list[StepResult] = []
        while True:
            try:
                rank, answer = _inbox.get(block=not is_enough())
            except Empty:  # of a `get` that does not block
                return results
            if not isinstance(answer, Answer):  # it is a `_Failure`
                hint = getattr(answer, "hint", None)
                raise PeerLost(f"worker {rank} cannot continue: {answer}", hint=hint)
            self._free_workers.add(rank)
            answers = self._open_steps[answer.number].answers
            answers[rank] = answer
            if len(answers) == self._parts:
                sum_of_parts = _add_answers([answers[worker] for worker in sorted(answers)])
                results.append(self._apply_answer(sum_of_parts))

    def _apply_answer(self, answer: Answer) -> StepResult:
        """Update the weights with the gradients of a whole step, and return its result.

        Buffers, such as running statistics, become those of the answer.
        """
        open_step = self._open_steps.pop(answer.number)
        # The gradients are multiplied by the loss scale of that time, which may have changed.
        rescale = self.tuning.scaler.get_scale() / open_step.loss_scale
        for parameter, gradient in zip(self.module.parameters(), answer.gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.mul_(rescale)
        _copy_values(list(self.module.buffers()), answer.buffers)
        # Votes are summed over all processes: those of the server, and of the workers.
        votes = _add_votes(open_step.step.votes, answer.votes)
        result = self.update(replace(open_step.step, votes=votes), answer.loss_sum)
        return replace(result, staleness=self._in_flight.finish(answer.number))

    # A worker.

    def serve(self, votes: Callable[[], Sequence[float]]) -> Any:
        """Compute gradients until the end of the run, and return its outcome.

        Each answer to the server contains the `votes` of this process at that time.

        Raises:
            PeerLost: the server is gone, or failed with an error that is not ckptool's.
            CheckpointError: the server failed with this error.
        """
        self.model.train()
        while isinstance(message := _inbox.get(), tuple):
            task, send_answer = message
            send_answer(self._compute_answer(task, votes()))
        # The last message is the end of the run, or the failure of the connection.
        end = message if isinstance(message, _RunEnd) else _RunEnd(failure=message)
        self._end = end
        if isinstance(end.failure, str):
            raise PeerLost(f"the server, rank 0, cannot continue: {end.failure}")
        if end.failure is not None:
            raise end.failure
        return end.outcome

    def _compute_answer(self, task: Task, votes: Sequence[float]) -> Answer:
        """Compute the gradients of a task in this worker.

        Random numbers, as of dropout, depend on the step and the part, not on the worker.
        """
        self._part = task.part
        part_number, _ = task.part
        step_seed = self.config.seed * 1_000_003 + task.step.number
        seed_all(step_seed + part_number * 7_919_000_000)  # far from the seeds of other steps
        _copy_values(self._state_tensors(), task.state)
        self.tuning.scaler.load_state_dict(dict(task.scaler))
        self.module.zero_grad()
        loss_sum = self.backward(task.step)
        gradients = [
            None if parameter.grad is None else parameter.grad.cpu()
            for parameter in self.module.parameters()
        ]
        buffers = [buffer.detach().cpu() for buffer in self.module.buffers()]
        return Answer(task.step.number, loss_sum, gradients, buffers, list(votes))

    def _state_tensors(self) -> list[torch.Tensor]:
        """Return the parameters and buffers, in the order in which they are sent."""
        return [*self.module.parameters(), *self.module.buffers()]


def _add_answers(answers: Sequence[Answer]) -> Answer:
    """Return the sum of the answers to all parts of a step, added in this order.

    The buffers, such as running statistics, are those of the first answer.
    """
    total, *others = answers
    for other in others:
        pairs = zip(total.gradients, other.gradients, strict=True)
        total = replace(
            total,
            loss_sum=total.loss_sum + other.loss_sum,
            gradients=[_add_gradients(a, b) for a, b in pairs],
            votes=_add_votes(total.votes, other.votes),
        )
    return total


def _add_gradients(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two gradients; a missing one counts as zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _add_votes(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return the sum of votes by position; missing ones are 0."""
    return [sum(votes) for votes in zip_longest(a, b, fillvalue=0.0)]


@torch.no_grad()
def _copy_values(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy values into tensors in place."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
