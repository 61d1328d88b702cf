"""`match` changes nothing of a model, and runs no loading code of its own."""

import random

import numpy
import pytest
import torch
from torch import nn

import ckptool


class Copied:
    """An attribute that counts how often it is copied."""

    made = 0

    def __deepcopy__(self, memo):
        Copied.made += 1
        return Copied()


class Odd(nn.Linear):
    """With an extra state that is hard to compare, and a loading that throws dice."""

    state = None

    def __init__(self):
        super().__init__(2, 2)
        self.held, self.told = Copied(), []

    def get_extra_state(self):
        return self.state() if callable(self.state) else self.state

    def set_extra_state(self, state):
        self.told.append(state)

    def _load_from_state_dict(self, *args):
        random.random()
        numpy.random.rand()
        torch.rand(1)
        super()._load_from_state_dict(*args)


def no_order():
    return {"array": numpy.arange(3), "object": object()}


@pytest.mark.parametrize("state", [numpy.arange(3), object, no_order, float("nan")])
def test_an_extra_state_is_not_set_on_the_model(state):
    model = Odd()
    model.state = state
    _, report = ckptool.match({"weight": torch.ones(2, 2)}, model)
    assert [name for name, _ in report.kept] == ["bias", "_extra_state"]
    assert model.told == []


def test_random_numbers_come_as_they_would_have():
    def dice():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    model = Odd()
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    wanted = dice()
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
    ckptool.match({"weight": torch.ones(2, 2)}, model)
    assert dice() == wanted


@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_the_model_is_neither_copied_nor_loaded(shape):
    model, tensor = Odd(), torch.ones(shape)
    before, weight = Copied.made, model.weight.detach().clone()
    ckptool.match({"weight": tensor}, model)
    assert Copied.made == before
    assert torch.equal(model.weight, weight)
