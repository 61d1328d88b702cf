"""What a trial on a twin tells of a module's own loading."""

import functools
import weakref

import pytest
import torch

from ckptool.errors import CheckpointError, MatchError
from ckptool.loading.fitting import trial
from ckptool.loading.fitting.states import stated
from ckptool.loading.fitting.trial import tried
from ckptool.loading.load_into import load_into
from ckptool.loading.match import match
from tests.loading.bits import Untouched


class Converting(torch.nn.Module):
    """Some of it as it was given, under the same name or another's, some made of it."""

    def __init__(self):
        super().__init__()
        for name in ("same", "up", "gate", "turned", "cast", "mixed", "part", "stretched"):
            self.register_parameter(name, torch.nn.Parameter(torch.ones(4, 4)))

    def _load_from_state_dict(self, state, prefix, *rest):
        def change(name, how):
            state[prefix + name] = how(state[prefix + name])

        up, gate = f"{prefix}up", f"{prefix}gate"
        state[up], state[gate] = state[gate], state[up]
        change("turned", lambda tensor: tensor.t())
        change("cast", lambda tensor: tensor.half().clone())
        change("mixed", lambda tensor: tensor[torch.tensor([1, 0, 2, 3])])
        with torch.no_grad():
            self.part[:2].copy_(state.pop(prefix + "part")[:2])
            self.stretched.copy_(state.pop(prefix + "stretched")[0])
        super()._load_from_state_dict(state, prefix, *rest)


def test_it_tells_which_entries_are_in_the_model_as_they_were_given():
    model = torch.nn.Sequential(Converting())
    with stated(model.state_dict()) as state:
        found = tried(model, state, {name: name for name in state.slots}, None)
    assert found.filled == set(model.state_dict())
    assert dict(sorted(found.origins.items())) == {
        "0.cast": "0.cast",
        "0.gate": "0.up",
        "0.same": "0.same",
        "0.up": "0.gate",
    }


class Renaming(torch.nn.Linear):
    """Takes an old name, and has to do with another module as well."""

    def _load_from_state_dict(self, state, prefix, *rest):
        if f"{prefix}old" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}old")
        with torch.no_grad():
            self.other().weight.fill_(7)
        super()._load_from_state_dict(state, prefix, *rest)


class Copied:
    def __init__(self, other):
        self.other = other

    def __call__(self):
        return self.other


class Held(Copied):
    """Is not copied."""

    def __deepcopy__(self, memo):
        return self


KNOWN = {}


def by_default(other):
    return lambda one=other: one


def by_a_global(other):
    KNOWN["other"] = other
    return lambda: KNOWN["other"]


def by_data_of_a_global(other):
    KNOWN["other"] = type("Other", (), {"weight": other.weight.data})
    return lambda: KNOWN["other"]


def by_a_class(other):
    return type("Other", (), {"other": other, "__call__": lambda self: self.other})()


def by_memory(other):
    return type("Other", (), {"weight": other.weight.data, "__call__": lambda self: self})()


def by_weak_values(other):
    values = weakref.WeakValueDictionary(other=other)
    return lambda: values["other"]


def by_a_closure(other):
    return lambda: other


def by_a_partial(other):
    return functools.partial(lambda one: one, other)


REPLACED = [Copied, weakref.ref, by_a_closure, by_default, by_a_partial]
FOUND = [Held, by_a_class, by_memory, by_weak_values]
MET = [by_a_global, by_data_of_a_global]


def renaming(known):
    torch.manual_seed(0)
    model = torch.nn.Sequential(Renaming(4, 4), torch.nn.Linear(4, 4))
    model[0].other = known(model[1])
    state = {name: value + 1 for name, value in model.state_dict().items()}
    state["0.old"] = state.pop("0.weight")
    return model, state


@pytest.mark.parametrize("known", REPLACED)
def test_what_the_code_knows_is_the_twins(known):
    model, state = renaming(known)
    untouched = Untouched(model)
    versions = [one._version for one in model.parameters()]
    assert match(state, model)[1].fits
    with pytest.raises(MatchError):
        load_into(model, {**state, "more": torch.ones(1)})
    untouched.check()
    assert versions == [one._version for one in model.parameters()]
    load_into(model, state)
    assert torch.equal(model[1].weight, state["1.weight"])


@pytest.mark.parametrize("known", FOUND + MET)
def test_code_that_leads_to_the_model_itself_is_not_tried(known):
    model, state = renaming(known)
    untouched = Untouched(model)
    _, report = match(state, model)
    assert not report.fits
    assert report.notes == ("Renaming loads in its own way, which could not be tried beforehand",)
    with pytest.raises(MatchError) as caught:
        load_into(model, state)
    assert "could not be tried beforehand" in caught.value.hint
    untouched.check()


def test_what_is_too_large_to_be_copied_and_is_written_to_by_a_global_is_an_error(monkeypatch):
    monkeypatch.setattr(trial, "_COPIED", 0)
    for known in FOUND:
        model, state = renaming(known)
        untouched = Untouched(model)
        assert not match(state, model)[1].fits
        untouched.check()
    model, state = renaming(by_a_global)
    with pytest.raises(CheckpointError) as caught:
        match(state, model)
    assert caught.value.message == (
        "Sequential's own loading was tried on a twin, and has written to the model itself, which "
        "it knows by a global: 1.weight changed"
    )
    assert caught.value.hint == (
        "load the model anew, by model.load_state_dict(ckptool.load_state_dict(path))"
    )


def test_code_that_builds_layers_is_tried_where_they_have_no_elements():
    class Growing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            if metadata.get("version") == 1:
                self.stem = torch.nn.Linear(3, 2)
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    source, model = Growing(), torch.nn.Sequential(Growing())
    source.stem = torch.nn.Linear(3, 2)
    state = torch.nn.Sequential(source).state_dict()
    assert load_into(model, state).fits
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
