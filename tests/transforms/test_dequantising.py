"""Weights of quantisers as plain numbers, beside what their own libraries make of them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptool.errors import CorruptFile, NotRepresentable
from ckptool.formats import open_checkpoint
from ckptool.transforms import cast
from ckptool.writing import save

QUANTISED = Path(__file__).parent.parent.parent / "fixtures" / "quantised"
ANSWERS = load_file(QUANTISED / "dequantised.safetensors")
FILES = {"bnb4.safetensors": "bitsandbytes 4 bit", "bnb8.safetensors": "bitsandbytes 8 bit"}


def dequantised(source, target, dtype="float32"):
    """What a library reads of the result, and the receipt."""
    with open_checkpoint(source) as checkpoint:
        receipt = save(cast(checkpoint, dequantize=dtype), target)
    return load_file(target) if target.suffix == ".safetensors" else torch.load(target), receipt


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", ["out.safetensors", "out.pth"])
def test_every_weight_is_what_its_own_library_makes_of_it(tmp_path, name, dtype, target):
    source = load_file(QUANTISED / name)
    made, receipt = dequantised(QUANTISED / name, tmp_path / target, dtype)
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
    assert told.startswith(f"{count} tensors dequantised ({FILES[name]}); left out: ")


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
        ref = cast(checkpoint, dequantize="float32")["w"]
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
    state = load_file(QUANTISED / "bnb4.safetensors")
    state |= {f"{FIRST}.{name}": value for name, value in changed.items()}
    state = {name: value for name, value in state.items() if value is not None}
    save_file(state, tmp_path / "m.safetensors")
    with (
        open_checkpoint(tmp_path / "m.safetensors") as checkpoint,
        pytest.raises(NotRepresentable, match=f"'{FIRST}' cannot be dequantised: it is bitsandb"),
    ):
        cast(checkpoint, dequantize="bfloat16")


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
    save_file(load_file(QUANTISED / "bnb8.safetensors") | {name: value}, tmp_path / "m.safetensors")
    with (
        open_checkpoint(tmp_path / "m.safetensors") as checkpoint,
        pytest.raises(NotRepresentable, match=r"'wide\.weight' cannot be dequantised: it is bits"),
    ):
        cast(checkpoint, dequantize="bfloat16")


@pytest.mark.parametrize("name", ["bnb4_state.pth", "bnb8_state.pth"])
def test_a_plain_cast_names_the_command(tmp_path, name):
    with (
        open_checkpoint(QUANTISED / name) as checkpoint,
        pytest.raises(NotRepresentable) as caught,
    ):
        cast(checkpoint, "bfloat16")
    assert "ckptool cast --dequantize bfloat16" in caught.value.hint
    made, _ = dequantised(QUANTISED / name, tmp_path / "o.safetensors", "bfloat16")
    assert made.keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert made["0.weight"].shape == (16, 16)


@pytest.mark.parametrize("name", ["w.absmax", "w.quant_map", "w"])
def test_damage_to_any_part_is_told_and_nothing_is_written(tmp_path, name):
    state = load_file(QUANTISED / "bnb4.safetensors")
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
        made = cast(checkpoint, dequantize="bfloat16")
        with pytest.raises(CorruptFile, match="is damaged"):
            save(made, tmp_path / "o.pth")
    assert not (tmp_path / "o.pth").exists()
