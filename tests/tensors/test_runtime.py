"""Attributes from a file never replace what a class has."""

from collections import OrderedDict

import pytest
import torch

import ckptool
from ckptool.errors import CheckpointWarning
from ckptool.tensors import require_torch, set_attributes
from ckptool.tensors.materialise import called


def test_attributes_are_set_unless_the_class_has_them():
    made = OrderedDict(a=1)
    given = {"_metadata": 1, "keys": 2, "__class__": dict, 3: 4, "__reduce__": 5}
    with pytest.warns(CheckpointWarning, match="the root is .* keys, __class__, 3, __reduce__:"):
        set_attributes(made, given, "the root")
    assert vars(made) == {"_metadata": 1}
    assert list(made.keys()) == ["a"]
    assert type(made) is OrderedDict


def test_torch_is_there():
    assert require_torch() is None


@pytest.mark.parametrize(
    ("name", "shown"), [("fc.weight", "tensor 'fc.weight'"), ("", "the tensor")]
)
def test_how_a_tensor_is_called(name, shown):
    assert called(name) == shown


def test_a_name_cannot_reach_the_terminal():
    assert "\x1b" not in called("a\x1b[2Jb")


def test_the_default_device_of_the_user_changes_no_figures(tmp_path):
    a, b = {"w": torch.rand(30, 20)}, {"w": torch.rand(30, 20)}
    torch.save(a, tmp_path / "a.pth")
    torch.save(b, tmp_path / "b.pth")
    small, scale = a["w"].to(torch.float8_e4m3fn), torch.full((1, 1), 0.5)
    torch.save({"l.weight": small, "l.weight_scale_inv": scale}, tmp_path / "q.pth")
    for device in ("cpu", "meta"):
        with torch.device(device):
            (row,) = ckptool.stats(tmp_path / "a.pth").tensors
            (value,) = ckptool.diff(tmp_path / "a.pth", tmp_path / "b.pth").changed
            ckptool.convert(tmp_path / "a.pth", tmp_path / f"cast-{device}.pth", cast="bfloat16")
            ckptool.convert(tmp_path / "q.pth", tmp_path / f"q-{device}.pth", dequantize="float32")
            ckptool.average([tmp_path / "a.pth", tmp_path / "b.pth"], tmp_path / f"{device}.pth")
        assert row.measures.maximum == a["w"].max()
        assert value.difference.max_abs == pytest.approx((a["w"] - b["w"]).abs().max().item())
        assert torch.equal(torch.load(tmp_path / f"{device}.pth")["w"], (a["w"] + b["w"]) / 2)
        assert torch.equal(torch.load(tmp_path / f"cast-{device}.pth")["w"], a["w"].bfloat16())
        assert torch.equal(torch.load(tmp_path / f"q-{device}.pth")["l.weight"], small.float() / 2)
