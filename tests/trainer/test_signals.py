"""SIGTERM and Ctrl-C: the step that is under way ends, a checkpoint is written, all is put back."""

import os
import signal
import threading

import pytest

from ckptool.trainer.signals import Signals
from tests.trainer.runs import Told, assert_same_run, run

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")
BOTH = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers():
    """Those of the test run, which every test leaves as they were."""
    before = [signal.getsignal(one) for one in BOTH]
    yield
    assert [signal.getsignal(one) for one in BOTH] == before


def sending(number, *, times=1, at=4):
    def act(event):
        if type(event).__name__ == "Stepped" and event.step == at:
            for _ in range(times):
                signal.raise_signal(number)

    return Told(act)


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
    def act(event):
        if type(event).__name__ == "EpochEnded" and event.epoch == 1:
            signal.raise_signal(signal.SIGTERM)

    run(tmp_path / "whole")
    result = run(tmp_path / "cut", Told(act))
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
    told = Told(lambda event: seen.append(signal.getsignal(signal.SIGINT)))
    thread = threading.Thread(target=run, args=(tmp_path, told), kwargs={"epochs": 1})
    thread.start()
    thread.join(timeout=60)
    assert set(seen) == {before}
    assert (tmp_path / "last.pth").exists()


def test_votes_are_summed():
    signals = Signals()
    assert signals.votes == [0.0, 0.0]
    assert Signals.asked([0.0, 0.0, 1.0]) is None
    assert Signals.asked([0.0, 2.0]) == signal.SIGINT
    assert Signals.asked([1.0, 1.0]) == signal.SIGTERM
    assert Signals.asked([]) is None
