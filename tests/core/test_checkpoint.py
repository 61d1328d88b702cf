"""What a checkpoint offers in Python: its tensors by name, its state dict, and devices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

import ckptool
from ckptool.errors import AmbiguousName, DeviceError, NotFound
from tests import trees


@pytest.fixture
def model():
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


@pytest.fixture
def opened(model, tmp_path):
    state = {f"module.{key}": value for key, value in model.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "m.pth")
    with ckptool.open(tmp_path / "m.pth") as checkpoint:
        yield checkpoint


def test_tensors_are_a_mapping_of_paths_that_takes_every_name(opened):
    tensors = opened.tensors
    assert isinstance(tensors, Mapping)
    assert next(iter(tensors)) == "state_dict/module.0.weight"
    assert len(tensors) == len(tensors.items()) == 7
    weight = tensors["state_dict/module.0.weight"]
    assert tensors["0.weight"] is weight
    assert tensors["state_dict", "module.0.weight"] is weight
    assert tensors.get("nothing", 5) == 5
    assert "running_mean" in tensors
    assert "weight" not in tensors  # which of them?
    with pytest.raises(AmbiguousName):
        tensors["weight"]
    with pytest.raises(
        NotFound, match=r"no tensor matches '0\.wieght'; did you mean module\.0\.weight\?"
    ):
        tensors["0.wieght"]
    assert list(tensors()) == [(("state_dict", key.rpartition("/")[2]), one)
                               for key, one in tensors.items()]  # fmt: skip
    assert repr(tensors) == "<TensorMap of 7 tensors>"


def test_a_checkpoint_has_what_its_tensors_have_and_is_no_mapping(opened):
    assert not isinstance(opened, Mapping)
    assert list(opened) == list(opened.keys()) == list(opened.tensors)
    assert dict(opened) == dict(opened.items()) == dict(opened.tensors)
    assert len(opened) == 7
    assert "0.weight" in opened
    assert "epoch" not in opened
    assert opened.get("0.weight") is opened["0.weight"]
    assert opened.get("nothing") is None
    assert opened["epoch"] == 3
    assert "module.0.bias" in opened["state_dict"]
    assert trees.checkpoint({"epoch": 3})  # true without tensors


def test_the_state_dict_is_that_of_the_model_where_to_put_it(opened, model):
    state = opened.to("cpu").state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[key], one) for key, one in model.state_dict().items())
    model.load_state_dict(state)
    there = opened.to(torch.device("cuda", 9))
    assert there.devices == {"cuda:9": 7}
    with pytest.raises(DeviceError, match="cuda:9"):
        there.state_dict(key="state_dict")
    two = trees.checkpoint({"a": trees.state_dict(["x.w"]), "b": trees.state_dict(["x.w"])})
    with pytest.raises(AmbiguousName):
        two.state_dict()


def test_numpy_gets_the_values_of_a_tensor(opened, model):
    weight, values = opened["0.weight"], model[0].weight.detach().numpy()
    array = np.asarray(weight)
    assert (array.dtype, array.shape) == (np.float32, (3, 2))
    assert np.array_equal(array, values)
    assert np.asarray(weight, dtype="float64").dtype == np.float64
    half = np.asarray(opened.then(ckptool.Cast("bfloat16"))["0.weight"])
    assert half.dtype == np.float32  # numpy has no bfloat16
    assert np.array_equal(half, model[0].weight.detach().bfloat16().float().numpy())
