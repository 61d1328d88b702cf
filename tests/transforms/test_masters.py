"""The fp32 masters of DeepSpeed's optimizer in the place of the weights."""

import json
from pathlib import Path

import pytest
import torch

import ckptool
from ckptool.errors import NotFound

ZERO = Path(__file__).parents[2] / "fixtures" / "zero"
SCRIPT = json.loads((ZERO / "masters.json").read_text())
"""What DeepSpeed's `zero_to_fp32` makes of each folder: shape and hash of each tensor."""
NAMES = ["scale", "embed.weight", "up.weight", "up.bias", "down.bias", "norm.weight", "norm.bias"]


@pytest.mark.parametrize("name", [name for name in SCRIPT if isinstance(SCRIPT[name], dict)])
def test_the_weights_are_those_of_deepspeeds_script(name):
    with ckptool.open(ZERO / name, master=True) as checkpoint:
        rows = ckptool.list_tensors(checkpoint, hash=True).to_dict()["tensors"]
        found = {row["name"]: row["sha256"] for row in rows}
        assert checkpoint["module/head.weight"].place == checkpoint["module/embed.weight"].place
    assert not [key for key in found if key.endswith("/fp32")]
    for key in (*NAMES, "head.weight"):
        assert found[f"module/{key}"] == SCRIPT[name][key][1]


@pytest.mark.parametrize("name", ["z1-fp32", "z1-bf16", "z2-bf16", "z3-bf16", "bf16"])
def test_convert_writes_them(name, tmp_path):
    target = tmp_path / "model.safetensors"
    ckptool.convert(ZERO / name, target, model_only=True, master=True)
    made = ckptool.load(target)
    with ckptool.open(ZERO / name) as checkpoint:
        for key in NAMES:
            state = checkpoint["optimizer"]["state"][key]
            master = state["fp32"] if "fp32" in state else checkpoint["module"][key]
            assert torch.equal(made[key], master.torch())
        for key in ("down.weight", "angles", "count"):
            assert torch.equal(made[key], checkpoint["module"][key].torch())


def test_what_was_done_is_told(tmp_path):
    with ckptool.open(ZERO / "z2-bf16", master=True) as checkpoint:
        (change,) = checkpoint.changes
    assert (change.kind, change.count) == ("master", 8)
    assert change.text.endswith("; 3 tensors without one stay as they are")
    with ckptool.open(ZERO / "z3-fp32", master=True) as checkpoint:
        assert not checkpoint.changes
    with ckptool.open(ZERO / "z3-bf16") as checkpoint:
        assert [one.kind for one in checkpoint.changes] == ["cast"]
    receipt = ckptool.convert(ZERO / "z3-bf16", tmp_path / "m.pth", master=True)
    assert [one.kind for one in receipt.changes] == ["format", "master"]
    assert not receipt.outcomes


@pytest.mark.parametrize("name", ["torch-2.13.0/dp_full_cuda3.pth", "numpy/jax.npz"])
def test_a_file_without_masters_is_refused(name):
    with pytest.raises(NotFound, match="holds no fp32 masters") as caught:
        ckptool.open(ZERO.parent / name, master=True)
    assert "master=True" in caught.value.hint
