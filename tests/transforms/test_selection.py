"""One state dict out of a checkpoint, and the rest named."""

from __future__ import annotations

import pytest

from ckptool.errors import AmbiguousName
from ckptool.model import Global, Opaque, OrderedMap, Wrapping
from ckptool.transforms import single_state_dict
from tests.trees import checkpoint, module, opened, parallel, state_dict, tensor


def left_out(made):
    assert all(change.kind == "left-out" for change in made.changes)
    return [change.text for change in made.changes]


def test_the_rest_is_named():
    root = {
        "epoch": 3,
        "run": {"model": state_dict(["a.w"], metadata=["", "a"]), "lr": 0.1, "hist": [1, 2]},
        "ema": state_dict(["a.w"]),
        "opt": {"state": {0: {"m": tensor()}}, "param_groups": []},
        "rng": [tensor()],
        "args": Opaque(Global("m", "A"), ()),
    }
    made = single_state_dict(checkpoint(root), "model")
    assert made.root == root["run"]["model"]
    assert made.root is not root["run"]["model"]
    assert made.root.metadata is root["run"]["model"].metadata
    assert left_out(made) == [
        "the state_dict ema (1 tensor)",
        "the optimizer opt (1 tensor)",
        "the tensors rng",
        "the values epoch, run/lr, run/hist",
        "the objects args",
    ]
    assert [change.count for change in made.changes] == [1, 1, 1, 4, 1]


def test_a_file_that_is_one_state_dict_is_itself():
    read = checkpoint(state_dict(["w"]))
    assert single_state_dict(read) is read
    plain = single_state_dict(checkpoint({"w": tensor()}))
    assert type(plain.root) is OrderedMap
    assert plain.changes == ()


def test_a_module_becomes_its_state_dict_and_its_class_is_named():
    made = single_state_dict(checkpoint({"model": parallel(module(parameters={"w": tensor()}))}))
    assert type(made.root) is OrderedMap
    assert list(made.root) == ["module.w"]
    assert left_out(made) == [
        "the object of class torch.nn.parallel.data_parallel.DataParallel around the state dict"
    ]


def test_a_part_of_a_section_leaves_out_its_rest():
    root = {"opt": {"state": {0: {"m": tensor()}, 1: {"m": tensor()}}, "param_groups": []}}
    made = single_state_dict(checkpoint(root), "opt/state/0")
    assert left_out(made) == ["the rest of the optimizer opt (1 tensor)"]


def test_several_need_a_key():
    with pytest.raises(AmbiguousName):
        single_state_dict(checkpoint({"a": state_dict(["w"]), "b": state_dict(["w"])}))


def test_a_real_module(fixtures):
    with opened(fixtures / "torch-2.13.0/whole_single.pth") as read:
        made = single_state_dict(read)
        assert next(iter(made.root)) == "conv1.weight"
        assert next(read.tensors())[1].is_parameter
        assert not made.root["conv1.weight"].is_parameter
        assert left_out(made) == ["the object of class net.Net around the state dict"]


@pytest.mark.parametrize("name", ["torch-2.13.0/scripted.pt", "torch-2.10.0/exported.pt2"])
def test_a_program_gives_plain_tensors(fixtures, name):
    with opened(fixtures / name) as read:
        made = single_state_dict(read)
        assert any(tensor.requires_grad for _, tensor in read.tensors())
        assert not any(tensor.requires_grad or tensor.wrapping for _, tensor in made.tensors())
        assert list(made.root) == list(read.root)
        assert made.changes == ()
        assert single_state_dict(made) is made


def test_a_state_dict_keeps_the_parameters_that_it_was_saved_with():
    weight = tensor(requires_grad=True, wrapping=(Wrapping("parameter"),))
    read = checkpoint({"model": OrderedMap({"fc.w": weight}), "epoch": 1})
    assert single_state_dict(read).root["fc.w"] is weight


def test_a_subclass_stays_one_without_being_a_parameter():
    kept = Wrapping("type", type=Global("m", "Labelled"), state={})
    weight = tensor(
        requires_grad=True, kind="subclass", hooks=1, wrapping=(kept, Wrapping("parameter"))
    )
    made = single_state_dict(checkpoint(module(parameters={"w": weight}))).root["w"]
    assert [layer.type for layer in made.wrapping] == [kept.type]
    assert not made.requires_grad
    assert not made.is_parameter
    assert made.hooks is None
