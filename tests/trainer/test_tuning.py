"""Optimizer, schedule, scaler: torch is the judge."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedules
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptool.errors import TrainingError
from ckptool.trainer import TrainConfig
from ckptool.trainer.data import Batches
from ckptool.trainer.tuning import Average, Tuning, compute_rate_factor
from tests.trainer.runs import data, held, net, run

STEPS, EPOCH = 24, 4


def config(**options):
    return TrainConfig(out="unused", **options)


def tuned(module, **options):
    return Tuning(config(**options), module, steps=STEPS, steps_per_epoch=EPOCH)


def rates(make):
    """The rates that a schedule of torch's gives, from a rate of 0.01."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    schedule = make(optimizer)
    told = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR steps its own with a number
        for _ in range(STEPS):
            told.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    return told


def warmed(optimizer, then, steps):
    up = torch_schedules.LinearLR(optimizer, 1 / (steps + 1), 1.0, steps)
    return torch_schedules.SequentialLR(optimizer, [up, then], [steps])


def test_a_schedule_is_that_of_torch():
    for options, make in [
        ({}, lambda one: torch_schedules.ConstantLR(one, 1.0)),
        ({"schedule": "cosine"}, lambda one: torch_schedules.CosineAnnealingLR(one, STEPS)),
        ({"schedule": "linear"}, lambda one: torch_schedules.LinearLR(one, 1.0, 0.0, STEPS)),
        (
            {"schedule": "step", "step_size": 2, "gamma": 0.5},
            lambda one: torch_schedules.StepLR(one, 2 * EPOCH, 0.5),
        ),
        (
            {"schedule": "cosine", "warmup": 5},
            lambda one: warmed(one, torch_schedules.CosineAnnealingLR(one, STEPS - 5), 5),
        ),
        (
            {"schedule": "linear", "warmup": 3},
            lambda one: warmed(one, torch_schedules.LinearLR(one, 1.0, 0.0, STEPS - 3), 3),
        ),
        ({"warmup": 7}, lambda one: torch_schedules.LinearLR(one, 1 / 8, 1.0, 7)),
    ]:
        made = config(lr=0.01, **options)
        ours = [
            0.01 * compute_rate_factor(made, done, steps=STEPS, steps_per_epoch=EPOCH)
            for done in range(STEPS)
        ]
        assert ours == pytest.approx(rates(make), rel=1e-9, abs=1e-15), options


def test_a_schedule_whose_warmup_is_all_there_is_ends_at_its_rate():
    made = config(schedule="cosine", warmup=STEPS)
    assert compute_rate_factor(made, STEPS, steps=STEPS, steps_per_epoch=EPOCH) == 1.0


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({"optimizer": "adam"}, torch.optim.Adam),
        ({"optimizer": "adamw", "weight_decay": 0.1}, torch.optim.AdamW),
        ({"optimizer": "sgd", "momentum": 0.9}, torch.optim.SGD),
    ],
)
def test_a_run_is_what_a_loop_by_hand_gives(tmp_path, options, make):
    """Accumulation, clipping over all gradients, smaller last batches: in float64, to rounding."""
    model, reference = (net(dropout=0.0).double() for _ in range(2))
    given = data(dtype="float64")
    run(tmp_path, model=model, given=given, clip=0.3, lr=0.02, dtype="float64", **options)
    keywords = {key: value for key, value in options.items() if key != "optimizer"}
    optimizer = make(reference.parameters(), lr=0.02, **keywords)
    for epoch in range(3):
        for batches in Batches(22, 4, 2, 0).iterate_epoch(epoch):
            rows = [row for batch in batches for row in batch]  # one large batch
            x, y = given.train.tensors[0][rows], given.train.tensors[1][rows]
            optimizer.zero_grad()
            nn.functional.mse_loss(reference(x), y).backward()
            nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
            optimizer.step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_an_infinite_gradient_is_skipped_by_the_scaler():
    module = net()
    tuning = tuned(module, amp="fp16", ema=0.5, schedule="linear", clip=1.0)
    before = [one.detach().clone() for one in module.parameters()]
    scale, rate = tuning.scaler.get_scale(), tuning.rate
    for one in module.parameters():
        one.grad = torch.full_like(one, math.inf)
    tuning.scaler.scale(torch.zeros(()))  # the scale is made with the first loss
    assert tuning.has_finite_gradients  # nothing that ends the run
    scale = tuning.scaler.get_scale()
    tuning.step()
    assert all(map(torch.equal, before, module.parameters()))
    assert (tuning.rate, tuning.scaler.get_scale()) == (rate, scale / 2)
    assert tuning.schedule.last_epoch == 0
    for one in module.parameters():
        one.grad = torch.ones_like(one)
    tuning.step()
    assert not any(map(torch.equal, before, module.parameters()))
    assert tuning.schedule.last_epoch == 1


def test_a_gradient_that_is_no_number_is_seen():
    for value in [math.inf, -math.inf, math.nan]:
        module = net()
        tuning = tuned(module)
        assert tuning.has_finite_gradients, value  # there are none
        for one in module.parameters():
            one.grad = torch.ones_like(one)
        assert tuning.has_finite_gradients, value
        module[3].weight.grad[0, 2] = value
        assert not tuning.has_finite_gradients, value


def test_gradients_that_are_sparse_or_of_no_element_are_looked_at():
    module = nn.Embedding(4, 2, sparse=True)
    module.empty = nn.Parameter(torch.empty(0))
    tuning = tuned(module, optimizer="sgd")
    (module(torch.tensor([1, 1, 2])).sum() + module.empty.sum()).backward()
    assert tuning.has_finite_gradients
    module.weight.grad *= math.nan
    assert not tuning.has_finite_gradients


def test_parameters_that_are_frozen_have_no_state():
    module = net()
    module[0].weight.requires_grad_(False)
    assert len(tuned(module).optimizer.param_groups[0]["params"]) == 3


def test_options_are_the_configuration_s_whatever_the_file_had():
    one, other = net(), net()
    before = tuned(one, lr=0.1, weight_decay=0.5, schedule="linear")
    for parameter in one.parameters():
        parameter.grad = torch.ones_like(parameter)
    before.step()
    after = tuned(other, lr=0.3, schedule="linear")
    after.optimizer.load_state_dict(before.optimizer.state_dict())
    assert after.restore(before.state(), step=1) == []
    group = after.optimizer.param_groups[0]
    assert (group["lr"], group["initial_lr"]) == (pytest.approx(0.3 * 23 / 24), 0.3)
    assert group["weight_decay"] == 0.0
    after.step()
    assert after.rate == pytest.approx(0.3 * 22 / 24)


def test_what_a_file_does_not_hold_is_named_and_begins_anew():
    module = net()
    tuning = tuned(module, ema=0.9, amp="fp16", schedule="linear")
    with torch.no_grad():
        module[0].bias.fill_(7.0)
    assert tuning.restore({}, step=6) == ["scheduler", "scaler", "ema"]
    assert tuning.rate == pytest.approx(0.01 * 18 / 24)
    assert tuning.average.state()["0.bias"].tolist() == [7.0] * 8


def test_the_scale_of_an_earlier_run_goes_on():
    tuning = tuned(net(), amp="fp16")
    tuning.scaler.scale(torch.ones(()))
    tuning.scaler.update(4.0)
    later = tuned(net(), amp="fp16")
    assert later.restore(tuning.state(), step=0) == []
    later.scaler.scale(torch.ones(()))
    assert later.scaler.get_scale() == 4.0


class Looking(nn.Module):
    """An embedding with a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)

    def forward(self, x):
        return self.last(self.table((x > 0).long()).mean(1))


@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": "sgd", "clip": 1.0}, {"optimizer": "sgd", "weight_decay": 0.1}],
)
def test_a_sparse_gradient_is_told_where_torch_takes_none(tmp_path, options):
    with pytest.raises(
        TrainingError, match="torch does not support a sparse gradient here: "
    ) as caught:
        run(tmp_path, model=Looking(), **options)
    assert "--optimizer sgd without --clip" in caught.value.hint


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"amp": "fp16"}, {"ema": 0.9}])
def test_a_sparse_gradient_is_taken_where_torch_does(tmp_path, options):
    model, before = Looking(), Looking()
    before.load_state_dict(model.state_dict())
    run(tmp_path, model=model, optimizer="sgd", **options)
    assert not torch.equal(model.table.weight, before.table.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_moving_average_is_that_of_torch(dtype):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).to(dtype)
    ours = Average(model, 0.9)
    reference = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    reference.update_parameters(model)  # torch's begins with its first update
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()
        ours.update()
        reference.update_parameters(model)
    wanted = reference.module.state_dict()
    assert list(ours.state()) == list(wanted)
    assert all(torch.equal(one, wanted[name]) for name, one in ours.state().items())


def test_a_moving_average_loads_into_the_bare_model(tmp_path):
    run(tmp_path, ema=0.5, epochs=1)
    average = held(tmp_path / "last.pth")["ema"]
    model = net(seed=1)
    model.load_state_dict(average)
    assert not torch.equal(
        average["0.weight"], held(tmp_path / "last.pth")["state_dict"]["0.weight"]
    )


def test_an_average_of_another_model_is_none():
    average = Average(net(), 0.9)
    before = {name: one.clone() for name, one in average.state().items()}
    assert not average.restore({"other.weight": torch.zeros(1)})
    assert not average.restore({})
    assert all(torch.equal(one, before[name]) for name, one in average.state().items())


def test_tied_weights_are_averaged_under_both_names():
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight = model[0].weight
    average = Average(model, 0.5)
    first = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    average.update()
    for one in average.state().values():
        torch.testing.assert_close(one, first + 0.5)
