"""Tensors of another file in the place of those of the same key; torch judges the result."""

import pytest
import torch
from safetensors.torch import save_file

import ckptool
from ckptool.errors import AmbiguousName, NotFound, NotRepresentable, UsageError
from ckptool.transforms import overlay


@pytest.fixture
def base(tmp_path):
    vae = {"vae.conv.weight": torch.zeros(2, 2), "vae.norm.bias": torch.zeros(2)}
    torch.save({"state_dict": {**vae, "unet.w": torch.ones(3)}, "epoch": 3}, tmp_path / "base.ckpt")
    return tmp_path / "base.ckpt"


def over(base, other, **options):
    out = base.parent / "out.pth"
    receipt = ckptool.convert(base, out, ckptool.Overlay(other, **options), overwrite=True)
    return torch.load(out, weights_only=True), receipt


def test_a_part_is_put_into_a_model(base, tmp_path):
    save_file({"conv.weight": torch.full((2, 2), 7.0)}, tmp_path / "vae.safetensors")
    found, receipt = over(base, tmp_path / "vae.safetensors", at="vae")
    assert found["state_dict"]["vae.conv.weight"].tolist() == [[7, 7], [7, 7]]
    assert found["state_dict"]["vae.norm.bias"].tolist() == [0, 0]
    assert (list(found["state_dict"]), found["epoch"]) == (
        ["vae.conv.weight", "vae.norm.bias", "unet.w"], 3,
    )  # fmt: skip
    assert receipt.changes[0].text.startswith("replaced 1 tensor in state_dict with those of ")


def test_wrapper_prefixes_of_both_sides_do_not_count(tmp_path):
    torch.save({"module.a": torch.zeros(2), "module.b": torch.zeros(2)}, tmp_path / "base.pth")
    torch.save({"_orig_mod.a": torch.ones(2)}, tmp_path / "other.pth")
    found, _ = over(tmp_path / "base.pth", tmp_path / "other.pth")
    assert {name: one.tolist() for name, one in found.items()} == {
        "module.a": [1, 1], "module.b": [0, 0],
    }  # fmt: skip


def test_ties_follow(tmp_path):
    shared = torch.zeros(2)
    torch.save({"embed.w": shared, "head.w": shared, "b": torch.zeros(1)}, tmp_path / "base.pth")
    torch.save({"embed.w": torch.ones(2)}, tmp_path / "other.pth")
    found, receipt = over(tmp_path / "base.pth", tmp_path / "other.pth")
    assert found["head.w"].data_ptr() == found["embed.w"].data_ptr()
    assert found["head.w"].tolist() == [1, 1]
    assert "updated 1 tied key: head.w" in [one.text for one in receipt.changes]


def test_nothing_in_common_names_the_prefix_that_would_fit(base, tmp_path):
    torch.save({"conv.weight": torch.ones(2, 2), "norm.bias": torch.ones(2)}, tmp_path / "vae.pth")
    with pytest.raises(NotFound, match="has a key of the model") as caught:
        over(base, tmp_path / "vae.pth")
    assert caught.value.hint == "add --overlay-at vae, which matches 2 of 2"


def test_new_keys_only_where_that_is_asked(base, tmp_path):
    torch.save({"unet.w": torch.zeros(3), "unet.extra": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(UsageError, match=r"1 tensor of"):
        over(base, tmp_path / "other.pth")
    found, _ = over(base, tmp_path / "other.pth", add=True)
    assert list(found["state_dict"])[-1] == "unet.extra"
    only, _ = over(base, tmp_path / "other.pth", include=["unet.w"])
    assert "unet.extra" not in only["state_dict"]
    with pytest.raises(NotFound, match=r"no tensor matches 'x\.\*'"):
        over(base, tmp_path / "other.pth", include=["x.*"])


@pytest.mark.parametrize("other", [torch.ones(4), torch.ones(3).half()])
def test_another_shape_or_dtype_is_refused(base, tmp_path, other):
    torch.save({"unet.w": other}, tmp_path / "other.pth")
    with pytest.raises(UsageError, match=r"1 tensor of"):
        over(base, tmp_path / "other.pth")
    assert not (tmp_path / "out.pth").exists()


def test_quantized_weights_go_with_their_scales(tmp_path):
    codes = {
        "l.weight": torch.ones(8, 8).to(torch.float8_e4m3fn),
        "l.weight_scale": torch.ones(8, 1),
    }
    torch.save(codes, tmp_path / "base.pth")
    other = {"l.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn)}
    torch.save(other, tmp_path / "other.pth")
    with pytest.raises(
        NotRepresentable,
        match=r"'l\.weight' of the model is quantized \(fp8 with scales\), and would be",
    ):
        over(tmp_path / "base.pth", tmp_path / "other.pth")
    torch.save({**other, "l.weight_scale": torch.ones(8, 1) * 2}, tmp_path / "other.pth")
    found, _ = over(tmp_path / "base.pth", tmp_path / "other.pth")
    assert found["l.weight_scale"].sum() == 16


def test_the_state_dict_of_the_other_file_is_chosen(base, tmp_path):
    states = {"a": {"unet.w": torch.zeros(3)}, "b": {"unet.w": torch.full((3,), 5.0)}}
    torch.save(states, tmp_path / "other.pth")
    with pytest.raises(AmbiguousName):
        over(base, tmp_path / "other.pth")
    found, _ = over(base, tmp_path / "other.pth", key="b")
    assert found["state_dict"]["unet.w"].tolist() == [5, 5, 5]


def test_an_open_checkpoint_is_taken_and_a_dict_refused(base, tmp_path):
    torch.save({"unet.w": torch.zeros(3)}, tmp_path / "other.pth")
    with ckptool.open(tmp_path / "other.pth") as other, ckptool.open(base) as checkpoint:
        made = checkpoint.then(ckptool.Overlay(other))
        assert made["state_dict"]["unet.w"].torch().tolist() == [0, 0, 0]
    with pytest.raises(UsageError, match="Overlay needs a file"):
        ckptool.Overlay(tmp_path / "other.pth")({"unet.w": torch.ones(3)})


def test_what_the_caller_opened_stays_open(base, tmp_path):
    torch.save({"unet.w": torch.zeros(3)}, tmp_path / "other.pth")
    with ckptool.open(tmp_path / "other.pth") as other, ckptool.open(base) as checkpoint:
        for _ in range(2):
            ckptool.convert(checkpoint, tmp_path / "o.pth", ckptool.Overlay(other), overwrite=True)
        assert other["unet.w"].torch().tolist() == [0, 0, 0]


def test_a_pickled_module_is_refused_with_the_option_that_helps(tmp_path):
    model = torch.nn.Linear(2, 2)
    torch.save(model, tmp_path / "whole.pth")
    torch.save(model.state_dict(), tmp_path / "state.pth")
    with pytest.raises(UsageError, match="is a pickled module") as caught:
        over(tmp_path / "whole.pth", tmp_path / "state.pth")
    assert "--model-only" in caught.value.hint


def test_a_refused_later_step_closes_the_file_that_was_opened(base, tmp_path, monkeypatch):
    torch.save({"unet.w": torch.ones(3)}, tmp_path / "other.pth")
    opened, real = [], overlay.open_checkpoint
    monkeypatch.setattr(
        overlay, "open_checkpoint", lambda path: opened.append(real(path)) or opened[-1]
    )
    with ckptool.open(base) as checkpoint:
        with pytest.raises(NotFound):
            checkpoint.then(ckptool.Overlay(tmp_path / "other.pth"), ckptool.Drop(["nothing"]))
        (other,) = opened
        with pytest.raises(ValueError, match="closed"):
            other.sources[0].read(0, 1)
        assert checkpoint.sources[0].read(0, 2) == b"PK"
