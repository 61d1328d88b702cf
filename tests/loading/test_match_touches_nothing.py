"""`match` tries a model's own loading on a twin: nothing of the model itself is changed."""

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
    assert report.missing_keys == ["bias", "_extra_state"]
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


@pytest.mark.parametrize(("shape", "copies"), [((2, 2), 1), ((2, 3), 2)])
def test_the_model_is_copied_once_and_again_only_for_other_shapes(shape, copies):
    model = Odd()
    before = Copied.made
    ckptool.match({"weight": torch.ones(shape)}, model)
    assert Copied.made - before == copies
