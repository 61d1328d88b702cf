"""Ranks of Megatron joined along the dimensions that the user names; torch.cat is the judge."""

import pytest
import torch

import ckptool
from ckptool.errors import UsageError
from tests.formats.distributed.megatron_files import (
    EMBEDDING,
    NORM,
    PROJ,
    QKV,
    RULES,
    TIED,
    whole,
    write_ranks,
)

NET = "torch-2.13.0/dp_full_cuda3.pth"


@pytest.mark.parametrize(
    ("world", "target"), [(1, "model.pth"), (2, "model.safetensors"), (4, "model.pth")]
)
def test_the_model_is_whole(tmp_path, world, target):
    model = whole()
    folder = write_ranks(tmp_path / "iter_0000100", model, world)
    rules = [*RULES, "output_layer.*=0"]
    ckptool.convert(folder, tmp_path / target, model_only=True, concat=rules)
    made = ckptool.load(tmp_path / target)
    assert made.keys() - {TIED, "decoder.layers.0._extra_state"} == model.keys()
    assert all(torch.equal(made[name], one) for name, one in model.items())
    assert made[TIED].data_ptr() == made[EMBEDDING].data_ptr()


def test_what_lies_beside_the_model_is_of_rank_0_or_left_out(tmp_path):
    folder = write_ranks(tmp_path / "iter_0000100", whole())
    rules = [*RULES, "output_layer.*=0"]
    receipt = ckptool.convert(folder, tmp_path / "all.pth", concat=rules)
    made = torch.load(tmp_path / "all.pth", weights_only=False)
    assert (made["iteration"], made["args"].rank) == (100, 0)
    assert not {"optimizer", "rng_state"} & made.keys()
    _, change, kept = receipt.changes  # the first is of the format
    assert (change.kind, change.count) == ("concat", 4)
    assert kept.text == f"taken once, as all ranks have the same: model/{NORM}"
    assert receipt.left_out == ("what each rank has of its own: optimizer, rng_state",)


def test_a_tensor_without_a_rule_that_differs_is_named(tmp_path):
    folder = write_ranks(tmp_path / "iter_0000100", whole())
    with pytest.raises(UsageError, match="ranks differ in 2 tensors, and no rule") as caught:
        ckptool.convert(folder, tmp_path / "m.pth", concat=["*embed*=0", "*output*=0"])
    assert QKV in str(caught.value)
    assert PROJ in str(caught.value)
    assert NORM not in str(caught.value)
    assert not (tmp_path / "m.pth").exists()


def changed(folder, change):
    path = folder / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    change(state["model"])
    torch.save(state, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.pop(NORM), "not all ranks have: .*norm.weight"),
        (lambda model: model.update(more=torch.ones(1)), "not all ranks have: .*more"),
        (
            lambda model: model.update({NORM: torch.ones(8)}),
            "ranks differ in 1 tensor, .*norm",
        ),
        (lambda model: model.update({QKV: torch.ones(6, 7)}), "cannot be joined along dimension 0"),
        (
            lambda model: model.update({QKV: torch.ones(6, 8)}),
            r"bfloat16 \[6, 8\], float32 \[6, 8\]",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_refused(tmp_path, change, message):
    folder = write_ranks(tmp_path / "iter_0000100", whole())
    changed(folder, change)
    with pytest.raises(UsageError, match=message):
        ckptool.convert(folder, tmp_path / "m.pth", concat=[*RULES, "output_layer.*=0"])


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["*.weight"], "not a glob with a dimension"),
        (["=0"], "not a glob with a dimension"),
        (["*=-1"], "not a glob with a dimension"),
        (["*.nothing=0", "*=0"], r"no tensor of the model matches '\*.nothing'"),
        (["*=1"], "cannot be joined along dimension 1"),
    ],
)
def test_a_rule_that_is_none_is_refused(tmp_path, rules, message):
    folder = write_ranks(tmp_path / "iter_0000100", whole())
    with pytest.raises(UsageError, match=message):
        ckptool.convert(folder, tmp_path / "m.pth", concat=rules)


def test_a_file_of_one_process_has_no_ranks(tmp_path):
    torch.save({"model": whole()}, tmp_path / "one.pth")
    with pytest.raises(UsageError, match="no ranks of Megatron's"):
        ckptool.convert(tmp_path / "one.pth", tmp_path / "m.pth", concat=RULES)
