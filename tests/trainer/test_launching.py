"""Processes that are started, and how they end."""

import logging
import os
import signal
import socket

import pytest
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ckptool.errors import TrainingError, WorkerFailed
from ckptool.trainer.launching import launch, record_errors
from tests.forks import FORKS, Worker, ended, start
from tests.sources import PROJECT
from tests.trainer.ranks import needs_gloo

pytestmark = needs_gloo
PROGRAM = ("-m", "tests.trainer.launched")


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch):
    monkeypatch.chdir(PROJECT)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))


def launched(how, out, *more, nproc=2):
    return launch([how, str(out), *more], nproc=nproc, program=PROGRAM)


@pytest.fixture
def _warm(monkeypatch):
    monkeypatch.setattr(SubprocessHandler, "_popen", lambda _, *given: Worker(*given))


def test_words_go_through_as_they_are_and_all_is_as_it_was(tmp_path, capfd):
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    before, logger = dict(os.environ), logging.getLogger("torch.distributed")
    shown = logger.handlers
    assert launched("words", tmp_path, "$$", "${local_rank}", "a b") == 0
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert dict(os.environ) == before
    assert logger.handlers is shown
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize(
    ("how", "message", "hint"),
    [
        ("refuses", "a sentence", "what helps"),
        ("killed", "rank 1 was killed by signal 9 (Killed)", None),
        ("killed in a save", "rank 1 was killed by signal 9 (Killed)", None),
        ("exits", "rank 1 exited with code 3", None),
        ("bug", "rank 1 failed: ZeroDivisionError: nobody foresaw this", None),
    ],
)
def test_what_one_worker_ends_with_is_said_once(tmp_path, capfd, how, message, hint):
    with pytest.raises(WorkerFailed) as failed:
        launched(how, tmp_path)
    assert (str(failed.value), failed.value.hint) == (message, hint)
    assert ("nobody foresaw this" in failed.value.traceback) is (how == "bug")
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("_warm")
def test_a_worker_that_is_asked_to_end_ends_all_of_them_saved(tmp_path):
    assert launched("terminated", tmp_path) == 143
    assert torch.load(tmp_path / "last.pth", weights_only=True)["step"] >= 3


def test_one_that_is_interrupted_while_the_others_wait_for_it(tmp_path):
    os.mkfifo(tmp_path / "meeting")
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(25)  # before the launcher's own patience ends
    try:
        assert launched("interrupted", tmp_path) == 130
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def test_a_port_that_is_taken(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(TrainingError, match=f"port {port} of 127.0.0.1: the port is in use"):
            launch(["words", str(tmp_path)], nproc=2, port=port, program=PROGRAM)


@pytest.fixture
def alone(tmp_path):
    """Starts a launcher in a session of its own; comes back when its workers are under way."""
    pipe, told = FORKS.Pipe(duplex=False)
    lines = os.fdopen(pipe.fileno(), closefd=False)
    children = []

    def start_one(how):
        errors = tmp_path / "errors"
        words = ("tests.trainer.launching_alone", how, tmp_path)
        warm = how == "forever"  # "waits": a signal that comes before the last one is started
        where = {"environment": {}, "said": errors, "printed": told}
        children.append(start(*words, **where, are_workers_warm=warm))
        told.close()
        assert lines.readline().startswith("under way")

        def end(send, *signals, timeout):
            """Send signals; the exit code, and what it has said when all its workers have ended."""
            for number in signals:
                send(children[0].pid, number)
            codes = ended(children, timeout=timeout)
            lines.read()
            return codes[0], errors.read_text()

        return end

    yield start_one
    ended(children, timeout=0)
    pipe.close()


@pytest.mark.parametrize(
    ("send", "sent", "code"),  # as a terminal and as another process sends them
    [(os.killpg, signal.SIGINT, 130), (os.kill, signal.SIGTERM, 143)],
)
def test_a_signal_to_the_launcher_ends_workers_that_wait_inside_torch(alone, send, sent, code):
    end = alone("waits")
    assert end(send, sent, timeout=25) == (code, "")  # before the launcher's own patience ends


@pytest.mark.parametrize(
    ("signals", "code"),  # Ctrl-C as a terminal sends it; SIGTERM: tests/cli/test_train.py
    [([signal.SIGINT, signal.SIGINT], 130), ([signal.SIGKILL], -9)],
)
def test_a_signal_to_the_launcher_ends_all_of_them_saved(tmp_path, alone, signals, code):
    end = alone("forever")
    assert end(os.killpg, *signals, timeout=100) == (code, "")
    held = torch.load(tmp_path / "last.pth", weights_only=True)
    assert held["progress"]["position"] == held["step"] % 3


def test_nothing_is_recorded_where_no_launcher_asks_for_it(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(ZeroDivisionError), record_errors(lambda error: (str(error), None)):
        raise ZeroDivisionError
