"""`convert`: every change in one pass, and what does not go together."""

import argparse
import struct
import tempfile
from collections import OrderedDict
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file

import ckptool
from ckptool.conversion import apply_steps
from ckptool.errors import CheckpointError, MatchError, NotRepresentable, UsageError
from tests.conversions import convert_by_options


@pytest.fixture
def source(tmp_path):
    """A checkpoint with all that the options are about."""
    big = torch.randn(1000, 8)
    state = OrderedDict(
        (f"module.{name}", tensor)
        for name, tensor in {
            "body.weight": big[:4],
            "body.bias": torch.randn(4),
            "head.weight": torch.randn(2, 4),
            "steps": torch.tensor(3),
        }.items()
    )
    state["module.tied.weight"] = state["module.head.weight"]
    modules = ("module", "module.body", "module.head", "module.tied")
    state._metadata = OrderedDict(
        {"": {"version": 1}, **{path: {"version": 2} for path in modules}}
    )
    args = argparse.Namespace(lr=0.1)
    path = tmp_path / "model.pth"
    torch.save({"state_dict": state, "epoch": 3, "args": args}, path)
    return path


def test_all_of_it_in_one_pass(source, tmp_path):
    receipt = ckptool.convert(
        source,
        tmp_path / "out.pth",
        ckptool.Take(exclude=["steps", "module.steps"]),
        ckptool.Strip(),
        ckptool.Rename(["^head=>classifier"]),
        ckptool.Plain(),
        ckptool.Untie(),
        ckptool.Cast("bfloat16", keep={"*.bias": None, "tied.*": "float16"}),
        ckptool.Compact(),
        ckptool.Remap("cuda:1"),
        verify=True,
    )
    assert receipt.verified
    assert receipt.size < 5000
    found = torch.load(tmp_path / "out.pth", map_location="cpu", weights_only=True)
    before = torch.load(source, weights_only=False)["state_dict"]
    assert (found["epoch"], found["args"]) == (3, {"lr": 0.1})
    state = found["state_dict"]
    assert list(state) == ["body.weight", "body.bias", "classifier.weight", "tied.weight"]
    assert state["body.weight"].equal(before["module.body.weight"].bfloat16())
    assert state["body.bias"].equal(before["module.body.bias"])
    assert state["classifier.weight"].equal(before["module.head.weight"].bfloat16())
    assert state["tied.weight"].equal(before["module.head.weight"].half())
    assert state._metadata == {path: {"version": 2} for path in ("", "body", "classifier", "tied")}
    with ckptool.open(tmp_path / "out.pth") as checkpoint:
        assert set(checkpoint.devices) == {"cuda:1"}


@pytest.mark.parametrize("name", ["out.safetensors", "out.safetensors.index.json", "out.bin"])
def test_a_cast_into_shards_of_the_part_that_was_chosen(source, tmp_path, name):
    ckptool.convert(
        source,
        tmp_path / "set" / name,
        ckptool.Take(include=["*.weight"], model_only=True),
        ckptool.Strip(),
        ckptool.Cast("float16"),
        max_shard_size=40,
    )
    found = {}
    for path in (tmp_path / "set").iterdir():
        if path.suffix == ".safetensors":
            found.update(load_file(path))
        elif path.suffix != ".json":
            found.update(torch.load(path, weights_only=True))
    before = torch.load(source, weights_only=False)["state_dict"]
    for key in ("body.weight", "head.weight"):
        assert found[key].equal(before[f"module.{key}"].half())
    merged = tmp_path / "merged.safetensors"
    ckptool.convert(tmp_path / "set", merged)
    with ckptool.open(merged) as checkpoint:
        assert list(checkpoint) == ["body.weight", "head.weight", "tied.weight"]


def test_what_was_asked_to_be_left_out_is_no_loss(source, tmp_path):
    whole = {"wrappers": "strip", "strict": True}
    with pytest.raises(NotRepresentable, match="epoch"):
        convert_by_options(source, tmp_path / "out.safetensors", **whole)
    receipt = convert_by_options(source, tmp_path / "out.safetensors", key="state_dict", **whole)
    assert any("epoch" in text for text in receipt.left_out)
    ckptool.convert(source, tmp_path / "some.pth", ckptool.Take(exclude=["*.bias"]), strict=True)
    ckptool.convert(
        source, tmp_path / "plain.pth", ckptool.Plain(drop_objects=True, plain=False), strict=True
    )
    assert "args" not in torch.load(tmp_path / "plain.pth", weights_only=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"wrappers": "peel"}, "'strip' or 'keep'"),
        ({"ties": "cut"}, "'keep' or 'copy'"),
        (
            {"to": "cpu", "map": {"cuda:0": "cpu"}},
            r"give only one of these: a device for all",
        ),
        (
            {"to": "cpu", "visible_devices": [0]},
            r"give only one of these: a device for all",
        ),
        ({"keep": {"*": None}}, "cast needs --dtype or --dequantize"),
        ({"cast_optimizer": True}, "cast needs --dtype or --dequantize"),
        ({"allow_overflow": True}, "cast needs --dtype or --dequantize"),
        ({"include": "*.weight"}, "a list of globs"),
        ({"rename": ["a"]}, "REGEX=>REPL"),
        ({"dtype": "float12"}, "float12"),
        ({"max_shard_size": "5 apples"}, "5 apples"),
        ({"like": "ref.pth", "wrappers": "keep"}, "leave out --wrappers"),
        ({"like_key": "ema"}, "--like-key needs a reference"),
        ({"allow_missing": ["a"]}, "--allow-missing needs a reference"),
        ({"min_coverage": 0.5}, "--min-coverage needs a reference"),
    ],
)
def test_what_does_not_go_together_is_refused(source, tmp_path, options, words):
    with pytest.raises(UsageError, match=words):
        convert_by_options(source, tmp_path / "out.pth", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pth"]


def test_a_conversion_is_applied_to_an_open_checkpoint(source):
    with ckptool.open(source) as checkpoint:
        steps = [ckptool.Take("state_dict"), ckptool.Strip()]
        assert "body.weight" in apply_steps(checkpoint, steps, "torch-zip").root
        assert apply_steps(checkpoint, [], "torch-zip") is checkpoint


def test_names_are_made_those_of_a_reference(source, tmp_path):
    like = {"body.weight": (4, 8), "body.bias": (4,), "steps": ()}
    with pytest.raises(MatchError, match=r"head\.weight") as caught:
        ckptool.convert(source, tmp_path / "out.safetensors", ckptool.Fit(like))
    assert caught.value.report.unexpected_keys == ["module.head.weight", "module.tied.weight"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.pth"]
    receipt = ckptool.convert(
        source, tmp_path / "out.safetensors", ckptool.Fit(like, allow_unexpected=["module.*"])
    )
    assert any("module.head.weight" in text for text in receipt.left_out)
    assert load_file(tmp_path / "out.safetensors").keys() == like.keys()


@pytest.mark.parametrize(
    "options", [{"include": ["head"]}, {"exclude": ["head", "rest"]}, {"key": "part"}]
)
def test_bytes_that_only_what_is_left_out_saw_are_left_out(tmp_path, options):
    big = torch.randn(1000, 100)
    torch.save({"head": big[:2], "part": {"a": big[2:4]}, "rest": big}, tmp_path / "in.pth")
    target = tmp_path / "out.pth"
    receipt = convert_by_options(tmp_path / "in.pth", target, **options)
    assert target.stat().st_size < 4000
    cut = [one for one in receipt.changes if "from 400,000 to 800 bytes, dropping" in one.text]
    assert len(cut) == 1
    assert not any("ckptool compact" in one.text for one in receipt.changes)
    plain = ckptool.convert(
        tmp_path / "in.pth", tmp_path / "out.safetensors", ckptool.Take(key="part")
    )
    assert not any("trimmed" in one.text for one in plain.changes)


def test_where_nothing_is_left_out_storages_stay_as_they_are(tmp_path):
    torch.save({"model": {"a.b": torch.randn(1000)[:2]}, "epoch": 1}, tmp_path / "in.pth")
    ckptool.convert(tmp_path / "in.pth", tmp_path / "out.pth", ckptool.Take(model_only=True))
    assert torch.load(tmp_path / "out.pth")["a.b"].untyped_storage().nbytes() == 4000


@pytest.mark.parametrize("target", ["out.pth", "out.safetensors"])
@pytest.mark.parametrize("content", [torch.nn.ReLU(), {"state_dict": torch.nn.ReLU()}])
def test_a_result_with_nothing_in_it_is_refused(tmp_path, content, target):
    torch.save(content, tmp_path / "in.pth")
    with pytest.raises(CheckpointError, match=r"the result would be empty|no state dict"):
        ckptool.convert(tmp_path / "in.pth", tmp_path / target, ckptool.Take(model_only=True))
    assert [path.name for path in tmp_path.iterdir()] == ["in.pth"]


def test_an_empty_file_has_an_empty_copy(tmp_path):
    torch.save({}, tmp_path / "in.pth")
    ckptool.convert(tmp_path / "in.pth", tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth") == {}


def test_values_without_a_tensor_are_a_result(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "in.pth")
    ckptool.convert(tmp_path / "in.pth", tmp_path / "out.pth")
    assert torch.load(tmp_path / "out.pth") == {"epoch": 3}


class Holder:
    """An object with tensors."""

    def __init__(self, held):
        self.held = held


class Held(torch.nn.Module):
    """A module with a tensor that its `state_dict()` has not."""

    def __init__(self, beside):
        super().__init__()
        self.body = torch.nn.Linear(2, 2)
        self.beside = beside


class Tensors:
    """Tensors of which no two are alike."""

    def __init__(self):
        self.made = 0

    def __call__(self):
        self.made += 1
        return torch.tensor([float(self.made), 0.5])


def trees():
    """Shapes of entries: what stands under a key of a state dict, or beside one."""
    leaves = st.sampled_from(["tensor", "tensor", "tensor", "value"])
    kinds = st.sampled_from(["dict", "list", "tuple", "object", "parameter", "module"])
    return st.recursive(leaves, lambda inner: st.tuples(kinds, st.lists(inner, max_size=2)))


def grown(shape, fresh):
    if not isinstance(shape, tuple):
        return fresh() if shape == "tensor" else 7
    kind, inside = shape
    made = [grown(one, fresh) for one in inside]
    match kind:
        case "dict":
            return {f"k{number}": one for number, one in enumerate(made)}
        case "object":
            return Holder(made)
        case "parameter":
            parameter = torch.nn.Parameter(fresh())
            parameter.scale = made
            return parameter
        case "module":
            module = Held(made)
            torch.nn.init.constant_(module.body.weight, fresh()[0].item())
            return module
    return tuple(made) if kind == "tuple" else made


def numbers_in(path):
    """The first number of every listed tensor of a file."""
    with ckptool.open(path) as checkpoint:
        return {struct.unpack_from("<f", ref.read())[0] for _, ref in checkpoint.tensors()}


@settings(max_examples=40, deadline=None)
@given(
    entries=st.lists(trees(), min_size=1, max_size=4),
    beside=st.lists(trees(), max_size=2),
    changes=st.fixed_dictionaries({"model_only": st.booleans(), "drop_objects": st.booleans()}),
    target=st.sampled_from(["out.pth", "out.safetensors"]),
)
def test_every_tensor_is_in_the_result_or_named_as_left_out(entries, beside, changes, target):
    fresh, keys = Tensors(), {}
    state, tree = OrderedDict({"first.weight": fresh()}), {}
    state._metadata = OrderedDict({"": {"version": 1}})
    for holder, shapes, name in (state, entries, "layer{}.weight"), (tree, beside, "beside{}"):
        for number, shape in enumerate(shapes):
            key, made = name.format(number), fresh.made
            holder[key] = grown(shape, fresh)
            keys.update((one, key) for one in range(made + 1, fresh.made + 1))
    tree["model"] = state
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder) / "in.pth", Path(folder) / target
        torch.save(tree, source)
        try:
            receipt = convert_by_options(source, result, **changes)
        except CheckpointError:
            assert not result.exists()
            return
        after, content = numbers_in(result), result.read_bytes()
    said = " ".join(receipt.left_out)
    assert 1.0 in after
    for number, key in keys.items():
        kept = target == "out.pth" and struct.pack("<f", number) in content  # below an object
        assert number in after or kept or key in said


def test_a_folder_is_edited_in_place(tmp_path):
    folder = tmp_path / "model"
    state = {"module.a": torch.ones(4), "module.b": torch.zeros(4)}
    torch.save(state, tmp_path / "plain.pth")
    keep = ckptool.Strip(levels=0)
    ckptool.convert(tmp_path / "plain.pth", f"{folder}/", keep, max_shard_size=20)
    before = sorted(one.name for one in folder.iterdir())
    assert len(before) == 3
    assert sorted(ckptool.load(folder)) == ["module.a", "module.b"]
    ckptool.convert(folder, folder, ckptool.Strip(), in_place=True)
    assert sorted(one.name for one in folder.iterdir()) == before
    assert sorted(ckptool.load(folder)) == ["a", "b"]
