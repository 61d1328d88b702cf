"""Layouts of quantizers, next to what their own libraries make of them: `fixtures/quantizers/`."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.diagnosis.info import info
from ckptool.errors import CheckpointError, CorruptFile, NotFound, NotRepresentable
from ckptool.tensors.unpacking import CONFIG_HINT
from ckptool.words import counted
from tests.sources import PROJECT

FOLDERS = PROJECT / "fixtures" / "quantizers"
LAYOUTS = sorted(path.name for path in FOLDERS.iterdir())
SCHEMES = {
    "torchao": "torchao",
    "quanto": "quanto",
    "mlx": "MLX (4 bits, groups of 64)",
    "compressed-int8": "int8 with scales (8 bits, compressed-tensors according to config.json)",
    "compressed-fp8": "fp8 with scales (8 bits, compressed-tensors according to config.json)",
    "compressed-packed": "compressed-tensors (4 bits, groups of 32)",
    "gptq-v2-no-index": "GPTQ (4 bits, groups of 32)",
    "gptq": "GPTQ (4 bits, groups of 32)",
    "awq": "AWQ (4 bits, groups of 64)",
    "nvfp4": "NVFP4 (4 bits, groups of 16, modelopt according to config.json)",
    "mxfp4": "MXFP4",
    "hqq": "HQQ",
    "compressed-order": "compressed-tensors (4 bits, groups of 32)",
    "compressed-nvfp4": "compressed-tensors (4 bits, groups of 16)",
    "compressed-mxfp4": "compressed-tensors (4 bits, groups of 32)",
}
"""What `info` calls them, by how their folders' names begin."""
LARGEST_ERROR = {
    "torchao": 0.13,
    "quanto": 0.4,
    "mlx": 0.4,
    "compressed-int8": 0.01,
    "compressed-fp8": 0.08,
    "compressed": 0.6,
    "gptq": 0.5,
    "awq": 0.1,
    "nvfp4": 0.2,
    "mxfp4": 0.4,
    "hqq": 1.2,
}
"""How far a weight of `weights()` in `fixtures/make/quantizers.py` is off, at most."""

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def of(table, layout):
    return next(value for start, value in table.items() if layout.startswith(start))


def dequantized(source, target, dtype):
    receipt = ckptool.convert(source, target, ckptool.Cast(dequantize=dtype))
    return load_file(target), receipt


@every_layout
def test_every_weight_is_what_its_library_makes_of_it(layout, tmp_path):
    source, plain = FOLDERS / layout, load_file(FOLDERS / layout / "plain.safetensors")
    before = load_file(source / "model.safetensors")
    stems = tuple(f"{key.rpartition('.')[0]}." for key in plain)
    kept = {key for key in before if not key.startswith(stems) or key.endswith("bias")}
    scheme = of(SCHEMES, layout).partition(" (")[0]
    for dtype in {one.dtype for one in plain.values()} | {torch.float32}:
        target = tmp_path / f"{dtype}.safetensors"
        made, receipt = dequantized(source / "model.safetensors", target, dtype)
        assert made.keys() == plain.keys() | kept
        for key, wanted in plain.items():
            assert made[key].dtype == dtype
            assert torch.equal(made[key].to(wanted.dtype), wanted), key
        assert all(torch.equal(made[key], before[key]) for key in kept)
        [text] = [change.text for change in receipt.changes if change.kind == "dequantize"]
        assert text.startswith(f"dequantized {counted(len(plain), 'tensor')} ({scheme}); left out")


@every_layout
def test_nothing_marks_the_result_as_quantized(layout, tmp_path):
    for name in ("model.safetensors", "config.json"):
        if (FOLDERS / layout / name).exists():
            shutil.copy(FOLDERS / layout / name, tmp_path / name)
    ckptool.convert(
        tmp_path / "model.safetensors", f"{tmp_path}/out/", ckptool.Cast(dequantize="bfloat16")
    )
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    if (tmp_path / "config.json").exists():
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert not [key for key in config if key.startswith("quantization")]
    assert not [note for note in info(tmp_path / "out").notes if "quantized" in note]


@every_layout
def test_diff_shows_the_errors_of_the_method(layout, tmp_path):
    dequantized(FOLDERS / layout / "model.safetensors", tmp_path / "o.safetensors", "float32")
    found = ckptool.diff(FOLDERS / layout / "original.safetensors", tmp_path / "o.safetensors")
    errors = [one.difference.max_abs for one in found.changed if one.difference]
    assert len(errors) == len(load_file(FOLDERS / layout / "original.safetensors"))
    assert 0 < max(errors) <= of(LARGEST_ERROR, layout)


@every_layout
def test_info_names_the_scheme_and_the_command(layout):
    [note] = [
        one for one in info(FOLDERS / layout / "model.safetensors").notes if "quantized" in one
    ]
    assert f" quantized: {of(SCHEMES, layout)}" in note
    assert "--dequantize bfloat16" in note


@pytest.mark.parametrize("part", ["0._weight_zero_point", "2._weight_zero_point"])
def test_parts_of_torchao_that_are_missing_are_named(part, tmp_path):
    with safe_open(FOLDERS / "torchao" / "model.safetensors", "pt") as file:
        state, header = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    del state[f"layers.{part}"]
    save_file(state, tmp_path / "m.safetensors", header)
    with pytest.raises(NotRepresentable, match=f"and {part[2:]} is missing next to it"):
        dequantized(tmp_path / "m.safetensors", tmp_path / "o.safetensors", "float32")


def test_torchao_without_its_metadata_is_refused(tmp_path):
    save_file(load_file(FOLDERS / "torchao" / "model.safetensors"), tmp_path / "m.safetensors")
    with pytest.raises(NotRepresentable, match="no entry of its file's __metadata__ states its"):
        dequantized(tmp_path / "m.safetensors", tmp_path / "o.safetensors", "float32")


def changed_file(layout, folder, *, config=None, **tensors):
    """A copy of a layout's file with other tensors (None: without it), and other configuration."""
    state = load_file(FOLDERS / layout / "model.safetensors")
    state |= {key.replace("__", "."): one for key, one in tensors.items()}
    path = folder / "m.safetensors"
    save_file({key: one for key, one in state.items() if one is not None}, path)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return path


def refused(path, reason):
    with pytest.raises(
        NotRepresentable, match=f"cannot be dequantized: it is .*{reason}"
    ) as caught:
        ckptool.convert(path, path.with_name("o.safetensors"), ckptool.Cast(dequantize="float32"))
    missing = "no config.json" in str(caught.value)
    assert caught.value.hint == (CONFIG_HINT if missing else None)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"layers__2__bias": None}, "its shape is not known: it has no bias"),
        ({"layers__2__bias": torch.zeros(0)}, "its shape is not known"),
        ({"layers__2__bias": torch.zeros(7)}, "its shape is not known"),
        ({"layers__2__weight___shift": None}, "ckptool does not know this layout"),
        ({"layers__2__weight___shift": torch.zeros(9)}, "ckptool does not know this layout"),
        ({"layers__0__weight___shift": torch.zeros(6, 1)}, "ckptool does not know this layout"),
        ({"layers__0__weight___scale": torch.ones(5, 1)}, "ckptool does not know this layout"),
    ],
)
def test_quanto_whose_shape_or_parts_are_unknown_is_refused(tensors, reason, tmp_path):
    refused(changed_file("quanto-float32", tmp_path, **tensors), reason)


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        (None, "no config.json next to it states bits"),
        ({"bits": 4}, "no config.json next to it states bits"),
        ({"bits": 4, "group_size": "x"}, "no config.json next to it states group_size"),
        (
            {"bits": 4, "group_size": 64},
            r"its tensors contradict config.json \(4 bits, groups of 64",
        ),
        (
            {"bits": 4, "group_size": 32, "x.layers.0": {"bits": 2, "group_size": 64}},
            "config.json has 2 bits for x.layers.0, which may be this layer",
        ),
        ({"bits": 4, "group_size": 64, "mode": "mxfp4"}, "ckptool does not know this layout"),
    ],
)
def test_mlx_whose_configuration_does_not_tell_is_refused(stated, reason, tmp_path):
    config = {} if stated is None else {"quantization": stated}
    refused(changed_file("mlx-float16", tmp_path, config=config), reason)


@pytest.mark.parametrize(
    ("layout", "tensors", "reason"),
    [
        ("packed", {"layers__0__weight_shape": torch.tensor([9, 65])}, "weight_shape does not fit"),
        ("packed", {"layers__0__weight_shape": torch.tensor([-9, 64])}, "ckptool does not know"),
        ("packed", {"layers__0__weight_shape": None}, "weight_shape is missing next to it"),
        ("packed", {"layers__0__weight_packed": torch.ones(9, 6).int()}, "with 2, 4 or 8 bits"),
        ("packed", {"layers__0__weight_scale": torch.ones(9, 3)}, "ckptool does not know"),
        ("packed", {"layers__1__weight_zero_point": torch.ones(3, 2).int()}, "does not know"),
        ("int8", {"layers__0__weight_scale": torch.ones(8, 1)}, "ckptool does not know"),
        ("int8", {"layers__1__weight_zero_point": torch.ones(8, 1).byte()}, "does not know"),
        ("int8", {"layers__0__comfy_quant": torch.ones(9).byte()}, "ckptool does not know"),
        ("fp8", {"layers__2__weight_scale": torch.ones(9, 3)}, "ckptool does not know"),
        ("nvfp4", {"layers__0__weight_global_scale": None}, "weight_global_scale is missing next"),
        ("nvfp4", {"layers__0__weight_global_scale": torch.ones(9)}, "ckptool does not know"),
        ("mxfp4", {"layers__0__weight_scale": torch.ones(9, 4).byte()}, "ckptool does not know"),
    ],
)
def test_compressed_tensors_whose_parts_do_not_fit_are_refused(layout, tensors, reason, tmp_path):
    refused(changed_file(f"compressed-{layout}", tmp_path, **tensors), reason)


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 8},
        {"group_size": 64},
        {"type": "float"},
        {"actorder": "group"},
        {"strategy": "channel"},
        {"strategy": "tensor"},
    ],
)
def test_compressed_tensors_that_contradict_their_configuration_are_refused(weights, tmp_path):
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 32, **weights}}}
    stated = {"quant_method": "compressed-tensors", "config_groups": groups}
    path = changed_file("compressed-packed", tmp_path, config={"quantization_config": stated})
    refused(path, "its tensors contradict config.json")


def test_columns_with_scales_are_not_the_channels_of_a_configuration(tmp_path):
    state = {"a.weight": torch.ones(8, 8).char(), "a.weight_scale": torch.ones(1, 8)}
    save_file(state, tmp_path / "m.safetensors")
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    stated = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated}))
    refused(tmp_path / "m.safetensors", "its tensors contradict config.json")


@pytest.mark.parametrize("scales", [(4, 1, 1), (4, 3, 1)])
def test_the_channels_of_more_than_two_dimensions_have_scales(scales, tmp_path):
    state = {"a.weight": torch.ones(4, 3, 8).char(), "a.weight_scale": torch.full(scales, 2.0)}
    save_file(state, tmp_path / "m.safetensors")
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    stated = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated}))
    made, _ = dequantized(tmp_path / "m.safetensors", tmp_path / "o.safetensors", "float32")
    assert made["a.weight"].eq(2).all()


@pytest.mark.parametrize("layout", ["packed", "int8", "fp8", "nvfp4"])
@pytest.mark.parametrize("in_group", [False, True])
def test_a_format_of_compressed_tensors_that_is_not_known_is_refused(layout, in_group, tmp_path):
    folder = FOLDERS / f"compressed-{layout}"
    config = json.loads((folder / "config.json").read_text())
    stated = config["quantization_config"]
    (stated["config_groups"]["group_0"] if in_group else stated)["format"] = "marlin-24"
    path = changed_file(f"compressed-{layout}", tmp_path, config=config)
    refused(path, "format marlin-24 is not known")


def test_weights_without_the_scales_that_others_have_are_refused(tmp_path):
    path = changed_file("compressed-int8", tmp_path, layers__0__weight_scale=None)
    with pytest.raises(NotRepresentable, match="but the tensors that it needs are missing"):
        ckptool.convert(path, path.with_name("o.pth"), ckptool.Cast(dequantize="float32"))
    ckptool.convert(
        path,
        path.with_name("o.pth"),
        ckptool.Take(exclude=["layers.0.*"]),
        ckptool.Cast(dequantize="float32"),
    )


def test_blocks_that_contradict_the_configuration_are_refused(tmp_path):
    state = {"a.weight": torch.ones(256, 130).to(torch.float8_e4m3fn)}
    save_file(state | {"a.weight_scale_inv": torch.ones(2, 2)}, tmp_path / "m.safetensors")
    for block in ([64, 64], [128, 128]):
        stated = {"quant_method": "fp8", "weight_block_size": block}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stated}))
        if block == [64, 64]:
            refused(tmp_path / "m.safetensors", r"contradict config.json \(blocks of \[64, 64\]\)")
        else:
            out = tmp_path / "out.pth"
            step = ckptool.Cast(dequantize="float32")
            ckptool.convert(tmp_path / "m.safetensors", out, step)
            assert torch.load(out)["a.weight"].eq(1).all()


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
ONE_LAYER = {
    f"layers__1__{part}": None for part in ("qweight", "qzeros", "scales", "g_idx", "bias")
}
"""Leaves only the layer of `gptq-v1-order` that has the bits of `GPTQ`."""


@pytest.mark.parametrize(
    ("stated", "tensors", "reason"),
    [
        (None, {}, "states quant_method gptq, but no config.json does"),
        ({**GPTQ, "quant_method": "mine"}, {}, "but config.json states mine"),
        ({**GPTQ, "checkpoint_format": "marlin"}, {}, "checkpoint_format marlin is not known"),
        ({**GPTQ, "is_marlin_format": True}, {}, "checkpoint_format gptq is not known"),
        ({**GPTQ, "bits": 8}, {}, r"its tensors contradict config.json \(8 bits, groups of 32\)"),
        ({"quant_method": "gptq"}, {}, "no config.json next to it states bits"),
        (GPTQ, {"layers__0__scales": torch.ones(2, 31)}, "its tensors contradict config.json"),
        (GPTQ, {"layers__0__qzeros": torch.ones(2, 5).int()}, "its tensors contradict config"),
        (GPTQ, {"layers__0__g_idx": torch.zeros(56).int()}, "its tensors contradict config.json"),
        (GPTQ, {"layers__0__g_idx": None, "layers__0__scales": torch.ones(3, 32)}, "contradict"),
        (GPTQ, {"layers__0__scales": None}, "scales is missing next to it"),
    ],
)
def test_gptq_whose_layout_is_not_stated_or_contradicted_is_refused(
    stated, tensors, reason, tmp_path
):
    config = {} if stated is None else {"quantization_config": stated}
    path = changed_file("gptq-v1-order", tmp_path, config=config, **ONE_LAYER, **tensors)
    refused(path, reason)


def test_gptq_of_which_nothing_is_changed_is_not_refused(tmp_path):
    config = {"quantization_config": GPTQ}
    path = changed_file("gptq-v1-order", tmp_path, config=config, **ONE_LAYER)
    made, _ = dequantized(path, tmp_path / "o.safetensors", "float32")
    assert made["layers.0.weight"].shape == (32, 64)


@pytest.mark.parametrize(
    ("layout", "name", "entries"),
    [
        ("gptq-v2-no-index", "quantize_config.json", {"checkpoint_format": "gptq_v2"}),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 64, "version": "GEMM"}),
    ],
)
def test_the_separate_configuration_of_a_quantizer_is_read(layout, name, entries, tmp_path):
    """AutoGPTQ and AutoAWQ wrote it next to a `config.json` without the quantization."""
    path = changed_file(layout, tmp_path, config={"model_type": "llama"})
    if "w_bit" not in entries:
        entries = {**entries, "bits": 4, "group_size": 32, "desc_act": False}
    (tmp_path / name).write_text(json.dumps(entries))
    assert any(f"({entries.get('bits', 4)} bits, groups of" in one for one in info(path).notes)
    made, _ = dequantized(path, tmp_path / "o.safetensors", "float32")
    for key, wanted in load_file(FOLDERS / layout / "plain.safetensors").items():
        assert torch.equal(made[key].to(wanted.dtype), wanted)
    for steps, is_kept in ([], True), ([ckptool.Cast(dequantize="float32")], False):
        target = f"{tmp_path}/{is_kept}/"
        receipt = ckptool.convert(path, target, *steps, files_from=tmp_path)
        assert (tmp_path / f"{is_kept}" / name).exists() is is_kept
        assert any(one.startswith(f"skipped {name}") for one in receipt.notes) is not is_kept
    (tmp_path / "config.json").unlink()
    if "gptq" in layout:
        refused(path, "no config.json next to it states model_type")


def test_the_method_that_a_separate_configuration_states_counts(tmp_path):
    path = changed_file("gptq-v2-no-index", tmp_path, config={"model_type": "llama"})
    entries = {"quant_method": "qqq", "bits": 4, "group_size": 32}
    (tmp_path / "quantize_config.json").write_text(json.dumps(entries))
    refused(path, "but quantize_config.json states qqq")


@pytest.mark.parametrize(
    ("layout", "part"),
    [
        ("awq", "qzeros"),
        ("gptq-v2-no-index", "scales"),
        ("compressed-packed", "weight_scale"),
        ("hqq-float16", "packing"),
        ("quanto-float32", "weight._scale"),
    ],
)
@pytest.mark.parametrize("all_layers", [False, True])
def test_codes_without_their_companions_are_refused_by_key(layout, part, all_layers, tmp_path):
    keys = [key for key in load_file(FOLDERS / layout / "model.safetensors") if key.endswith(part)]
    if (FOLDERS / layout / "config.json").exists():
        shutil.copy(FOLDERS / layout / "config.json", tmp_path / "config.json")
    gone = {key.replace(".", "__"): None for key in (keys if all_layers else keys[:1])}
    path = changed_file(layout, tmp_path, **gone)
    with pytest.raises(NotRepresentable, match=r"layers\.\d\..*(needs are|is) missing"):
        dequantized(path, tmp_path / "o.safetensors", "float32")
    assert not (tmp_path / "o.safetensors").exists()


def test_a_weight_with_two_scales_is_refused(tmp_path):
    state = {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    for key in ("a.weight_scale", "a.weight_scale_inv"):
        state[key] = torch.ones(1)
    save_file(state, tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", "two scales for it: a.weight_scale, a.weight_scale_inv")


FP8 = torch.ones(8, 64).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"l.weight": FP8, "l.weight_scale": torch.ones(8, 2).byte()}, "its scale is uint8"),
        ({"l.weight": FP8, "l.weight_scale": torch.ones(8, 2).int()}, "its scale is int32"),
        (
            {
                "l.weight": FP8,
                "l.weight_scale": torch.ones(8, 1),
                "l.weight_g_idx": torch.zeros(64).int(),
            },
            "weight_g_idx next to it is not supported",
        ),
        (
            {
                "l.weight": FP8,
                "l.weight_scale": torch.ones(8, 1),
                "l.weight_zero_point": torch.zeros(8, 1),
            },
            "weight_zero_point next to it is not supported",
        ),
        (
            {
                "l.weight": torch.ones(8, 64).char(),
                "l.weight_scale": torch.ones(8, 2),
                "l.weight_g_idx": torch.zeros(64).int(),
            },
            "weight_g_idx next to it is not supported",
        ),
        (
            {"l.weight": torch.ones(8, 64).char(), "l.weight_scale": torch.ones(8, 1).int()},
            "its scale is int32",
        ),
    ],
)
def test_entries_that_would_change_the_numbers_otherwise_are_refused(tensors, reason, tmp_path):
    save_file(tensors, tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", reason)


@pytest.mark.parametrize(
    ("layout", "tensors"),
    [
        ("gptq-v1-order", {"layers__0__g_idx": torch.zeros(64, dtype=torch.uint32)}),
        ("gptq-v1-order", {"layers__0__scales": torch.ones(2, 32).to(torch.float8_e4m3fn)}),
        ("awq", {"layers__0__scales": torch.ones(2, 32).to(torch.float8_e4m3fn)}),
        ("mlx-float16", {"layers__0__scales": torch.ones(6, 1).bool()}),
        ("mlx-float16", {f"layers__0__{x}": torch.ones(()) for x in ("scales", "biases")}),
        ("quanto-float32", {"layers__2__weight___scale": torch.ones(9, 1).bool()}),
        ("hqq-float16", {"layers__1__zero": torch.ones(32, 1).to(torch.float8_e4m3fn)}),
        ("hqq-float16", {"layers__1__packing": torch.full((7,), 1 << 40)}),
        ("hqq-float16", {"layers__1__W_q": torch.ones(16, 0).byte()}),
        ("compressed-packed", {"layers__1__weight_zero_point": torch.ones(2, 2).char()}),
        ("compressed-packed", {"layers__1__weight_zero_point": torch.ones(2, 2).long()}),
    ],
)
def test_companions_of_an_unusual_dtype_or_shape_are_refused(layout, tensors, tmp_path):
    if (FOLDERS / layout / "config.json").exists():
        shutil.copy(FOLDERS / layout / "config.json", tmp_path / "config.json")
    refused(changed_file(layout, tmp_path, **tensors), "")


@pytest.mark.parametrize("stated", [["a"], {"a": 1}, 3])
def test_a_format_that_is_no_text_is_refused(stated, tmp_path):
    folder = FOLDERS / "compressed-int8"
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["format"] = stated
    path = changed_file("compressed-int8", tmp_path, config=config)
    refused(path, "format .* is not known")
    assert info(path).notes


def test_a_transform_of_compressed_tensors_is_refused(tmp_path):
    config = json.loads((FOLDERS / "compressed-int8" / "config.json").read_text())
    config["quantization_config"]["transform_config"] = {"config_groups": {}}
    refused(changed_file("compressed-int8", tmp_path, config=config), "a transform_config")


@pytest.mark.parametrize(
    ("layout", "name", "separate", "key"),
    [
        (
            "gptq-v1",
            "quantize_config.json",
            {"bits": 4, "checkpoint_format": "gptq_v2"},
            "checkpoint_format",
        ),
        ("gptq-v1", "quantize_config.json", {"bits": 4, "format": "gptq_v2"}, "checkpoint_format"),
        ("gptq-v1", "quantize_config.json", {"bits": 4, "group_size": 64}, "group_size"),
        ("awq", "quant_config.json", {"w_bit": 4, "version": "GEMV"}, "version"),
    ],
)
def test_two_configurations_that_contradict_each_other_are_refused(
    layout, name, separate, key, tmp_path
):
    config = json.loads((FOLDERS / layout / "config.json").read_text())
    path = changed_file(layout, tmp_path, config=config)
    (tmp_path / name).write_text(json.dumps(separate))
    refused(path, f"config.json and {name} state different values of {key}")


def test_the_version_of_gptq_under_its_short_key_counts(tmp_path):
    config = json.loads((FOLDERS / "gptq-v2" / "config.json").read_text())
    stated = config["quantization_config"]
    stated["format"] = stated.pop("checkpoint_format")
    path = changed_file("gptq-v2", tmp_path, config=config)
    made, _ = dequantized(path, tmp_path / "o.safetensors", "float16")
    for key, wanted in load_file(FOLDERS / "gptq-v2" / "plain.safetensors").items():
        assert torch.equal(made[key], wanted)


@pytest.mark.parametrize(
    ("tensors", "bare"),
    [
        (
            {
                "a.up_blocks": torch.ones(2, 4, 1, 16).byte(),
                "a.up_scales": torch.ones(2, 4, 1).byte(),
                "a.down_blocks": torch.ones(2, 4, 1, 16).byte(),
            },
            "a.down_blocks",
        ),
        ({"a.up": FP8, "a.up_scale_inv": torch.ones(1), "a.down": FP8}, "a.down"),
    ],
)
def test_weights_without_scales_are_refused_under_other_keys_too(tensors, bare, tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    save_file({key: one.clone() for key, one in tensors.items()}, tmp_path / "m.safetensors")
    with pytest.raises(NotRepresentable, match=f"{bare}.*that it needs are missing"):
        dequantized(tmp_path / "m.safetensors", tmp_path / "o.safetensors", "float32")


@pytest.mark.parametrize("key", [0, None, ("a", 1)])
def test_a_quantized_tensor_under_a_key_that_is_no_text(key, tmp_path):
    weight = torch.quantize_per_tensor(torch.randn(4, 4), 0.1, 0, torch.qint8)
    torch.save({key: weight}, tmp_path / "m.pth")
    step = ckptool.Cast(dequantize="float32")
    ckptool.convert(tmp_path / "m.pth", tmp_path / "o.pth", step)
    assert torch.equal(torch.load(tmp_path / "o.pth")[key], weight.dequantize())


def test_a_dtype_can_be_kept_for_a_dequantized_weight(tmp_path):
    state = {"l.weight": FP8, "l.weight_scale": torch.full((1,), 1e6), "m": torch.ones(2)}
    save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(NotRepresentable, match="overflow") as caught:
        dequantized(tmp_path / "m.safetensors", tmp_path / "o.safetensors", "float16")
    assert "--keep l.weight=float32" in caught.value.hint
    step = ckptool.Cast(dequantize="float16", keep=[("l.weight", "float32")])
    ckptool.convert(tmp_path / "m.safetensors", tmp_path / "o.safetensors", step)
    made = load_file(tmp_path / "o.safetensors")
    assert made["l.weight"].eq(1e6).all()
    assert made["l.weight"].dtype == torch.float32


def test_a_configuration_next_to_an_edited_file_is_named(tmp_path):
    path = changed_file(
        "awq", tmp_path, config=json.loads((FOLDERS / "awq/config.json").read_text())
    )
    step = ckptool.Cast(dequantize="bfloat16")
    receipt = ckptool.convert(path, path, step, in_place=True, overwrite=True)
    assert "config.json next to the file still states the quantization" in receipt.notes
    assert load_file(path)["layers.0.weight"].dtype == torch.bfloat16


def test_the_dtype_of_the_configuration_follows(tmp_path):
    config = json.loads((FOLDERS / "awq" / "config.json").read_text()) | {"torch_dtype": "float16"}
    path = changed_file("awq", tmp_path, config=config)
    step = ckptool.Cast(dequantize="bfloat16")
    receipt = ckptool.convert(path, f"{tmp_path}/o/", step, files_from=tmp_path)
    assert json.loads((tmp_path / "o" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert not [one for one in receipt.changes if one.kind == "warning"]


def test_float8_weights_without_scales_are_cast(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, path)
    with pytest.raises(NotFound, match="no quantized weights") as caught:
        dequantized(path, tmp_path / "o.safetensors", "bfloat16")
    assert caught.value.hint == "cast float8 weights without scales with --dtype bfloat16"
    ckptool.convert(path, tmp_path / "o.safetensors", ckptool.Cast("bfloat16"))
    assert load_file(tmp_path / "o.safetensors")["a.weight"].eq(1).all()


def test_gptq_without_the_order_that_it_states_is_refused(tmp_path):
    config = json.loads((FOLDERS / "gptq-v2-no-index" / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    path = changed_file("gptq-v2-no-index", tmp_path, config=config)
    refused(path, "g_idx is missing, although config.json states desc_act")


def test_gptq_of_a_model_with_transposed_layers_is_refused(tmp_path):
    config = {"model_type": "gpt2", "quantization_config": GPTQ}
    reason = "the layers of a gpt2 model may have their weights transposed"
    refused(changed_file("gptq-v1-order", tmp_path, config=config), reason)


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({}, "but config.json states desc_act false"),
        ({"layers__0__qzeros": torch.full((2, 4), -1).int()}, "a zero point is 0, which the first"),
        (
            {"layers__0__g_idx": torch.full((64,), 2).int()},
            "'layers.0.qweight': its g_idx has groups beyond the 2",
        ),
    ],
)
def test_values_of_gptq_without_a_meaning_are_refused_when_they_are_read(tensors, error, tmp_path):
    config = {"quantization_config": {**GPTQ, "desc_act": False}}
    path = changed_file("gptq-v1-order", tmp_path, config=config, **ONE_LAYER, **tensors)
    with pytest.raises(CheckpointError, match=error) as caught:
        ckptool.convert(path, tmp_path / "o.safetensors", ckptool.Cast(dequantize="float32"))
    assert caught.value.file == str(path)
    assert not (tmp_path / "o.safetensors").exists()


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}


@pytest.mark.parametrize(
    ("stated", "tensors", "reason"),
    [
        (None, {}, "states quant_method awq, but no config.json does"),
        ({**AWQ, "version": "gemv"}, {}, "version gemv is not known"),
        ({**AWQ, "bits": 8}, {}, r"its tensors contradict config.json \(8 bits, groups of 64\)"),
        ({**AWQ, "group_size": 32}, {}, "its tensors contradict config.json"),
        (AWQ, {"layers__0__scales": torch.ones(2, 31)}, "its tensors contradict config.json"),
        (AWQ, {"layers__0__scales": None}, "scales is missing next to it"),
    ],
)
def test_awq_whose_layout_is_not_stated_or_contradicted_is_refused(
    stated, tensors, reason, tmp_path
):
    config = {} if stated is None else {"quantization_config": stated}
    refused(changed_file("awq", tmp_path, config=config, **tensors), reason)


@every_layout
def test_any_part_of_a_weight_is_that_part_of_all(layout, monkeypatch):
    """In chunks of a few rows, read from anywhere, by several threads."""
    monkeypatch.setattr("ckptool.tensors.unpacking.CHUNK", 300)
    with ckptool.open(FOLDERS / layout / "model.safetensors") as checkpoint:
        made = checkpoint.then(ckptool.Cast(dequantize="float32"))
        plain = load_file(FOLDERS / layout / "plain.safetensors")
        for key, wanted in plain.items():
            data = made[key].data
            with torch.device("meta"):  # a caller's default device changes nothing
                whole = data.read()
            assert torch.equal(made[key].torch().to(wanted.dtype), wanted)
            size = len(whole)
            parts = [(0, 1), (size // 3 + 1, size // 4), (3, size - 3), (size // 2, 5)]
            with ThreadPoolExecutor(4) as threads:
                found = list(threads.map(lambda one, data=data: data.read(*one), parts))
            assert found == [whole[start : start + size] for start, size in parts]


MXFP4 = {"quant_method": "mxfp4"}
BLOCKS = "layers__0__experts__down_proj"


@pytest.mark.parametrize(
    ("layout", "stated", "tensors", "reason"),
    [
        ("nvfp4", {}, {"layers__0__comfy_quant": torch.ones(9).byte()}, "does not know"),
        ("nvfp4", {}, {"layers__0__weight_scale": torch.ones(9, 4)}, "does not know"),
        ("nvfp4", {}, {"layers__0__weight_scale": None}, "weight_scale is missing next to it"),
        ("nvfp4", {}, {"layers__0__weight_scale_2": torch.ones(2)}, "does not know"),
        ("nvfp4", {}, {"layers__0__pre_quant_scale": torch.ones(64)}, "pre_quant_scale next to"),
        ("mxfp4", {}, {}, "states quant_method mxfp4, but no config.json does"),
        ("mxfp4", MXFP4, {f"{BLOCKS}_scales": torch.ones(3, 10, 3).byte()}, "does not know"),
        ("mxfp4", MXFP4, {f"{BLOCKS}_blocks": torch.ones(10, 2, 16).byte()}, "does not know"),
        ("hqq-float16", {}, {"layers__1__view_as_float": torch.ones(()).byte()}, "does not know"),
        ("hqq-float16", {}, {"layers__1__quant_zero": torch.ones(()).byte()}, "does not know"),
        ("hqq-float16", {}, {"layers__1__scale": torch.ones(31, 1)}, "does not know"),
        ("hqq-float16", {}, {"layers__1__shape": torch.tensor([16, 127])}, "does not know"),
        ("hqq-float16", {}, {"layers__1__shape": torch.ones(99).long()}, "does not know"),
        ("hqq-float16", {}, {"layers__1__packing": None}, "packing is missing next to it"),
        ("hqq-float16", {}, {"layers__1__packing": torch.ones(3).byte()}, "is not known"),
        ("hqq-float16", {}, {"layers__1__W_q": torch.ones(15, 64).byte()}, "does not know"),
        ("hqq-float16", {}, {"layers__1__W_q": torch.ones(16, 64)}, "does not know"),
    ],
)
def test_other_layouts_that_are_not_known_are_refused(layout, stated, tensors, reason, tmp_path):
    config = {"quantization_config": stated} if stated else {}
    refused(changed_file(layout, tmp_path, config=config, **tensors), reason)


@pytest.mark.parametrize("layout", ["gptq-v1-order", "hqq-float16", "mxfp4"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_damage_to_any_part_is_told_and_nothing_is_written(layout, part, tmp_path):
    """In a file with checksums, of the codes and of what they need."""
    state = load_file(FOLDERS / layout / "model.safetensors")
    words = ("qweight", "qzeros", "scales") if "gptq" in layout else ("W_q", "zero", "scale")
    words = ("_blocks", "_scales", "_blocks") if layout == "mxfp4" else words
    key = max(key for key in state if key.endswith(words[part]))
    torch.save(state, tmp_path / "m.pth")
    shutil.copy(FOLDERS / layout / "config.json", tmp_path / "config.json")
    content = bytearray((tmp_path / "m.pth").read_bytes())
    content[content.index(state[key].view(torch.uint8).numpy().tobytes()) + 9] ^= 1
    (tmp_path / "m.pth").write_bytes(content)
    with pytest.raises(CorruptFile, match="is damaged"):
        ckptool.convert(tmp_path / "m.pth", tmp_path / "o.pth", ckptool.Cast(dequantize="float32"))
    assert not (tmp_path / "o.pth").exists()


def test_torchao_in_shards_is_known_by_the_metadata_of_each(tmp_path):
    with safe_open(FOLDERS / "torchao" / "model.safetensors", "pt") as file:
        state, header = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    places, shards = {}, (("layers.0.", "layers.1.", "norm."), ("layers.2.", "layers.3."))
    for number, stems in enumerate(shards, 1):
        name = f"model-0000{number}-of-00002.safetensors"
        part = {key: one for key, one in state.items() if key.startswith(stems)}
        own = [key for key in header if key.startswith(stems)]
        entries = {key: header[key] for key in own} | {"tensor_names": json.dumps(own)}
        save_file(part, tmp_path / name, {**entries, "format": "pt"})
        places |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    made, _ = dequantized(tmp_path, tmp_path / "o.safetensors", "bfloat16")
    plain = load_file(FOLDERS / "torchao" / "plain.safetensors")
    assert made.keys() == plain.keys() | {"norm.weight"}
    assert all(torch.equal(made[key], one) for key, one in plain.items())
    with safe_open(tmp_path / "o.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("other", ["weight", "hqq-float16"])
def test_weights_that_would_have_the_key_of_another_entry_are_refused(other, tmp_path):
    config = json.loads((FOLDERS / "gptq-v1" / "config.json").read_text())
    more = {"layers.0.weight": torch.ones(32, 64)}
    if other != "weight":
        more = load_file(FOLDERS / other / "model.safetensors")
        more |= load_file(FOLDERS / "gptq-v1" / "model.safetensors")
    path = changed_file("gptq-v1", tmp_path, config=config, **more)
    with pytest.raises(NotRepresentable, match=r"several entries would become layers\.0\.weight"):
        dequantized(path, tmp_path / "o.safetensors", "float32")
