"""What two processes of a run decide, they decide together; what one writes, both know of."""

import os
import signal

import pytest
import torch

import ckptool
from tests.trainer.ranks import by_ranks, needs_gloo
from tests.trainer.runs import differences, held, lines, net, run

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks") / "of"


@pytest.fixture(scope="module")
def told(folder):
    """What each was told, scene by scene."""
    return by_ranks("tests.trainer.two_ranks", folder, 2)


def both(told, scene):
    one, other = (each[scene] for each in told)
    return one, other


def test_every_kind_is_written_by_the_first_alone(told, folder):
    for kind in ("full", "wrapped", "unwrapped", "module"):
        assert sorted(os.listdir(folder / kind)) == [
            "best.pth",
            "last.pth",
            "metrics.jsonl",
            "step-00000002.pth",
            "step-00000003.pth",
        ]
        assert list(ckptool.load_state_dict(folder / kind / "last.pth")) == list(net().state_dict())
        ckptool.load_into(net(seed=3), folder / kind / "last.pth")
    wrapped = torch.load(folder / "wrapped" / "last.pth", weights_only=True)
    assert next(iter(wrapped["state_dict"])) == "module.0.weight"
    bare = torch.load(folder / "unwrapped" / "last.pth", weights_only=True)
    assert next(iter(bare["state_dict_model"])) == "0.weight"
    assert len(held(folder / "full" / "last.pth")["rng"]) == 2


def test_processes_that_train_the_same_in_one_folder_write_it_once(told, folder):
    assert sorted(os.listdir(folder / "whole")) == ["best.pth", "last.pth", "metrics.jsonl"]
    assert len(held(folder / "whole" / "last.pth")["rng"]) == 1


def test_a_run_goes_on_in_one_process_and_in_two_again(told, folder):
    assert both(told, "there_and_back") == (["rng"], ["rng"])
    run(folder / "single", model=net(dropout=0.0))
    ours, single = (held(folder / name / "last.pth") for name in ("back", "single"))
    for name, one in single["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], one, rtol=1e-4, atol=1e-6)
    assert ours["step"] == single["step"]
    assert lines(folder / "back")[-1]["val_loss"] == pytest.approx(
        lines(folder / "single")[-1]["val_loss"], rel=1e-4
    )


@pytest.mark.parametrize(
    ("scene", "kind", "said"),
    [
        ("in_the_way", "TrainingError", "already has an earlier run: "),
        ("a_file_in_place_of_the_folder", "TargetExists", "is a file, not a folder"),
        ("another_architecture", "MatchError", "does not fit Sequential"),
        ("no_number_in_one", "TrainingError", "the loss is nan at step 1"),
    ],
)
def test_all_are_told_before_a_step_is_taken(told, scene, kind, said):
    for error, text, steps in both(told, scene):
        assert error == kind
        assert said in text
        assert steps == 0


def test_a_checkpoint_that_one_does_not_have(told, folder):
    (error, text, steps), missing = both(told, "missing_for_one")
    assert (error, steps) == ("FileMissing", 0)
    assert text.startswith("training was not started, because rank 1 failed: ")
    assert missing[0] == "FileMissing"


def test_what_the_first_cannot_write_ends_the_other(told):
    for error, text in both(told, "a_disk_that_fills"):
        assert error == "WriteError"
        assert "cannot be written (Is a directory)" in text


def test_a_signal_for_one_ends_both_at_the_same_step(told, folder):
    assert both(told, "a_signal_for_one") == ([signal.SIGTERM, 5], [signal.SIGTERM, 5])
    assert held(folder / "stopped" / "last.pth")["step"] == 5


def test_random_numbers_differ(told, folder):
    one, other = both(told, "dropout")
    assert one != other
    states = held(folder / "dropout" / "last.pth")["rng"]
    assert differences(states[0], states[1])


def test_the_first_clock_decides(told, folder):
    assert len(os.listdir(folder / "clock")) == 6


def test_batch_norm_of_a_share_is_told(told):
    for rank in told:
        note, (kind, message, steps) = rank["batch_norm"]
        assert "whole batch on GPUs, add --sync-batchnorm" in note
        assert (kind, steps) == ("TrainingError", 0)
        assert message == "torch's SyncBatchNorm only works on GPUs"
