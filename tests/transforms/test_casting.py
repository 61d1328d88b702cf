"""Casting whole checkpoints, with torch reading what comes out."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

import ckptool
from ckptool.core.checkpoint import Checkpoint
from ckptool.errors import CorruptFile, NotFound, NotRepresentable, UsageError
from ckptool.files import ByteRange, MemorySource
from ckptool.formats import open_checkpoint
from ckptool.transforms import Cast, extract_state_dict, parse_floating_dtype
from ckptool.transforms.casting import FLOATING, parse_keep
from ckptool.writing import save
from tests import trees


def saved(path, root):
    torch.save(root, path)
    return open_checkpoint(path)


def written(checkpoint, path, **options):
    """What torch loads of a checkpoint that is written, and the receipt."""
    receipt = save(checkpoint, path, overwrite=True, **options)
    return torch.load(path, weights_only=False), receipt


def kinds(changes):
    return [change.kind for change in changes]


def texts(changes, kind):
    return [change.text for change in changes if change.kind == kind]


def test_words_for_types():
    for word, name in [
        ("bfloat16", "bfloat16"),
        ("bf16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        (torch.float8_e5m2, "float8_e5m2"),
        ("fp16", "float16"),
        ("half", "float16"),
        ("F32", "float32"),
        ("float", "float32"),
        ("double", "float64"),
        ("f8_e4m3", "float8_e4m3fn"),
        ("fp8_e4m3fnuz", "float8_e4m3fnuz"),
        ("Float8_E8M0FNU", "float8_e8m0fnu"),
    ]:
        assert parse_floating_dtype(word) == name, word


def test_other_words_are_refused_with_a_list():
    for word in ["int8", "float7", "", "complex64", "float4_e2m1fn_x2", "fp"]:
        with pytest.raises(UsageError) as caught:
            parse_floating_dtype(word)
        assert all(name in caught.value.hint for name in FLOATING), word


def test_the_types_are_those_of_the_kernel():
    from ckptool.tensors.casting import FLOATS

    assert tuple(FLOATS) == FLOATING


@pytest.mark.parametrize(
    ("dtype", "format"),
    [(one, ("torch-zip", "safetensors")[at % 2]) for at, one in enumerate(FLOATING)],
)
def test_floating_tensors_become_what_torch_makes_of_them(tmp_path, dtype, format):
    weights = {
        "w": torch.randn(5, 7).abs() + 0.1,
        "b": torch.rand(3).half() + 0.1,
        "d": torch.rand((), dtype=torch.float64) + 0.1,
        "t": (torch.rand(4, 6) + 0.1).t(),
        "n": torch.arange(3),
        "flag": torch.tensor([True]),
        "z": torch.zeros(2, dtype=torch.complex64),
    }
    with saved(tmp_path / "m.pth", weights) as checkpoint:
        made = Cast(dtype)(extract_state_dict(checkpoint))
        receipt = save(made, tmp_path / "out", format=format, verify=True)
    with open_checkpoint(tmp_path / "out") as result:
        for name, tensor in weights.items():
            wanted = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
            found = result[name].torch()
            assert found.dtype == wanted.dtype
            assert torch.equal(found.reshape(-1).view(torch.uint8),
                               wanted.reshape(-1).view(torch.uint8))  # fmt: skip
    assert receipt.verified
    assert receipt.outcomes


def test_ties_views_strides_gradients_and_metadata_stay(tmp_path):
    net = torch.nn.Linear(4, 4)
    state = net.state_dict(keep_vars=True)
    state["tied"] = state["weight"].detach()
    state["view"] = state["weight"].detach()[1:3, ::2]
    state["column"] = state["weight"].detach().t()
    state["neg"] = torch._neg_view(state["weight"].detach())
    with saved(tmp_path / "m.pth", state) as checkpoint:
        made, _ = written(Cast("bfloat16")(checkpoint), tmp_path / "o.pth")
    assert list(made) == list(state)
    assert made._metadata == state._metadata
    assert isinstance(made["weight"], torch.nn.Parameter)
    assert made["weight"].requires_grad
    pointers = {made[name].untyped_storage().data_ptr() for name in made if name != "bias"}
    assert len(pointers) == 1
    for name, tensor in state.items():
        assert made[name].dtype == torch.bfloat16
        assert made[name].stride() == tensor.stride()
        assert made[name].storage_offset() == tensor.storage_offset()
        assert made[name].is_neg() == tensor.is_neg()
        assert torch.equal(made[name], tensor.to(torch.bfloat16))


def optimizer_file(path):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    root = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "optimizer_states": [{"fp32_groups": [torch.ones(3)]}],
        "best": torch.tensor(0.5),
    }
    return saved(path, root)


def test_optimizer_state_is_left_alone_and_counted(tmp_path):
    with optimizer_file(tmp_path / "m.pth") as checkpoint:
        made = Cast("float16")(checkpoint)
        loaded, _ = written(made, tmp_path / "o.pth")
    assert loaded["model"]["weight"].dtype == torch.float16
    assert loaded["best"].dtype == torch.float16
    assert loaded["optimizer"]["state"][0]["exp_avg"].dtype == torch.float32
    assert loaded["optimizer_states"][0]["fp32_groups"][0].dtype == torch.float32
    assert "skipped 7 tensors of optimizers (--cast-optimizer casts them)" in texts(
        made.changes, "keep"
    )


def test_everything_is_everything(tmp_path):
    with optimizer_file(tmp_path / "m.pth") as checkpoint:
        loaded, _ = written(Cast("float16", cast_optimizer=True)(checkpoint), tmp_path / "o.pth")
    assert loaded["optimizer"]["state"][0]["exp_avg"].dtype == torch.float16
    assert loaded["optimizer"]["state"][0]["step"].dtype == torch.float16
    assert loaded["optimizer_states"][0]["fp32_groups"][0].dtype == torch.float16


def test_a_pickled_optimizer_is_one_too():
    group = {"momentum": trees.tensor()}
    pickled = trees.Opaque(
        trees.Global("torch.optim.sgd", "SGD"), (), maker="newobj", steps=[("build", group)]
    )
    made = Cast("float16")(trees.checkpoint({"w": trees.tensor(), "trained_with": pickled}))
    assert made.root["w"].dtype == "float16"
    assert made.root["trained_with"].attributes["momentum"].dtype == "float32"


def test_keep_makes_exceptions_and_the_first_match_decides():
    root = trees.state_dict(["a.norm.weight", "a.bias", "b.norm.weight"])
    rules = [("b.*", None), ("*.norm.*", "fp64"), ("*", "bf16"), ("a.bias", "half")]
    made = Cast("float16", keep=rules)(trees.checkpoint(root))
    assert {name: tensor.dtype for name, tensor in made.root.items()} == {
        "a.norm.weight": "float64",
        "a.bias": "bfloat16",
        "b.norm.weight": "float32",
    }
    assert texts(made.changes, "keep") == ["kept 1 tensor that match 'b.*'"]
    assert texts(made.changes, "warning") == ["no floating-point tensor matches 'a.bias'"]


def test_keep_with_a_slash_is_held_against_the_whole_name():
    root = {"model": trees.state_dict(["a.w"]), "ema": trees.state_dict(["a.w"])}
    made = Cast("float16", keep=[("ema/*", None)])(trees.checkpoint(root))
    assert made.root["model"]["a.w"].dtype == "float16"
    assert made.root["ema"]["a.w"].dtype == "float32"


def test_nothing_to_cast_gives_the_same_checkpoint_back():
    checkpoint = trees.checkpoint({"w": trees.tensor(), "n": trees.tensor(dtype="int64")})
    assert Cast("float32")(checkpoint) is checkpoint
    warned = Cast("float32", keep=[("n", None)])(checkpoint)
    assert (warned.root, kinds(warned.changes)) == (checkpoint.root, ["warning"])


def test_a_tie_with_one_kept_name_comes_apart_and_says_so(tmp_path):
    weight = torch.randn(3, 3)
    root = {"a": weight, "b": weight.detach()}
    with saved(tmp_path / "m.pth", root) as checkpoint:
        made = Cast("float16", keep=[("b", None)])(checkpoint)
        loaded, _ = written(made, tmp_path / "o.pth")
    assert torch.equal(loaded["a"], weight.half())
    assert torch.equal(loaded["b"], weight)
    assert texts(made.changes, "warning") == ["no longer shares memory with other tensors: a"]


def test_one_tensor_under_two_names_keeps_what_one_name_keeps():
    weight = trees.tensor()
    made = Cast("float16", keep=[("b", None)])(trees.checkpoint({"a": weight, "b": weight}))
    assert made.root["a"] is made.root["b"]
    assert made.root["a"].dtype == "float32"
    assert "tied keys must have one dtype: a" in texts(made.changes, "warning")[0]


def test_a_storage_seen_under_several_types_becomes_several(tmp_path):
    weight = torch.randn(4)
    raw = bytes(weight.view(torch.uint8).tolist())
    over = trees.Storage("0", ByteRange(MemorySource(raw, "m"), 0, 16), 16)
    root = {
        "w": trees.TensorRef("float32", (4,), (1,), 0, over, "cpu"),
        "bits": trees.TensorRef("int32", (4,), (1,), 0, over, "cpu"),
        "halves": trees.TensorRef("float16", (4,), (2,), 1, over, "cpu"),
    }
    made = Cast("bfloat16")(trees.checkpoint(root))
    loaded, _ = written(made, tmp_path / "o.pth")
    assert torch.equal(loaded["w"], weight.bfloat16())
    assert torch.equal(loaded["bits"], weight.view(torch.int32))
    assert torch.equal(loaded["halves"], weight.view(torch.float16)[1::2].bfloat16())
    (warning,) = texts(made.changes, "warning")
    assert warning.endswith("w, halves")


def test_sparse_and_nested_tensors_are_cast_by_their_values(tmp_path):
    root = {
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]),
    }
    with saved(tmp_path / "m.pth", root) as checkpoint:
        made = Cast("float16")(checkpoint)
        loaded, receipt = written(made, tmp_path / "o.pth")
    assert torch.equal(loaded["coo"].to_dense(), torch.eye(3).half())
    assert torch.equal(loaded["csr"].to_dense(), torch.eye(3).half())
    for found, part in zip(loaded["nested"].unbind(), root["nested"].unbind(), strict=True):
        assert torch.equal(found, part.half())
    assert {tensor.dtype for _, tensor in made.tensors()} == {"float16"}
    assert receipt.outcomes[0].count == 3 + 3 + 5


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_what_cannot_be_cast_is_left_and_named(tmp_path):
    root = {
        "w": torch.ones(2),
        "array": np.ones(3, dtype=np.float32),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "jagged": torch.nested.nested_tensor(
            [torch.rand(2, 3), torch.rand(1, 3)], layout=torch.jagged
        ),
    }
    with saved(tmp_path / "m.pth", root) as checkpoint:
        made = Cast("float16")(checkpoint)
        loaded, _ = written(made, tmp_path / "o.pth")
    assert loaded["w"].dtype == torch.float16
    assert loaded["array"].dtype == np.float32
    assert loaded["quantized"].dtype == torch.qint8
    assert loaded["jagged"].dtype == torch.float32
    (warning,) = texts(made.changes, "warning")
    assert "array (a numpy array)" in warning
    assert "jagged (a nested tensor)" in warning


def test_lazily_negated_tensors_stay_where_torch_cannot_negate(tmp_path):
    with saved(tmp_path / "m.pth", {"neg": torch._neg_view(torch.ones(2))}) as checkpoint:
        made = Cast("float8_e5m2")(checkpoint)
    assert made.root is checkpoint.root
    assert (
        "unchanged: neg (lazily negated, which torch does not support for 8-bit dtypes)"
        in texts(made.changes, "warning")[0]
    )


def test_part_of_a_distributed_tensor_is_left_and_named(fixtures):
    path = next(fixtures.rglob("*dtensor*.pt*"))
    with open_checkpoint(path) as checkpoint:
        made = Cast("float16")(checkpoint)
    assert any("part of a distributed tensor" in text for text in texts(made.changes, "warning"))


def test_a_pickled_module_is_cast(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    net[0].register_buffer("mask", torch.rand(2), persistent=False)
    with saved(tmp_path / "m.pth", net) as checkpoint:
        loaded, _ = written(Cast("bfloat16")(checkpoint), tmp_path / "o.pth")
    assert torch.equal(loaded[0].mask, net[0].mask.bfloat16())
    for name, tensor in net.state_dict().items():
        wanted = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert torch.equal(loaded.state_dict()[name], wanted)


def test_tensors_of_a_tpu_are_carried_as_tensors(tmp_path):
    data = trees.tensor(4)
    carried = replace(data, device="xla:0", parts={"carrier": "cpu_tensor", "data": data})
    made = Cast("bfloat16")(trees.checkpoint({"w": carried})).root["w"]
    assert (made.dtype, made.device, made.parts["data"].device) == ("bfloat16", "xla:0", "cpu")
    assert made.parts["data"].storage is made.storage


def test_parameters_with_attributes_are_cast_also_where_these_are(tmp_path):
    shared = torch.ones(2)
    parameter = torch.nn.Parameter(torch.rand(3))
    parameter.scale = shared
    with saved(tmp_path / "m.pth", {"p": parameter, "shared": shared}) as checkpoint:
        loaded, _ = written(Cast("float16")(checkpoint), tmp_path / "o.pth")
    assert torch.equal(loaded["p"], parameter.half())
    assert loaded["p"].scale is loaded["shared"]


def test_losses_are_told_after_the_write_tensor_by_tensor(tmp_path):
    root = {
        "large": torch.tensor([1e6, -7e4, 1.0, 65519.0]),
        "tiny": torch.tensor([1e-9, 0.0, 0.1]),
        "fine": torch.ones(3),
        "fine_too": torch.ones(1),
    }
    with saved(tmp_path / "m.pth", root) as checkpoint:
        made = Cast("float16", allow_overflow=True)(checkpoint)
        _, receipt = written(made, tmp_path / "o.pth")
    told = [(change.kind, change.text, change.count) for change in receipt.outcomes]
    assert told == [
        (
            "cast",
            "4 tensors, float32 -> float16: 2 values overflowed, 1 value underflowed to zero, "
            "18% of the values lost precision",
            11,
        ),
        (
            "overflow",
            "large: 2 of 4 values overflowed in float16 (the largest magnitude is 1e+06)",
            2,
        ),
        ("underflow", "tiny: 1 of 3 values underflowed to zero in float16", 1),
        ("precision", "large: 1 of 4 values lost precision in float16", 1),
        ("precision", "tiny: 1 of 3 values lost precision in float16", 1),
    ]


def test_an_exact_cast_says_so(tmp_path):
    with saved(tmp_path / "m.pth", {"a": torch.ones(3).half()}) as checkpoint:
        _, receipt = written(Cast("float32")(checkpoint), tmp_path / "o.pth")
    assert [change.text for change in receipt.outcomes] == [
        "1 tensor, float16 -> float32: nothing was lost"
    ]


def test_a_share_is_neither_all_nor_nothing_where_it_is_not(tmp_path):
    for rounded, said in (
        (1, "1 value lost precision"),
        (150, "50% of the values lost precision"),
        (299, "more than 99% of the values lost precision"),
        (300, "100% of the values lost precision"),
    ):
        values = torch.ones(300)
        values[:rounded] = 0.1
        with saved(tmp_path / "m.pth", {"w": values}) as checkpoint:
            _, receipt = written(Cast("float16")(checkpoint), tmp_path / "o.pth")
        assert receipt.outcomes[0].text == f"1 tensor, float32 -> float16: {said}"


@pytest.mark.parametrize("format", ["torch-zip", "torch-legacy", "safetensors"])
def test_overflow_writes_nothing(tmp_path, format):
    root = {"fine": torch.ones(3), "a.b": torch.full((5, 5), 1e6).t(), "after": torch.ones(3)}
    with (
        saved(tmp_path / "m.pth", root) as checkpoint,
        pytest.raises(
            NotRepresentable, match=r"25 of 25 values overflow float16 \(maximum 65504\)"
        ) as caught,
    ):
        save(Cast("half")(checkpoint), tmp_path / "o", format=format)
    assert "--keep a.b=float32" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["m.pth"]


def test_big_endian_and_compressed_storages(tmp_path, fixtures):
    path = next(path for path in fixtures.rglob("*big*") if not path.name.endswith(".json"))
    with open_checkpoint(path) as checkpoint:
        made = Cast("float64", cast_optimizer=True)(checkpoint)
        pairs = [(one.torch(), new.torch()) for (_, one), (_, new)
                 in zip(checkpoint.tensors(), made.tensors(), strict=True)
                 if one.has_content and one.kind == "strided"]  # fmt: skip
    assert pairs
    for one, new in pairs:
        assert torch.equal(one.to(new.dtype), new)


def test_chains_with_other_changes(tmp_path):
    root = {"module.w": torch.randn(3, 3), "module.v": torch.randn(2)}
    with saved(tmp_path / "m.pth", root) as checkpoint:
        made = checkpoint.then(ckptool.Cast("bf16")).strip_module().remap({"*": "cpu"})
        assert isinstance(made, Checkpoint)
        loaded, receipt = written(made, tmp_path / "o.pth")
    assert list(loaded) == ["w", "v"]
    assert torch.equal(loaded["w"], root["module.w"].bfloat16())
    assert receipt.outcomes


def test_an_optimizers_tensor_that_is_a_weight_too_stays_as_it_is(tmp_path):
    weight = torch.randn(4)
    state = {0: {"z": weight, "l": [weight, 1]}}
    root = {
        "model": {"w": weight},
        "optimizer": {"state": state, "param_groups": [{"params": [0]}]},
    }
    with saved(tmp_path / "m.pth", root) as checkpoint:
        made = Cast("bfloat16")(checkpoint)
        loaded, _ = written(made, tmp_path / "out.pth")
    assert loaded["model"]["w"].dtype == torch.bfloat16
    held = loaded["optimizer"]["state"][0]
    assert torch.equal(held["z"], weight)
    assert held["l"][0] is held["z"]
    assert "no longer shares memory with other tensors: model/w" in texts(made.changes, "warning")


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
def test_a_damaged_source_is_refused_and_nothing_written(tmp_path, target):
    values = torch.arange(100_000).float()
    torch.save({"w": values}, tmp_path / "m.pth")
    content = bytearray((tmp_path / "m.pth").read_bytes())
    content[content.index(values.numpy().tobytes()) + 99] ^= 1
    (tmp_path / "m.pth").write_bytes(content)
    with open_checkpoint(tmp_path / "m.pth") as checkpoint:
        made = Cast("bfloat16")(checkpoint)
        with pytest.raises(CorruptFile, match="storage '0' is damaged"):
            save(made, tmp_path / target)
    assert not (tmp_path / target).exists()


def test_exceptions_are_a_mapping_or_pairs_or_globs():
    for keep in [{"b": "float32", "c": None}, [("b", "fp32"), "c"], (("b", "F32"), ("c", None))]:
        assert parse_keep(keep) == (("b", "float32"), ("c", None)), keep


@pytest.mark.parametrize("keep", ["b", 5, None, [5], [("b",)], [("b", "int8")], [(1, "half")]])
def test_other_exceptions_are_refused(keep):
    with pytest.raises(UsageError):
        parse_keep(keep)
    checkpoint = trees.checkpoint({"w": trees.tensor()})
    with pytest.raises(UsageError):
        Cast("half", keep=keep)(checkpoint)


def test_where_nothing_is_there_to_be_cast_it_is_told():
    checkpoint = trees.checkpoint({"n": trees.tensor(dtype="complex64")})
    made = Cast("half")(checkpoint)
    assert texts(made.changes, "keep") == [
        "skipped 1 tensor that is not floating point (complex64)"
    ]
    assert made.root is checkpoint.root


def test_tied_names_are_told_together(tmp_path):
    tied = torch.full((3,), 0.1)
    with saved(tmp_path / "m.pth", {"a": tied, "b": tied, "c": tied}) as checkpoint:
        _, receipt = written(Cast("half")(checkpoint), tmp_path / "out.pth")
    assert texts(receipt.outcomes, "precision") == [
        "a (and b, c): 3 of 3 values lost precision in float16"
    ]


def test_zeros_of_a_type_without_zero_lose_precision(tmp_path):
    with saved(tmp_path / "m.pth", {"a": torch.tensor([0.0, 1.0, 3.0])}) as checkpoint:
        _, receipt = written(Cast("float8_e8m0fnu")(checkpoint), tmp_path / "out.pth")
    assert texts(receipt.outcomes, "precision") == [
        "a: 2 of 3 values lost precision in float8_e8m0fnu"
    ]


def scaled(weight, scale):
    """What `weight_dequant` of DeepSeek-V3 makes, in float32: a program for each block."""
    if scale.dim() == 2 and scale.shape[1] > 1:
        made = torch.empty(weight.shape)
        for m in range(scale.shape[0]):
            for n in range(scale.shape[1]):
                block = slice(128 * m, 128 * m + 128), slice(128 * n, 128 * n + 128)
                made[block] = weight[block].float() * scale[m, n].float()
        return made
    return weight.float() * scale.float().reshape(-1, *[1] * (weight.dim() - 1))


SCALES = [
    ((128, 128), (1, 1)),
    ((256, 384), (2, 3)),
    ((300, 200), (3, 2)),
    ((129, 127), (2, 1)),
    ((1, 129), (1, 2)),
    ((2, 40_000), (1, 313)),
    ((700, 300), (6, 3)),
    ((5, 7), ()),
    ((5, 7), (1,)),
    ((300, 200), (1, 1)),
    ((300, 200), (300,)),
    ((300, 200), (300, 1)),
    ((6, 3, 3, 2), (6, 1, 1, 1)),
    ((9,), (1,)),
    ((9,), (9,)),
    ((0, 4), (0, 1)),
]


@pytest.mark.parametrize(("shape", "scales"), SCALES)
def test_weights_times_their_scales_as_their_makers_have_them(memory_path, shape, scales):
    for kind, target, read in (
        (torch.float8_e4m3fn, torch.bfloat16, load_file),
        (torch.float8_e4m3fn, torch.float32, torch.load),
        (torch.float8_e4m3fn, torch.float16, torch.load),
        (torch.float8_e5m2, torch.bfloat16, torch.load),
    ):
        weight, scale = torch.randn(shape).to(kind), torch.rand(scales) + 0.5
        if scales == (2, 1):
            scale = scale.bfloat16()
        state = {"a.weight": weight, "a.weight_scale_inv": scale, "n.weight": torch.ones(3).half()}
        if scales == (2, 1):  # two blocks in one column
            scale = scale.repeat_interleave(128, 0)[: shape[0]]
        out = memory_path / f"out.{'safetensors' if read is load_file else 'pth'}"
        with saved(memory_path / "m.pth", state) as checkpoint:
            save(Cast(dequantize=target)(checkpoint), out, overwrite=True)
        found = read(out)
        assert set(found) == {"a.weight", "n.weight"}
        assert found["a.weight"].dtype == target
        assert torch.equal(found["a.weight"], scaled(weight, scale).to(target)), (kind, target)
        assert found["n.weight"].dtype == torch.float16


def test_threads_may_read_one_dequantized_weight(tmp_path):
    weight, scale = torch.randn(1024, 512).to(torch.float8_e4m3fn), torch.rand(8, 4)
    state = {"a.weight": weight, "a.weight_scale_inv": scale}
    with saved(tmp_path / "m.pth", state) as checkpoint, ThreadPoolExecutor(8) as pool:
        made = Cast(dequantize="float32")(checkpoint).by_name["a.weight"]
        found = list(pool.map(lambda _: made.torch(), range(40)))
    assert all(torch.equal(one, found[0]) for one in found)


@settings(max_examples=40)
@given(
    rows=st.integers(0, 300), columns=st.integers(0, 300), start=st.integers(0, 2),
    kind=st.sampled_from(["blocks", "rows", "one"]),
)  # fmt: skip
def test_any_part_of_dequantized_weights_is_that_part_of_all(rows, columns, start, kind):
    scales = {"blocks": (-(-rows // 128), -(-columns // 128)), "rows": (rows, 1), "one": ()}[kind]
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.rand(scales)
    if kind == "blocks":
        wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    else:
        wide = scale
    with tempfile.TemporaryDirectory() as folder:
        state = {"w": weight, "w_scale": scale}
        with saved(f"{folder}/m.pth", state) as checkpoint:
            ref = Cast(dequantize="float32")(checkpoint)["w"]
            assert torch.equal(ref.torch(), weight.float() * wide)
            data = ref.data
            step = start + 4 * (columns // 2) + 97
            parts = [
                data.read(at, min(step, data.length - at)) for at in range(0, data.length, step)
            ]
            assert b"".join(parts) == data.read()


@pytest.mark.parametrize("options", [{}, {"keep": ["*.weight"]}, {"keep": ["*_inv"]}])
def test_quantized_numbers_are_not_cast_without_what_they_mean_something_with(tmp_path, options):
    state = {
        "a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.ones(1, 1),
    }
    with saved(tmp_path / "m.pth", {"model": state}) as checkpoint:
        with pytest.raises(
            NotRepresentable, match=r"'a\.weight' is quantized \(fp8 with scales\): its values need"
        ) as caught:
            Cast("float16", **options)(checkpoint)
        made, _ = written(Cast("float16", raw=True)(checkpoint), tmp_path / "raw.pth")
    assert "--dequantize" in caught.value.hint
    assert "--raw" in caught.value.hint
    assert {value.dtype for value in made["model"].values()} == {torch.float16}


def test_both_kept_or_without_scales_they_are_cast_as_ever(tmp_path):
    weight = torch.ones(2, 2).to(torch.float8_e4m3fn)
    with saved(
        tmp_path / "m.pth", {"a": weight, "a_scale": torch.ones(()), "b": weight.clone()}
    ) as one:
        made, _ = written(Cast("float16", keep=["a", "a_scale"])(one), tmp_path / "o.pth")
    assert [made[name].dtype for name in "ab"] == [torch.float8_e4m3fn, torch.float16]
    assert made["a_scale"].dtype == torch.float32


def test_the_rest_is_cast_to_another_type_than_what_is_dequantized(tmp_path):
    state = {
        "a": torch.ones(2, 2).to(torch.float8_e4m3fn), "a_scale": torch.full((), 3.0),
        "n": torch.ones(2), "i": torch.ones(2, dtype=torch.int64),
    }  # fmt: skip
    with saved(tmp_path / "m.pth", state) as checkpoint:
        change = Cast("float16", dequantize="bfloat16")(checkpoint)
        made, receipt = written(change, tmp_path / "o.pth", strict=True)
    assert {name: str(one.dtype)[6:] for name, one in made.items()} == {
        "a": "bfloat16", "n": "float16", "i": "int64"
    }  # fmt: skip
    assert made["a"].eq(3).all()
    assert texts(receipt.changes, "dequantize") == [
        "dequantized 1 tensor (fp8 with scales); left out: a_scale"
    ]


@pytest.mark.parametrize("tied", [True, False])
def test_one_weight_under_two_names_has_the_scale_of_each(tmp_path, tied):
    weight, scale = torch.ones(2, 2).to(torch.float8_e4m3fn), torch.full((), 2.0)
    other = scale if tied else torch.full((), 5.0)
    state = {"a": weight, "a_scale": scale, "b": weight, "b_scale": other}
    with saved(tmp_path / "m.pth", state) as checkpoint:
        made, _ = written(Cast(dequantize="bfloat16")(checkpoint), tmp_path / "o.pth")
    assert made["a"].eq(2).all()
    assert made["b"].eq(2 if tied else 5).all()
    assert (made["a"].data_ptr() == made["b"].data_ptr()) is tied


@pytest.mark.parametrize("scales", [(2,), (3, 2), (1, 7), (2, 2), (1, 1, 2)])
def test_scales_laid_out_otherwise_are_refused(tmp_path, scales):
    state = {"w": torch.ones(5, 7).to(torch.float8_e4m3fn), "w_scale": torch.ones(scales)}
    with (
        saved(tmp_path / "m.pth", state) as checkpoint,
        pytest.raises(NotRepresentable, match="'w' cannot be dequantized"),
    ):
        Cast(dequantize="bfloat16")(checkpoint)


def test_other_quantized_weights_are_refused_by_name(tmp_path):
    state = {
        "l.qweight": torch.ones(2, 2, dtype=torch.int32),
        "l.g_idx": torch.zeros(2, dtype=torch.int32),
        "l.qzeros": torch.ones(1, 2, dtype=torch.int32),
        "l.scales": torch.ones(1, 2).half(),
    }  # fmt: skip
    with saved(tmp_path / "m.pth", state) as checkpoint:
        for options in ({"dtype": "bfloat16"}, {"dequantize": "bfloat16"}):
            with pytest.raises(NotRepresentable, match=r"'l.qweight' .*GPTQ"):
                Cast(**options)(checkpoint)
        made = Cast("bfloat16", raw=True)(checkpoint)
        assert made["l.scales"].dtype == "bfloat16"


def test_what_overflows_once_it_is_scaled_is_refused(tmp_path):
    state = {
        "w": torch.full((2, 2), 400.0).to(torch.float8_e4m3fn),
        "w_scale": torch.full((), 400.0),
    }
    with saved(tmp_path / "m.pth", state) as checkpoint:
        with pytest.raises(NotRepresentable, match="4 of 4 values overflow float16"):
            save(Cast(dequantize="float16")(checkpoint), tmp_path / "o.pth")
        made, _ = written(Cast(dequantize="bfloat16")(checkpoint), tmp_path / "o.pth")
    assert torch.equal(made["w"], (state["w"].float() * 400).bfloat16())


@pytest.mark.parametrize("which", ["w", "w_scale"])
@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
def test_damaged_weights_or_scales_are_told_and_nothing_written(tmp_path, which, target):
    state = {"w": torch.randn(1200, 1200).to(torch.float8_e4m3fn), "w_scale": torch.rand(1200, 1)}
    torch.save(state, tmp_path / "m.pth")
    content = bytearray((tmp_path / "m.pth").read_bytes())
    mark = state[which].view(torch.uint8).numpy().tobytes()
    content[content.index(mark) + 99] ^= 1
    (tmp_path / "m.pth").write_bytes(content)
    with open_checkpoint(tmp_path / "m.pth") as checkpoint:
        made = Cast(dequantize="bfloat16")(checkpoint)
        with pytest.raises(CorruptFile, match="is damaged"):
            save(made, tmp_path / target)
    assert not (tmp_path / target).exists()


def test_dequantize_is_refused_where_there_is_nothing_for_it(tmp_path):
    with saved(tmp_path / "m.pth", {"w": torch.ones(2)}) as checkpoint:
        with pytest.raises(NotFound, match="no quantized weights"):
            Cast(dequantize="bfloat16")(checkpoint)
        with pytest.raises(UsageError):
            Cast()(checkpoint)


@pytest.mark.parametrize(("name", "scales"), [("a.scale", (1, 1)), ("a.scale_weight", ())])
def test_scales_of_other_names_are_scales_too(tmp_path, name, scales):
    state = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), name: torch.full(scales, 3.0)}
    with saved(tmp_path / "m.pth", state) as checkpoint:
        with pytest.raises(NotRepresentable, match=f"its values need {name}"):
            Cast("bfloat16")(checkpoint)
        made, _ = written(Cast(dequantize="bfloat16")(checkpoint), tmp_path / "o.pth")
    assert set(made) == {"a.weight"}
    assert made["a.weight"].eq(3).all()


def test_only_what_works_is_proposed(tmp_path):
    """Experts in three dimensions with blocks of scales are not dequantized."""
    weight = torch.ones(2, 256, 256).to(torch.float8_e4m3fn)
    state = {"experts": weight, "experts_scale_inv": torch.ones(2, 2, 2)}
    with (
        saved(tmp_path / "m.pth", state) as checkpoint,
        pytest.raises(NotRepresentable) as caught,
    ):
        Cast("bfloat16")(checkpoint)
    assert "--dequantize" not in caught.value.hint
