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


@pytest.mark.parametrize("view", [lambda w: w.view(2, 2), lambda w: w[1:3], lambda w: w[::2]])
def test_where_the_file_has_two_contents_it_is_as_torch_loads_it(view, tmp_path):
    model, judge = Viewing(view), Viewing(view)
    state = {"w": torch.tensor([1.0, 2, 3, 4]), "v": view(torch.full((4,), 9.0))}
    torch.save(state, tmp_path / "a.pth")
    judge.load_state_dict(state)
    for source in (state, tmp_path / "a.pth"):
        assert load_into(model, source).overlapping == ()
        assert torch.equal(model.w, judge.w)
        assert torch.equal(model.v, judge.v)


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
