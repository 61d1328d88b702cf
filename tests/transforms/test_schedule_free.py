"""A schedule-free optimizer keeps the model elsewhere: `--ema` gives what its `eval()` gives."""

import copy

import pytest
import torch
from torch import nn

import ckptool
from ckptool.cli import main


class ScheduleFree(torch.optim.Optimizer):
    """As facebookresearch/schedule_free 1.4.1: its state, its groups and its `eval()`."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, "train_mode": True, **options})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta = self.beta(group)
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone(memory_format=torch.preserve_format))
                p.lerp_(end=z, weight=0.3).sub_(p.grad, alpha=group["lr"] * (beta * 0.7 - 1))
                z.sub_(p.grad, alpha=group["lr"])

    def beta(self, group):
        return group["betas"][0] if "betas" in group else group["momentum"]

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(end=self.state[p]["z"], weight=1 - 1 / self.beta(group))
            group["train_mode"] = False


class Net(nn.Sequential):
    def __init__(self, dtype=torch.float32):
        super().__init__(nn.Linear(13, 37), nn.BatchNorm1d(37), nn.Linear(37, 37, bias=False))
        self.tied = nn.Linear(37, 37, bias=False)
        self.tied.weight = self[2].weight
        self.to(dtype)


def trained(dtype=torch.float32, groups=None, named=False, **options):
    torch.manual_seed(2)
    model = Net(dtype)
    given = model.named_parameters() if named else model.parameters()
    optimizer = ScheduleFree(groups(model) if groups else given, **(options or {"momentum": 0.9}))
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return model, optimizer


def wanted(model, optimizer):
    other, copied = Net(next(model.parameters()).dtype), copy.deepcopy(optimizer.state_dict())
    other.load_state_dict(model.state_dict())
    mine = ScheduleFree(
        [{**group, "params": [*other.parameters()][at : at + len(group["params"])]}
         for group in optimizer.param_groups
         for at in [len([p for g in optimizer.param_groups[: optimizer.param_groups.index(group)]
                         for p in g["params"]])]]
    )  # fmt: skip
    mine.load_state_dict(copied)
    mine.eval()
    return other.state_dict()


def halves(model):
    every = [*model.named_parameters()]
    return [{"params": every[:2]}, {"params": every[2:], "betas": (0.5, 0.9)}]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "options",
    [{"momentum": 0.9}, {"betas": (0.95, 0.99)}, {"betas": (0.9, 0.99), "groups": halves}],
)
def test_ema_gives_the_weights_of_eval_mode_to_the_last_bit(tmp_path, options, dtype, wrapped):
    model, optimizer = trained(dtype, **options)
    outer = nn.DataParallel(model) if wrapped else model
    torch.save({"m": outer.state_dict(), "o": optimizer.state_dict()}, tmp_path / "f.pth")
    assert main(["extract", str(tmp_path / "f.pth"), "--ema", "-o", str(tmp_path / "e.pth")]) == 0
    found, right = ckptool.load_state_dict(tmp_path / "e.pth"), wanted(model, optimizer)
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert not torch.equal(found["0.weight"], model.state_dict()["0.weight"])


def test_info_and_doctor_warn_of_training_weights(tmp_path):
    model, optimizer = trained()
    path = tmp_path / "f.pth"
    for is_training in (True, False):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        kinds = [one.kind for one in ckptool.doctor(path).complaints]
        assert ("training-weights" in kinds) == is_training
        notes = [note for note in ckptool.info(path).notes if "schedule-free" in note]
        assert len(notes) == is_training
        assert all(f"ckptool extract {path} --ema" in note for note in notes)
        optimizer.eval()


def other_groups(model):
    every = [*model.parameters()]
    return [{"params": every[:2]}, {"params": every[2:]}]


@pytest.mark.parametrize(
    ("groups", "extra"),
    [(other_groups, {}), (lambda model: [*model.parameters()][::-1], {}),
     (lambda model: [*model.parameters()][1:], {}), (None, {"more.weight": torch.ones(2)})],
)  # fmt: skip
def test_positions_that_prove_nothing_are_refused(tmp_path, capsys, groups, extra):
    model, optimizer = trained(groups=groups, momentum=0.9)
    path = tmp_path / "f.pth"
    held = {"model": {**model.state_dict(), **extra}, "optimizer": optimizer.state_dict()}
    torch.save(held, path)
    assert main(["extract", str(path), "--ema", "-o", str(tmp_path / "e.pth")]) != 0
    said = capsys.readouterr().err
    assert "do not prove which state belongs to which weight" in said
    assert "optimizer.eval()" in said
