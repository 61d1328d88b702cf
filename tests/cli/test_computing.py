"""cast, average and merge-lora on the command line."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import FIXTURES


@pytest.fixture
def saved(tmp_path):
    def save(**tensors):
        torch.save(tensors, tmp_path / "m.pth")
        return tmp_path / "m.pth"

    return save


def test_the_type_names_the_target_and_optimizers_stay(ckptool, model):
    done = ckptool("cast", model, "--dtype", "bf16")
    assert done.code == 0, done.err
    before = torch.load(model)
    after = torch.load(model.with_name("model.bfloat16.pth"))
    for name, tensor in before["state_dict"].items():
        wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(after["state_dict"][name], wanted)
    assert after["optim_dict"] == before["optim_dict"]
    assert "tensors from float32 to bfloat16" in done.err
    assert "float32 -> bfloat16: " in done.err
    assert "of the values lost precision" in done.err
    assert ", verified)" in done.err


def test_safetensors_come_out_as_safetensors(ckptool, saved, tmp_path):
    source = saved(w=torch.randn(4, 4))
    assert ckptool("convert", source, tmp_path / "m.safetensors").code == 0
    assert ckptool("cast", tmp_path / "m.safetensors", "--dtype", "float16").code == 0
    from safetensors.torch import load_file

    made = load_file(tmp_path / "m.float16.safetensors")["w"]
    assert torch.equal(made, torch.load(source)["w"].half())


def test_overflow_is_an_error_with_the_way_out(ckptool, saved, tmp_path):
    source = saved(fine=torch.ones(2), large=torch.tensor([1.0, 1e6]))
    done = ckptool("cast", source, "--dtype", "half")
    assert done.code == 2
    assert "'large' cannot be cast: 1 of 2 values overflow float16" in done.err
    assert "hint: add --allow-overflow" in done.err
    assert os.listdir(tmp_path) == ["m.pth"]
    assert ckptool("cast", source, "--dtype", "half", "--keep", "large=float32").code == 0
    assert torch.load(tmp_path / "m.float16.pth")["large"].tolist() == [1.0, 1e6]
    done = ckptool("cast", source, "--dtype", "half", "--allow-overflow", "--force")
    assert done.code == 0
    assert torch.load(tmp_path / "m.float16.pth")["large"].tolist() == [1.0, float("inf")]
    assert "large: 1 of 2 values overflowed in float16" in done.err


def test_only_the_worst_tensors_are_named_and_json_has_all(ckptool, saved):
    source = saved(**{f"w{at}": torch.full((at,), 1e-9) for at in range(1, 6)})
    done = ckptool("cast", source, "--dtype", "fp16", "--json")
    assert [line for line in done.err.splitlines() if "underflow" in line] == [
        "5 tensors, float32 -> float16: 15 values underflowed to zero",
        "w5: 5 of 5 values underflowed to zero in float16",
        "w4: 4 of 4 values underflowed to zero in float16",
        "w3: 3 of 3 values underflowed to zero in float16",
        "underflow in 2 more tensors (--json lists all)",
    ]
    kinds = [(outcome["kind"], outcome["count"]) for outcome in done.document["outcomes"]]
    assert kinds == [("cast", 15), *(("underflow", at) for at in (5, 4, 3, 2, 1))]


def test_a_dry_run_computes_nothing(ckptool, saved, tmp_path):
    source = saved(large=torch.tensor([1e6]))
    done = ckptool("cast", source, "--dtype", "half", "--dry-run", "--json")
    assert done.code == 0
    assert done.document["outcomes"] == []
    assert os.listdir(tmp_path) == ["m.pth"]


def test_keep_and_all(ckptool, saved, tmp_path):
    weights = torch.ones(2)
    torch.save(
        {"model": {"a.w": weights, "n.w": weights * 2}, "optimizer": {"exp_avg": weights * 3}},
        tmp_path / "m.pth",
    )
    options = ["--dtype", "float16", "--keep", "n.*", "--cast-optimizer"]
    done = ckptool("cast", tmp_path / "m.pth", *options)
    assert done.code == 0, done.err
    made = torch.load(tmp_path / "m.float16.pth")
    assert [made["model"][name].dtype for name in ("a.w", "n.w")] == [torch.float16, torch.float32]
    assert made["optimizer"]["exp_avg"].dtype == torch.float16


@pytest.mark.parametrize("options", [["--dtype", "int8"], ["--dtype", "half", "--keep", "*=in8"]])
def test_a_type_that_is_none_is_refused_with_a_list(ckptool, saved, options):
    done = ckptool("cast", saved(w=torch.ones(1)), *options)
    assert done.code == 2
    assert "float8_e8m0fnu" in done.err


def test_torch_is_imported_only_where_something_is_cast(process, saved, tmp_path):
    shadow = tmp_path / "shadow" / "torch"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text('raise ImportError("not here")\n')
    source = saved(w=torch.ones(3))
    for options, code in (
        (["--dtype", "float32"], 0),
        (["--dtype", "float16", "--dry-run"], 0),
        (["--dtype", "float16"], 2),
    ):
        done = process("cast", source, *options, PYTHONPATH=str(shadow.parent))
        assert done.code == code, done.err
    assert "torch" in done.err


def test_quantized_weights_are_refused_dequantized_or_cast_raw(ckptool, saved, tmp_path):
    weight = torch.randn(3, 3).to(torch.float8_e4m3fn)
    source = saved(w=weight, w_scale_inv=torch.full((1, 1), 0.5))
    for verb in (
        ("cast", source, "--dtype", "bf16"),
        ("convert", source, tmp_path / "x.pth", "--dtype", "bf16"),
        ("average", source, source, "-o", tmp_path / "x.pth"),
    ):
        done = ckptool(*verb)
        assert done.code == 2
        assert "its values need w_scale_inv" in done.err
        assert "--dequantize bfloat16" in done.err
        assert ("--raw" in done.err) is (verb[0] != "average")
    assert not (tmp_path / "x.pth").exists()
    assert ckptool("cast", source, "--dequantize", "bf16").code == 0
    made = torch.load(tmp_path / "m.bfloat16.pth")
    assert list(made) == ["w"]
    assert torch.equal(made["w"], (weight.float() * 0.5).bfloat16())
    assert ckptool("convert", source, tmp_path / "x.pth", "--dequantize", "float16").code == 0
    assert torch.load(tmp_path / "x.pth")["w"].dtype == torch.float16
    assert ckptool("cast", source, "--dtype", "half", "--raw").code == 0
    assert torch.equal(torch.load(tmp_path / "m.float16.pth")["w"], weight.half())


def test_a_cast_without_a_type_is_wrong_usage(ckptool, saved):
    done = ckptool("cast", saved(w=torch.ones(2)))
    assert done.code == 2
    assert "--dtype" in done.err


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
    assert "the mean of 2 files: 1 tensor in state_dict" in done.err
    assert f"took from {files[0]}: epoch" in done.err
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
    assert "mode task needs three checkpoints" in done.err
    assert ckptool("average", *files, "--weights", "a,b", "-o", target, "--force").code == 2


LORA = FIXTURES / "lora"
BASE = LORA / "base.safetensors"


def test_it_says_what_was_changed_by_what(ckptool, tmp_path):
    target = tmp_path / "merged.safetensors"
    done = ckptool("merge-lora", BASE, LORA / "plain", "-o", target, "--scale", "2", "--json")
    assert done.code == 0, done.err
    assert f"merged {LORA / 'plain'}" in done.err
    assert "(scale 3)" in done.err
    assert done.document["verified"]
    assert load_file(target).keys() == load_file(BASE).keys()


def test_shards_are_written_and_read(ckptool, tmp_path):
    first, second = tmp_path / "model.safetensors", tmp_path / "again.safetensors"
    shards = ("--max-shard-size", "400B")
    assert ckptool("merge-lora", BASE, LORA / "plain", "-o", first, *shards).code == 0
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists()
    assert ckptool("merge-lora", index, LORA / "conv", "-o", second).code == 0


def test_wrong_usage_is_told(ckptool, tmp_path):
    target = tmp_path / "merged.pth"
    assert "'-o' / '--output'" in ckptool("merge-lora", BASE, LORA / "plain").err
    done = ckptool("merge-lora", BASE, LORA / "plain", "-o", target, "--scale", "1,2")
    assert done.code == 2
    assert "ckptool: scale needs one finite number, or one for each adapter (1)" in done.err
    assert ckptool("merge-lora", BASE, BASE, "-o", target).code == 2
