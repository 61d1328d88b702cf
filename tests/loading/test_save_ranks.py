"""`save` in a distributed run: two processes, of which one writes and both know how it went."""

import pytest
import torch

from tests.loading.two_ranks import net, plain
from tests.trainer.ranks import by_ranks, needs_gloo

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def told(folder):
    """What each rank was told, scene by scene."""
    return by_ranks("tests.loading.two_ranks", folder, 2)


@pytest.fixture(scope="module")
def run(folder, told):
    """The folder in which two processes went through all scenes."""
    return folder


def test_the_first_rank_writes_its_values_and_all_get_the_receipt(run, told):
    receipt = told[0]["replicated"]
    assert receipt == told[1]["replicated"]
    assert receipt["size"] == (run / "replicated.pth").stat().st_size
    assert torch.load(run / "replicated.pth", weights_only=True)["rank"] == 0


SAVED = {
    "replicated": "by_itself", "zero": "by_itself", "fully_sharded": "by_itself",
    "fsdp_True": "by_itself_untied", "fsdp_False": "by_itself_untied",
}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_a_spread_model_is_saved_as_one_process_would(run, told, name):
    tree = torch.load(run / f"{name}.pth", weights_only=True)
    alone = torch.load(run / f"{SAVED[name]}.pth", weights_only=True)
    state = tree["state_dict"]
    assert list(state) == list(alone["state_dict"])
    for key, tensor in alone["state_dict"].items():
        assert torch.allclose(state[key], tensor, atol=1e-6)
    if SAVED[name] == "by_itself":
        assert state["0.weight"].data_ptr() == state["3.weight"].data_ptr()


@pytest.mark.parametrize("name", SAVED)
def test_its_optimizer_too_in_the_form_that_a_plain_one_takes(run, told, name):
    tree = torch.load(run / f"{name}.pth", weights_only=True)
    alone = torch.load(run / f"{SAVED[name]}.pth", weights_only=True)
    model = net(1) if SAVED[name] == "by_itself" else plain(1)
    model.load_state_dict(tree["state_dict"])
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(tree["optimizer"])
    found = optimizer.state_dict()
    assert found["param_groups"][0]["param_names"] == [key for key, _ in model.named_parameters()]
    assert list(found["state"]) == list(alone["optimizer"]["state"])
    for number, state in alone["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.allclose(found["state"][number][key], value, atol=1e-6)


def test_a_module_among_the_values_is_whole_as_well(run, told):
    tree = torch.load(run / "fully_sharded.pth", weights_only=True)
    assert list(tree["critic"]) == list(tree["state_dict"])
    assert all(map(torch.equal, tree["critic"].values(), tree["state_dict"].values()))


REFUSALS = {
    "no_plain_data": ("NotRepresentable", "config/args: argparse.Namespace is not plain data"),
    "no_room": ("TargetExists", "is a folder"),
    "the_writer_fails": ("NotRepresentable", "ema/bad: argparse.Namespace is not plain data"),
}


@pytest.mark.parametrize("scene", REFUSALS)
def test_a_refusal_is_raised_in_all_ranks(run, told, scene):
    kind, text = REFUSALS[scene]
    for rank in told:
        assert rank[scene]["error"] == kind
        assert text in rank[scene]["text"]


FAILURES = {
    "one_fails": ("RuntimeError", "not today"),
    "one_fails_before_the_parts_are_gathered": ("RuntimeError", "not today"),
    "one_fails_with_an_error_of_the_users": ("OfTheUsers", "this and that"),
}


@pytest.mark.parametrize("scene", FAILURES)
def test_a_rank_that_fails_stops_the_others(run, told, scene):
    kind, text = FAILURES[scene]
    first, second = (rank[scene] for rank in told)
    assert (second["error"], second["text"]) == (kind, text)
    heard = f"nothing was written, because rank 1 failed: {kind}: {text}"
    assert (first["error"], first["text"]) == ("WriteError", heard)
    assert not (run / "never.pth").exists()


DIFFERENCES = {
    "other_parts_in_each_rank": ("a tensor of [4, 6]", "nothing"),
    "parts_in_one_rank_alone": ("a tensor of [6, 4]", "nothing"),
}


@pytest.mark.parametrize("scene", DIFFERENCES)
def test_ranks_that_gather_other_things_do_not_wait_for_each_other(told, scene):
    one, other = DIFFERENCES[scene]
    texts = [rank[scene]["text"] for rank in told]
    assert texts == [
        f"nothing was written, because rank 0 gathers {one}, but rank 1 gathers {other}",
        f"nothing was written, because rank 1 gathers {other}, but rank 0 gathers {one}",
    ]
    assert {rank[scene]["error"] for rank in told} == {"WriteError"}


def test_an_argument_of_one_rank_that_makes_no_sense_stops_all(told):
    first, second = (rank["no_such_overwrite"]["text"] for rank in told)
    assert second == "overwrite='no' is not True or False"
    assert first == f"nothing was written, because rank 1 failed: {second}"


def test_a_rank_that_is_left_alone_says_who_must_call(run, told):
    alone = told[0]["left_alone"]
    assert alone["error"] == "WriteError"
    text = "nothing was written, because another rank did not answer rank 0: "
    assert alone["text"].startswith(text)
    assert alone["hint"] == "call ckptool.save on every rank"
    assert not (run / "never.pth").exists()


def test_the_run_goes_on_after_failures(run, told):
    assert torch.load(run / "afterwards.pth", weights_only=True) == {"rank": 0}
