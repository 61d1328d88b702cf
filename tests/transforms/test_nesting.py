"""Trees made flat, and put under a key."""

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file

import ckptool
from ckptool.errors import NameCollision, NotRepresentable, UsageError


def saved(path, content):
    torch.save(content, path)
    return path


def test_keys_on_the_way_are_joined_and_what_goes_is_named(tmp_path):
    layer = torch.nn.Linear(2, 2)
    content = {"enc": {"w": torch.ones(2), "l": [torch.ones(1), 5]}, "dec": layer.state_dict()}
    source = saved(tmp_path / "a.pth", {**content, "none": {}})
    receipt = ckptool.convert(source, tmp_path / "b.pth", ckptool.Flatten("/"))
    found = torch.load(tmp_path / "b.pth")
    assert list(found) == ["enc/w", "enc/l/0", "enc/l/1", "dec/weight", "dec/bias"]
    assert found["enc/l/1"] == 5
    assert torch.equal(found["dec/weight"], layer.weight)
    assert receipt.left_out == ("the attributes of dec: _metadata", "none is empty")


def test_a_list_and_a_lone_tensor_become_safetensors(tmp_path):
    tensors = [torch.ones(2), torch.zeros(3)]
    ckptool.convert(
        saved(tmp_path / "l.pth", tensors),
        tmp_path / "l.safetensors",
        ckptool.Flatten("."),
        ckptool.Rename(["^=>part."]),
    )
    assert list(load_file(tmp_path / "l.safetensors")) == ["part.0", "part.1"]
    ckptool.convert(
        saved(tmp_path / "t.pth", tensors[0]), tmp_path / "t.safetensors", ckptool.Nest("w")
    )
    assert torch.equal(load_file(tmp_path / "t.safetensors")["w"], tensors[0])


def test_what_is_taken_is_put_under_a_key(tmp_path):
    model = {"module.w": torch.ones(2)}
    source = saved(tmp_path / "a.pth", {"model": model, "epoch": 3})
    ckptool.convert(
        source,
        tmp_path / "b.pth",
        ckptool.Take(model_only=True),
        ckptool.Strip(),
        ckptool.Nest("state_dict"),
    )
    assert list(torch.load(tmp_path / "b.pth")) == ["state_dict"]
    assert list(torch.load(tmp_path / "b.pth")["state_dict"]) == ["w"]
    with pytest.raises(UsageError, match="cannot be nested"):
        ckptool.convert(source, tmp_path / "c.safetensors", ckptool.Nest("state_dict"))


def test_two_names_that_become_one_and_objects_are_refused(tmp_path):
    one = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}
    with pytest.raises(NameCollision, match=r"'a\.b'"):
        ckptool.convert(saved(tmp_path / "a.pth", one), tmp_path / "b.pth", ckptool.Flatten("."))
    ckptool.convert(tmp_path / "a.pth", tmp_path / "b.pth", ckptool.Flatten("/"))
    module = {"net": torch.nn.Linear(2, 2)}
    with pytest.raises(NotRepresentable, match=r"net is an object of class"):
        ckptool.convert(saved(tmp_path / "m.pth", module), tmp_path / "n.pth", ckptool.Flatten("."))


NAMES = st.text("ab.", min_size=1, max_size=3)
TREES = st.recursive(
    st.integers(0, 9),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(NAMES, TREES, min_size=1, max_size=3))
def test_each_leaf_is_there_under_its_keys_or_it_is_refused(tree):
    def leaves(node, path=()):
        if isinstance(node, (dict, list)):
            for key, value in node.items() if isinstance(node, dict) else enumerate(node):
                yield from leaves(value, (*path, str(key)))
        else:
            yield ".".join(path), node

    from ckptool.core.checkpoint import Checkpoint

    expected = list(leaves(tree))
    try:
        made = ckptool.Flatten(".")(Checkpoint(tree, "memory", "")).root
    except NameCollision:
        assert len({name for name, _ in expected}) < len(expected)
        return
    assert list(made.items()) == expected
