"""Starting the processes of a run on this machine, with torch's own elastic launcher.

Workers are `python -m ckptool ...` with the environment variables of torchrun (`RANK`,
`LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`). A worker that fails writes its error to
the file that the launcher names, and the launcher prints the error that came first.
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
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, Any

from ckptool.errors import CheckpointError, PeerLost, TrainingError, WorkerFailed

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

ASKING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def handled(
    handler: Callable[[int, FrameType | None], Any] | signal.Handlers,
    signals: Sequence[int] = ASKING,
) -> Iterator[None]:
    """Set the handler of SIGTERM and SIGINT, and restore the handlers at the end of the block."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other may set a handler
        before = {one: signal.signal(one, handler) for one in signals}
    try:
        yield
    finally:
        for one, other in before.items():
            if other is not None:  # None: Python did not set it, and cannot set it again
                signal.signal(one, other)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Let SIGTERM and SIGINT end this process, with the exit code of a shell, unless ignored.

    The handler exits, as an exception that it raised inside an import may be lost. A worker gets
    the system's handlers for good: Python calls no handler while torch waits for other processes,
    and one that raises while the interpreter ends prints an error.
    """

    def end(number: int, _: FrameType | None) -> None:
        os._exit(128 + number)

    taken = [one for one in ASKING if signal.getsignal(one) != signal.SIG_IGN]
    if "RANK" not in os.environ:
        with handled(end, taken):
            yield
        return
    for one in taken:
        signal.signal(one, signal.SIG_DFL)
    yield


class Signals:
    """The signals that this process got, as votes that are summed over the processes."""

    def __init__(self) -> None:
        """Begin with no signal; a worker may get Ctrl-C from both its launcher and its terminal."""
        self._is_patient = "LOCAL_RANK" in os.environ
        self._came: set[int] = set()
        is_torch = "TORCHELASTIC_RUN_ID" in os.environ
        self._launcher = os.getppid() if is_torch else None

    def watched(self) -> AbstractContextManager[None]:
        """Take SIGTERM and SIGINT inside."""
        return handled(self._take)

    def _take(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._came and not self._is_patient:
            raise KeyboardInterrupt
        self._came.add(number)

    @property
    def votes(self) -> list[float]:
        """1 for each signal that this process got, and SIGTERM if torch's launcher was killed."""
        if self._launcher is not None and os.getppid() != self._launcher:
            self._came.add(signal.SIGTERM)
        return [float(one in self._came) for one in ASKING]

    @staticmethod
    def asked(votes: Sequence[float]) -> int | None:
        """Return the signal that any process voted for, or None."""
        return next((one for one, vote in zip(ASKING, votes, strict=False) if vote), None)


_ERROR_FILE, _COUNT = "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT"
_HERE = "127.0.0.1"
_SENT_ON = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
)
_ROOM_TO_SAVE = "600"
"""Seconds that workers have to save after a signal."""


def launch(
    argv: Sequence[str],
    *,
    nproc: int,
    port: int | None = None,
    program: Sequence[str] = ("-m", "ckptool"),
) -> int:
    """Run `python -m ckptool ARGV` in `nproc` processes that know of each other, to their end.

    SIGTERM, SIGINT and SIGHUP are sent on to the workers, which have ten minutes to save. If a
    worker fails, the others are ended, by force after 30 s. If this process is killed, the workers
    end at their next step.

    Args:
        argv: The arguments of `python -m ckptool`.
        nproc: The number of processes.
        port: The port of 127.0.0.1 at which the processes meet; None: any free port.
        program: What Python runs instead of `-m ckptool`.

    Returns:
        0, or 130 or 143 if a signal ended the run.

    Raises:
        TrainingError: the port is taken.
        WorkerFailed: a worker failed; with its error, or how it ended.
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
            return _first_failure(Path(folder), {}, sent=int(ended.sigval))
        except ChildFailedError as failed:
            return _first_failure(Path(folder), failed.failures)
        except RendezvousError as error:
            raise not_met(error.__cause__ or error, port, _HERE) from error
    return 0


def not_met(error: BaseException, port: Any, address: str) -> TrainingError:
    """Return the error for processes that cannot connect."""
    text = str(error)
    is_taken = "EADDRINUSE" in text or "in use" in text
    return TrainingError(
        f"processes cannot connect at port {port} of {address}: "
        + ("the port is in use" if is_taken else text.partition("\n")[0]),
        hint="use another --port or MASTER_PORT, or --nproc without --port for a free port",
    )


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


_Failure = tuple[int, float, int | WorkerFailed]
"""How a worker ended: its place in the search for the cause, the time, and exit code or error."""
_FAILED, _DIED, _INTERRUPTED, _TERMINATED, _LOST_PEER = range(5)
"""The places: others end because a peer is lost, and SIGTERM is also what the launcher sends."""


def _first_failure(folder: Path, failures: Mapping[int, Any], *, sent: int | None = None) -> int:
    """Return the exit code of a run that a signal ended, or raise the error that ended it.

    `failures` are torch's `ProcessFailure` by rank, `sent` is a signal to the launcher.
    """
    found = {rank: _by_exit_code(rank, one) for rank, one in failures.items()}
    found |= {int(path.parent.name): _by_file(path) for path in folder.glob("**/error.json")}
    if sent is not None:
        found[-1] = _TERMINATED, 0.0, 128 + sent
    _, _, outcome = min(found.values(), key=lambda one: one[:2])
    if isinstance(outcome, WorkerFailed):
        raise outcome
    return outcome


def _by_exit_code(rank: int, failure: Any) -> _Failure:
    code, time = int(failure.exitcode), float(failure.timestamp)
    as_shell = code if code >= 0 else 128 - code
    if as_shell - 128 in ASKING:
        is_term = as_shell - 128 == signal.SIGTERM
        return _TERMINATED if is_term else _INTERRUPTED, time, as_shell
    how = f"exited with code {code}"
    if code < 0:
        how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
    return _DIED, time, WorkerFailed(f"rank {rank} {how}")


def _by_file(path: Path) -> _Failure:
    told = _read(path)
    extra, message = told["extraInfo"], told["message"]
    error = WorkerFailed(message, hint=extra["hint"])
    if extra["is_foreign"]:
        rank = int(path.parent.name)
        error = WorkerFailed(f"rank {rank} failed: {message}", extra["py_callstack"])
    return _LOST_PEER if extra["is_lost_peer"] else _FAILED, path.stat().st_mtime, error


def _read(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["message"]
    return told


def is_again() -> bool:
    """Return whether torchrun restarts the run, and the attempt before was not refused."""
    number, path = int(os.environ.get(_COUNT, "0")), os.environ.get(_ERROR_FILE)
    if not (number and path):
        return False
    before = Path(path.replace(f"attempt_{number}", f"attempt_{number - 1}"))
    if not before.exists():  # it was killed
        return True
    extra = _read(before)["extraInfo"]
    return bool(extra["is_foreign"] or extra["is_lost_peer"])


@contextmanager
def recorded(in_words: Callable[[BaseException], tuple[str, str | None]]) -> Iterator[None]:
    """Write an error of a worker to the file that its launcher names, and exit with code 2.

    The traceback of an error that is not ckptool's is written too; `in_words` returns the message
    and the hint of any other error. Without such a file the error is raised as it is.

    SIGTERM and SIGINT end the process at once where nothing handles them to save.
    """
    path = os.environ.get(_ERROR_FILE)
    try:
        with ended_at_once():
            yield
    except Exception as error:
        if not path:
            raise
        is_foreign = not isinstance(error, (CheckpointError, OSError, MemoryError))
        message, hint = in_words(error)
        shown = message if hint is None else f"{message}\nhint: {hint}"
        if is_foreign:
            message, hint = f"{type(error).__name__}: {error}", None
            shown = traceback.format_exc()
        extra = {
            "py_callstack": shown,
            "timestamp": str(int(time.time())),
            "hint": hint,
            "is_foreign": is_foreign,
            "is_lost_peer": isinstance(error, PeerLost),
        }
        beside = Path(f"{path}.tmp")
        told = {"message": {"message": message, "extraInfo": extra}}  # as torch reads it
        beside.write_text(json.dumps(told), encoding="utf-8")
        beside.replace(path)
        raise SystemExit(2) from error


@contextmanager
def _surroundings(nproc: int) -> Iterator[None]:
    """Set the environment of the workers and silence torch's launcher inside the block."""
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
