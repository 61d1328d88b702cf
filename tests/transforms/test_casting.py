"""Casting whole checkpoints, with torch reading what comes out."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from ckptool.checkpoint import Checkpoint
from ckptool.errors import CorruptFile, NotRepresentable, UsageError
from ckptool.files import ByteRange, MemorySource
from ckptool.formats import open_checkpoint
from ckptool.transforms import cast, floating_type, single_state_dict
from ckptool.transforms.casting import FLOATING, kept
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


@pytest.mark.parametrize(
    ("word", "name"),
    [
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
    ],
)
def test_words_for_types(word, name):
    assert floating_type(word) == name


@pytest.mark.parametrize("word", ["int8", "float7", "", "complex64", "float4_e2m1fn_x2", "fp"])
def test_other_words_are_refused_with_a_list(word):
    with pytest.raises(UsageError) as caught:
        floating_type(word)
    assert all(name in caught.value.hint for name in FLOATING)


def test_the_types_are_those_of_the_kernel():
    from ckptool.tensors.floats import FLOATS

    assert tuple(FLOATS) == FLOATING


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("format", ["torch-zip", "safetensors"])
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
        made = cast(single_state_dict(checkpoint), dtype)
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
        made, _ = written(cast(checkpoint, "bfloat16"), tmp_path / "o.pth")
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
        made = cast(checkpoint, "float16")
        loaded, _ = written(made, tmp_path / "o.pth")
    assert loaded["model"]["weight"].dtype == torch.float16
    assert loaded["best"].dtype == torch.float16
    assert loaded["optimizer"]["state"][0]["exp_avg"].dtype == torch.float32
    assert loaded["optimizer_states"][0]["fp32_groups"][0].dtype == torch.float32
    assert "not cast: 7 tensors of optimizers (--all casts them too)" in texts(made.changes, "keep")


def test_everything_is_everything(tmp_path):
    with optimizer_file(tmp_path / "m.pth") as checkpoint:
        loaded, _ = written(cast(checkpoint, "float16", everything=True), tmp_path / "o.pth")
    assert loaded["optimizer"]["state"][0]["exp_avg"].dtype == torch.float16
    assert loaded["optimizer"]["state"][0]["step"].dtype == torch.float16
    assert loaded["optimizer_states"][0]["fp32_groups"][0].dtype == torch.float16


def test_a_pickled_optimizer_is_one_too():
    group = {"momentum": trees.tensor()}
    pickled = trees.Opaque(
        trees.Global("torch.optim.sgd", "SGD"), (), maker="newobj", steps=[("build", group)]
    )
    made = cast(trees.checkpoint({"w": trees.tensor(), "trained_with": pickled}), "float16")
    assert made.root["w"].dtype == "float16"
    assert made.root["trained_with"].attributes["momentum"].dtype == "float32"


def test_keep_makes_exceptions_and_the_first_match_decides():
    root = trees.state_dict(["a.norm.weight", "a.bias", "b.norm.weight"])
    rules = [("b.*", None), ("*.norm.*", "fp64"), ("*", "bf16"), ("never", "half")]
    made = cast(trees.checkpoint(root), "float16", keep=rules)
    assert {name: tensor.dtype for name, tensor in made.root.items()} == {
        "a.norm.weight": "float64",
        "a.bias": "bfloat16",
        "b.norm.weight": "float32",
    }
    assert texts(made.changes, "keep") == ["1 tensor kept by 'b.*'"]
    assert texts(made.changes, "warning") == ["no floating tensor is left for 'never' to match"]


def test_keep_with_a_slash_is_held_against_the_whole_name():
    root = {"model": trees.state_dict(["a.w"]), "ema": trees.state_dict(["a.w"])}
    made = cast(trees.checkpoint(root), "float16", keep=[("ema/*", None)])
    assert made.root["model"]["a.w"].dtype == "float16"
    assert made.root["ema"]["a.w"].dtype == "float32"


def test_nothing_to_cast_gives_the_same_checkpoint_back():
    checkpoint = trees.checkpoint({"w": trees.tensor(), "n": trees.tensor(dtype="int64")})
    assert cast(checkpoint, "float32") is checkpoint
    warned = cast(checkpoint, "float32", keep=[("x", None)])
    assert (warned.root, kinds(warned.changes)) == (checkpoint.root, ["warning"])


def test_a_tie_with_one_kept_name_comes_apart_and_says_so(tmp_path):
    weight = torch.randn(3, 3)
    root = {"a": weight, "b": weight.detach()}
    with saved(tmp_path / "m.pth", root) as checkpoint:
        made = cast(checkpoint, "float16", keep=[("b", None)])
        loaded, _ = written(made, tmp_path / "o.pth")
    assert torch.equal(loaded["a"], weight.half())
    assert torch.equal(loaded["b"], weight)
    assert texts(made.changes, "warning") == ["memory that was shared with others is no longer: a"]


def test_one_tensor_under_two_names_keeps_what_one_name_keeps():
    weight = trees.tensor()
    made = cast(trees.checkpoint({"a": weight, "b": weight}), "float16", keep=[("b", None)])
    assert made.root["a"] is made.root["b"]
    assert made.root["a"].dtype == "float32"
    assert "one type" in texts(made.changes, "warning")[0]


def test_a_storage_seen_under_several_types_becomes_several(tmp_path):
    weight = torch.randn(4)
    raw = bytes(weight.view(torch.uint8).tolist())
    over = trees.Storage("0", ByteRange(MemorySource(raw, "m"), 0, 16), 16)
    root = {
        "w": trees.TensorRef("float32", (4,), (1,), 0, over, "cpu"),
        "bits": trees.TensorRef("int32", (4,), (1,), 0, over, "cpu"),
        "halves": trees.TensorRef("float16", (4,), (2,), 1, over, "cpu"),
    }
    made = cast(trees.checkpoint(root), "bfloat16")
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
        made = cast(checkpoint, "float16")
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
        made = cast(checkpoint, "float16")
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
        made = cast(checkpoint, "float8_e5m2")
    assert made.root is checkpoint.root
    assert "neg (negated lazily" in texts(made.changes, "warning")[0]


def test_part_of_a_distributed_tensor_is_left_and_named(fixtures):
    path = next(fixtures.rglob("*dtensor*.pt*"))
    with open_checkpoint(path) as checkpoint:
        made = cast(checkpoint, "float16")
    assert any("part of a distributed tensor" in text for text in texts(made.changes, "warning"))


def test_a_pickled_module_is_cast(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    net[0].register_buffer("mask", torch.rand(2), persistent=False)
    with saved(tmp_path / "m.pth", net) as checkpoint:
        loaded, _ = written(cast(checkpoint, "bfloat16"), tmp_path / "o.pth")
    assert torch.equal(loaded[0].mask, net[0].mask.bfloat16())
    for name, tensor in net.state_dict().items():
        wanted = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        assert torch.equal(loaded.state_dict()[name], wanted)


def test_tensors_without_bytes_change_their_type():
    over = trees.Storage("0", None, 40, "meta")
    meta = trees.TensorRef("float32", (5,), (1,), 5, over, "meta")
    bare = trees.TensorRef("float32", (5,), (1,), 0, None, "meta", kind="meta")
    made = cast(trees.checkpoint({"a": meta, "b": bare}), "float16")
    assert (made.root["a"].dtype, made.root["a"].storage.nbytes) == ("float16", 20)
    assert made.root["b"].dtype == "float16"


def test_tensors_of_a_tpu_are_carried_as_tensors(tmp_path):
    data = trees.tensor(4)
    carried = replace(data, device="xla:0", parts={"carrier": "cpu_tensor", "data": data})
    made = cast(trees.checkpoint({"w": carried}), "bfloat16").root["w"]
    assert (made.dtype, made.device, made.parts["data"].device) == ("bfloat16", "xla:0", "cpu")
    assert made.parts["data"].storage is made.storage


def test_parameters_with_attributes_are_cast_also_where_these_are(tmp_path):
    shared = torch.ones(2)
    parameter = torch.nn.Parameter(torch.rand(3))
    parameter.scale = shared
    with saved(tmp_path / "m.pth", {"p": parameter, "shared": shared}) as checkpoint:
        loaded, _ = written(cast(checkpoint, "float16"), tmp_path / "o.pth")
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
        made = cast(checkpoint, "float16", allow_overflow=True)
        _, receipt = written(made, tmp_path / "o.pth")
    told = [(change.kind, change.text, change.count) for change in receipt.outcomes]
    assert told == [
        (
            "cast",
            "4 tensors float32 -> float16: 2 elements overflow, 1 element underflow to zero, "
            "18% lose precision",
            11,
        ),
        (
            "overflow",
            "large: 2 of 4 elements overflow in float16 (the largest magnitude is 1e+06)",
            2,
        ),
        ("underflow", "tiny: 1 of 3 elements underflow to zero in float16", 1),
        ("precision", "large: 1 of 4 elements lose precision in float16", 1),
        ("precision", "tiny: 1 of 3 elements lose precision in float16", 1),
    ]


def test_an_exact_cast_says_so(tmp_path):
    with saved(tmp_path / "m.pth", {"a": torch.ones(3).half()}) as checkpoint:
        _, receipt = written(cast(checkpoint, "float32"), tmp_path / "o.pth")
    assert [change.text for change in receipt.outcomes] == [
        "1 tensor float16 -> float32: nothing is lost"
    ]


@pytest.mark.parametrize("format", ["torch-zip", "torch-legacy", "safetensors"])
def test_overflow_writes_nothing(tmp_path, format):
    root = {"fine": torch.ones(3), "a.b": torch.full((5, 5), 1e6).t(), "after": torch.ones(3)}
    with (
        saved(tmp_path / "m.pth", root) as checkpoint,
        pytest.raises(NotRepresentable, match=r"'a\.b' cannot be cast: 25 of its 25") as caught,
    ):
        save(cast(checkpoint, "half"), tmp_path / "o", format=format)
    assert "--keep a.b=float32" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["m.pth"]


def test_big_endian_and_compressed_storages(tmp_path, fixtures):
    path = next(path for path in fixtures.rglob("*big*") if not path.name.endswith(".json"))
    with open_checkpoint(path) as checkpoint:
        made = cast(checkpoint, "float64", everything=True)
        pairs = [(one.torch(), new.torch()) for (_, one), (_, new)
                 in zip(checkpoint.tensors(), made.tensors(), strict=True)
                 if one.has_content and one.kind == "strided"]  # fmt: skip
    assert pairs
    for one, new in pairs:
        assert torch.equal(one.to(new.dtype), new)


def test_chains_with_other_changes(tmp_path):
    root = {"module.w": torch.randn(3, 3), "module.v": torch.randn(2)}
    with saved(tmp_path / "m.pth", root) as checkpoint:
        made = checkpoint.cast("bf16").strip_module().remap({"*": "cpu"})
        assert isinstance(made, Checkpoint)
        loaded, receipt = written(made, tmp_path / "o.pth")
    assert list(loaded) == ["w", "v"]
    assert torch.equal(loaded["w"], root["module.w"].bfloat16())
    assert receipt.outcomes


def test_planning_a_cast_never_imports_torch():
    code = (
        "import sys\n"
        "from ckptool.transforms import cast\n"
        "from tests import trees\n"
        "made = cast(trees.checkpoint({'w': trees.tensor()}), 'bf16')\n"
        "assert made.root['w'].dtype == 'bfloat16'\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_optimizers_tensor_that_is_a_weight_too_stays_as_it_is(tmp_path):
    weight = torch.randn(4)
    state = {0: {"z": weight, "l": [weight, 1]}}
    root = {
        "model": {"w": weight},
        "optimizer": {"state": state, "param_groups": [{"params": [0]}]},
    }
    with saved(tmp_path / "m.pth", root) as checkpoint:
        made = cast(checkpoint, "bfloat16")
        loaded, _ = written(made, tmp_path / "out.pth")
    assert loaded["model"]["w"].dtype == torch.bfloat16
    held = loaded["optimizer"]["state"][0]
    assert torch.equal(held["z"], weight)
    assert held["l"][0] is held["z"]
    assert "memory that was shared with others is no longer: model/w" in texts(
        made.changes, "warning"
    )


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
def test_a_damaged_source_is_refused_and_nothing_written(tmp_path, target):
    values = torch.arange(100_000).float()
    torch.save({"w": values}, tmp_path / "m.pth")
    content = bytearray((tmp_path / "m.pth").read_bytes())
    content[content.index(values.numpy().tobytes()) + 99] ^= 1
    (tmp_path / "m.pth").write_bytes(content)
    with open_checkpoint(tmp_path / "m.pth") as checkpoint:
        made = cast(checkpoint, "bfloat16")
        with pytest.raises(CorruptFile, match="storage '0' is damaged"):
            save(made, tmp_path / target)
    assert not (tmp_path / target).exists()


@pytest.mark.parametrize(
    "keep", [{"b": "float32", "c": None}, [("b", "fp32"), "c"], (("b", "F32"), ("c", None))]
)
def test_exceptions_are_a_mapping_or_pairs_or_globs(keep):
    assert kept(keep) == (("b", "float32"), ("c", None))


@pytest.mark.parametrize("keep", ["b", 5, None, [5], [("b",)], [("b", "int8")], [(1, "half")]])
def test_other_exceptions_are_refused(keep):
    with pytest.raises(UsageError):
        kept(keep)
    checkpoint = trees.checkpoint({"w": trees.tensor()})
    with pytest.raises(UsageError):
        cast(checkpoint, "half", keep=keep)


def test_where_nothing_is_there_to_be_cast_it_is_told():
    checkpoint = trees.checkpoint({"n": trees.tensor(dtype="complex64")})
    made = cast(checkpoint, "half")
    assert texts(made.changes, "keep") == ["not cast: 1 tensor of other types (complex64)"]
    assert made.root is checkpoint.root


def test_tied_names_are_told_together(tmp_path):
    tied = torch.full((3,), 0.1)
    with saved(tmp_path / "m.pth", {"a": tied, "b": tied, "c": tied}) as checkpoint:
        _, receipt = written(cast(checkpoint, "half"), tmp_path / "out.pth")
    assert texts(receipt.outcomes, "precision") == [
        "a (and b, c): 3 of 3 elements lose precision in float16"
    ]


def test_zeros_of_a_type_without_zero_have_a_word_of_their_own(tmp_path):
    with saved(tmp_path / "m.pth", {"a": torch.tensor([0.0, 1.0, 3.0])}) as checkpoint:
        _, receipt = written(cast(checkpoint, "float8_e8m0fnu"), tmp_path / "out.pth")
    assert texts(receipt.outcomes, "zeros") == [
        "a: 1 of 3 elements become 5.9e-39 for want of a zero in float8_e8m0fnu"
    ]
    assert len(texts(receipt.outcomes, "precision")) == 1
