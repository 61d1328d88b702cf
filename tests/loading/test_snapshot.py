"""A model put back: what it is made of, what it holds, and signals that wait."""

import signal
import threading

import numpy
import pytest
import torch
from torch import nn

from ckptool.errors import CheckpointWarning
from ckptool.loading.snapshot import Snapshot, delay_signals, list_tensors
from tests.loading.bits import Untouched


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.zeros(2), persistent=False)
        self.inner = nn.Linear(2, 2)
        self.lazy = nn.LazyLinear(2)
        self.notes = {"a": 1}
        self.deep = {"list": [1]}

    def get_extra_state(self):
        return self.deep

    def set_extra_state(self, state):
        self.deep = state


def everything(tensor):
    return True


def test_all_of_a_model_is_put_back():
    model = Whole()
    untouched = Untouched(model)
    snapshot = Snapshot(model, copied=everything)
    with torch.no_grad():
        model.weight.fill_(1)
        model.count += 1
    model.inner.weight = nn.Parameter(torch.zeros(1))
    model.inner.bias.data = torch.zeros(5)
    model.inner.bias.requires_grad_(False)
    model.lazy.weight.materialize((2, 7))
    model.notes["b"] = 2
    model.extra = 3
    del model.inner
    model.__class__ = nn.Module
    snapshot.restore()
    untouched.check()
    assert (model.notes, hasattr(model, "extra")) == ({"a": 1}, False)


def test_a_buffer_that_was_computed_from_a_parameter_is_put_back():
    model = Whole()
    untouched = Untouched(model)
    snapshot = Snapshot(model, copied=everything)
    model.count.copy_(model.inner.bias)
    snapshot.restore()
    untouched.check()
    assert model.count.is_leaf


def test_an_extra_state_that_was_changed_in_place_is_set_again():
    model = Whole()
    snapshot = Snapshot(model, copied=everything)
    model.deep["list"].append(2)
    snapshot.restore()
    assert model.deep == {"list": [1]}


def test_what_cannot_be_put_back_keeps_nothing_else_from_it():
    class Refusing(Whole):
        def set_extra_state(self, state):
            raise ZeroDivisionError

    model = Refusing()
    weight = model.weight.detach().clone()
    snapshot = Snapshot(model, copied=everything)
    model.deep["list"].append(2)
    model.weight.data.zero_()
    with pytest.warns(CheckpointWarning, match="could not fully restore Refusing"):
        snapshot.restore()
    assert torch.equal(model.weight, weight)


def test_elements_that_are_repeated_are_put_back_once():
    model = nn.Module()
    model.register_buffer("mean", torch.ones(2, 1).expand(2, 3))
    snapshot = Snapshot(model, copied=everything)
    model.mean[:, 0] = 5
    snapshot.restore()
    assert model.mean.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_what_is_not_copied_keeps_its_elements():
    model = Whole()
    snapshot = Snapshot(model, copied=lambda tensor: tensor is not model.weight)
    with torch.no_grad():
        model.weight.fill_(5)
        model.inner.bias.fill_(5)
    snapshot.restore()
    assert model.weight.tolist() == [5, 5, 5]
    assert 5 not in model.inner.bias.tolist()


def test_tensors_are_met_once_each():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[1].weight = model[0].weight
    assert len(list(list_tensors(model))) == 3


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_signals_wait(error):
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append("now"))
    try:
        with delay_signals():
            signal.raise_signal(signal.SIGINT)
            assert came == []
        assert came == ["now"]
        signal.raise_signal(signal.SIGINT)
        assert came == ["now", "now"]
        if error is not None:
            with pytest.raises(error), delay_signals():
                raise error
            signal.raise_signal(signal.SIGINT)
            assert len(came) == 3
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_every_signal_that_came_is_handled_whatever_the_first_raises(error):
    came = []

    def handle(number, frame):
        came.append((number, frame is not None))
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        with pytest.raises(KeyboardInterrupt):
            two_signals_come(numbers, error)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    assert came == [(number, True) for number in numbers]


def two_signals_come(numbers, error):
    with delay_signals():
        for number in numbers:
            signal.raise_signal(number)
        if error is not None:
            raise error


EXTRA = {
    "array": (lambda: numpy.arange(3), lambda: numpy.arange(4), None),
    "object": (lambda: [object()], lambda: [object(), 1], None),
    "plain": (lambda: {"a": (1, [2.0])}, lambda: {"a": (1, [3.0])}, True),
    "tensor": (lambda: torch.ones(2), lambda: torch.zeros(2), None),
}


@pytest.mark.parametrize("kind", EXTRA)
def test_an_extra_state_is_set_where_it_may_differ(kind):
    made, other, is_told = EXTRA[kind]

    class Extra(nn.Module):
        held, told = made(), 0

        def get_extra_state(self):
            return self.held

        def set_extra_state(self, state):
            self.told += 1

    model = Extra()
    snapshot = Snapshot(model, copied=everything)
    snapshot.restore()
    assert bool(model.told) is (is_told is None)
    Extra.held = other()
    snapshot.restore()
    assert model.told


def test_other_threads_have_no_signals_to_hold():
    ran = []

    def work():
        with delay_signals():
            ran.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [True]
