"""Models whose state dicts have other names than their parameters."""

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import MatchError


def renaming(model, names):
    """What hooks on a state dict make of it, and back."""
    back = {new: old for old, new in names.items()}

    def renamed(state, prefix, table):
        held = {name: state.pop(name) for name in list(state)}
        for name, value in held.items():
            head, _, leaf = name.removeprefix(prefix).partition(".")
            state[f"{prefix}{table.get(head, head)}.{leaf}"] = value

    model.register_state_dict_post_hook(lambda m, state, prefix, _: renamed(state, prefix, names))
    model.register_load_state_dict_pre_hook(
        lambda m, state, prefix, *others: renamed(state, prefix, back)
    )
    return model


def renamed_all():
    return renaming(
        nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}), {"a": "A", "b": "B"}
    )


def swapped():
    return renaming(
        nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}), {"a": "b", "b": "a"}
    )


WRAPS = {"plain": lambda model: model, "inside": nn.Sequential, "DP": nn.DataParallel}


def stepped(model, named=False):
    optimizer = torch.optim.Adam(model.named_parameters() if named else model.parameters())
    for at, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, at + 1.0)
    optimizer.step()
    return optimizer


def check(model, optimizer, source):
    """Each parameter has its own moments again, and its own elements."""
    fresh = torch.optim.Adam(model.parameters())
    assert ckptool.load_into(model, source, optimizer=fresh).optimizer.by == "names"
    moments = [held["exp_avg"] for held in optimizer.state.values()]
    for parameter, moment in zip(model.parameters(), moments, strict=True):
        assert torch.equal(fresh.state[parameter]["exp_avg"], moment)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("made", [renamed_all, swapped])
@pytest.mark.parametrize("named", [False, True])
def test_what_save_writes_goes_back(made, wrap, named, tmp_path):
    model = WRAPS[wrap](made())
    optimizer = stepped(model, named)
    ckptool.save(tmp_path / "f.pth", model=model, optimizer=optimizer)
    check(WRAPS["plain" if wrap == "DP" else wrap](made()), optimizer, tmp_path / "f.pth")
    held = torch.load(tmp_path / "f.pth")
    assert {*held["optimizer"]["param_groups"][0]["param_names"]} == {*held["state_dict"]}


@pytest.mark.parametrize("wrap", WRAPS)
def test_names_that_torch_keeps_are_those_of_the_parameters(wrap, tmp_path):
    model = WRAPS[wrap](renamed_all())
    optimizer = stepped(model, named=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "f.pth")
    check(WRAPS[wrap](renamed_all()), optimizer, tmp_path / "f.pth")


def test_names_that_are_another_parameters_in_the_state_dict_are_refused():
    model = swapped()
    optimizer = stepped(model, named=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    target = swapped()
    fresh = torch.optim.Adam(target.parameters())
    with pytest.raises(MatchError) as caught:
        ckptool.load_into(target, state, optimizer=fresh)
    assert "it is not sure which" in str(caught.value)
    assert not fresh.state
