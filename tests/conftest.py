"""What every test may ask for."""

import gc
import os
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import tests.sources  # noqa: F401 - its PATH
from tests import forks

FIXTURES = Path(__file__).parent.parent / "fixtures"

# Every core has tests of its own: two threads of torch would wait for each other, by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: a loaded machine is not a bug, and torch's first call is slow anywhere.
_USUAL = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ckptool", _USUAL, derandomize=True, max_examples=100)
# What `make soak` finds by this profile becomes an `@example` of its test.
settings.register_profile("explore", _USUAL, derandomize=False, max_examples=500, database=None)
settings.load_profile("ckptool")

LONGEST = 900
"""Seconds that a test may take; the longest takes one in ten of them on two busy cores."""


def _passed_by(number, frame):
    """Stand for "ignored" in this process: who asked for that (`nohup`) still has it."""


def _reset_signals():
    """Have every process that a test starts meet the signals as from a terminal.

    What is ignored here stays so in a new process; a handler does not.
    """
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) == signal.SIG_IGN and number != signal.SIGPIPE:
            is_ctrl_c = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_ctrl_c else _passed_by)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


if os.name == "posix":
    _reset_signals()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fail what has not ended in time, whatever it waits for."""
    if os.name == "posix":
        signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"not through in {LONGEST} seconds"))
        signal.alarm(LONGEST)
    try:
        return (yield)
    finally:
        if os.name == "posix":
            signal.alarm(0)


def pytest_collection_finish():
    """Keep what is there by now out of every collection of garbage, here and in forks."""
    gc.collect()
    gc.freeze()


_MOST_REASONS = 10


def pytest_terminal_summary(terminalreporter):
    """Show why tests were skipped, the most frequent reasons first, one line each."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ").splitlines()[0]
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    )
    if not reasons:
        return
    shown = reasons.most_common(_MOST_REASONS if len(reasons) <= _MOST_REASONS else 9)
    terminalreporter.section(f"{reasons.total()} skipped")
    for reason, count in shown:
        terminalreporter.write_line(f"{count:5}  {reason}")
    if rest := reasons.total() - sum(count for _, count in shown):
        terminalreporter.write_line(f"{rest:5}  for {len(reasons) - len(shown)} other reasons")


@pytest.fixture(autouse=True)
def _processes_die_with_the_test(monkeypatch):
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    yield
    for process in started:
        if process.poll() is None:
            _end(process.pid)
            process.wait()
    for process in forks.STARTED:
        if process.exitcode is None:
            _end(process.pid)
            process.join()
    forks.STARTED.clear()


def _end(process):
    for pid in [*_below(process), process]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _below(pid):
    """The processes that a process has started, and those that they have, as far as Linux tells."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            yield from _below(child)
            yield child


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of real checkpoints, with what each must read as beside it."""
    return FIXTURES


@pytest.fixture
def memory_path(tmp_path: Path):
    """A folder in memory where the system has one: waiting for the disk costs nothing there."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir=memory))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def folder(memory_path: Path) -> Path:
    """A folder in memory that is not there yet."""
    return memory_path / "files"


@pytest.fixture(scope="module")
def light():
    """Calls a function in a process that has not imported torch, which forks in no time."""
    from tests.writing.kinds import apart

    with apart() as call:
        yield call
