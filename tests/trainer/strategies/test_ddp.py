"""Three processes of DistributedDataParallel."""

import pytest
import torch

from tests.trainer.ranks import by_ranks, needs_gloo
from tests.trainer.runs import assert_same_run, held, run
from tests.trainer.strategies.ddp_scenes import MODELS, OPTIONS, Partial

pytestmark = needs_gloo
SCENES = "tests.trainer.strategies.ddp_scenes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def told(folder):
    """Of three processes; `test_two_ranks.py` and `test_exactness.py` have two."""
    return by_ranks(SCENES, folder, 3)


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("model", MODELS)
def test_a_run_that_is_cut_goes_on_as_if_it_had_not_been(folder, model):
    assert_same_run(folder / model, folder / f"{model}_cut")


@pytest.mark.usefixtures("told")
def test_parameters_that_no_gradient_comes_to_stay_as_they_are(folder, tmp_path):
    run(tmp_path, model=Partial(), **{**OPTIONS, "strategy": "single"})
    one, other = (held(out / "last.pth") for out in (tmp_path, folder / "partial"))
    before = Partial().state_dict()
    for name, value in one["state_dict"].items():
        if name != "mean":  # of rank 0's samples alone, as torch has it
            torch.testing.assert_close(other["state_dict"][name], value, rtol=1e-4, atol=1e-6)
        if name.partition(".")[0] in ("unused", "frozen"):
            assert torch.equal(other["state_dict"][name], before[name])


def test_what_cannot_be_trained_is_refused_in_all_processes(told):
    for rank in told:
        assert rank["refused"] == [
            ["TrainingError", "a batch of 1 sample cannot be split over 3 processes", 0],
            ["TrainingError", "the model has no trainable parameters", 0],
        ]
