"""A run that is interrupted and goes on is the one that never was: to the bit, on CPU."""

import os
import random
import signal

import pytest

from tests.forks import ended, wait_for
from tests.trainer.ranks import free_port, stepping
from tests.trainer.runs import Crash, assert_same_run, crash, crash_at, lines, run, when

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
def test_a_run_that_crashes_at_one_step_after_the_other(tmp_path, kind):
    options = KINDS[kind]
    run(tmp_path / "whole", **options)
    for step in range(2, 10):
        with pytest.raises(Crash):
            run(tmp_path / "cut", crash_at(step), resume="auto", **options)
    run(tmp_path / "cut", resume="auto", **options)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_run_that_crashes_while_an_epoch_is_written(tmp_path):
    run(tmp_path / "whole")
    for name in ("EpochEnded", "Saved"):
        with pytest.raises(Crash):
            run(tmp_path / name, when(crash, name, epoch=2))
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
def begun(tmp_path):
    """Starts the processes of some runs, options by folder; each with the steps that it tells."""
    children = []

    def start_all(runs, *, world=0):
        group = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        ranks = [{**group, "RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]
        here = [stepping(runs, said=tmp_path / "said", environment=one) for one in ranks or [{}]]
        children.extend(here)
        return here

    yield start_all
    ended([child for child, _ in children], timeout=0)
    for _, steps in children:
        steps.close()


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_a_run_that_is_killed_at_any_moment(tmp_path, begun):
    options = {**EVERYTHING, "epochs": 8}
    run(tmp_path / "whole", **options)
    moments = random.Random(5)
    for step in sorted(moments.sample(range(2, 24), 2)):
        ((child, steps),) = begun({str(tmp_path / "cut"): {"resume": "auto", **options}})
        wait_for(step, steps)
        child.kill()
        assert ended([child], timeout=60) == [-signal.SIGKILL]
    run(tmp_path / "cut", resume="auto", **options)
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
    assert sorted(os.listdir(tmp_path / "cut")) == sorted(os.listdir(tmp_path / "whole"))


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL")
def test_two_processes_of_which_one_is_killed(tmp_path, begun):
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    options = {**EVERYTHING, "strategy": "ddp", "amp": "bf16"}
    (one, _), (other, steps) = begun({cut: options}, world=2)
    wait_for(5, steps)
    other.kill()
    assert ended([other, one], timeout=60)[1] > 0
    again = begun({cut: {"resume": "auto", **options}, whole: options}, world=2)
    codes = ended([child for child, _ in again], timeout=120)
    assert codes == [0, 0], (tmp_path / "said").read_text()
    assert_same_run(tmp_path / "whole", tmp_path / "cut")
