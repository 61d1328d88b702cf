"""A model built on the meta device, where that says all of it."""

import torch
from torch import nn

from ckptool.loading.target import on_meta


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight


def test_nothing_is_allocated():
    assert {value.is_meta for value in on_meta(Tied).state_dict().values()} == {True}


def test_what_wants_numbers_is_not_built():
    assert on_meta(lambda: nn.Linear(torch.ones(1).int().item(), 1)) is None


def test_a_state_dict_is_as_it_is_made():
    assert list(on_meta(lambda: {"a": torch.ones(2)})) == ["a"]
