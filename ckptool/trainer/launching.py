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
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.errors import CheckpointError, PeerLost, TrainingError, WorkerFailed

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""The signals that ask a run to save and end."""


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], Any] | signal.Handlers,
    signals: Sequence[int] = STOP_SIGNALS,
) -> Iterator[None]:
    """Set the handler of SIGTERM and SIGINT, and restore the handlers at the end of the block."""
    handlers_before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other may set a handler
        handlers_before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, handler_before in handlers_before.items():
            if handler_before is not None:  # None: Python did not set it, and cannot set it again
                signal.signal(number, handler_before)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit on SIGTERM and SIGINT with the exit code of a shell, unless they are ignored.

    The handler exits, because an exception inside an import may be lost. A worker gets the
    system's handlers permanently: Python calls no handler while torch waits for other processes,
    and a handler that raises while the interpreter ends prints an error.
    """

    def exit_process(number: int, _: FrameType | None) -> None:
        """End at once, with the exit code that a shell reports for this signal."""
        os._exit(128 + number)

    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    is_worker = "RANK" in os.environ
    if not is_worker:
        with handle_signals(exit_process, handled):
            yield
        return
    for number in handled:
        signal.signal(number, signal.SIG_DFL)
    yield


class Signals:
    """The signals that this process received, as votes that are summed over the processes."""

    def __init__(self) -> None:
        """Start without a signal, and remember the process of torch's launcher, if there is one."""
        self._received: set[int] = set()
        self._is_worker = "LOCAL_RANK" in os.environ
        has_torch_launcher = "TORCHELASTIC_RUN_ID" in os.environ
        self._launcher_pid = os.getppid() if has_torch_launcher else None

    def watch(self) -> AbstractContextManager[None]:
        """Return a context that records SIGTERM and SIGINT."""
        return handle_signals(self._record)

    def _record(self, number: int, _: FrameType | None) -> None:
        """Record a signal; a second Ctrl-C raises KeyboardInterrupt.

        Not in a worker, which may get one Ctrl-C twice: from the terminal and from the launcher.
        """
        is_repeated = number in self._received
        if number == signal.SIGINT and is_repeated and not self._is_worker:
            raise KeyboardInterrupt
        self._received.add(number)

    @property
    def votes(self) -> list[float]:
        """A number for each of `STOP_SIGNALS`: 1.0 if it was received, else 0.0.

        A killed launcher counts as SIGTERM: then this process has another parent.
        """
        if self._launcher_pid is not None and os.getppid() != self._launcher_pid:
            self._received.add(signal.SIGTERM)
        return [float(number in self._received) for number in STOP_SIGNALS]

    @staticmethod
    def find_requested(votes: Sequence[float]) -> int | None:
        """Return the first of `STOP_SIGNALS` that any process voted for, or None.

        `votes` are sums over the processes; there may be none, or others after the signals'.
        """
        for number, vote in zip(STOP_SIGNALS, votes, strict=False):
            if vote:
                return number
        return None


_ERROR_FILE, _RESTART_COUNT = "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT"
_HERE = "127.0.0.1"
_FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
)
_SHUTDOWN_SECONDS = "600"
"""Seconds for workers to save after a signal."""


def launch(
    argv: Sequence[str],
    *,
    nproc: int,
    port: int | None = None,
    program: Sequence[str] = ("-m", "ckptool"),
) -> int:
    """Run `python -m ckptool ARGV` in `nproc` connected processes until they end.

    SIGTERM, SIGINT and SIGHUP are sent on to the workers, which have ten minutes to save. If a
    worker fails, the others are ended, by force after 30 s. If this process is killed, the workers
    end at their next step.

    Args:
        argv: The arguments of `python -m ckptool`.
        nproc: The number of processes.
        port: The port of 127.0.0.1 at which the processes meet; None: any free port.
        program: The arguments of Python instead of `-m ckptool`.

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

    # torch's launcher replaces ${local_rank} in the arguments; there "$$" means "$".
    arguments = [word.replace("$", "$$") for word in (*program, *argv)]
    with TemporaryDirectory(prefix="ckptool-") as folder, _set_worker_environment(nproc):
        run = elastic_launch(_make_launch_config(nproc, port, folder), sys.executable)
        try:
            run(*arguments)
        except SignalException as ended:
            return _report_first_failure(Path(folder), {}, sent=int(ended.sigval))
        except ChildFailedError as failed:
            return _report_first_failure(Path(folder), failed.failures)
        except RendezvousError as error:
            raise connection_error(error.__cause__ or error, port, _HERE) from error
    return 0


def connection_error(error: BaseException, port: Any, address: str) -> TrainingError:
    """Return the error for processes that cannot connect, because torch raised `error`."""
    text = str(error)
    is_taken = "EADDRINUSE" in text or "in use" in text
    reason = "the port is in use" if is_taken else text.partition("\n")[0]
    return TrainingError(
        f"processes cannot connect at port {port} of {address}: {reason}",
        hint="use another --port or MASTER_PORT, or --nproc without --port for a free port",
    )


def _make_launch_config(nproc: int, port: int | None, folder: str) -> LaunchConfig:
    """Return the settings of torch's launcher for processes on this machine."""
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


_FAILED, _DIED, _INTERRUPTED, _TERMINATED, _LOST_PEER = range(5)
"""How a worker ended, the most likely cause of the run's end first: workers also end because a
peer is lost, or by the launcher's SIGTERM."""


class _WorkerEnd(NamedTuple):
    """The end of a worker: one of the causes above, its time, and the exit code or error."""

    cause: int
    time: float
    outcome: int | WorkerFailed


def _report_first_failure(
    folder: Path, failures: Mapping[int, Any], *, sent: int | None = None
) -> int:
    """Return the exit code of a run that a signal ended, or raise the error that ended it.

    `failures` are torch's `ProcessFailure` by rank; a worker's error file, in a folder that is
    named by its rank, has more details. `sent` is a signal to the launcher.
    """
    end_by_rank = {rank: _end_from_exit_code(rank, failure) for rank, failure in failures.items()}
    for path in folder.glob("**/error.json"):
        end_by_rank[int(path.parent.name)] = _end_from_error_file(path)
    ends = list(end_by_rank.values())
    if sent is not None:
        ends.append(_WorkerEnd(_TERMINATED, time=0.0, outcome=128 + sent))
    # The most likely cause comes first: a failed worker before those that lost it as a peer.
    first_end = min(ends, key=lambda end: (end.cause, end.time))
    if isinstance(first_end.outcome, WorkerFailed):
        raise first_end.outcome
    return first_end.outcome


def _end_from_exit_code(rank: int, failure: Any) -> _WorkerEnd:
    """Return the end of a worker that wrote no error: torch's `ProcessFailure` has its exit code.

    A signal is the code -15 if the system ended the process, 143 (128 + 15) if a handler did.
    """
    code, end_time = int(failure.exitcode), float(failure.timestamp)
    shell_code = code if code >= 0 else 128 - code
    signal_number = shell_code - 128
    if signal_number in STOP_SIGNALS:
        cause = _TERMINATED if signal_number == signal.SIGTERM else _INTERRUPTED
        return _WorkerEnd(cause, end_time, shell_code)
    description = f"exited with code {code}"
    if code < 0:
        description = f"was killed by signal {-code} ({signal.strsignal(-code)})"
    return _WorkerEnd(_DIED, end_time, WorkerFailed(f"rank {rank} {description}"))


def _end_from_error_file(path: Path) -> _WorkerEnd:
    """Return the end of a worker that wrote `RANK/error.json`, at the time of the file."""
    record = _read_error_file(path)
    extra, message = record["extraInfo"], record["message"]
    error = WorkerFailed(message, hint=extra["hint"])
    if extra["is_foreign"]:  # not an error of ckptool: show its traceback
        error = WorkerFailed(
            f"rank {int(path.parent.name)} failed: {message}", extra["py_callstack"]
        )
    cause = _LOST_PEER if extra["is_lost_peer"] else _FAILED
    return _WorkerEnd(cause, path.stat().st_mtime, error)


def _read_error_file(path: Path) -> dict[str, Any]:
    """Return the record that `record_errors` wrote to a worker's error file."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["message"]
    return record


def is_restarted() -> bool:
    """Return True if torchrun restarts the run after a failure that may not happen again.

    An error of ckptool's own, such as a wrong option, would: it is in the error file of the
    earlier attempt, whose path differs from that of this attempt only by the number.
    """
    number, path = int(os.environ.get(_RESTART_COUNT, "0")), os.environ.get(_ERROR_FILE)
    if not (number and path):
        return False
    error_file = Path(path.replace(f"attempt_{number}", f"attempt_{number - 1}"))
    if not error_file.exists():  # the earlier attempt was killed
        return True
    extra = _read_error_file(error_file)["extraInfo"]
    return bool(extra["is_foreign"] or extra["is_lost_peer"])


@contextmanager
def record_errors(describe: Callable[[BaseException], tuple[str, str | None]]) -> Iterator[None]:
    """Write an error of a worker to the file that its launcher names, and exit with code 2.

    The traceback of an error that is not ckptool's is written too; `describe` returns the message
    and the hint of an error. Without such a file the error is raised unchanged. SIGTERM and
    SIGINT end the process at once if nothing handles them.
    """
    path = os.environ.get(_ERROR_FILE)
    try:
        with exit_on_signals():
            yield
    except Exception as error:
        if not path:
            raise
        is_foreign = not isinstance(error, (CheckpointError, OSError, MemoryError))
        message, hint = describe(error)
        details = message if hint is None else f"{message}\nhint: {hint}"
        if is_foreign:
            message, hint = f"{type(error).__name__}: {error}", None
            details = traceback.format_exc()
        extra = {
            "py_callstack": details,  # torchrun prints it
            "timestamp": str(int(time.time())),
            "hint": hint,
            "is_foreign": is_foreign,
            "is_lost_peer": isinstance(error, PeerLost),
        }
        temporary = Path(f"{path}.tmp")
        record = {"message": {"message": message, "extraInfo": extra}}  # as torch reads it
        temporary.write_text(json.dumps(record), encoding="utf-8")
        temporary.replace(path)
        raise SystemExit(2) from error


@contextmanager
def _set_worker_environment(nproc: int) -> Iterator[None]:
    """Set the environment of the workers and silence torch's launcher inside the block.

    At its end the signal handlers are restored too, which torch's launcher replaces.
    """
    environment_before = dict(os.environ)
    has_affinity = hasattr(os, "sched_getaffinity")  # the processors that this process may use
    processors = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, processors // nproc)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_SECONDS)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # rpc warns of every process that ends
    logger = logging.getLogger("torch.distributed")
    log_handlers, propagate = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    signal_handlers = {}
    if threading.current_thread() is threading.main_thread():  # no other may set a handler
        signal_handlers = {number: signal.getsignal(number) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in signal_handlers.items():
            signal.signal(number, handler)
        logger.handlers, logger.propagate = log_handlers, propagate
        os.environ.clear()
        os.environ.update(environment_before)
