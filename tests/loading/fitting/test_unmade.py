"""Entries of a file that nothing can be made of."""

import argparse
import io
import pathlib

import pytest
import torch
from torch import nn

from ckptool.errors import MatchError
from ckptool.loading.filling.load_into import load_into
from tests.loading.bits import Untouched

np = pytest.importorskip("numpy")


class Stateful(nn.Module):
    def __init__(self, state=None):
        super().__init__()
        self.inner, self.state = nn.Linear(1, 1), state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (argparse.Namespace(a=1), "an object of argparse.Namespace"),
        ({"a": [io.BytesIO(b"1")]}, "an object of _io.BytesIO"),
        ({"a": pathlib.PurePosixPath("x")}, "an object of pathlib"),
        ([np.ones(2)], "a numpy array"),
    ],
)
def test_an_extra_state_with_objects_is_refused_with_its_name(value, what, tmp_path):
    torch.save(Stateful(value).state_dict(), tmp_path / "a.pth")
    model = Stateful()
    before = Untouched(model)
    with pytest.raises(MatchError) as caught:
        load_into(model, tmp_path / "a.pth")
    before.check()
    assert f"_extra_state: holds {what}" in str(caught.value)
    report = load_into(model, tmp_path / "a.pth", allow_missing=["_extra_state"])
    assert (report.missing_keys, model.state) == (["_extra_state"], None)


@pytest.mark.parametrize("value", [{1, 2}, torch.float32, {"a": (1, torch.Size([1]))}])
def test_plain_data_is_loaded(value, tmp_path):
    torch.save(Stateful(value).state_dict(), tmp_path / "a.pth")
    model = Stateful()
    assert load_into(model, tmp_path / "a.pth").fits
    assert model.state == value


def test_objects_in_memory_are_the_callers_own():
    value, model = argparse.Namespace(a=1), Stateful()
    assert load_into(model, Stateful(value).state_dict()).fits
    assert model.state is value


def lazy():
    return nn.Sequential(nn.LazyLinear(3))


@pytest.mark.parametrize("where", ["file", "memory"])
def test_a_lazy_model_that_never_ran(where, tmp_path):
    source = lazy().state_dict()
    if where == "file":
        torch.save(source, tmp_path / "a.pth")
        source = tmp_path / "a.pth"
    model = lazy()
    before = Untouched(model)
    assert load_into(model, source).fits
    before.check()
    other = nn.Sequential(nn.Linear(2, 3))
    before = Untouched(other)
    with pytest.raises(MatchError, match="lazy module that never ran"):
        load_into(other, source)
    before.check()
