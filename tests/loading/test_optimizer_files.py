"""Optimizers in files that old and new versions of torch, FSDP and trainers wrote."""

from pathlib import Path

import pytest
import torch

import ckptool
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
