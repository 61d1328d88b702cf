"""The known quantizers, by what their own libraries have written: `fixtures/quantised/`."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.core.quantizers import LOOKS_QUANTIZED, find_quantized
from ckptool.diagnosis.diagnose import doctor
from ckptool.diagnosis.info import info
from ckptool.errors import CheckpointError, MatchError, NotRepresentable
from ckptool.formats import open_checkpoint
from ckptool.inspection.listing import list_tensors
from ckptool.transforms import average
from tests.conversions import convert_by_options
from tests.sources import PROJECT
from tests.trees import scalar, tensor

FIXTURES = PROJECT / "fixtures"
QUANTIZED = FIXTURES / "quantised"
ANSWERS = json.loads((QUANTIZED / "answers.json").read_text())
AO, BNB4, BNB8 = "torch.ao packed parameters", "bitsandbytes 4 bit", "bitsandbytes 8 bit"
SCHEMES = {
    "ao_dynamic": AO, "ao_static": AO, "bnb4": BNB4, "bnb8": BNB8, "torchao": "torchao",
}  # fmt: skip

every_file = pytest.mark.parametrize("name", sorted(path.name for path in QUANTIZED.glob("*.pth")))
every_module = pytest.mark.parametrize("name", sorted(ANSWERS))


def scheme_of(name):
    return SCHEMES[name.rpartition("_")[0]]


@every_file
def test_the_quantizer_is_named(name):
    with open_checkpoint(QUANTIZED / name) as checkpoint:
        assert list_tensors(checkpoint).quantizers == (scheme_of(name),)
        assert any(
            f" quantized: {scheme_of(name)}; " in note
            and ("loads it" in note or "loads them" in note)
            for note in info(checkpoint).notes
        )


@every_module
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about quantized tensors
def test_every_tensor_that_the_library_saves_is_listed(name):
    """But for numbers among the attributes, of which the library makes tensors."""
    found = set()
    with open_checkpoint(QUANTIZED / name) as checkpoint:
        for _, ref in checkpoint.tensors():
            made = ref.torch().detach()
            made = (made.int_repr() if made.is_quantized else made).contiguous()
            data = made.reshape(-1).view(torch.uint8).numpy().tobytes()
            found.add((tuple(made.shape), hashlib.sha256(data).hexdigest()))
    numbers = ("scale", "zero_point", "weight_format")
    wanted = {
        key: (tuple(row["shape"]), row["sha256"])
        for key, row in ANSWERS[name].items()
        if key.rpartition(".")[2] not in numbers
    }
    assert [key for key, row in wanted.items() if row not in found] == []


@every_module
@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
def test_a_module_becomes_no_state_dict_without_what_its_class_saves(tmp_path, name, target):
    with pytest.raises(NotRepresentable, match=scheme_of(name)):
        ckptool.convert(QUANTIZED / name, tmp_path / target, ckptool.Take(model_only=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["bnb4_whole.pth", "bnb8_whole.pth", "ao_static_whole.pth"])
def test_what_only_the_class_saves_goes_where_that_is_asked_for(tmp_path, name):
    target = tmp_path / "out.safetensors"
    receipt = ckptool.convert(
        QUANTIZED / name, target, ckptool.Plain(drop_objects=True, plain=False)
    )
    assert any(scheme_of(name) in text for text in receipt.left_out)
    assert load_file(target).keys() <= ANSWERS[name].keys()


def test_packed_parameters_are_not_left_out_in_passing(tmp_path):
    source, target = QUANTIZED / "ao_dynamic_state.pth", tmp_path / "out.safetensors"
    with pytest.raises(NotRepresentable, match=f"{AO}: 2 tensors inside") as caught:
        ckptool.convert(source, target)
    assert "--exclude '*_packed_params'" in caught.value.hint
    receipt = ckptool.convert(source, target, ckptool.Take(exclude=["*_packed_params"]))
    assert load_file(target).keys() == {"0.scale", "0.zero_point", "2.scale", "2.zero_point"}
    assert any("_packed_params" in text for text in receipt.left_out)
    ckptool.convert(source, tmp_path / "out.pth", ckptool.Take(model_only=True))
    copy = torch.load(tmp_path / "out.pth")
    model = torch.load(QUANTIZED / "ao_dynamic_whole.pth", weights_only=False)
    assert model.load_state_dict(copy) == ([], [])


def test_a_dynamically_quantized_module_alone_is_no_hollow_state_dict(tmp_path):
    with pytest.raises(
        NotRepresentable, match="the result would have no tensors; the file has the module at the"
    ):
        ckptool.convert(
            QUANTIZED / "ao_dynamic_whole.pth",
            tmp_path / "out.pth",
            ckptool.Take(model_only=True),
            ckptool.Plain(drop_objects=True, plain=False),
        )
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_a_class_of_torchao_is_called_that(tmp_path):
    source = QUANTIZED / "torchao_state.pth"
    with pytest.raises(NotRepresentable, match=r"Int8Tensor \(torchao\)") as caught:
        ckptool.convert(source, tmp_path / "out.safetensors")
    assert "dequantize" in caught.value.hint
    with pytest.raises(CheckpointError, match="Int8Tensor") as caught:
        ckptool.load_state_dict(source)
    assert "rank" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "weight", "scheme", "companions"),
    [
        ("l.qweight l.qzeros l.scales l.g_idx l.bias", "l.qweight", "GPTQ", "g_idx qzeros scales"),
        ("l.qweight l.qzeros l.scales", "l.qweight", "GPTQ", "scales qzeros"),
        ("l.weight l.weight_scale_inv", "l.weight", "fp8 with scales", "weight_scale_inv"),
        ("l.up_proj l.up_proj_scale_inv", "l.up_proj", "fp8 with scales", "up_proj_scale_inv"),
        ("l.weight l.weight_scale", "l.weight", "fp8 with scales", "weight_scale"),
        ("l.weight l.scale", "l.weight", "fp8 with scales", "scale"),
        ("l.weight l.scale_weight", "l.weight", "fp8 with scales", "scale_weight"),
        ("l.weight l.SCB l.weight_format", "l.weight", BNB8, "SCB weight_format"),
    ],
)
def test_a_scheme_is_known_by_names(names, weight, scheme, companions):
    dtype = "float8_e4m3fn" if "fp8" in scheme else "int32"
    state = {name: tensor() for name in names.split()} | {weight: tensor(dtype=dtype)}
    found = find_quantized({"other.weight": tensor(), **state})
    wanted = tuple(f"l.{name}" for name in companions.split())
    assert found == {weight: (scheme, wanted)}


@pytest.mark.parametrize(
    "names", ["l.weight l.weight_scale", "l.SCB", "l.qzeros l.scales", "norm.scale logit_scale"]
)
def test_names_alone_do_not_make_a_scheme(names):
    assert find_quantized({name: tensor() for name in names.split()}) == {}


def test_a_dtensor_of_which_the_file_has_all_is_unwrapped(tmp_path):
    source = FIXTURES / "distributed" / "dtensor_0_of_1.pth"
    rows = json.loads(Path(f"{source}.oracle.json").read_text())["tensors"]
    receipt = ckptool.convert(source, tmp_path / "out.safetensors")
    assert any(change.text.startswith("converted 4 DTensors") for change in receipt.changes)
    for state in (load_file(tmp_path / "out.safetensors"), ckptool.load_state_dict(source)):
        for row in rows:
            data = state[row["path"][0]].detach().numpy().tobytes()
            wanted = row.get("local", row)
            assert hashlib.sha256(data).hexdigest() == wanted["sha256"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replicated_dtensor_is_unwrapped_and_a_sharded_one_is_not(tmp_path, rank):
    source = FIXTURES / "distributed" / f"dtensor_{rank}_of_2.pth"
    ckptool.convert(
        source, tmp_path / "out.safetensors", ckptool.Take(include=["replicated", "plain"])
    )
    assert load_file(tmp_path / "out.safetensors")["replicated"].shape == (4, 3)
    with pytest.raises(NotRepresentable, match="'sharded' is a distributed tensor"):
        ckptool.convert(source, tmp_path / "again.safetensors")


@pytest.mark.parametrize(
    ("scheme", "weight", "dtype", "beside"),
    [
        (
            "compressed-tensors",
            "l.weight_packed",
            torch.int32,
            ["l.weight_scale", "l.weight_shape"],
        ),
        ("int8 with scales", "l.weight", torch.int8, ["l.weight_scale"]),
        ("HQQ", "l.W_q", torch.uint8, ["l.zero", "l.scale"]),
        ("NVFP4", "l.weight", torch.uint8, ["l.weight_scale_2", "l.weight_scale"]),
        ("MXFP4", "l.down_proj_blocks", torch.uint8, ["l.down_proj_scales"]),
        ("fp8 with scales", "l.weight", torch.float8_e4m3fn, ["l.weight_scale", "l.input_scale"]),
    ],
)
def test_schemes_of_vllm_and_others_are_known_by_their_names(
    tmp_path, scheme, weight, dtype, beside
):
    state = {weight: torch.ones(32, 8).to(dtype), **{name: torch.ones(1) for name in beside}}
    torch.save(state, tmp_path / "f.pth")
    with open_checkpoint(tmp_path / "f.pth") as checkpoint:
        assert find_quantized(checkpoint.root) == {weight: (scheme, tuple(beside))}
    with pytest.raises(NotRepresentable, match="is quantized"):
        ckptool.convert(tmp_path / "f.pth", tmp_path / "out.pth", ckptool.Cast("float16"))


@every_file
def test_numbers_of_a_quantizer_are_neither_cast_nor_averaged(tmp_path, name):
    source = QUANTIZED / name
    with pytest.raises(NotRepresentable, match=scheme_of(name)) as caught:
        ckptool.convert(source, tmp_path / "out.pth", ckptool.Cast("float16"))
    assert "--raw" in caught.value.hint
    ckptool.convert(source, tmp_path / "raw.pth", ckptool.Cast("float16", raw=True))
    with (
        open_checkpoint(source) as one,
        open_checkpoint(source) as two,
        pytest.raises(CheckpointError) as caught,
    ):
        average([one, two])
    assert "--raw" not in str(caught.value.hint)


F8 = "float8_e4m3fn"
BY_SHAPE = {
    "rows": {"l.codes": ("int8", (8, 8)), "l.s": ("float32", (8,))},
    "rows, kept": {"l.codes": ("int32", (8, 8)), "l.s": ("float16", (8, 1))},
    "columns": {"l.codes": ("int8", (4, 16)), "l.s": ("float16", (16,))},
    "columns, kept": {"l.codes": ("uint32", (8, 16)), "l.s": ("float16", (1, 16))},
    "groups": {"l.codes": ("uint8", (8, 64)), "l.s": ("bfloat16", (8, 4))},
    "groups of rows": {"l.codes": ("int32", (8, 64)), "l.s": ("float16", (2, 64))},
    "blocks": {"l.codes": (F8, (300, 260)), "l.s": ("float32", (3, 3))},
    "experts": {"l.codes": ("int8", (4, 8, 16)), "l.s": ("float16", (4, 8))},
    "experts, rows": {"l.codes": ("int8", (4, 8, 16)), "l.s": ("float16", (4, 8, 1))},
    "experts, columns": {"l.codes": ("int8", (4, 8, 16)), "l.s": ("float16", (4, 1, 16))},
    "experts, one each": {"l.codes": ("int8", (4, 8, 16)), "l.s": ("float16", (4,))},
    "experts, groups": {"l.codes": (F8, (4, 8, 16)), "l.s": ("float32", (4, 8, 4))},
    "filters": {"l.codes": ("int8", (8, 4, 3, 3)), "l.s": ("float32", (8, 1, 1, 1))},
    "fp8, one number": {
        "l.codes": (F8, (8, 16)),
        "l.s": ("float32", ()),
        "l.bias": ("float16", (8,)),
    },
    "int8, one scale": {"l.codes": ("int8", (8, 16)), "l.my_scale": ("float32", ())},
    "fp8 scales": {"l.codes": ("uint8", (8, 64)), "l.s": (F8, (8, 8)), "l.t": ("float32", ())},
    "no dots": {"codes": ("int8", (8, 16)), "s": ("float32", (8,))},
}
"""Codes and what must be known as theirs; a bias is not."""


def state_of(shapes):
    return {
        name: tensor(*shape, dtype=dtype) if shape else scalar()
        for name, (dtype, shape) in shapes.items()
    }


@pytest.mark.parametrize("layout", BY_SHAPE)
def test_codes_with_scales_of_fitting_shape_look_quantized(layout):
    codes, *scales = (name for name in BY_SHAPE[layout] if not name.endswith("bias"))
    assert find_quantized(state_of(BY_SHAPE[layout])) == {codes: (LOOKS_QUANTIZED, tuple(scales))}


def test_scales_belong_to_the_codes_with_whose_name_theirs_begins():
    state = {f"e.w{at}_{what}": one for at in (1, 2) for what, one in BY_SHAPE["rows"].items()}
    state = {name.replace("l.", ""): one for name, one in state.items()}
    found = {name: one.companions for name, one in find_quantized(state_of(state)).items()}
    assert found == {"e.w1_codes": ("e.w1_s",), "e.w2_codes": ("e.w2_s",)}


def test_a_scale_at_the_root_is_named_as_its_codes():
    state = {"proj": ("int8", (8, 8)), "proj_s": ("float32", (8,)), "a.weight": ("float32", (8,))}
    assert find_quantized(state_of(state)) == {"proj": (LOOKS_QUANTIZED, ("proj_s",))}


ORDINARY = {
    "GPT-J": {"h.attn.bias": ("uint8", (1, 1, 64, 64)), "h.attn.masked_bias": ("float32", ()),
              "h.attn.scale_attn": ("float32", ())},
    "MADE": {"fc.mask": ("uint8", (8, 16)), "fc.weight": ("float32", (8, 16)),
             "fc.bias": ("float32", (8,))},
    "pruned": {"c.kept": ("uint8", (8, 4, 3, 3)), "c.weight": ("float32", (8, 4, 3, 3)),
               "c.bias": ("float32", (8,))},
    "Swin 2": {"a.relative_position_index": ("int32", (49, 49)), "a.logit_scale": ("float32", ()),
               "a.relative_position_bias_table": ("float32", (169, 49))},
    "LeViT": {"a.attention_bias_idxs": ("int32", (196, 196)),
              "a.attention_biases": ("float32", (4, 196))},
    "product quantizer": {"codes": ("uint8", (1000, 8)), "codebooks": ("float32", (8, 256, 4)),
                          "temperature": ("float32", ())},
    "ids": {"e.ids": ("int32", (100, 4)), "e.weight": ("float32", (100, 16))},
    "faces": {"faces": ("int32", (100, 3)), "areas": ("float32", (100,))},
    "mesh": {"faces": ("int32", (100, 3)), "scale": ("float32", ())},
    "tokens": {"text.tokens": ("int32", (10, 77)), "text.logit_scale": ("float32", ())},
    "images": {"images": ("uint8", (50, 3, 16, 16)), "weights": ("float32", (50,)),
               "mean": ("float32", (3, 1, 1))},
    "replay": {"obs": ("uint8", (100, 84, 84)), "rewards": ("float32", (100, 1))},
    "generators": {"rng_state": ("uint8", (8, 5056)), "loss_scale": ("float32", ())},
    "8-bit Adam": {"state.0.state1": ("uint8", (256, 256)), "state.0.qmap1": ("float32", (256,))},
    "optimizer": {"optim.0.codes": ("uint8", (8, 8)), "optim.0.s": ("float32", (8,))},
    "plain fp8": {"l.weight_v": (F8, (8, 8)), "l.weight_g": (F8, (8, 1)),
                  "l.bias": ("float16", (8,))},
    "CLIP in fp8": {"positional_embedding": (F8, (77, 64)), "logit_scale": ("float32", ()),
                    "ln.weight": ("float32", (64,))},
    "a scale of another": {"a": (F8, (2, 2)), "a_scale": ("float32", ()), "b": (F8, (2, 2))},
}  # fmt: skip


@pytest.mark.parametrize("model", ORDINARY)
def test_integers_and_fp8_of_ordinary_models_do_not_look_quantized(model):
    found = find_quantized(state_of(ORDINARY[model]))
    assert [one for one in found.values() if one.scheme == LOOKS_QUANTIZED] == []


def test_an_optimizer_whose_moments_are_codes_is_cast_with_its_model(tmp_path):
    moments = {"codes": torch.ones(8, 8, dtype=torch.uint8), "s": torch.ones(8)}
    optimizer = {"state": {0: moments}, "param_groups": [{"params": [0]}]}
    torch.save(
        {"model": {"l.weight": torch.ones(8, 8)}, "optimizer": optimizer}, tmp_path / "m.pth"
    )
    for everything in (False, True):
        ckptool.convert(
            tmp_path / "m.pth",
            tmp_path / "o.pth",
            ckptool.Cast("float16", cast_optimizer=everything),
            overwrite=True,
        )
        made = torch.load(tmp_path / "o.pth")
        assert made["model"]["l.weight"].dtype == torch.float16
        assert made["optimizer"]["state"][0]["s"].dtype == (
            torch.float16 if everything else torch.float32
        )


def int8(*shape):
    return torch.randint(-127, 127, shape, dtype=torch.int8)


OF_LIBRARIES = {
    "quanto": ("optimum-quanto", {
        "a.weight._data": int8(8, 8).view(torch.uint8), "a.weight._scale": torch.rand(8, 1),
    }),
    "torchao": ("torchao", {
        "a._weight_qdata": torch.ones(8, 8).to(torch.float8_e4m3fn),
        "a._weight_scale": torch.rand(8, 1), "a.bias": torch.rand(8),
    }),
    "MLX": ("mlx", {
        "a.weight": torch.ones(8, 8, dtype=torch.uint32), "a.scales": torch.rand(8, 1),
        "a.biases": torch.rand(8, 1),
    }),
    LOOKS_QUANTIZED: ("the library that wrote it", {
        "a.weight": int8(8, 8), "a.steps": torch.rand(8), "a.bias": torch.rand(8),
    }),
}  # fmt: skip


@pytest.fixture(params=OF_LIBRARIES)
def written_by(request, tmp_path):
    library, state = OF_LIBRARIES[request.param]
    save_file(state, tmp_path / "m.safetensors")
    return request.param, library, str(tmp_path / "m.safetensors")


def test_files_of_other_libraries_are_named_with_what_loads_them(written_by):
    scheme, library, path = written_by
    texts = [*info(path).notes, *(one.text for one in doctor(path).complaints)]
    assert len([text for text in texts if scheme in text and library in text]) == 2
    assert doctor(path).ok
    remarks = [line for one in ckptool.stats(path).tensors for line in one.remarks]
    assert [line.partition(" without ")[0] for line in remarks if "tics of codes" in line] == [
        scheme + ", judging by its shape: statistics of codes," if scheme == LOOKS_QUANTIZED
        else f"quantized ({scheme}): statistics of codes,"
    ]  # fmt: skip


def test_files_of_other_libraries_are_neither_cast_nor_averaged_nor_loaded(written_by, tmp_path):
    _, _, path = written_by
    out = tmp_path / "out.safetensors"
    with pytest.raises(NotRepresentable, match="its values need") as caught:
        ckptool.convert(path, out, ckptool.Cast("float16"))
    assert "--raw" in caught.value.hint
    with pytest.raises(NotRepresentable, match="cannot be dequantized"):
        ckptool.convert(path, out, ckptool.Cast(dequantize="float32"))
    with (
        open_checkpoint(path) as one,
        open_checkpoint(path) as two,
        pytest.raises(NotRepresentable, match="its values need"),
    ):
        average([one, two])
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8)})
    before = model.a.weight.clone()
    with pytest.raises(MatchError):
        ckptool.load_into(model, path, allow_unexpected=True, allow_lossy_cast=True)
    assert torch.equal(model.a.weight, before)
    ckptool.convert(path, out, ckptool.Cast("float16", raw=True))
    floats = {one.dtype for one in load_file(out).values() if one.is_floating_point()}
    assert floats == {torch.float16}


@pytest.mark.parametrize("in_memory", [False, True])
def test_codes_are_loaded_by_a_model_that_has_their_scales_alone(tmp_path, in_memory):
    class Scaled(torch.nn.Linear):
        def __init__(self):
            super().__init__(8, 8, bias=False)
            self.register_buffer("weight_scale", torch.ones(8))

    codes, scale = torch.randn(8, 8).to(torch.float8_e4m3fn), torch.rand(8)
    state = {"weight": codes, "weight_scale": scale}
    torch.save(state, tmp_path / "m.pth")
    source = state if in_memory else tmp_path / "m.pth"
    with pytest.raises(MatchError, match="would load its codes as values") as caught:
        ckptool.load_into(torch.nn.Linear(8, 8, bias=False), source, strict=False)
    assert ("--dequantize" in caught.value.hint) != in_memory
    model = Scaled()
    ckptool.load_into(model, source)
    assert torch.equal(model.weight, codes.float())
    assert torch.equal(model.weight_scale, scale)
    ckptool.convert(tmp_path / "m.pth", tmp_path / "plain.pth", ckptool.Cast(dequantize="float32"))
    plain = torch.nn.Linear(8, 8, bias=False)
    ckptool.load_into(plain, tmp_path / "plain.pth")
    assert torch.equal(plain.weight, codes.float() * scale[:, None])


def test_a_pickled_module_is_judged_as_its_state_dict(tmp_path):
    module = torch.nn.Module()
    module.codes = torch.nn.Parameter(int8(8, 8), requires_grad=False)
    module.register_buffer("s", torch.rand(8))
    torch.save(module, tmp_path / "m.pth")
    for options in ({"dtype": "float16"}, {"dequantize": "float16"}):
        with pytest.raises(NotRepresentable, match="'codes'"):
            convert_by_options(tmp_path / "m.pth", tmp_path / "o.pth", **options)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize(
    ("scale", "marks"),
    [
        ("a.scale_weight", {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}),
        ("a.weight_scale", {"a.comfy_quant": torch.tensor([*b'{"format": "f8"}']).byte()}),
    ],
)
def test_dequantized_files_keep_no_markers(tmp_path, prefix, scale, marks):
    codes = torch.randn(8, 8).to(torch.float8_e4m3fn)
    state = {"a.weight": codes, scale: torch.tensor(0.02), **marks, "a.bias": torch.ones(8)}
    save_file({prefix + name: one for name, one in state.items()}, tmp_path / "m.safetensors")
    receipt = ckptool.convert(
        tmp_path / "m.safetensors", tmp_path / "o.safetensors", ckptool.Cast(dequantize="float32")
    )
    made = load_file(tmp_path / "o.safetensors")
    assert made.keys() == {f"{prefix}a.weight", f"{prefix}a.bias"}
    assert torch.equal(made[f"{prefix}a.weight"], codes.float() * torch.tensor(0.02))
    [text] = [change.text for change in receipt.changes if change.kind == "dequantize"]
    left_out = text.partition("left out: ")[2].split(", ")
    assert {*left_out} == {prefix + name for name in (scale, *marks)}
