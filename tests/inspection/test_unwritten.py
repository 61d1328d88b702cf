"""Weights that were never written, and blobs of a cache that are another file."""

import hashlib

import pytest
import torch
from safetensors.torch import save, save_file

import ckptool

torch.manual_seed(0)
MODEL = {f"l{i}.weight": torch.randn(64, 64) for i in range(6)}
PADDED = torch.cat([torch.randn(60, 64), torch.zeros(4, 64)])


def zeroed(raw, at):
    return raw[:at] + bytes(len(raw) - at)


def test_zeros_to_the_end_that_begin_inside_a_tensor_are_named(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(MODEL, path, {"format": "pt"})
    assert ckptool.verify(path).notes == ()
    assert ckptool.doctor(path).ok
    raw = path.read_bytes()
    path.write_bytes(zeroed(raw, len(raw) * 2 // 3))
    verdict, (complaint,) = ckptool.verify(path), ckptool.doctor(path).complaints
    assert verdict.ok
    assert "l3.weight, l4.weight, l5.weight" in verdict.notes[0]
    assert (complaint.kind, complaint.severity) == ("unwritten", "misleads")
    assert "l3.weight, l4.weight, l5.weight" in complaint.text


@pytest.mark.parametrize(
    "last",
    [
        {"m.lora_B.weight": torch.zeros(64, 64)},
        {"m.linear.weight": torch.zeros(64, 64), "m.linear.zbias": torch.zeros(64)},
        {"zero_conv.weight": torch.zeros(64, 64, 1, 1)},
        {"x": torch.cat([torch.randn(63, 64), torch.zeros(1, 64)])},
        {
            "x": torch.cat([torch.randn(60, 64), torch.zeros(4, 64)]),
            "y.weight": torch.zeros(64, 64),
        },
        {
            "y.0.exp_avg": torch.cat([torch.randn(9), torch.zeros(9)]),
            "y.1.exp_avg": torch.zeros(4096),
        },
        {"x.weight": torch.tensor([1.0, 0.0]), "z.bias": torch.zeros(8)},
    ],
    ids=[
        "lora B",
        "final layer",
        "zero convolution",
        "padding row",
        "padding, head",
        "moments",
        "small",
    ],
)
def test_layers_that_begin_as_zeros_are_no_warning(tmp_path, last):
    path = tmp_path / "model.safetensors"
    save_file({**MODEL, **last}, path, {"format": "pt"})
    assert ckptool.verify(path).notes == ()
    assert "unwritten" not in {one.kind for one in ckptool.doctor(path).complaints}


@pytest.mark.parametrize("linked", [False, True])
def test_a_blob_that_is_not_the_file_of_its_name_is_damage(tmp_path, linked):
    raw = save(MODEL)
    blob = tmp_path / hashlib.sha256(raw).hexdigest()
    blob.write_bytes(raw)
    path = blob
    if linked:
        path = tmp_path / "model.safetensors"
        path.symlink_to(blob.name)
    assert ckptool.verify(path).ok
    blob.write_bytes(raw[:-5] + bytes(5))
    (problem,) = ckptool.verify(path).problems
    assert problem.kind == "name"
    assert blob.name in problem.text
