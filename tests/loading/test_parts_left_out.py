"""Models whose own `state_dict` leaves a part out: what is missing, and what lets it load."""

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import MatchError
from tests.loading.bits import untouched_by


class Teacher(nn.Module):
    """Its frozen part is in no file."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4)

    def state_dict(self, *args, **options):
        state = super().state_dict(*args, **options)
        return {name: value for name, value in state.items() if not name.startswith("frozen")}


class Looking(Teacher):
    """Code of its own sees the state dict before torch does."""

    def __init__(self):
        super().__init__()
        self._register_load_state_dict_pre_hook(lambda *_: None)


class Renaming(Teacher):
    """Its file has other names than torch asks for, which is no part left out."""

    def state_dict(self, *args, **options):
        state = nn.Module.state_dict(self, *args, **options)
        return {f"net_{name}": value for name, value in state.items()}

    def __init__(self):
        super().__init__()
        self._register_load_state_dict_pre_hook(self.back)

    def back(self, state, *_):
        for name in list(state):
            state[name.removeprefix("net_")] = state.pop(name)


def hooked():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def leave_out(module, state, prefix, local):
        for name in [name for name in state if name.startswith(f"{prefix}0.")]:
            del state[name]

    model._register_state_dict_hook(leave_out)
    return model


KINDS = {
    "state dict": (Teacher, "frozen"),
    "looking": (Looking, "frozen"),
    "hook": (hooked, "0"),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def file(kind, tmp_path):
    ckptool.save(tmp_path / "f.pth", model=kind[0]())
    return tmp_path / "f.pth"


def torch_asks_for(make, file):
    found = make().load_state_dict(torch.load(file)["state_dict"], strict=False)
    return found.missing_keys


def test_what_torch_misses_is_missing_for_match_and_load_into(kind, file):
    make, part = kind
    names = [f"{part}.weight", f"{part}.bias"]
    assert torch_asks_for(make, file) == names
    _, report = ckptool.match(file, make())
    if make is Looking:  # its own code could fill them
        told = dict(report.kept)
        assert all(told[name].startswith("torch decides") for name in names)
    else:
        assert (report.fits, report.missing_keys, report.coverage) == (False, names, 0.5)
    model = make()
    with untouched_by(MatchError, model, match=f"2 tensors are missing in it: {part}") as caught:
        ckptool.load_into(model, file)
    assert caught.value.report.missing_keys == names


def test_the_hint_is_followed_and_the_part_stays_as_it_is(kind, file):
    make, part = kind
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(make(), file)
    for options in (dict(caught.value.remedy.arguments), {"strict": False}):
        model = make()
        frozen = model.get_submodule(part).weight.detach().clone()
        report = ckptool.load_into(model, file, **options)
        assert report.coverage == 0.5
        assert report.missing_keys == [f"{part}.weight", f"{part}.bias"]
        assert torch.equal(model.get_submodule(part).weight, frozen)
        wanted = torch.load(file)["state_dict"]
        assert all(torch.equal(wanted[name], model.state_dict()[name]) for name in wanted)


def test_a_file_that_has_the_part_loads_whole(kind):
    make, part = kind
    source = make()
    state = nn.Module.state_dict(source) if part == "frozen" else Whole().state_dict()
    model = make()
    report = ckptool.load_into(model, state)
    assert (report.fits, report.coverage) == (True, 1.0)
    assert torch.equal(model.get_submodule(part).weight, state[f"{part}.weight"])


class Whole(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))


class Alone(nn.Module):
    """Its `load_state_dict` takes the state alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def load_state_dict(self, state):
        return super().load_state_dict(state)


class Anything(Alone):
    def load_state_dict(self, *args, **options):
        return nn.Module.load_state_dict(self, *args, **options)


@pytest.mark.parametrize("make", [Alone, Anything])
def test_a_loading_is_called_with_what_it_takes(make):
    source, model = make(), make()
    assert ckptool.load_into(model, source.state_dict()).fits
    assert torch.equal(model.layer.weight, source.layer.weight)


def test_what_a_hook_takes_away_may_be_allowed_and_is_told():
    def build():
        model = nn.Linear(2, 2)
        model.register_load_state_dict_pre_hook(lambda module, state, *_: state.pop("bias"))
        return model

    state = nn.Linear(2, 2).state_dict()
    with pytest.raises(MatchError, match="1 tensor is missing in it: bias") as caught:
        ckptool.load_into(build(), state)
    report = ckptool.load_into(build(), state, **dict(caught.value.remedy.arguments))
    assert report.missing_keys == ["bias"]
