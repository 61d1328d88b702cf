"""One server and its workers over `torch.distributed.rpc`: what is asked, who answers, who is gone.

Every process has an inbox. What others send is put there by the threads of rpc, and taken out by
the main thread: models run, and signals are seen, where they are in every other strategy.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from ckptool.errors import CheckpointError, PeerLost, TrainingError
from ckptool.loading.ranks import sendable
from ckptool.trainer.processes import TIMEOUT, require_launcher
from ckptool.trainer.strategies.base import Step

__all__ = ["Answer", "Service", "Task", "Workers", "launched_as"]

_SERVER = "server"  # torch's shutdown is led by the first name in alphabetical order
_PATIENCE = 10.0
"""Seconds in which a process that is alive takes a short message."""


@dataclass(frozen=True)
class Task:
    """What a worker computes: one step, with the weights and the scaler's state of now."""

    step: Step
    state: Sequence[torch.Tensor]
    scaler: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """What came of it: the samples' losses, summed, and tensors in the order of the model's.

    A parameter that the loss does not lead to has no gradient. `votes` are the worker's.
    """

    number: int
    loss_sum: float
    gradients: Sequence[torch.Tensor | None]
    buffers: Sequence[torch.Tensor]
    votes: Sequence[float]


@dataclass(frozen=True)
class _Failure:
    """A worker cannot go on; of one that has vanished there is no traceback."""

    rank: int
    what: str
    hint: str | None = None
    traceback: str = ""


@dataclass(frozen=True)
class _Asked:
    task: Task
    answer: Future[Answer]


@dataclass(frozen=True)
class _Released:
    """There is nothing more to do: what the run came to, or why the server ended it.

    `all_here`: every process is there to part from.
    """

    all_here: bool
    outcome: Any = None
    failure: CheckpointError | None = None
    is_server_gone: bool = False


class _Post:
    """What the functions that others call here reach: there is one a process at a time."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.over: Future[_Released] = Future()


_post = _Post()


def launched_as() -> tuple[int, int]:
    """Rank and number of processes, as a launcher has it.

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


class Workers:
    """The server's side: hands out tasks, and takes what comes back in the order it comes.

    Attributes:
        free: The ranks that have nothing to do.
        outcome: What the run came to, which all of them are told at the end.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        """All of them have nothing to do yet."""
        self.free = set(ranks)
        self.outcome: Any = None
        self._all_here = True

    @classmethod
    @contextmanager
    def connected(cls, size: int) -> Iterator[Workers]:
        """The workers of a run of `size` processes, which end with it.

        Raises:
            TrainingError: they cannot be reached.
        """
        _connect(_SERVER, 0, size)
        workers = cls(range(1, size))
        failure = None
        try:
            yield workers
        except BaseException as error:
            failure = _as_told(error)
            raise
        finally:
            _release(size, _Released(workers._all_here, workers.outcome, failure))

    def hand_out(self, task: Task) -> None:
        """To the first worker that is free."""
        rank = min(self.free)
        self.free.remove(rank)
        answer: Future[Answer] = rpc.rpc_async(_name(rank), _ask, args=(task,), timeout=0)
        answer.add_done_callback(lambda done: _post.inbox.put((rank, _outcome(rank, done))))

    def next(self, *, waits: bool) -> Answer | None:
        """The next answer; None: there is none yet, and this does not wait.

        Raises:
            PeerLost: a worker has failed, or is gone; the message has its traceback.
        """
        try:
            rank, outcome = _post.inbox.get(waits)
        except Empty:
            return None
        if isinstance(outcome, _Failure):
            self._all_here = False
            text = f"\n{outcome.traceback}" if outcome.traceback else ""
            raise PeerLost(f"worker {rank} {outcome.what}{text}", hint=outcome.hint)
        self.free.add(rank)
        return outcome  # type: ignore[no-any-return]


class Service:
    """A worker's side: takes tasks until the server has no more."""

    def __init__(self) -> None:
        """Not released yet."""
        self._end: _Released | None = None

    @classmethod
    @contextmanager
    def connected(cls, rank: int, size: int) -> Iterator[Service]:
        """The server of a run of `size` processes; it is told of what is raised inside.

        Raises:
            TrainingError: it cannot be reached.
        """
        _connect(_name(rank), rank, size)
        service = cls()
        over: Future[_Released] = rpc.rpc_async(_SERVER, _until_over, timeout=0)
        over.add_done_callback(lambda done: _post.inbox.put(_end_of(done)))
        try:
            yield service
        except BaseException as error:
            if service._end is None:
                _tell(_failure(rank, error))
            raise
        finally:
            _leave(is_graceful=service._end is not None and service._end.all_here)

    def tasks(self) -> Iterator[tuple[Task, Callable[[Answer], None]]]:
        """Every task, and what to call with its answer.

        Raises:
            PeerLost: the server is gone.
            CheckpointError: it could not go on, for this reason.
        """
        while isinstance(message := _post.inbox.get(), _Asked):
            yield message.task, message.answer.set_result
        self._end = message
        if message.is_server_gone:
            raise PeerLost("the server, rank 0, is gone: nobody is there to work for")
        if message.failure is not None:
            raise message.failure

    @property
    def outcome(self) -> Any:
        """What the run came to, once there are no more tasks."""
        return None if self._end is None else self._end.outcome


# What is called in another process.


@async_execution  # type: ignore[untyped-decorator]
def _ask(task: Task) -> Future[Answer]:
    """In a worker: put the task where its main thread finds it."""
    answer: Future[Answer] = Future()
    _post.inbox.put(_Asked(task, answer))
    return answer


def _end_service(released: _Released) -> None:
    """In a worker: there is nothing more to do."""
    _post.inbox.put(released)


@async_execution  # type: ignore[untyped-decorator]
def _until_over() -> Future[_Released]:
    """In the server: is answered at its end, and fails where it has none."""
    return _post.over


def _take_failure(failure: _Failure) -> None:
    """In the server: a worker says that it ends."""
    _post.inbox.put((failure.rank, failure))


# How they begin and end.


def _name(rank: int) -> str:
    return f"worker-{rank}"


def _connect(name: str, rank: int, size: int) -> None:
    global _post
    _post = _Post()
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=TIMEOUT.total_seconds())
    try:
        with warnings.catch_warnings():  # torch warns of its own use of its own process group
            warnings.simplefilter("ignore", UserWarning)
            rpc.init_rpc(  # type: ignore[no-untyped-call]
                name, rank=rank, world_size=size, rpc_backend_options=options
            )
    except (RuntimeError, ValueError) as error:
        line = str(error).partition("\n")[0]
        raise TrainingError(f"the other processes cannot be reached: {line}") from error


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
    """Graceful: all wait for all; otherwise for nobody, as one of them does not come."""
    with suppress(RuntimeError):
        rpc.shutdown(graceful=is_graceful, timeout=_PATIENCE)


def _outcome(rank: int, done: Future[Answer]) -> Answer | _Failure:
    try:
        return done.value()
    except Exception as error:
        line = str(error).partition(" (this error")[0]
        return _Failure(rank, f"is gone, its connection has ended ({line})")


def _end_of(over: Future[_Released]) -> _Released:
    try:
        return over.value()
    except Exception:
        return _Released(all_here=False, is_server_gone=True)


def _as_told(error: BaseException) -> CheckpointError:
    """Why the server ends, as its workers raise it: a foreign error may not survive the way."""
    told = sendable(error)
    if isinstance(told, CheckpointError):
        return told
    return PeerLost(f"the server, rank 0, has failed with {told}")


def _failure(rank: int, error: BaseException) -> _Failure:
    if isinstance(error, CheckpointError):
        return _Failure(rank, f"cannot go on: {error}", error.hint)
    shown = "".join(traceback.format_exception(error))
    return _Failure(rank, f"has failed with {type(error).__name__}: {error}", None, shown)


def _tell(failure: _Failure) -> None:
    with suppress(RuntimeError):  # the server is gone, or ending
        rpc.rpc_sync(_SERVER, _take_failure, args=(failure,), timeout=_PATIENCE)
