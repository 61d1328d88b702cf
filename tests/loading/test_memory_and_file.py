"""One state dict from memory and from its file: what is told of it is the same."""

import io
import warnings
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import ckptool
from ckptool.errors import CheckpointError

np = pytest.importorskip("numpy")


class Scaled(nn.Linear):
    """Keeps an extra state beside its weights."""

    def __init__(self):
        super().__init__(2, 2)
        self.scale = torch.ones(1)

    def get_extra_state(self):
        return self.scale

    def set_extra_state(self, state):
        self.scale = state


class Renaming(nn.Linear):
    """Takes `w` for `weight`."""

    def _load_from_state_dict(self, state, prefix, *rest):
        if f"{prefix}w" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}w")
        super()._load_from_state_dict(state, prefix, *rest)


def net():
    model = nn.ModuleDict(
        {
            "encoder": nn.Sequential(Scaled(), nn.BatchNorm1d(2), Scaled()),
            "embed": nn.Embedding(3, 2),
            "decode": nn.Linear(2, 3, bias=False),
            "own": Renaming(3, 3),
        }
    )
    model["decode"].weight = model["embed"].weight
    return model


FRONTS = ("", "module.", "model.", "_orig_mod.module.", "net.encoder.")
RENAMES = ({}, {"encoder.": "backbone."}, {"encoder.0.": "encoder.4."}, {"own.weight": "own.w"})
READONLY = np.arange(3.0)
READONLY.flags.writeable = False
ODD = {
    "halved": torch.full((2, 2), 1e-9, dtype=torch.float64), "another shape": torch.ones(5, 5),
    "a scalar": torch.tensor(3), "sparse": torch.eye(2).to_sparse(),
    "an array": np.ones((2, 2), dtype="float32"), "turned round": np.arange(4.0)[::-1],
    "of the other order": np.arange(4, dtype=">f4").reshape(2, 2),
    "wider than any": np.longdouble([1, 2]), "of times": np.zeros(2, dtype="M8[s]"),
    "not to be written to": READONLY, "plain": {"a": [1, "b"]}, "nothing": None,
    "an object": io.StringIO,
}  # fmt: skip
OBJECTS = {name for name, value in ODD.items() if isinstance(value, (np.ndarray, type))}
"""As extra states they are the caller's own in memory, and not made from a file."""


@st.composite
def trees(draw):
    state = net().state_dict()
    names = list(state)
    for name in draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
        odd = draw(st.sampled_from(["gone", *ODD]))
        if odd == "gone" or (name.endswith("_extra_state") and odd in OBJECTS):
            del state[name]
        else:
            state[name] = ODD[odd]
    renames = draw(st.sampled_from(RENAMES))
    front = draw(st.sampled_from(FRONTS))
    renamed = OrderedDict()
    for name, value in state.items():
        for old, new in renames.items():
            name = f"{new}{name.removeprefix(old)}" if name.startswith(old) else name
        renamed[front + name] = value
    if draw(st.booleans()):
        renamed._metadata = state._metadata
    beside = {name: ODD[name] for name in draw(st.sets(st.sampled_from(list(ODD)), max_size=2))}
    return {**renamed, **beside} if draw(st.booleans()) else {"state_dict": renamed, **beside}


def told(source, like):
    """The report without the name of the file, or the refusal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return replace(ckptool.match(source, like)[1], file="")
    except CheckpointError as error:
        return type(error), str(error).replace(f"{source}: ", "")


@given(trees())
@settings(deadline=None)
def test_one_state_dict_is_told_of_alike_from_memory_and_from_its_file(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("same") / "f.pth"
    torch.save(tree, path)
    for like in (net(), net().state_dict()):
        assert told(tree, like) == told(path, like)


@pytest.mark.parametrize("odd", [name for name, one in ODD.items() if isinstance(one, np.ndarray)])
def test_an_array_beside_a_state_dict_is_nothing_of_the_models(odd):
    given = {"state_dict": nn.Linear(2, 2).state_dict(), "history": ODD[odd]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ckptool.load_into(nn.Linear(2, 2), given).fits


def test_arrays_of_any_order_are_tensors_of_the_same_numbers():
    given = {"weight": np.arange(4, dtype=">f4").reshape(2, 2), "bias": np.arange(2.0)[::-1]}
    model = nn.Linear(2, 2)
    ckptool.load_into(model, given)
    assert model.weight.tolist() == [[0, 1], [2, 3]]
    assert model.bias.tolist() == [1, 0]


def test_an_extra_state_that_is_an_array_is_the_callers_own_in_memory():
    model, scale = nn.Sequential(Scaled()), np.ones(3)
    state = {**model.state_dict(), "0._extra_state": scale}
    assert ckptool.match(state, model)[0]["0._extra_state"] is scale
