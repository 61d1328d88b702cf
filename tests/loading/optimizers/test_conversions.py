"""State of parameters that a module's own loading makes something else of."""

import pytest
import torch

import ckptool
from ckptool.errors import MatchError
from tests.loading.bits import Untouched
from tests.loading.optimizing import assert_alike, by_name, content, loaded, refusal_of, stepped


class Gated(torch.nn.Module):
    """Its old files call two layers of one shape the other way round."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.up, self.gate = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if metadata.get("version", 1) < 2:
            for name in ("weight", "bias"):
                up, gate = f"{prefix}up.{name}", f"{prefix}gate.{name}"
                state[up], state[gate] = state[gate], state[up]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Turned(torch.nn.Linear):
    """Kept transposed in its files."""

    def __init__(self):
        super().__init__(3, 3)

    def _load_from_state_dict(self, state, prefix, *rest):
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()
        super()._load_from_state_dict(state, prefix, *rest)


class Renamed(torch.nn.Module):
    """Its parameter had another name."""

    def __init__(self, name):
        super().__init__()
        self.register_parameter(name, torch.nn.Parameter(torch.zeros(3, 3)))

    def _load_from_state_dict(self, state, prefix, *rest):
        if f"{prefix}old" in state:
            state[f"{prefix}new"] = state.pop(f"{prefix}old")
        super()._load_from_state_dict(state, prefix, *rest)


class Numerical(torch.nn.Linear):
    """What it does hangs on the numbers."""

    def __init__(self):
        super().__init__(3, 3)

    def _load_from_state_dict(self, state, prefix, *rest):
        if state[f"{prefix}weight"].sum() > 1e9:
            raise AssertionError
        super()._load_from_state_dict(state, prefix, *rest)


def saved(model, names=True):
    """As a script of before the versions wrote it."""
    used = stepped(
        model, parameters=list(model.named_parameters() if names else model.parameters())
    )
    given = content(model, used)
    given["model"] = dict(given["model"])
    return given, used


def test_state_goes_where_the_weights_go():
    old, new = (torch.nn.Sequential(Gated()) for _ in range(2))
    given, used = saved(old)
    optimizer = torch.optim.Adam(new.parameters())
    ckptool.load_into(new, given, optimizer=optimizer)
    assert torch.equal(new[0].up.weight, old[0].gate.weight)
    for name in ("weight", "bias"):
        for here, there in (("up", "gate"), ("gate", "up")):
            states = (
                opt.state[model.get_parameter(f"0.{layer}.{name}")]
                for opt, model, layer in ((optimizer, new, here), (used, old, there))
            )
            assert_alike(*states)


def test_with_a_version_that_changes_nothing_neither_does():
    old, new = (torch.nn.Sequential(Gated()) for _ in range(2))
    used = stepped(old, parameters=list(old.named_parameters()))
    optimizer = torch.optim.Adam(new.parameters())
    loaded(new, optimizer, content(old, used))
    assert_alike(by_name(new, optimizer), by_name(old, used))


def test_state_follows_a_name_that_is_new():
    old, new = torch.nn.Sequential(Renamed("old")), torch.nn.Sequential(Renamed("new"))
    given, used = saved(old)
    optimizer = torch.optim.Adam(new.parameters())
    ckptool.load_into(new, given, optimizer=optimizer)
    assert_alike(optimizer.state[new[0].new], used.state[old[0].old])


@pytest.mark.parametrize("order", [None, "position"])
def test_state_of_weights_that_are_changed_is_refused(order):
    old, new = (torch.nn.Sequential(Turned(), torch.nn.Linear(3, 2)) for _ in range(2))
    given, _ = saved(old)
    optimizer = torch.optim.Adam(new.parameters())
    untouched = Untouched(new, optimizer)
    problem, remedy = refusal_of(new, optimizer, given, order=order)
    assert problem == (
        "0.weight is made of what the file has by Turned's own loading, and what its optimizer "
        "keeps of that is not"
    )
    assert remedy == "without optimizer= the model alone is loaded"
    with pytest.raises(MatchError):
        ckptool.load_into(new, given, optimizer=optimizer)
    untouched.check()
    ckptool.load_into(new, given)


def test_what_cannot_be_tried_is_told():
    old, new = (torch.nn.Sequential(Numerical()) for _ in range(2))
    given, used = saved(old)
    optimizer = torch.optim.Adam(new.parameters())
    report = ckptool.load_into(new, given, optimizer=optimizer)
    assert report.optimizer.notes == (
        "Numerical loads in its own way, which could not be tried beforehand: state goes by the "
        "names as they are, whatever that makes of the tensors",
    )
    assert_alike(by_name(new, optimizer), by_name(old, used))
