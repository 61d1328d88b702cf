"""A run that is interrupted and goes on is the one that never was: to the bit, on CPU."""

import json
import os
import random
import signal
import socket
import subprocess
import sys

import pytest

from tests.sources import PROJECT
from tests.trainer.runs import Crash, Told, assert_same_run, crash_at, lines, run

EVERYTHING = {"clip": 0.5, "ema": 0.9, "schedule": "cosine", "warmup": 2, "save_every": 1}
KINDS = {
    "plain": {"save_every": 1},
    "all": EVERYTHING,
    "bf16": {**EVERYTHING, "amp": "bf16"},
    "fp16": {**EVERYTHING, "amp": "fp16"},
    "sgd": {**EVERYTHING, "optimizer": "sgd", "momentum": 0.9, "schedule": "step", "step_size": 1},
    "float64": {**EVERYTHING, "dtype": "float64", "optimizer": "adamw", "schedule": "linear"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_crashes_at_every_step_in_turn(tmp_path, kind):
    options = KINDS[kind]
    run(tmp_path / "whole", **options)
    for step in range(2, 10):
        with pytest.raises(Crash):
            run(tmp_path / "cut", crash_at(step), resume="auto", **options)
    run(tmp_path / "cut", resume="auto", **options)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_run_that_crashes_while_an_epoch_is_written(tmp_path):
    def crash(event):
        if type(event).__name__ == name and event.epoch == 2:
            raise Crash

    run(tmp_path / "whole")
    for name in ("EpochEnded", "Saved"):
        with pytest.raises(Crash):
            run(tmp_path / name, Told(crash))
        run(tmp_path / name, resume="auto")
        assert_same_run(tmp_path / "whole", tmp_path / name)


def test_a_run_of_fewer_steps_goes_on_as_one_of_more(tmp_path):
    options = {**EVERYTHING, "schedule": "constant"}
    run(tmp_path / "whole", **options)
    for limit in (4, 5):
        result = run(tmp_path / "cut", resume="auto", max_steps=limit, **options)
        assert (result.epoch, result.step) == (1, limit)
        assert [line["step"] for line in lines(tmp_path / "cut")] == [3, limit]
    run(tmp_path / "cut", resume="auto", **options)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


@pytest.fixture
def started():
    """Starts the processes of some runs, options by folder, which tell their steps on a pipe."""
    children = []

    def start(runs, *, world=0):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        spread = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "tests.trainer.stepping", json.dumps(runs)]
        begun = []
        for rank in range(world or 1):
            own = {**spread, "RANK": rank, "LOCAL_RANK": rank} if world else {}
            variables = {name: str(value) for name, value in own.items()}
            child = subprocess.Popen(
                command,
                cwd=PROJECT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            begun.append(child)
        children.extend(begun)
        return begun

    yield start
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_a_run_that_is_killed_at_any_moment(tmp_path, started):
    options = {**EVERYTHING, "epochs": 8}
    run(tmp_path / "whole", **options)
    moments = random.Random(5)
    for step in sorted(moments.sample(range(2, 24), 2)):
        (child,) = started({str(tmp_path / "cut"): {"resume": "auto", **options}})
        for line in child.stdout:
            if int(line) == step:
                break
        child.kill()
        child.communicate(timeout=60)
        assert child.returncode == -signal.SIGKILL
    run(tmp_path / "cut", resume="auto", **options)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert sorted(os.listdir(tmp_path / "cut")) == sorted(os.listdir(tmp_path / "whole"))


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_two_processes_of_which_one_is_killed(tmp_path, started):
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    options = {**EVERYTHING, "strategy": "ddp", "amp": "bf16"}
    both = started({cut: options}, world=2)
    for line in both[1].stdout:
        if int(line) == 5:
            break
    both[1].kill()
    for one in both:
        one.communicate(timeout=60)
        assert one.returncode != 0
    for one in started({cut: {"resume": "auto", **options}, whole: options}, world=2):
        _, errors = one.communicate(timeout=120)
        assert one.returncode == 0, errors
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
