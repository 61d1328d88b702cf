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


def started(out, *, world=0, **options):
    """The processes of a run, which tell their steps on a pipe."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spread = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.stepping", str(out), json.dumps(options)],
            cwd=PROJECT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **({k: str(v) for k, v in spread.items()} if world else {}),
                **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world else {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world or 1)
    ]


def finished(processes):
    for one in processes:
        _, errors = one.communicate(timeout=120)
        assert one.returncode == 0, errors


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_a_run_that_is_killed_at_any_moment(tmp_path):
    options = {**EVERYTHING, "epochs": 8}
    run(tmp_path / "whole", **options)
    moments = random.Random(5)
    for step in sorted(moments.sample(range(2, 24), 2)):
        (child,) = started(tmp_path / "cut", resume="auto", **options)
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
def test_two_processes_of_which_one_is_killed(tmp_path):
    options = {**EVERYTHING, "strategy": "ddp", "amp": "bf16"}
    finished(started(tmp_path / "whole", world=2, **options))
    both = started(tmp_path / "cut", world=2, **options)
    for line in both[1].stdout:
        if int(line) == 5:
            break
    both[1].kill()
    for one in both:
        one.communicate(timeout=60)
        assert one.returncode != 0
    finished(started(tmp_path / "cut", world=2, resume="auto", **options))
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
