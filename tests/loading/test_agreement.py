"""`load_into` in a distributed run: two processes, of which both load or neither does."""

import pytest
import torch

import ckptool
from tests.loading.two_ranks_loading import WRAPS
from tests.trainer.ranks import by_ranks, needs_gloo

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def told(folder):
    """What each rank was told, scene by scene."""
    return by_ranks("tests.loading.two_ranks_loading", folder, 2)


@pytest.fixture(scope="module")
def run(folder, told):
    """The folder in which two processes went through all scenes."""
    return folder


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_all_ranks_can_load_is_loaded_in_all(told, wrap):
    for rank in told:
        assert rank[f"loaded {wrap}"] == {"loaded": True, "untouched": False}


FAILURES = {
    "lacking": ("MatchError", "MatchError", "2.bias"),
    "absent": ("FileMissing", "FileMissing", "absent.pth: no such file"),
    "damaged": ("CorruptFile", "CorruptFile", "tensor '0.weight' is damaged"),
    "hook": ("ValueError", "MatchError", "not today"),
    "read": ("ValueError", "MatchError", "not today"),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("scene", FAILURES)
def test_what_one_rank_cannot_load_is_loaded_in_none(told, scene, wrap):
    own, others, text = FAILURES[scene]
    first, second = (rank[f"{scene} {wrap}"] for rank in told)
    assert (first["error"], second["error"]) == (others, own)
    assert text in second["text"]
    assert not second["text"].startswith("nothing")
    assert first["text"].startswith("nothing was loaded, because rank 1 failed: ")
    assert second["text"] in first["text"]
    assert first["hint"] == second["hint"]
    assert first["untouched"]
    assert second["untouched"]


@pytest.mark.parametrize("wrap", ["fsdp", "fully_sharded"])
def test_what_torch_fills_is_put_back_however_much_it_is(told, wrap):
    first, second = (rank[f"read of many {wrap}"] for rank in told)
    assert (
        first["text"]
        == f"nothing was loaded, because rank 1 failed: {second['error']}: " + (second["text"])
    )
    assert first["untouched"]
    assert second["untouched"]


def test_a_rank_that_is_filled_and_not_put_back_says_so(told):
    first, second = (rank["read of many ddp"] for rank in told)
    reason = "the model is partly filled, because loading failed: ValueError: not today"
    assert second["text"].endswith(reason)
    assert first["text"].startswith("the model is partly filled, because rank 1 failed: ")
    assert first["text"].endswith(reason)
    assert first["hint"] == second["hint"] == "load an intact file before you use the model"
    assert not first["untouched"]


def test_a_rank_that_is_left_alone_says_who_must_call(told):
    alone = told[0]["left_alone"]
    assert alone["error"] == "MatchError"
    assert alone["text"].startswith(
        "nothing was loaded, because another rank did not answer rank 0: "
    )
    assert alone["hint"] == ("call load_into with this model on every rank")
    assert alone["untouched"]


def test_an_optimizer_that_does_not_fit_in_one_rank_stops_the_others(told):
    first, second = (rank["optimizer ddp"] for rank in told)
    assert "6 parameters in groups of 6, but the live one has 5 in 5" in second["text"]
    assert second["text"] in first["text"]
    assert first["untouched"]
    assert second["untouched"]


def test_a_model_that_nothing_spreads_is_each_ranks_own(told):
    first, second = (rank["on_its_own"] for rank in told)
    assert first == {"loaded": True, "untouched": False}
    assert second["error"] == "MatchError"


def test_only_the_ranks_that_the_model_is_spread_over_are_asked(told):
    assert told[0]["in_a_group_of_one"] == {"loaded": True, "untouched": False}


def test_parts_of_an_optimizer_are_refused_with_what_takes_them(run, told):
    for rank in told:
        refused = rank["parts"]
        text = "the optimizer's 0.weight is sharded by FSDP: each rank has one part"
        assert text in refused["text"]
        assert "state_dict.set_optimizer_state_dict" in refused["hint"]
        assert refused["untouched"]
    assert_same_state(run / "saved.pth", run / "fsdp_again.pth")


@pytest.mark.parametrize("name", ["by_names.pth", "by_position.pth"])
def test_of_an_optimizer_over_dtensors_each_rank_takes_its_part(run, told, name):
    assert all(rank[name]["loaded"] for rank in told)
    assert_same_state(run / "saved.pth", run / name)
    state = ckptool.load(run / name)["optimizer"]["state"]
    steps = 4 * len(state)  # a number of each parameter, which every rank has
    whole = sum(value.nbytes for held in state.values() for value in held.values()) - steps
    assert sum(rank[name]["bytes"] - steps for rank in told) == whole


def test_state_of_other_shapes_than_those_of_dtensors_is_refused(told):
    for rank in told:
        refused = rank["factored_again.pth"]
        assert refused["untouched"]
        assert "has shape [4], but the parameter has shape [6, 4]" in refused["text"]


def assert_same_state(*files):
    before, after = (ckptool.load(file)["optimizer"] for file in files)
    assert len(before["state"]) == len(after["state"]) == 6
    for number, state in before["state"].items():
        assert all(torch.equal(value, after["state"][number][key]) for key, value in state.items())
