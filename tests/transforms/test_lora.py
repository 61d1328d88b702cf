"""Adapters merged into their base: held against merge_and_unload of peft 0.21.2."""

import json
import shlex
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.cli import main
from ckptool.errors import CheckpointError, NotFound, NotRepresentable, UsageError
from tests.conftest import FIXTURES

LORA = FIXTURES / "lora"
BASE = LORA / "base.safetensors"
CASES = sorted(path.parent.name for path in LORA.glob("*/adapter_config.json"))


def merged(target, *adapters, base=BASE, **options):
    """Return what merge_lora writes, read by safetensors itself."""
    ckptool.merge_lora(base, adapters, target, **options)
    return load_file(target)


@pytest.fixture
def target(tmp_path):
    """A file to write."""
    return tmp_path / "merged.safetensors"


def assert_same(made, wanted):
    """Compare with what peft computed, on a processor whose products may round differently."""
    assert made.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(made[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_that_of_peft(case, target):
    made, base = merged(target, LORA / case), load_file(BASE)
    wanted = base | load_file(LORA / case / "merged.safetensors")
    assert made.keys() == base.keys()
    assert any(not torch.equal(made[name], base[name]) for name in base)
    assert_same(made, wanted)


@pytest.mark.parametrize("case", ["plain", "saved"])
def test_the_state_dict_of_a_whole_peft_model_becomes_that_of_the_model(case, target):
    made = merged(target, base=LORA / case / "whole.pth")
    wanted = load_file(BASE) | load_file(LORA / case / "merged.safetensors")
    assert_same(made, wanted)


def test_adapters_add_up_with_their_scales(target, tmp_path):
    base = load_file(BASE)
    once = merged(tmp_path / "one.safetensors", LORA / "plain")["lin.weight"]
    both = merged(target, LORA / "plain", LORA / "plain", scale=(0.5, 2))["lin.weight"]
    wanted = base["lin.weight"] + 2.5 * (once - base["lin.weight"])
    torch.testing.assert_close(both, wanted)


def test_a_half_precision_base_is_rounded_once(target, tmp_path):
    half = {name: tensor.bfloat16() for name, tensor in load_file(BASE).items()}
    save_file(half, tmp_path / "half.safetensors")
    adapter = load_file(LORA / "plain" / "adapter_model.safetensors")
    down, up = (adapter[f"base_model.model.lin.lora_{one}.weight"] for one in "AB")
    made = merged(target, LORA / "plain", base=tmp_path / "half.safetensors")
    wanted = (half["lin.weight"].float() + up @ down * 1.5).bfloat16()
    assert torch.equal(made["lin.weight"], wanted)


def kohya(path, **more):
    """Write a file of kohya: a linear layer and a LoCon convolution, with alpha."""
    tensors = {
        "lora_unet_lin.lora_down.weight": torch.rand(2, 8),
        "lora_unet_lin.lora_up.weight": torch.rand(6, 2),
        "lora_unet_lin.alpha": torch.tensor(1.0),
        "lora_unet_conv.lora_down.weight": torch.rand(2, 3, 3, 3),
        "lora_unet_conv.lora_up.weight": torch.rand(4, 2, 1, 1),
        "lora_unet_conv.alpha": torch.tensor(3.0),
    }
    save_file(tensors | more, path)
    return tensors


def test_kohya_has_alpha_in_the_file(target, tmp_path):
    one = kohya(tmp_path / "kohya.safetensors")
    made, base = merged(target, tmp_path / "kohya.safetensors"), load_file(BASE)
    down, up = (one[f"lora_unet_lin.lora_{word}.weight"] for word in ("down", "up"))
    torch.testing.assert_close(made["lin.weight"], base["lin.weight"] + up @ down / 2)
    down, up = (one[f"lora_unet_conv.lora_{word}.weight"] for word in ("down", "up"))
    delta = torch.einsum("or,rihw->oihw", up[:, :, 0, 0], down) * 1.5
    torch.testing.assert_close(made["conv.weight"], base["conv.weight"] + delta)


@pytest.mark.parametrize("words", [("lora_A", "lora_B"), ("lora.down", "lora.up")])
def test_diffusers_without_alpha_has_the_scale_1(words, target, tmp_path):
    down, up = torch.rand(2, 8), torch.rand(6, 2)
    names = [f"unet.lin.{word}.weight" for word in words]
    save_file(dict(zip(names, (down, up), strict=True)), tmp_path / "pytorch_lora.safetensors")
    made = merged(target, tmp_path / "pytorch_lora.safetensors")["lin.weight"]
    torch.testing.assert_close(made, load_file(BASE)["lin.weight"] + up @ down)


@pytest.mark.parametrize(
    "name",
    ["lora_unet_lin.hada_w1_a", "lora_unet_lin.lokr_w1", "lora_unet_conv.lora_mid.weight",
     "lora_unet_lin.dora_scale"],
)  # fmt: skip
def test_other_adapters_are_named_and_refused(name, target, tmp_path):
    kohya(tmp_path / "other.safetensors", **{name: torch.rand(2, 2)})
    with pytest.raises(NotRepresentable, match=name):
        merged(target, tmp_path / "other.safetensors")
    assert not target.exists()


def test_what_fits_nothing_in_the_base_is_named(target, tmp_path):
    more = {f"lora_te_x.lora_{word}.weight": torch.rand(2, 2) for word in ("down", "up")}
    kohya(tmp_path / "more.safetensors", **more)
    with pytest.raises(NotFound, match="'lora_te_x' has no counterpart"):
        merged(target, tmp_path / "more.safetensors")


def test_names_that_are_one_with_underscores_are_ambiguous(target, tmp_path):
    save_file({"lin.a.weight": torch.ones(6, 8), "lin_a.weight": torch.ones(6, 8)}, target)
    halves = {"down": torch.ones(2, 8), "up": torch.ones(6, 2)}
    one = {f"lora_unet_lin_a.lora_{word}.weight": half for word, half in halves.items()}
    save_file(one, tmp_path / "one.safetensors")
    with pytest.raises(
        NotFound, match=r"'lora_unet_lin_a' is ambiguous: it could be lin\.a\.weight, lin_a\.weight"
    ):
        merged(tmp_path / "out.safetensors", tmp_path / "one.safetensors", base=target)


def test_shapes_must_fit(target, tmp_path):
    kohya(tmp_path / "a.safetensors", **{"lora_unet_lin.lora_up.weight": torch.rand(7, 2)})
    with pytest.raises(UsageError, match=r"consists of .* \[7, 2\]"):
        merged(target, tmp_path / "a.safetensors")


def test_an_adapter_of_peft_needs_its_alpha(target, tmp_path):
    alone = tmp_path / "adapter_model.safetensors"
    shutil.copy(LORA / "plain" / "adapter_model.safetensors", alone)
    with pytest.raises(UsageError, match="the scale of the adapter is unknown"):
        merged(target, alone)
    made = merged(target, alone, alpha=3)["lin.weight"]
    wanted = load_file(LORA / "plain" / "merged.safetensors")["lin.weight"]
    assert_same({"lin.weight": made}, {"lin.weight": wanted})


@pytest.mark.parametrize(
    "change",
    [{"peft_type": "LOHA"}, {"lora_bias": True}, {"init_lora_weights": "pissa"},
     {"alpha_pattern": {"(.*)*x": 1}}, {"alpha_pattern": {".*a.*b.*c.*d": 1}},
     {"alpha_pattern": ["lin"]}],
)  # fmt: skip
def test_what_the_configuration_asks_for_beyond_lora_is_refused(change, target, tmp_path):
    with pytest.raises(NotRepresentable):
        merged(target, configured(tmp_path, change))


@pytest.mark.parametrize(
    "change",
    [{"lora_alpha": value} for value in (None, "16", [1], float("nan"), 10**400)]
    + [{"alpha_pattern": pattern} for pattern in ({"(": 1}, {"x{99999999999}": 1}, {"x": "a"})],
)
def test_a_configuration_with_other_values_is_refused(change, target, tmp_path):
    with pytest.raises(
        UsageError, match=r"is unknown|expected a finite number|no regular expression"
    ):
        merged(target, configured(tmp_path, change))


def configured(folder, change):
    """Copy an adapter, with another configuration."""
    shutil.copytree(LORA / "plain", folder / "one")
    config = folder / "one" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    return folder / "one"


@pytest.mark.parametrize("down", [(), (2,), (2, 8, 1, 1, 1, 1), (2, 7), (3, 8)])
def test_factors_of_any_shape_are_refused_by_a_sentence(down, target, tmp_path):
    kohya(tmp_path / "a.safetensors", **{"lora_unet_lin.lora_down.weight": torch.rand(down)})
    with pytest.raises(UsageError, match="they do not fit"):
        merged(target, tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        (
            "lora_unet_lin.alpha",
            torch.ones(2),
            r"expected a finite number",
        ),
        (
            "lora_unet_lin.alpha",
            torch.tensor(torch.nan),
            r"expected a finite number",
        ),
        ("lora_unet_lin.lora_up.weight", torch.full((6, 2), torch.nan), "infinite or NaN"),
        ("lora_unet_lin.lora_up.weight", torch.ones(6, 2).int(), "they do not fit"),
        ("lora_unet_lin.lora_magnitude_vector", torch.ones(1), "they do not fit"),
        ("lora_unet_lin.lora_A.weight", torch.ones(2, 8), "has two of lora_"),
    ],
)
def test_values_that_make_no_weight_are_refused(name, tensor, told, target, tmp_path):
    kohya(tmp_path / "a.safetensors", **{name: tensor})
    with pytest.raises(CheckpointError, match=told):
        merged(target, tmp_path / "a.safetensors")


def test_layers_may_be_called_diff_and_parameters_alpha(target, tmp_path):
    """Names that end kohya's parts are those of layers elsewhere."""
    base = {
        "diff.weight": torch.ones(3, 3),
        "lin.weight": torch.ones(2, 3),
        "act.alpha": torch.ones(3),
    }
    torch.save(base | {"norm.steps": torch.tensor(1)}, tmp_path / "base.pth")
    peft = "base_model.model."
    adapter = {
        f"{peft}lin.lora_A.weight": torch.ones(1, 3),
        f"{peft}lin.lora_B.weight": torch.ones(2, 1),
        f"{peft}diff.weight": torch.zeros(3, 3),
        f"{peft}act.alpha": torch.zeros(3),
        f"{peft}norm.steps": torch.tensor(7),
    }
    save_file(adapter, tmp_path / "adapter.safetensors")
    made = merged(target, tmp_path / "adapter.safetensors", base=tmp_path / "base.pth", alpha=2)
    assert torch.equal(made["lin.weight"], torch.full((2, 3), 3.0))
    assert not made["diff.weight"].any()
    assert not made["act.alpha"].any()
    assert made["norm.steps"] == 7


def test_a_square_weight_beside_turned_ones_needs_its_configuration(target, tmp_path):
    names = ("wide", "square")
    base = {f"{name}.weight": torch.rand(4, size) for name, size in zip(names, (6, 4), strict=True)}
    whole = {f"base_model.model.{name[:-6]}base_layer.weight": one for name, one in base.items()}
    for name, size in zip(names, (6, 4), strict=True):
        whole[f"base_model.model.{name}.lora_A.default.weight"] = torch.rand(2, 4)
        whole[f"base_model.model.{name}.lora_B.default.weight"] = torch.rand(size, 2)
    torch.save(whole, tmp_path / "whole.pth")
    with pytest.raises(UsageError, match="square' is square"):
        merged(target, base=tmp_path / "whole.pth", alpha=2)
    config = {"fan_in_fan_out": True, "lora_alpha": 2}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    made = merged(target, base=tmp_path / "whole.pth")
    down, up = (whole[f"base_model.model.square.lora_{one}.default.weight"] for one in "AB")
    torch.testing.assert_close(made["square.weight"], base["square.weight"] + (up @ down).T)


def test_a_square_weight_beside_others_that_contradict_its_configuration(target, tmp_path):
    whole = {}
    for name, size in (("wide", 6), ("square", 4)):
        whole[f"base_model.model.{name}.base_layer.weight"] = torch.rand(size, 4)
        whole[f"base_model.model.{name}.lora_A.default.weight"] = torch.rand(2, 4)
        whole[f"base_model.model.{name}.lora_B.default.weight"] = torch.rand(size, 2)
    torch.save(whole, tmp_path / "whole.pth")
    config = {"fan_in_fan_out": True, "lora_alpha": 2}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"are \(out, in\), but fan_in_fan_out is set") as caught:
        merged(target, base=tmp_path / "whole.pth")
    assert caught.value.hint.startswith("remove fan_in_fan_out")


def test_diffusers_has_the_configuration_in_the_header(target, tmp_path):
    down, up = torch.rand(2, 8), torch.rand(6, 2)
    tensors = {"unet.lin.lora_A.weight": down, "unet.lin.lora_B.weight": up}
    header = {"lora_adapter_metadata": json.dumps({"lora_alpha": 6, "r": 2})}
    save_file(tensors, tmp_path / "one.safetensors", header)
    made = merged(target, tmp_path / "one.safetensors")["lin.weight"]
    torch.testing.assert_close(made, load_file(BASE)["lin.weight"] + 3 * up @ down)
    header["lora_adapter_metadata"] = json.dumps({"unet.lora_alpha": 6})
    save_file(tensors, tmp_path / "one.safetensors", header)
    with pytest.raises(UsageError, match="the scale of the adapter is unknown"):
        merged(target, tmp_path / "one.safetensors")
    save_file(tensors, tmp_path / "one.safetensors", {"lora_adapter_metadata": "{"})
    with pytest.raises(UsageError, match="not valid JSON") as caught:
        merged(target, tmp_path / "one.safetensors")
    assert caught.value.file == str(tmp_path / "one.safetensors")


def test_of_a_training_run_the_optimizer_stays_and_is_named(target, tmp_path):
    whole = torch.load(LORA / "plain" / "whole.pth")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    state = {"model": whole, "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "run.pth")
    told = ckptool.merge_lora(tmp_path / "run.pth", (), tmp_path / "out.pth", alpha=3).changes
    assert [one.text for one in told if one.kind == "warning"] == [
        "the optimizer still has the state of the merged adapter"
    ]
    made = torch.load(tmp_path / "out.pth")
    assert made.keys() == state.keys()
    wanted = load_file(LORA / "plain" / "merged.safetensors")["lin.weight"]
    torch.testing.assert_close(made["model"]["lin.weight"], wanted, rtol=1e-6, atol=1e-6)


def test_trainable_tokens_are_refused(target, tmp_path):
    whole = torch.load(LORA / "plain" / "whole.pth")
    whole["base_model.model.emb.token_adapter.trainable_tokens_delta.default"] = torch.ones(2)
    torch.save(whole, tmp_path / "whole.pth")
    with pytest.raises(NotRepresentable, match="trainable_tokens_"):
        merged(target, base=tmp_path / "whole.pth", alpha=3)


def test_tied_weights_change_together_and_the_rest_of_the_file_stays(tmp_path):
    weight = torch.rand(6, 8)
    state = {"lin.weight": weight, "twin.weight": weight, "b": torch.ones(3)}
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "base.pth")
    parts = {"lin.lora_A.weight": torch.rand(2, 8), "lin.lora_B.weight": torch.rand(6, 2)}
    torch.save(parts, tmp_path / "adapter.pth")
    ckptool.merge_lora(tmp_path / "base.pth", [tmp_path / "adapter.pth"], tmp_path / "out.pth")
    made = torch.load(tmp_path / "out.pth")
    one, two = (made["state_dict"][name] for name in ("lin.weight", "twin.weight"))
    assert one.data_ptr() == two.data_ptr()
    torch.testing.assert_close(
        one, weight + parts["lin.lora_B.weight"] @ parts["lin.lora_A.weight"]
    )
    assert made["epoch"] == 3


def test_a_key_that_is_no_name_stays(tmp_path):
    torch.save({"m": {"lin.weight": torch.ones(6, 8), 0: torch.ones(2)}}, tmp_path / "base.pth")
    torch.save(
        {"lin.lora_A.weight": torch.rand(2, 8), "lin.lora_B.weight": torch.rand(6, 2)},
        tmp_path / "adapter.pth",
    )
    files = tmp_path / "base.pth", [tmp_path / "adapter.pth"], tmp_path / "out.pth"
    ckptool.merge_lora(*files, key="m")
    assert list(torch.load(files[2])["m"]) == ["lin.weight", 0]


@pytest.mark.parametrize("text", ["{", "[" * 200_000, "\xff"])
def test_a_configuration_that_is_no_json(text, target, tmp_path):
    shutil.copytree(LORA / "plain", tmp_path / "one")
    (tmp_path / "one" / "adapter_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="is not valid JSON"):
        merged(target, tmp_path / "one")
    assert not target.exists()


@pytest.mark.parametrize("config", [{}, {"lora_alpha": 3}])
def test_a_base_with_an_adapter_of_its_own_takes_no_other(target, tmp_path, config):
    whole = shutil.copy(LORA / "plain" / "whole.pth", tmp_path / "my model.pth")
    with pytest.raises(UsageError, match="already contains an adapter") as caught:
        merged(target, configured(tmp_path, config), base=whole)
    assert f"ckptool merge-lora '{whole}' -o OUT --alpha N" in caught.value.hint
    assert not target.exists()


def test_a_vocabulary_that_grew_needs_its_rows_first(target, tmp_path):
    old = {"tok.weight": torch.rand(6, 4), "head.weight": torch.rand(6, 4)}
    torch.save(old, tmp_path / "base.pth")
    peft = "base_model.model."
    adapter = {
        f"{peft}tok.weight": torch.rand(9, 4),
        f"{peft}head.lora_A.weight": torch.rand(2, 4),
        f"{peft}head.lora_B.weight": torch.rand(9, 2),
    }
    save_file(adapter, tmp_path / "a.safetensors")
    with pytest.raises(UsageError) as caught:
        merged(target, tmp_path / "a.safetensors", base=tmp_path / "base.pth", alpha=2)
    assert "is [9, 4] in the adapter and [6, 4] in the base" in str(caught.value)
    options = shlex.split(caught.value.hint.partition("ckptool ")[2])
    assert options[:3] == ["convert", str(tmp_path / "base.pth"), "OUT"]
    grown = tmp_path / "grown.pth"
    assert main([*options[:2], str(grown), *options[3:]]) == 0
    made = merged(target, tmp_path / "a.safetensors", base=grown, alpha=2)
    assert torch.equal(made["tok.weight"], adapter[f"{peft}tok.weight"])
    assert made["head.weight"].shape == (9, 4)


def test_an_embedding_with_more_rows_in_its_adapter(target, tmp_path):
    save_file({"tok.weight": torch.rand(6, 4)}, tmp_path / "base.safetensors")
    adapter = {
        "base_model.model.tok.lora_embedding_A": torch.rand(2, 9),
        "base_model.model.tok.lora_embedding_B": torch.rand(4, 2),
    }
    save_file(adapter, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match=r"is \[9, 4\] in the adapter and \[6, 4\] in the base"):
        merged(target, tmp_path / "a.safetensors", base=tmp_path / "base.safetensors", alpha=2)
