"""Optimizers in files: of old and new torch, FSDP and trainers; whole or, by names, in part."""

from pathlib import Path

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import MatchError
from tests.loading.optimizing import assert_alike, loaded, model_of, refusal_of, report_of

FIXTURES = Path(__file__).parents[2] / "fixtures"

FILES = [
    *(f"torch-{version}/dp_full_cuda1.pth" for version in (
        "1.0.1-python2", "1.0.1", "1.2.0", "1.5.0", "1.8.1", "1.10.2", "1.12.1", "2.0.1", "2.2.2",
        "2.6.0", "2.10.0",
    )),
    *(f"torch-{version}/single_full.tar" for version in ("1.4.0", "1.6.0", "1.13.1", "2.13.0")),
    "ddp/ddp_full.pth", "ecosystem/lightning.ckpt", "trainers/ddp.pth.tar",
    "trainers/lightning.ckpt",
]  # fmt: skip


def optimizer_for(model, state):
    """One of the kind that a state dict is of."""
    options = state["param_groups"][0]
    kind = torch.optim.SGD if "momentum" in options else torch.optim.Adam
    return kind(model.parameters(), lr=0.5)


@pytest.mark.parametrize("name", FILES)
def test_position_gives_what_torch_gives_where_the_order_is_vouched_for(name):
    file = FIXTURES / name
    with ckptool.open(file) as checkpoint:
        (where,) = (one.name for one in checkpoint.sections if one.kind == "optimizer")
    held = ckptool.load(file)
    for key in where.split("/"):
        held = held[int(key) if key.isdigit() else key]
    model = model_of(ckptool.load_state_dict(file))
    mine, theirs = optimizer_for(model, held), optimizer_for(model, held)
    theirs.load_state_dict(held)
    report = loaded(model, mine, file, order="position")
    assert report.matched == len(list(model.parameters())) == len(theirs.state)
    assert_alike(*(dict(sorted(one.state_dict()["state"].items())) for one in (mine, theirs)))
    for key in held["param_groups"][0].keys() - {"params"}:
        assert mine.param_groups[0][key] == theirs.param_groups[0][key]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    mine.step()


def test_state_by_name_as_fsdp_gathers_it():
    file = FIXTURES / "distributed/fsdp1_full.pth"
    held = ckptool.load(file)
    model = model_of(held["model"])
    optimizer = torch.optim.Adam(reversed(list(model.parameters())))
    assert loaded(model, optimizer, file).by == "names"
    for name, parameter in model.named_parameters():
        assert_alike(optimizer.state[parameter], held["optim"]["state"][name])


def test_parts_of_ranks_are_refused():
    file = FIXTURES / "distributed/fsdp2_0_of_2.pth"
    whole = model_of(ckptool.load(FIXTURES / "distributed/fsdp1_full.pth")["model"])
    problems = report_of(whole, torch.optim.Adam(whole.parameters()), file).problems
    assert problems


def test_names_that_torch_stores():
    file = FIXTURES / "training/named_optimizer.pth"
    held = ckptool.load(file)
    model = model_of(ckptool.load_state_dict(file))
    options = {"lr": 0.1, "momentum": 0.9}
    optimizer = torch.optim.SGD(reversed(list(model.parameters())), **options)
    assert "there are 2 optimizers" in refusal_of(model, optimizer, file)[0]
    for key in ("optim_dict", "optim_by_name"):
        assert loaded(model, optimizer, file, key=key).by == "names"
        names = held[key]["param_groups"][0]["param_names"]
        numbers = held[key]["param_groups"][0]["params"]
        wanted = dict(zip(names, numbers, strict=True))
        mine = {name.split("module.")[-1]: number for name, number in wanted.items()}
        for name, parameter in model.named_parameters():
            assert_alike(optimizer.state[parameter], held[key]["state"][mine[name]])


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
