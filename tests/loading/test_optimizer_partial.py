"""State of an optimizer over other parameters, or in other groups: what both have, by names."""

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import MatchError

ALLOWED = {"allow_missing": ["head.*"], "allow_unexpected": ["old.*"]}


class Net(nn.Module):
    def __init__(self, head="old", width=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.add_module(head, nn.Linear(4, width))


def trained(tmp_path, net=None):
    net = net or Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.3)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    ckptool.save(tmp_path / "run.pth", model=net, optimizer=optimizer)
    return net, optimizer


def moments(net, optimizer):
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return {names[id(one)]: state["exp_avg"] for one, state in optimizer.state.items()}


def steps(net, optimizer):
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_new_head_starts_without_state_and_the_old_one_is_left_out(tmp_path):
    old, used = trained(tmp_path)
    net = Net("head", width=7)
    fresh = torch.optim.AdamW(net.parameters(), lr=0.1)
    with pytest.raises(MatchError) as refused:
        ckptool.load_into(net, tmp_path / "run.pth", optimizer=fresh, **ALLOWED)
    assert "optimizer_partial=True" in refused.value.hint
    assert not fresh.state
    report = ckptool.load_into(
        net, tmp_path / "run.pth", optimizer=fresh, optimizer_partial=True, **ALLOWED
    ).optimizer
    assert (report.by, report.matched, report.parameters) == ("names", 4, 6)
    assert report.notes == (
        "2 parameters without state: head.weight, head.bias",
        "state of 2 parameters left out: old.weight, old.bias",
    )
    there, here = moments(old, used), moments(net, fresh)
    assert here.keys() == {name for name in there if name.startswith("body")}
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert fresh.param_groups[0]["lr"] == 0.3
    steps(net, fresh)
    assert len(fresh.state) == 6


def test_groups_that_are_divided_by_decay_keep_their_own_options(tmp_path):
    old, used = trained(tmp_path)
    net = Net()
    decayed = [one for one in net.parameters() if one.dim() > 1]
    others = [one for one in net.parameters() if one.dim() == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    fresh = torch.optim.AdamW(groups, lr=0.1)
    report = ckptool.load_into(
        net, tmp_path / "run.pth", optimizer=fresh, optimizer_partial=True
    ).optimizer
    assert report.matched == 6
    assert report.notes[0].startswith("the groups keep their own learning rates")
    assert [(one["lr"], one["weight_decay"]) for one in fresh.param_groups] == [
        (0.1, 0.01), (0.1, 0.0),
    ]  # fmt: skip
    there, here = moments(old, used), moments(net, fresh)
    assert all(torch.equal(here[name], there[name]) for name in there)
    steps(net, fresh)


def test_frozen_layers_need_no_state(tmp_path):
    trained(tmp_path)
    net = Net()
    fresh = torch.optim.AdamW(net.old.parameters())
    report = ckptool.load_into(
        net, tmp_path / "run.pth", optimizer=fresh, optimizer_partial=True
    ).optimizer
    assert report.matched == 2
    assert report.notes[0].startswith("state of 4 parameters left out: body.0.weight")


def test_what_has_no_names_or_shares_none_is_refused_all_the_same(tmp_path):
    net, used = trained(tmp_path)
    torch.save({"model": net.state_dict(), "optimizer": used.state_dict()}, tmp_path / "bare.pth")
    fresh = torch.optim.AdamW(net.old.parameters())
    with pytest.raises(MatchError, match="does not name"):
        ckptool.load_into(net, tmp_path / "bare.pth", optimizer=fresh, optimizer_partial=True)
    other = nn.Sequential(Net("head"), nn.Linear(2, 2))
    fresh = torch.optim.AdamW(other[1].parameters())
    with pytest.raises(MatchError, match=r"over other parameters|first difference"):
        ckptool.load_into(
            other, tmp_path / "run.pth", optimizer=fresh, optimizer_partial=True, strict=False
        )
