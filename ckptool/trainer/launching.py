"""Starting the processes of a run on this machine, by torch's own elastic launcher.

Workers are `python -m ckptool ...` with `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR` and
`MASTER_PORT` in their environment, as torchrun sets them; what they print goes where the launcher's
output goes. An error is left in the file that the launcher names, and said once, by the launcher.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any

from ckptool.errors import CheckpointError, PeerLost, TrainingError, WorkerFailed

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

__all__ = [
    "ASKING",
    "Signals",
    "ended_at_once",
    "handled",
    "is_again",
    "launch",
    "leave_to_system",
    "recorded",
]

ASKING = (signal.SIGTERM, signal.SIGINT)
_JUDGED = 255  # no number of a signal
_watchers: list[Callable[[], Any]] = []


@contextmanager
def handled(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """Give both signals to `handler` inside; what took them before does so again afterwards."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other may set a handler
        before = {one: signal.signal(one, handler) for one in ASKING}
    try:
        yield
    finally:
        for watcher in _watchers:  # it may be late to read of a signal that `handler` has taken
            watcher()
        for one, other in before.items():
            if other is not None:  # None: none of Python's, which cannot be set again
                signal.signal(one, other)


def leave_to_system() -> None:
    """Restore the system's handlers: either signal ends this process at once."""
    if threading.current_thread() is threading.main_thread():
        for one in ASKING:
            signal.signal(one, signal.SIG_DFL)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Have both end this process where nobody else takes them, with the exit code of a shell.

    One that is ignored stays so. It is a thread that ends it: a handler of Python's would not be
    called while torch waits for other processes, and what it raises in the middle of an import may
    be swallowed, by half.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: set[int] = set()
    ignored = {int(one) for one in ASKING if signal.getsignal(one) == signal.SIG_IGN}
    own = os.getpid()

    def take(number: int, _: FrameType | None) -> None:
        if number not in ignored:
            came.add(number)

    def forget() -> None:
        if os.getpid() == own:
            return
        _watchers.clear()
        if signal.getsignal(signal.SIGTERM) is take:
            signal.set_wakeup_fd(-1)
            leave_to_system()

    def end() -> None:
        while number := os.read(read_end, 1)[0]:
            if number == _JUDGED:
                judged.set()
                continue
            is_ours = signal.getsignal(number) is take and number not in ignored
            if is_ours or number in came:
                os._exit(128 + number)

    def wait() -> None:
        judged.clear()
        os.write(write_end, bytes([_JUDGED]))
        judged.wait(timeout=1)

    judged = threading.Event()
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    watcher = threading.Thread(target=end, daemon=True)
    watcher.start()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)  # it has no such thread, and our pipe
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        with handled(take):
            _watchers.append(wait)
            try:
                yield
            finally:
                _watchers[:] = [one for one in _watchers if one is not wait]
    finally:
        signal.set_wakeup_fd(before)
        os.write(write_end, b"\0")
        watcher.join()
        os.close(write_end)
        os.close(read_end)


class Signals:
    """Which of the two has come; a vote for each, that processes add up."""

    def __init__(self) -> None:
        """Begin with none; a launcher and its terminal may both send a worker Ctrl-C."""
        self._is_patient = "LOCAL_RANK" in os.environ
        self._came: set[int] = set()
        is_torch = "TORCHELASTIC_RUN_ID" in os.environ
        self._launcher = os.getppid() if is_torch else None

    def watched(self) -> AbstractContextManager[None]:
        """Take both signals inside."""
        return handled(self._take)

    def _take(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._came and not self._is_patient:
            raise KeyboardInterrupt
        self._came.add(number)

    @property
    def votes(self) -> list[float]:
        """1 for each that has come to this process.

        Where torch's launcher has gone, killed without a word, nobody else will ever end this one.
        """
        if self._launcher is not None and os.getppid() != self._launcher:
            self._came.add(signal.SIGTERM)
        return [float(one in self._came) for one in ASKING]

    @staticmethod
    def asked(votes: Sequence[float]) -> int | None:
        """Return the signal that any process has voted for; None: to go on."""
        return next((one for one, vote in zip(ASKING, votes, strict=False) if vote), None)


_ERROR_FILE, _COUNT = "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT"
_HERE = "127.0.0.1"
_SENT_ON = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
)
_ROOM_TO_SAVE = "600"
"""Seconds that workers have to save in after a signal."""


@dataclass(frozen=True)
class _Failure:
    """How one worker ended: what it has left in its error file, else its exit code alone."""

    rank: int
    code: int
    time: float
    message: str = ""
    hint: str | None = None
    traceback: str = ""
    is_lost_peer: bool = False

    @property
    def _is_asked_for(self) -> bool:
        """Whether a signal, which others may have got too, has ended it."""
        return not self.message and self._exit_code - 128 in ASKING

    @property
    def _exit_code(self) -> int:
        """As a shell has it: 128 and the signal that has ended it."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def order(self) -> tuple[int, float]:
        """The lowest is the cause; the others ended because of it, or were told to."""
        if self.message and not self.is_lost_peer:
            return 0, self.time
        if self._is_asked_for:  # SIGTERM is also what the launcher sends to those that are left
            return 2 + (self._exit_code - 128 != signal.SIGINT), self.time
        return 4 if self.is_lost_peer else 1, self.time

    def as_exit_code(self) -> int:
        """Return the exit code of the run.

        Raises:
            WorkerFailed: nobody has asked for this end.
        """
        if self._is_asked_for:
            return self._exit_code
        if self.traceback or not self.message:
            raise WorkerFailed(f"rank {self.rank} {self._ending}", self.traceback)
        raise WorkerFailed(self.message, hint=self.hint)

    @property
    def _ending(self) -> str:
        if self.message:
            return f"ended with {self.message}"
        if self.code < 0:
            return f"was ended by signal {-self.code} ({signal.strsignal(-self.code)})"
        return f"ended with exit code {self.code}"


def launch(
    argv: Sequence[str],
    *,
    nproc: int,
    port: int | None = None,
    program: Sequence[str] = ("-m", "ckptool"),
) -> int:
    """Run `python -m ckptool ARGV` in `nproc` processes that know of each other, to their end.

    SIGTERM, SIGINT and SIGHUP are sent on to the workers, which have ten minutes to save. Where one
    fails the others are ended at once, by force after 30 s. Workers end at their next step where
    this process has gone without a word.

    Args:
        argv: What follows `python -m ckptool`.
        nproc: How many processes.
        port: Where they meet, on 127.0.0.1; None: any that is free.
        program: What Python is to run instead of `-m ckptool`.

    Returns:
        0, or 130 and 143 where a signal has ended the run.

    Raises:
        TrainingError: the port is taken.
        WorkerFailed: a worker's error, or how it died.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    words = [word.replace("$", "$$") for word in (*program, *argv)]  # it fills in ${local_rank}
    with TemporaryDirectory(prefix="ckptool-") as folder, _surroundings(nproc):
        run = elastic_launch(_config(nproc, port, folder), sys.executable)
        try:
            run(*words)
        except SignalException as ended:
            failures = [one for one in _left(Path(folder), {}) if not one.is_lost_peer]
            return failures[0].as_exit_code() if failures else 128 + int(ended.sigval)
        except ChildFailedError as failed:
            return _left(Path(folder), failed.failures)[0].as_exit_code()
        except RendezvousError as error:
            text = str(error.__cause__ or error)
            is_taken = "EADDRINUSE" in text or "in use" in text
            reason = "it is taken" if is_taken else text.partition("\n")[0]
            raise TrainingError(
                f"processes cannot meet at port {port} of {_HERE}: {reason}",
                hint="another --port, or none: a free one is taken then",
            ) from error
    return 0


def _config(nproc: int, port: int | None, folder: str) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    logs: dict[str, Any] = {"log_dir": folder}
    if "logs_specs" in {field.name for field in fields(LaunchConfig)}:  # from torch 2.3 on
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

        logs = {"logs_specs": DefaultLogsSpecs(log_dir=folder)}
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_HERE}:{port or 0}",
        rdzv_configs={"is_host": True},
        local_addr=_HERE,
        max_restarts=0,
        monitor_interval=0.1,
        **logs,
    )


def _left(folder: Path, failures: Mapping[int, Any]) -> list[_Failure]:
    """Return the failures in the error files below `folder`, and all others, the cause first."""
    left = {
        rank: _Failure(rank, int(failure.exitcode), float(failure.timestamp))
        for rank, failure in failures.items()
    }
    left |= {int(path.parent.name): _read(path) for path in folder.glob("**/error.json")}
    return sorted(left.values(), key=lambda one: one.order)


def _read(path: Path) -> _Failure:
    told = json.loads(path.read_text(encoding="utf-8"))["message"]
    extra = told["extraInfo"]
    return _Failure(
        rank=int(path.parent.name),
        code=1,
        time=float(extra.get("time", extra["timestamp"])),
        message=told["message"],
        hint=extra.get("hint"),
        traceback=extra["py_callstack"] if extra.get("is_unforeseen", True) else "",
        is_lost_peer=bool(extra.get("is_lost_peer")),
    )


def is_again() -> bool:
    """Return whether torchrun starts the run again, and the attempt before was not refused."""
    number, path = int(os.environ.get(_COUNT, "0")), os.environ.get(_ERROR_FILE)
    if not (number and path):
        return False
    before = Path(path.replace(f"attempt_{number}", f"attempt_{number - 1}"))
    left = _read(before) if before.exists() else None  # None: it was killed
    return left is None or bool(left.traceback) or left.is_lost_peer


@contextmanager
def recorded(in_words: Callable[[BaseException], tuple[str, str | None]]) -> Iterator[None]:
    """Leave an error of a worker to its launcher, which prints it, and end with exit code 2.

    Of an error that is none of ckptool's the traceback is left, too. `in_words` makes a sentence,
    and what helps, of any other. None of this is done where no launcher has named a file for it.

    SIGTERM and SIGINT end the process at once while nothing is trained, and a worker when it is
    done: a handler of Python's that raises while the interpreter ends prints that.
    """
    path = os.environ.get(_ERROR_FILE)
    try:
        with ended_at_once():
            yield
    except Exception as error:
        if not path:
            raise
        is_unforeseen = not isinstance(error, (CheckpointError, OSError, MemoryError))
        sentence, hint = in_words(error)
        if is_unforeseen:
            sentence, hint = f"{type(error).__name__}: {error}", None
        shown = traceback.format_exc() if is_unforeseen else sentence
        extra = {
            "py_callstack": shown if hint is None else f"{shown}\nhint: {hint}",
            "timestamp": str(int(time.time())),  # torch reads whole seconds
            "time": time.time(),
            "hint": hint,
            "is_unforeseen": is_unforeseen,
            "is_lost_peer": isinstance(error, PeerLost),
        }
        told = {"message": {"message": sentence, "extraInfo": extra}}
        beside = Path(f"{path}.tmp")
        beside.write_text(json.dumps(told), encoding="utf-8")
        beside.replace(path)
        raise SystemExit(2) from error
    finally:
        if path:
            leave_to_system()


@contextmanager
def _surroundings(nproc: int) -> Iterator[None]:
    """Set what workers inherit, and silence torch's launcher; undone afterwards."""
    environment = dict(os.environ)
    can_ask = hasattr(os, "sched_getaffinity")
    processors = len(os.sched_getaffinity(0)) if can_ask else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, processors // nproc)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _ROOM_TO_SAVE)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # rpc warns of every process that ends
    logger = logging.getLogger("torch.distributed")
    handlers, propagate = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    is_main = threading.current_thread() is threading.main_thread()
    taken = {one: signal.getsignal(one) for one in _SENT_ON} if is_main else {}
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        logger.handlers, logger.propagate = handlers, propagate
        os.environ.clear()
        os.environ.update(environment)
