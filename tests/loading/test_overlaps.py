"""Tensors of a model that look at some of the same memory."""

import pytest
import torch
from torch import nn

from ckptool.errors import MatchError
from ckptool.loading.load_into import load_into
from tests.loading.bits import Untouched


class Viewing(nn.Module):
    def __init__(self, view):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4))
        self.register_buffer("v", view(self.w.data))


WHOLE = Viewing(lambda w: w.view(2, 2))
PART = Viewing(lambda w: w[1:3])
OTHER = Viewing(lambda w: w.view(torch.int32))


@pytest.mark.parametrize(
    ("model", "v"),
    [
        (WHOLE, torch.zeros(2, 2)),
        (PART, torch.tensor([2.0, 4.0])),
        (OTHER, torch.zeros(4, dtype=torch.int32)),
    ],
)
def test_what_one_would_undo_of_the_other_is_refused(model, v):
    before = Untouched(model)
    with pytest.raises(MatchError) as caught:
        load_into(model, {"w": torch.tensor([1.0, 2, 3, 4]), "v": v})
    before.check()
    (overlap,) = caught.value.report.overlapping
    assert (set(overlap.names), overlap.whole) == ({"v", "w"}, "w")


@pytest.mark.parametrize("view", [lambda w: w.view(2, 2), lambda w: w[1:3], lambda w: w[:2]])
def test_following_what_helps_loads_the_tensor_that_has_all_of_the_memory(view):
    model = Viewing(view)
    state = {"w": torch.tensor([1.0, 2, 3, 4]), "v": view(torch.full((4,), 9.0))}
    with pytest.raises(MatchError) as caught:
        load_into(model, state)
    report = load_into(model, state, **dict(caught.value.remedy.arguments))
    assert (report.missing_keys, report.unexpected_keys) == (["v"], ["v"])
    assert model.w.tolist() == [1, 2, 3, 4]
    assert model.v.tolist() == view(model.w.detach()).tolist()


def test_of_names_that_are_one_tensor_all_are_passed_over_but_those_of_the_parameter():
    model = Viewing(lambda w: w.view(2, 2))
    model.register_buffer("a", model.v)
    model.register_buffer("z", model.w.data)
    state = {
        "a": torch.zeros(2, 2),
        "v": torch.ones(2, 2),
        "w": torch.tensor([1.0, 2, 3, 4]),
        "z": torch.zeros(4),
    }
    with pytest.raises(MatchError) as caught:
        load_into(model, state)
    load_into(model, state, **dict(caught.value.remedy.arguments))
    assert model.w.tolist() == [1, 2, 3, 4]


def test_tensors_of_which_none_has_all_of_the_memory_need_another_model():
    flat = torch.zeros(6)
    model = nn.ParameterList([nn.Parameter(flat[:4]), nn.Parameter(flat[2:])])
    before = Untouched(model)
    with pytest.raises(MatchError, match="share memory in the model, and differ") as caught:
        load_into(model, {"0": torch.ones(4), "1": torch.zeros(4)})
    before.check()
    assert caught.value.report.overlapping[0].whole == ""
    assert not caught.value.remedy.arguments
    assert "memory of its own" in caught.value.hint


@pytest.mark.parametrize("view", [lambda w: w.view(2, 2), lambda w: w[1:3], lambda w: w[::2]])
def test_what_agrees_is_loaded(view, tmp_path):
    source, model = Viewing(view), Viewing(view)
    source.w.data.copy_(torch.arange(4.0))
    torch.save(source.state_dict(), tmp_path / "a.pth")
    assert load_into(model, tmp_path / "a.pth").fits
    assert model.v.tolist() == view(torch.arange(4.0)).tolist()
    assert model.w.tolist() == [0, 1, 2, 3]


def test_neighbours_do_not_overlap():
    flat = torch.zeros(8)
    model = nn.ParameterList([nn.Parameter(flat[:4]), nn.Parameter(flat[4:])])
    assert load_into(model, {"0": torch.ones(4), "1": torch.zeros(4)}).fits
    assert flat.tolist() == [1] * 4 + [0] * 4


def test_what_torch_copies_nothing_into_is_its_refusal_as_an_error_of_ours(tmp_path):
    model = Viewing(lambda w: w[:1].expand(3))
    state = {"w": torch.ones(4), "v": torch.ones(3)}
    torch.save(state, tmp_path / "a.pth")
    before = Untouched(model)
    for source in (state, tmp_path / "a.pth"):
        with pytest.raises(MatchError, match="more than one element of the written-to tensor"):
            load_into(model, source)
        before.check()
