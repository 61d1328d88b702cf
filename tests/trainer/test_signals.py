"""SIGTERM and Ctrl-C: the step that is under way ends, a checkpoint is written, all is put back."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from ckptool.trainer.launching import Signals
from tests.sources import PROJECT
from tests.trainer.runs import BytesDone, assert_same_run, run, when

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
BOTH = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers():
    """Those of the test run, which every test leaves as they were."""
    before = [signal.getsignal(one) for one in BOTH]
    yield
    assert [signal.getsignal(one) for one in BOTH] == before


def sending(number, *, times=1, at=4):
    def act(_event):
        for _ in range(times):
            signal.raise_signal(number)

    return when(act, "Stepped", step=at)


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_saves_at_the_next_step_and_ends_the_run(tmp_path, number):
    run(tmp_path / "whole")
    told = sending(number)
    result = run(tmp_path / "cut", told)
    assert (result.stopped, result.epoch, result.step) == (number, 1, 5)
    assert type(told.events[-1]).__name__ == "Saved"
    assert told.events[-1].path.endswith("last.pth")
    result = run(tmp_path / "cut", resume="auto")
    assert (result.stopped, result.epoch, result.step) == (None, 3, 9)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_signal_at_the_end_of_an_epoch(tmp_path):
    run(tmp_path / "whole")
    ends = when(lambda _: signal.raise_signal(signal.SIGTERM), "EpochEnded", epoch=1)
    result = run(tmp_path / "cut", ends)
    assert (result.stopped, result.step) == (signal.SIGTERM, 4)
    run(tmp_path / "cut", resume="auto")
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_signal_after_the_last_step_changes_nothing(tmp_path):
    assert run(tmp_path, sending(signal.SIGTERM, at=9)).stopped is None


def test_a_second_ctrl_c_ends_it_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, sending(signal.SIGINT, times=2))
    assert sorted(os.listdir(tmp_path)) == ["best.pth", "last.pth", "metrics.jsonl"]


def test_a_second_sigterm_is_the_first(tmp_path):
    assert run(tmp_path, sending(signal.SIGTERM, times=3)).stopped == signal.SIGTERM


def test_a_launcher_sends_ctrl_c_again(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run(tmp_path, sending(signal.SIGINT, times=2)).stopped == signal.SIGINT


def test_a_run_in_another_thread_takes_no_signals(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    seen = []
    told = BytesDone(lambda event: seen.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=run, args=(tmp_path, told), kwargs={"epochs": 1})
    thread.start()
    thread.join(timeout=60)
    assert set(seen) == {before}
    assert (tmp_path / "last.pth").exists()


def test_votes_are_summed():
    signals = Signals()
    assert signals.votes == [0.0, 0.0]
    assert Signals.find_requested([0.0, 0.0, 1.0]) is None
    assert Signals.find_requested([0.0, 2.0]) == signal.SIGINT
    assert Signals.find_requested([1.0, 1.0]) == signal.SIGTERM
    assert Signals.find_requested([]) is None


AT_ONCE = """
import os, signal, sys
from ckptool.trainer.launching import exit_on_signals, handle_signals

def told(number, frame):
    print("taken", flush=True)

def paused():  # signal.pause() would wait on after a signal that comes just before it
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    os.read(read, 1)

with exit_on_signals():
    WAITING
"""
SWALLOWING = """while True:
        try:
            print("ready", flush=True)
            paused()
        except BaseException:
            pass"""
IN_C = """import torch.distributed as dist
    print("ready", flush=True)
    dist.TCPStore("127.0.0.1", 0, is_master=True, world_size=2)"""
TAKEN = """with handle_signals(told):
        print("ready", flush=True)
        sys.stdin.readline()
    print("after", flush=True)
    paused()"""
FORKED = """pid = os.fork()
    if not pid:
        print("ready", flush=True)
        paused()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 143
    print("after", flush=True)
    paused()"""


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_ends_what_would_swallow_it(number):
    with started(AT_ONCE.replace("WAITING", SWALLOWING)) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(60) == 128 + number


def test_a_signal_ends_a_worker_that_waits_inside_torch():
    """Ctrl-C, for which Python has a handler of its own; SIGTERM: test_launching.py."""
    with started(AT_ONCE.replace("WAITING", IN_C), RANK="0") as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


def test_a_signal_that_somebody_takes_ends_nothing():
    with started(AT_ONCE.replace("WAITING", TAKEN)) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "taken\n"
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "after\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143


def test_a_signal_that_is_ignored_stays_so():
    code = AT_ONCE.replace("WAITING", "for _ in range(2): print(input(), flush=True)")
    ignoring = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    with started(ignoring + code) as process:
        for _ in range(2):
            process.stdin.write("on\n")
            process.stdin.flush()
            assert process.stdout.readline() == "on\n"
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_a_fork_of_such_a_process_is_ended_alone():
    code = AT_ONCE.replace("WAITING", FORKED).replace('print("ready"', "print(os.getpid()")
    with started(code) as process:
        os.kill(int(process.stdout.readline()), signal.SIGTERM)
        assert process.stdout.readline() == "after\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143


@contextmanager
def started(code, **environment):
    """A process that runs `code`; none is left behind."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()
