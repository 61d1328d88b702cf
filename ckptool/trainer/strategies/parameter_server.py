"""A parameter server: one process has the weights, the others compute gradients, over rpc."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from queue import Empty, SimpleQueue
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import torch
from torch.distributed import rpc
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from ckptool.errors import CheckpointError, PeerLost, TrainingError
from ckptool.loading.ranks import sendable
from ckptool.trainer.data import share
from ckptool.trainer.devices import device_of
from ckptool.trainer.processes import TIMEOUT, local_rank, of_this_attempt, require_launcher
from ckptool.trainer.strategies.base import Step, StepResult, Strategy
from ckptool.trainer.tuning import seed_all

__all__ = ["ParameterServer"]


class InFlight:
    """The steps that are handed out and not applied yet.

    The age of a gradient is the number of updates between the weights that it was computed with
    and those that it is applied to (Q. Ho et al.: More effective distributed ML via a stale
    synchronous parallel parameter server, 2013, bounds the same for whole workers).

    Attributes:
        applied: Updates so far.
    """

    def __init__(self, limit: int) -> None:
        """Begin with nothing; no gradient may be older than `limit` when it is applied."""
        self._limit = limit
        self._began: dict[int, int] = {}
        self.applied = 0

    def __len__(self) -> int:
        """Return the number of steps in flight."""
        return len(self._began)

    @property
    def has_room(self) -> bool:
        """Whether one more keeps the limit, in whatever order they arrive.

        At worst the oldest is the last: all the others, and the new one, are applied before it.
        """
        if not self._began:
            return True
        return self.applied - min(self._began.values()) + len(self._began) <= self._limit

    def begin(self, number: int) -> None:
        """Note that step `number` is handed out with the weights of now."""
        self._began[number] = self.applied

    def end(self, number: int) -> int:
        """Count the gradient of step `number` as applied, and return its age."""
        age = self.applied - self._began.pop(number)
        self.applied += 1
        return age


_SERVER = "server"  # torch's shutdown is led by the first name in alphabetical order
_SCHEME = "ckptool"
_PATIENCE = 10.0
"""Seconds in which a process that is alive takes a short message."""


@dataclass(frozen=True)
class Task:
    """What a worker computes: its part of one step, with weights and scaler's state of now.

    `part` is its number, and how many parts each batch has.
    """

    step: Step
    state: Sequence[torch.Tensor]
    scaler: Mapping[str, Any]
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class Answer:
    """What came of it: the samples' losses, summed, and tensors in the order of the model's.

    A parameter that the loss does not lead to has no gradient. `votes` are the worker's.
    """

    number: int
    part: int
    loss_sum: float
    gradients: Sequence[torch.Tensor | None]
    buffers: Sequence[torch.Tensor]
    votes: Sequence[float]


@dataclass(frozen=True)
class _Released:
    """There is nothing more to do: what the run came to, or why it ended.

    `all_here`: every process is there to part from.
    """

    all_here: bool
    outcome: Any = None
    failure: CheckpointError | None = None


class _Post:
    """What the functions that others call here reach: there is one a process at a time."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.over: Future[_Released] = Future()


_post = _Post()


def launched_as() -> tuple[int, int]:
    """Return rank and number of processes, as a launcher has set them.

    Raises:
        TrainingError: none has started this process, or it has started a single one, or this torch
            has no rpc.
    """
    require_launcher()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size < 2:
        raise TrainingError(
            "a parameter server and its workers are 2 processes or more, and this is 1",
            hint="--nproc 3 starts a server and two workers",
        )
    if not rpc.is_available():
        raise TrainingError("this torch has no torch.distributed.rpc", hint="--strategy ddp")
    return rank, size


# What is called in another process.


@async_execution  # type: ignore[untyped-decorator]
def _ask(task: Task) -> Future[Answer]:
    """Put the task where the worker's main thread finds it."""
    answer: Future[Answer] = Future()
    _post.inbox.put((task, answer.set_result))
    return answer


def _end_service(released: _Released) -> None:
    """Tell the worker that there is nothing more to do."""
    _post.inbox.put(released)


@async_execution  # type: ignore[untyped-decorator]
def _until_over() -> Future[_Released]:
    """Return the end of the server, in a future that fails if the server is lost."""
    return _post.over


def _take_failure(rank: int, why: PeerLost) -> None:
    """Tell the server that a worker ends."""
    _post.inbox.put((rank, why))


# How they begin and end.


def _name(rank: int) -> str:
    return f"worker-{rank}"


def _connect(name: str, rank: int, size: int) -> None:
    global _post
    _post = _Post()
    with suppress(RuntimeError):  # it is known already
        register_rendezvous_handler(_SCHEME, _meet)  # type: ignore[no-untyped-call]
    options = rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=TIMEOUT.total_seconds(), init_method=f"{_SCHEME}://"
    )
    try:
        with warnings.catch_warnings():  # torch warns of its own use of its own process group
            warnings.simplefilter("ignore", UserWarning)
            rpc.init_rpc(  # type: ignore[no-untyped-call]
                name, rank=rank, world_size=size, rpc_backend_options=options
            )
    except (RuntimeError, ValueError) as error:
        line = str(error).partition("\n")[0]
        raise TrainingError(f"the other processes cannot be reached: {line}") from error


def _meet(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield the launcher's store for this attempt, for rpc."""
    query = parse_qs(urlsplit(url).query)
    rank, size = int(query["rank"][0]), int(query["world_size"][0])
    store, *_numbers = next(rendezvous("env://", rank, size, timeout=TIMEOUT))
    yield of_this_attempt(store), rank, size


def _release(size: int, released: _Released) -> None:
    """Let the workers go when they have done what they are at; those that are gone are passed."""
    told = [
        rpc.rpc_async(_name(rank), _end_service, args=(released,), timeout=_PATIENCE)
        for rank in range(1, size)
    ]
    for one in told:
        try:
            one.wait()
        except RuntimeError:
            released = replace(released, all_here=False)
    _post.over.set_result(released)
    _leave(is_graceful=released.all_here)


def _leave(*, is_graceful: bool) -> None:
    """Leave rpc: if graceful, all wait for all; otherwise for nobody, as one does not come."""
    with suppress(RuntimeError):
        rpc.shutdown(graceful=is_graceful, timeout=_PATIENCE)


def _answer(rank: int, done: Future[Answer]) -> Answer | PeerLost:
    try:
        return done.value()
    except Exception as error:
        line = str(error).partition(" (this error")[0]
        return PeerLost(f"worker {rank} is gone, its connection has ended ({line})")


def _end_of(over: Future[_Released]) -> _Released:
    try:
        return over.value()
    except Exception:
        gone = PeerLost("the server, rank 0, is gone: nobody is there to work for")
        return _Released(all_here=False, failure=gone)


def _as_told(error: BaseException) -> CheckpointError:
    """Return why the server ends, as its workers raise it: a foreign error may not be picklable."""
    told = sendable(error)
    if isinstance(told, CheckpointError):
        return told
    return PeerLost(f"the server, rank 0, has failed with {told}")


def _tell(rank: int, error: BaseException) -> None:
    """Send the server the error that ends this worker."""
    if isinstance(error, CheckpointError):
        why = PeerLost(f"worker {rank} cannot go on: {error}", hint=error.hint)
    else:
        shown = "".join(traceback.format_exception(error))
        what = f"{type(error).__name__}: {error}"
        why = PeerLost(f"worker {rank} has failed with {what}\n{shown}")
    with suppress(RuntimeError):  # the server is gone, or ending
        rpc.rpc_sync(_SERVER, _take_failure, args=(rank, why), timeout=_PATIENCE)


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
        self._end: _Released | None = None
        _connect(_SERVER if self.takes_steps else _name(self._rank), self._rank, self._size)
        with self._serving() if self.takes_steps else self._working():
            yield

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Lead the workers, which end with the block."""
        is_split = self.config.updates == "synchronous"
        self._parts = self._size - 1 if is_split else 1
        self._in_flight = InFlight(0 if is_split else self.config.staleness)
        self._handed_out: dict[int, tuple[Step, float, list[Answer]]] = {}
        self._free, self._are_all_here = set(range(1, self._size)), True
        self._outcome: Any = None
        failure = None
        try:
            yield
        except BaseException as error:
            failure = _as_told(error)
            raise
        finally:
            _release(self._size, _Released(self._are_all_here, self._outcome, failure))

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Watch the server, and tell it of what is raised in the block."""
        over: Future[_Released] = rpc.rpc_async(_SERVER, _until_over, timeout=0)
        over.add_done_callback(lambda done: _post.inbox.put(_end_of(done)))
        try:
            yield
        except BaseException as error:
            if self._end is None:
                _tell(self._rank, error)
            raise
        finally:
            _leave(is_graceful=self._end is not None and self._end.all_here)

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
        """Return all rows, or in a worker those of the part that it was handed."""
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
            self._hand_out(replace(task, part=(part, self._parts)))
        return self._collected(lambda: bool(self._in_flight.has_room and self._free))

    def settled(self) -> list[StepResult]:
        """Wait until nothing is in flight any more."""
        return self._collected(lambda: not len(self._in_flight))

    def end(self, outcome: Any) -> None:
        """Give the outcome to the workers when they are released."""
        self._outcome = outcome

    def _hand_out(self, task: Task) -> None:
        rank = min(self._free)
        self._free.remove(rank)
        answer: Future[Answer] = rpc.rpc_async(_name(rank), _ask, args=(task,), timeout=0)
        answer.add_done_callback(lambda done: _post.inbox.put((rank, _answer(rank, done))))

    def _next(self, *, waits: bool) -> Answer | None:
        """Return the next answer; None: there is none yet, and `waits` is false."""
        try:
            rank, outcome = _post.inbox.get(waits)
        except Empty:
            return None
        if isinstance(outcome, PeerLost):
            self._are_all_here = False
            raise outcome
        self._free.add(rank)
        return outcome  # type: ignore[no-any-return]

    def _collected(self, is_enough: Callable[[], bool]) -> list[StepResult]:
        """Apply what has arrived, and what arrives until it is enough."""
        results = []
        while (answer := self._next(waits=not is_enough())) is not None:
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
        result = self.update(replace(step, votes=_sums(step.votes, answer.votes)), answer.loss_sum)
        return replace(result, staleness=self._in_flight.end(answer.number))

    # A worker.

    def serve(self, votes: Callable[[], Sequence[float]]) -> Any:
        """Compute gradients until the server needs no more, and return the outcome of the run.

        Raises:
            PeerLost: the server is gone.
            CheckpointError: it could not go on, for this reason.
        """
        self.model.train()
        while not isinstance(message := _post.inbox.get(), _Released):
            task, answer = message
            answer(self._computed(task, votes()))
        self._end = message
        if message.failure is not None:
            raise message.failure
        return message.outcome

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
    """Return the sum of all parts of a step, in their own order, whichever came first."""
    first, *others = sorted(answers, key=lambda one: one.part)
    for other in others:
        first = replace(
            first,
            loss_sum=first.loss_sum + other.loss_sum,
            gradients=[
                one if two is None else two if one is None else one + two
                for one, two in zip(first.gradients, other.gradients, strict=True)
            ],
            votes=_sums(first.votes, other.votes),
        )
    return first


def _sums(one: Sequence[float], two: Sequence[float]) -> list[float]:
    return [sum(votes) for votes in zip_longest(one, two, fillvalue=0.0)]


@torch.no_grad()
def _fill(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
