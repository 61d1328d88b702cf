"""`ckptool average` on the command line."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file


@pytest.fixture
def files(tmp_path):
    """Two checkpoints of one model."""
    made = []
    for at in (1.0, 2.0):
        path = tmp_path / f"{at:.0f}.pth"
        torch.save({"epoch": int(at), "state_dict": {"fc.weight": torch.full((2, 3), at)}}, path)
        made.append(path)
    return made


def test_the_mean_is_written_and_told(ckptool, files, tmp_path):
    done = ckptool("average", *files, "-o", tmp_path / "mean.pth", "--json")
    assert done.code == 0, done.err
    made = torch.load(tmp_path / "mean.pth")
    assert made["state_dict"]["fc.weight"].unique().tolist() == [1.5]
    assert made["epoch"] == 1
    assert "1 tensor of state_dict: the mean of 2 files" in done.err
    assert f"as in {files[0]}: epoch" in done.err
    assert done.document["file"] == str(tmp_path / "mean.pth")
    assert done.document["verified"]


def test_formats_mix(ckptool, files, tmp_path):
    save_file({"fc.weight": torch.full((2, 3), 6.0)}, tmp_path / "b.safetensors")
    target = tmp_path / "mean.safetensors"
    assert ckptool("average", *files, tmp_path / "b.safetensors", "-o", target).code == 0
    assert load_file(target)["fc.weight"].unique().tolist() == [3.0]


@pytest.mark.parametrize("count", [1, 2])
def test_without_a_target_or_a_second_file_it_is_wrong_usage(ckptool, files, tmp_path, count):
    more = ["-o", tmp_path / "mean.pth"] if count == 1 else []
    done = ckptool("average", *files[:count], *more)
    assert done.code == 2
    assert "hint: ckptool average " in done.err
    assert sorted(os.listdir(tmp_path)) == ["1.pth", "2.pth"]


def test_a_source_is_no_target(ckptool, files):
    before = files[1].read_bytes()
    assert ckptool("average", *files, "-o", files[1], "--force").code == 2
    assert files[1].read_bytes() == before


def test_ints_and_key(ckptool, tmp_path):
    for at in (1, 2):
        torch.save(
            {"m": {"a.w": torch.full((2,), float(at)), "n": torch.tensor([at])},
             "ema": {"a.w": torch.full((2,), 8.0 * at)}},
            tmp_path / f"{at}.pth",
        )  # fmt: skip
    files = tmp_path / "1.pth", tmp_path / "2.pth"
    done = ckptool("average", *files, "-o", tmp_path / "o.pth")
    assert done.code == 2
    assert "--ints first" in done.err
    assert ckptool("average", *files, "-o", tmp_path / "o.pth", "--ints", "first").code == 0
    assert torch.load(tmp_path / "o.pth")["m"]["n"].tolist() == [1]
    assert ckptool("average", *files, "-o", tmp_path / "e.pth", "--key", "ema").code == 0
    assert torch.load(tmp_path / "e.pth")["a.w"].tolist() == [12.0, 12.0]


def test_weights_and_modes(ckptool, files, tmp_path):
    target = tmp_path / "mixed.pth"
    for options, wanted in (
        (["--weights", "0.75,0.25"], 1.25),
        (["--mode", "slerp", "--t", "0.25"], 1.25),
        ([files[0], "--mode", "task", "--t", "3"], 4.0),
    ):
        done = ckptool("average", *files, *options, "-o", target, "--force")
        assert done.code == 0, done.err
        assert torch.load(target)["state_dict"]["fc.weight"].unique().tolist() == [wanted]
    done = ckptool("average", *files, "--mode", "task", "-o", target, "--force")
    assert done.code == 2
    assert "slerp takes two checkpoints, task three" in done.err
    assert ckptool("average", *files, "--weights", "a,b", "-o", target, "--force").code == 2
