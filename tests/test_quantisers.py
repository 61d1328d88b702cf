"""The known quantisers, by what their own libraries have written: `fixtures/quantised/`."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptool
from ckptool.errors import CheckpointError, NotRepresentable
from ckptool.formats import open_checkpoint
from ckptool.inspection.info import info
from ckptool.inspection.listing import list_tensors
from ckptool.quantisers import quantised
from ckptool.transforms import average
from tests.trees import tensor

FIXTURES = Path(__file__).parent.parent / "fixtures"
QUANTISED = FIXTURES / "quantised"
ANSWERS = json.loads((QUANTISED / "answers.json").read_text())
AO, BNB4, BNB8 = "torch.ao packed parameters", "bitsandbytes 4 bit", "bitsandbytes 8 bit"
SCHEMES = {
    "ao_dynamic": AO, "ao_static": AO, "bnb4": BNB4, "bnb8": BNB8, "torchao": "torchao",
}  # fmt: skip

every_file = pytest.mark.parametrize("name", sorted(path.name for path in QUANTISED.glob("*.pth")))
every_module = pytest.mark.parametrize("name", sorted(ANSWERS))


def scheme_of(name):
    return SCHEMES[name.rpartition("_")[0]]


@every_file
def test_the_quantiser_is_named(name):
    with open_checkpoint(QUANTISED / name) as checkpoint:
        assert list_tensors(checkpoint).quantisers == (scheme_of(name),)
        assert any(
            note.endswith(f"quantised: {scheme_of(name)}") for note in info(checkpoint).notes
        )


@every_module
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about quantised tensors
def test_every_tensor_that_the_library_saves_is_listed(name):
    """But for numbers among the attributes, of which the library makes tensors."""
    found = set()
    with open_checkpoint(QUANTISED / name) as checkpoint:
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
        ckptool.convert(QUANTISED / name, tmp_path / target, model_only=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["bnb4_whole.pth", "bnb8_whole.pth", "ao_static_whole.pth"])
def test_what_only_the_class_saves_goes_where_that_is_asked_for(tmp_path, name):
    target = tmp_path / "out.safetensors"
    receipt = ckptool.convert(QUANTISED / name, target, drop_objects=True)
    assert any(scheme_of(name) in text for text in receipt.left_out)
    assert load_file(target).keys() <= ANSWERS[name].keys()


def test_packed_parameters_are_not_left_out_in_passing(tmp_path):
    source, target = QUANTISED / "ao_dynamic_state.pth", tmp_path / "out.safetensors"
    with pytest.raises(NotRepresentable, match=f"{AO}: 2 tensors inside") as caught:
        ckptool.convert(source, target)
    assert "--exclude '*_packed_params'" in caught.value.hint
    receipt = ckptool.convert(source, target, exclude=["*_packed_params"])
    assert load_file(target).keys() == {"0.scale", "0.zero_point", "2.scale", "2.zero_point"}
    assert any("_packed_params" in text for text in receipt.left_out)
    ckptool.convert(source, tmp_path / "out.pth", model_only=True)
    copy = torch.load(tmp_path / "out.pth")
    model = torch.load(QUANTISED / "ao_dynamic_whole.pth", weights_only=False)
    assert model.load_state_dict(copy) == ([], [])


def test_a_dynamically_quantised_module_alone_is_no_hollow_state_dict(tmp_path):
    with pytest.raises(NotRepresentable, match="no tensor is left; the file has the mod"):
        ckptool.convert(
            QUANTISED / "ao_dynamic_whole.pth",
            tmp_path / "out.pth",
            model_only=True,
            drop_objects=True,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_of_a_class_of_torchao_is_called_that(tmp_path):
    source = QUANTISED / "torchao_state.pth"
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
        ("l.qweight l.qzeros l.scales", "l.qweight", "AWQ", "qzeros scales"),
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
    found = quantised({"other.weight": tensor(), **state})
    wanted = tuple(f"l.{name}" for name in companions.split())
    assert found == {weight: (scheme, wanted)}


@pytest.mark.parametrize(
    "names", ["l.weight l.weight_scale", "l.SCB", "l.qzeros l.scales", "norm.scale logit_scale"]
)
def test_names_alone_do_not_make_a_scheme(names):
    assert quantised({name: tensor() for name in names.split()}) == {}


def test_a_dtensor_of_which_the_file_has_all_is_unwrapped(tmp_path):
    source = FIXTURES / "distributed" / "dtensor_0_of_1.pth"
    rows = json.loads(Path(f"{source}.oracle.json").read_text())["tensors"]
    receipt = ckptool.convert(source, tmp_path / "out.safetensors")
    assert any(change.text.startswith("4 DTensors") for change in receipt.changes)
    for state in (load_file(tmp_path / "out.safetensors"), ckptool.load_state_dict(source)):
        for row in rows:
            data = state[row["path"][0]].detach().numpy().tobytes()
            wanted = row.get("local", row)
            assert hashlib.sha256(data).hexdigest() == wanted["sha256"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replicated_dtensor_is_unwrapped_and_a_sharded_one_is_not(tmp_path, rank):
    source = FIXTURES / "distributed" / f"dtensor_{rank}_of_2.pth"
    ckptool.convert(source, tmp_path / "out.safetensors", include=["replicated", "plain"])
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
        assert quantised(checkpoint.root) == {weight: (scheme, tuple(beside))}
    with pytest.raises(NotRepresentable, match="is quantised"):
        ckptool.convert(tmp_path / "f.pth", tmp_path / "out.pth", cast="float16")


@every_file
def test_numbers_of_a_quantiser_are_neither_cast_nor_averaged(tmp_path, name):
    source = QUANTISED / name
    with pytest.raises(NotRepresentable, match=scheme_of(name)) as caught:
        ckptool.convert(source, tmp_path / "out.pth", cast="float16")
    assert "--raw" in caught.value.hint
    ckptool.convert(source, tmp_path / "raw.pth", cast="float16", raw=True)
    with (
        open_checkpoint(source) as one,
        open_checkpoint(source) as two,
        pytest.raises(CheckpointError) as caught,
    ):
        average([one, two])
    assert "--raw" not in str(caught.value.hint)
