"""Weights of quantizers as plain numbers, beside what their own libraries make of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptool.errors import CheckpointError, CorruptFile, NotRepresentable
from ckptool.formats import open_checkpoint
from ckptool.transforms import Cast
from ckptool.writing import save

QUANTIZED = Path(__file__).parent.parent.parent / "fixtures" / "quantised"
ANSWERS = load_file(QUANTIZED / "dequantised.safetensors")
FILES = {"bnb4.safetensors": "bitsandbytes 4 bit", "bnb8.safetensors": "bitsandbytes 8 bit"}


def dequantized(source, target, dtype="float32"):
    """What a library reads of the result, and the receipt."""
    with open_checkpoint(source) as checkpoint:
        receipt = save(Cast(dequantize=dtype)(checkpoint), target)
    return load_file(target) if target.suffix == ".safetensors" else torch.load(target), receipt


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("dtype", "target"),
    [
        (torch.float32, "out.safetensors"),
        (torch.bfloat16, "out.pth"),
        (torch.float16, "out.safetensors"),
    ],
)
def test_every_weight_is_what_its_own_library_makes_of_it(tmp_path, name, dtype, target):
    source = load_file(QUANTIZED / name)
    made, receipt = dequantized(QUANTIZED / name, tmp_path / target, dtype)
    judged = 0
    for key in source.keys() & ANSWERS.keys():
        wanted = ANSWERS[key]
        assert made[key].dtype == dtype
        assert made[key].shape == wanted.shape
        if wanted.dtype in (dtype, torch.float32):  # a rounded answer says nothing of other types
            assert torch.equal(made[key], wanted.to(dtype)), key
            judged += 1
    assert judged >= 2
    biases = {key for key in source if key.endswith(".bias")}
    assert made.keys() == biases | (source.keys() & ANSWERS.keys())
    assert all(torch.equal(made[key], source[key]) for key in biases)
    (told,) = (change.text for change in receipt.changes if change.kind == "dequantize")
    count = len(source.keys() & ANSWERS.keys())
    assert told.startswith(f"dequantized {count} tensors ({FILES[name]}); left out: ")


@pytest.mark.parametrize("code", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_any_part_of_large_weights_is_that_part_of_all(tmp_path, code, nested):
    """Of 100,000 elements, against the formula of bitsandbytes' own fallback for any device."""
    torch.manual_seed(5)
    count, block, outer = 100_000, 32, 256
    blocks = count // block
    raw, codes = torch.randint(0, 256, (count // 2, 1), dtype=torch.uint8), torch.randn(16)
    facts = {"quant_type": code, "blocksize": block, "dtype": "float16", "shape": [100, 1000]}
    state = {"w": raw, "w.quant_map": codes, "w.absmax": torch.rand(blocks)}
    if nested:
        state["w.absmax"] = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        state["w.nested_absmax"] = torch.rand(-(-blocks // outer))
        state["w.nested_quant_map"] = torch.randn(256)
        facts |= {"nested_blocksize": outer, "nested_dtype": "float32", "nested_offset": 0.37}
    packed = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    state[f"w.quant_state.bitsandbytes__{code}"] = packed
    absmax = state["w.absmax"]
    if nested:
        wide = state["w.nested_absmax"].repeat_interleave(outer)[:blocks]
        absmax = state["w.nested_quant_map"][absmax.int()] * wide + 0.37
    both = torch.stack((raw.flatten() >> 4, raw.flatten() & 15), 1).flatten()
    wanted = (codes[both.int()].view(-1, block) * absmax[:, None]).reshape(100, 1000)
    save_file(state, tmp_path / "m.safetensors")
    with open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        ref = Cast(dequantize="float32")(checkpoint)["w"]
        assert torch.equal(ref.torch(), wanted)
        whole = ref.data.read()
        for start, size in ((0, 1), (4 * 32_768 - 3, 7), (131_071, 200_003), (399_990, 10)):
            assert ref.data.read(start, size) == whole[start : start + size]


def packed_facts(**changed):
    facts = {
        "quant_type": "nf4", "blocksize": 64, "shape": [6, 70], "dtype": "bfloat16",
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.1,
    } | changed  # fmt: skip
    return torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)


FACTS, FIRST = "quant_state.bitsandbytes__nf4", "nf4.nested.bfloat16.weight"
DAMAGED = [
    {FACTS: torch.frombuffer(bytearray(b"[1, "), dtype=torch.uint8)},
    {FACTS: torch.frombuffer(bytearray(b"[" * 60_000), dtype=torch.uint8)},
    {FACTS: packed_facts(shape=[6, 71])},
    {FACTS: packed_facts(shape=[-6, -70])},
    {FACTS: packed_facts(shape=None)},
    {FACTS: packed_facts(shape=[2**40, 2**40, 2**40])},
    {FACTS: packed_facts(blocksize=0)},
    {FACTS: packed_facts(blocksize=48)},
    {FACTS: packed_facts(blocksize="64")},
    {FACTS: packed_facts(nested_blocksize=0)},
    {FACTS: packed_facts(nested_blocksize=2)},
    {FACTS: packed_facts(nested_offset="0")},
    {"absmax": torch.zeros(6, dtype=torch.uint8)},
    {"absmax": torch.zeros(7)},
    {"nested_absmax": None},
    {"nested_quant_map": torch.zeros(16)},
    {"quant_map": torch.zeros(15)},
    {"quant_map": None},
    {FACTS: None},
]


@pytest.mark.parametrize("changed", DAMAGED)
def test_4_bit_weights_whose_parts_do_not_fit_are_refused(tmp_path, changed):
    state = load_file(QUANTIZED / "bnb4.safetensors")
    state |= {f"{FIRST}.{name}": value for name, value in changed.items()}
    state = {name: value for name, value in state.items() if value is not None}
    save_file(state, tmp_path / "m.safetensors")
    with (
        open_checkpoint(tmp_path / "m.safetensors") as checkpoint,
        pytest.raises(
            NotRepresentable, match=f"'{FIRST}' cannot be dequantized: it is quantized .bitsandb"
        ),
    ):
        Cast(dequantize="bfloat16")(checkpoint)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wide.weight_format", torch.tensor(2, dtype=torch.uint8)),
        ("wide.weight_format", torch.zeros(2, dtype=torch.uint8)),
        ("wide.SCB", torch.ones(6)),
        ("wide.SCB", torch.ones(5).half()),
        ("wide.weight", torch.ones(5, 70)),
    ],
)
def test_8_bit_weights_in_tiles_or_that_do_not_fit_are_refused(tmp_path, name, value):
    save_file(load_file(QUANTIZED / "bnb8.safetensors") | {name: value}, tmp_path / "m.safetensors")
    with (
        open_checkpoint(tmp_path / "m.safetensors") as checkpoint,
        pytest.raises(
            NotRepresentable, match=r"'wide\.weight' cannot be dequantized: it is quantized .bits"
        ),
    ):
        Cast(dequantize="bfloat16")(checkpoint)


@pytest.mark.parametrize("name", ["bnb4_state.pth", "bnb8_state.pth"])
def test_a_plain_cast_names_the_command(tmp_path, name):
    with (
        open_checkpoint(QUANTIZED / name) as checkpoint,
        pytest.raises(NotRepresentable) as caught,
    ):
        Cast("bfloat16")(checkpoint)
    assert "ckptool cast --dequantize bfloat16" in caught.value.hint
    made, _ = dequantized(QUANTIZED / name, tmp_path / "o.safetensors", "bfloat16")
    assert made.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert made["0.weight"].shape == (16, 16)


@pytest.mark.parametrize("name", ["w.absmax", "w.quant_map", "w"])
def test_damage_to_any_part_is_told_and_nothing_is_written(tmp_path, name):
    state = load_file(QUANTIZED / "bnb4.safetensors")
    state = {
        name.replace("fp4.flat.float16.weight", "w"): value
        for name, value in state.items()
        if name.startswith("fp4.flat.float16.weight")
    }
    torch.save(state, tmp_path / "m.pth")
    content = bytearray((tmp_path / "m.pth").read_bytes())
    content[content.index(state[name].view(torch.uint8).numpy().tobytes()) + 9] ^= 1
    (tmp_path / "m.pth").write_bytes(content)
    with open_checkpoint(tmp_path / "m.pth") as checkpoint:
        made = Cast(dequantize="bfloat16")(checkpoint)
        with pytest.raises(CorruptFile, match="is damaged"):
            save(made, tmp_path / "o.pth")
    assert not (tmp_path / "o.pth").exists()


LAYOUTS = QUANTIZED / "torchao_layouts.pth"
TORCHAO = ["row", "tensor", "half", "dynamic", "group", "group16", "axis", "float8", "float8wide"]


def test_tensors_of_torchao_are_what_its_dequantize_makes(tmp_path):
    answers = {name: ANSWERS[name] for name in (f"{one}.weight" for one in TORCHAO)}
    for dtype in {wanted.dtype for wanted in answers.values()}:
        made, receipt = dequantized(LAYOUTS, tmp_path / f"{dtype}.safetensors", dtype)
        assert made.keys() == answers.keys()
        for name, wanted in answers.items():
            assert wanted.dtype != dtype or torch.equal(made[name], wanted), name
        assert "dequantized 9 tensors (torchao)" in {change.text for change in receipt.changes}


def quantized_tensors():
    """Of each type that torch quantizes to, per tensor, per channel, with zeros that are floats."""
    torch.manual_seed(6)
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        zero = 117 if dtype == torch.quint8 else -9
        weight = torch.randn(301, 203) * 9
        yield torch.quantize_per_tensor(weight, 0.0371, zero, dtype)
        for axis in (0, 1):
            count = weight.shape[axis]
            scales, zeros = torch.rand(count) / 9 + 0.01, torch.randint(90, 127, (count,))
            yield torch.quantize_per_channel(weight, scales.double(), zeros, axis, dtype)
            if dtype != torch.qint32:
                yield torch.quantize_per_channel(weight, scales, torch.rand(count), axis, dtype)
    large = (torch.rand(40_000, dtype=torch.float64) * 4e9 - 2e9).float()
    yield torch.quantize_per_tensor(large, 0.93, -1_234_567, torch.qint32)
    scales, zeros = torch.rand(40_000).double() + 0.5, torch.randint(-300_000, 300_000, (40_000,))
    yield torch.quantize_per_channel(large, scales, zeros, 0, torch.qint32)
    image = torch.randn(8, 5, 3, 3).contiguous(memory_format=torch.channels_last)
    scales, zeros = torch.rand(8).double() + 0.01, torch.zeros(8, dtype=torch.int64)
    yield torch.quantize_per_channel(image, scales, zeros, 0, torch.qint8)
    yield torch.quantize_per_tensor(image, 0.1, 2, torch.quint8)
    yield torch.quantize_per_tensor(torch.randn(9, 4), 0.1, 2, torch.qint8)[2:7].t()
    yield torch.quantize_per_tensor(torch.tensor(3.0), 0.1, 2, torch.qint8)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about quantized tensors
def test_quantized_tensors_of_torch_are_what_its_dequantize_makes(tmp_path):
    state = {f"t{at}": one for at, one in enumerate(quantized_tensors())}
    torch.save({"model": state, "epoch": 3}, tmp_path / "m.pth")
    made, receipt = dequantized(tmp_path / "m.pth", tmp_path / "out.pth")
    assert made["epoch"] == 3
    assert made["model"].keys() == state.keys()
    for name, one in state.items():
        assert torch.equal(made["model"][name], one.dequantize()), (name, one.dtype, one.qscheme())
        assert made["model"][name].shape == one.shape
    (told,) = (change.text for change in receipt.changes if change.kind == "dequantize")
    assert told.startswith(f"dequantized {len(state)} tensors (torch.qint8, torch.quint8, torch.q")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_damage_to_quantized_tensors_of_torch_is_told(tmp_path, layout):
    image = torch.randn(8, 5, 3, 3).contiguous(memory_format=layout)
    one = torch.quantize_per_tensor(image, 0.1, 2, torch.qint8)
    torch.save({"w": one}, tmp_path / "m.pth")
    content = bytearray((tmp_path / "m.pth").read_bytes())
    codes = torch.as_strided(one.int_repr(), (one.numel(),), (1,))
    content[content.index(codes.numpy().tobytes()) + 9] ^= 1
    (tmp_path / "m.pth").write_bytes(content)
    with pytest.raises(CorruptFile, match="is damaged"):
        dequantized(tmp_path / "m.pth", tmp_path / "o.safetensors")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["ao_dynamic_state.pth", "ao_static_state.pth"])
def test_layers_of_torch_ao_become_those_of_the_plain_model(tmp_path, name):
    source = torch.load(QUANTIZED / name, weights_only=False)
    made, receipt = dequantized(QUANTIZED / name, tmp_path / "o.safetensors")
    wanted = {}
    for key, value in source.items():
        if key.endswith("._packed_params._packed_params"):
            stem = key.removesuffix("_packed_params._packed_params")
            wanted[f"{stem}weight"], wanted[f"{stem}bias"] = value[0].dequantize(), value[1]
        elif key in ("1.weight", "1.bias"):
            wanted[key] = value.dequantize()
        elif name == "ao_static_state.pth" and key in ("0.scale", "0.zero_point"):
            wanted[key] = value  # of a QuantStub, which has no weight
    assert made.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(made[key], value), key
    (told,) = (change.text for change in receipt.changes if change.kind == "dequantize")
    gone = {key for key in source if key.endswith(("_params.dtype", "scale", "zero_point"))}
    assert set(told.partition("left out: ")[2].split(", ")) == gone - wanted.keys()


@pytest.mark.parametrize(
    "part",
    [
        {"block_size": [0, 64]}, {"block_size": [1]}, {"block_size": [1, 48]}, {"block_size": "x"},
        {"scale": torch.ones(5, 1)}, {"scale": None}, {"zero_point": torch.zeros(4)},
        {"act_pre_scale": torch.ones(64)}, {"qdata": None},
    ],
)  # fmt: skip
def test_a_tensor_of_torchao_whose_parts_do_not_fit_is_refused(tmp_path, part):
    with open_checkpoint(LAYOUTS) as checkpoint:
        found = checkpoint["row.weight"]
        live = {key: one for key, one in part.items() if isinstance(one, torch.Tensor)}
        torch.save(live, tmp_path / "parts.pth")
        with open_checkpoint(tmp_path / "parts.pth") as parts:
            state = {**found.parts["state"], **part, **{key: parts[key] for key in live}}
            changed = replace(found, parts={**found.parts, "state": state})
            with pytest.raises(
                NotRepresentable, match=r"'w' cannot be dequantized: it is quantized .torchao"
            ):
                Cast(dequantize="bfloat16")(checkpoint.with_root({"w": changed}))


@pytest.mark.parametrize("name", ["bnb4_whole.pth", "bnb8_whole.pth", "ao_dynamic_whole.pth"])
def test_what_only_the_class_of_a_module_knows_is_refused(tmp_path, name):
    with open_checkpoint(QUANTIZED / name) as checkpoint, pytest.raises(CheckpointError):
        Cast(dequantize="bfloat16")(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_layers_that_are_not_quantized_are_none_without_their_scales(name, tmp_path):
    state = load_file(QUANTIZED / name)
    dtypes = (torch.bfloat16, torch.float16)
    plain = {f"{dtype}.weight": torch.ones(4, 4, dtype=dtype) for dtype in dtypes}
    save_file(state | plain, tmp_path / "in.safetensors")
    made, _ = dequantized(tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert all(made[key].eq(1).all() for key in plain)
