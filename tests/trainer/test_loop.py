"""Epochs, steps, the end: what a run does when, and what it writes."""

import itertools
import math
import os
import re

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ckptool.errors import CheckpointError, TargetExists, TrainingError, UsageError
from ckptool.trainer import TrainData
from ckptool.trainer.data import Batches
from tests.trainer.runs import BytesDone, data, differences, held, lines, net, run, when


def files(out):
    return sorted(name for name in os.listdir(out) if name.endswith(".pth"))


def test_the_figures_are_means_over_samples(tmp_path):
    model, given, told = net(dropout=0.0), data(), BytesDone()
    run(tmp_path, told, model=model, given=given, epochs=1, lr=1e-30)
    (line,) = lines(tmp_path)
    for name, rows in (("train_loss", given.train), ("val_loss", given.validation)):
        wanted = nn.functional.mse_loss(
            net()[0:2].append(net()[3])(rows.tensors[0]), rows.tensors[1]
        )
        assert line[name] == pytest.approx(wanted.item(), rel=1e-6)
    steps = told.of("Stepped")
    assert [(one.epoch, one.step, one.samples) for one in steps] == [
        (1, 1, 8),
        (1, 2, 8),
        (1, 3, 6),
    ]
    mean = sum(one.loss * one.samples for one in steps) / 22
    assert line["train_loss"] == pytest.approx(mean, rel=1e-12)


def test_the_best_epoch_stays(tmp_path):
    result = run(tmp_path, epochs=6, lr=0.5)
    figures = lines(tmp_path)
    best = min(figures, key=lambda line: line["val_loss"])
    assert held(tmp_path / "best.pth")["epoch"] == best["epoch"]
    assert held(tmp_path / "last.pth")["epoch"] == 6
    assert result.best == best["val_loss"]


def test_the_best_is_not_overwritten_by_the_weights_that_come_after(tmp_path):
    """A state dict is references: what is saved must be the weights of that moment."""
    kept = {}

    def act(event):
        if type(event).__name__ == "Saved" and event.path.endswith("best.pth"):
            kept.update({name: one.clone() for name, one in model.state_dict().items()})

    model = net()
    run(tmp_path, BytesDone(act), model=model, epochs=4, lr=0.5)
    assert not differences(dict(held(tmp_path / "best.pth")["state_dict"]), kept)


def test_without_validation_the_training_loss_decides(tmp_path):
    result = run(tmp_path, given=data(validation=0), epochs=2)
    assert [line["val_loss"] for line in lines(tmp_path)] == [None, None]
    assert result.best == min(line["train_loss"] for line in lines(tmp_path))


def test_every_so_many_steps(tmp_path):
    run(tmp_path, save_every=2, keep=3)
    assert files(tmp_path) == [
        "best.pth",
        "last.pth",
        "step-00000004.pth",
        "step-00000006.pth",
        "step-00000008.pth",
    ]
    assert held(tmp_path / "step-00000004.pth")["sampler"]["position"] == 1


def test_what_a_checkpoint_was_before_goes_once_it_is_written_anew(tmp_path):
    def act(_event):
        (tmp_path / "last").mkdir(exist_ok=True)  # as a sharded run leaves it
        (tmp_path / "last" / "run.pth").touch()

    run(tmp_path, when(act, "Stepped"), epochs=1)
    assert (tmp_path / "last.pth").is_file()
    assert not (tmp_path / "last").exists()


def test_every_so_many_seconds(tmp_path, monkeypatch):
    clock = itertools.count(step=10.0)  # every look at it is ten seconds later
    monkeypatch.setattr("ckptool.trainer.checkpoints.time.monotonic", lambda: next(clock))
    run(tmp_path / "often", save_seconds=0.1, keep=9, epochs=1)
    assert len(files(tmp_path / "often")) == 5
    run(tmp_path / "never", save_seconds=1e9, keep=9, epochs=1)
    assert len(files(tmp_path / "never")) == 2


def test_training_ends_where_nothing_becomes_better(tmp_path):
    told = BytesDone()
    result = run(tmp_path, told, epochs=20, patience=2, lr=1e-12)
    assert result.epoch == 3
    assert told.notes == [
        f"training stopped after epoch 3: no lower loss than {result.best:g} in 2 epochs"
    ]
    assert held(tmp_path / "last.pth")["progress"]["since_best"] == 2


@pytest.mark.parametrize(("limit", "epochs"), [(1, 0), (3, 1), (4, 1), (6, 2), (99, 3)])
def test_the_last_step_is_evaluated_and_saved(tmp_path, limit, epochs):
    told = BytesDone()
    result = run(tmp_path, told, max_steps=limit)
    step = min(limit, 9)
    assert (result.epoch, result.step) == (epochs, step)
    assert lines(tmp_path)[-1]["step"] == step
    assert held(tmp_path / "last.pth")["step"] == step
    assert [event.step for event in told.of("Stepped")] == list(range(1, step + 1))
    whole = [line for line in lines(tmp_path) if line["step"] % 3 == 0]  # of three steps
    assert result.best == min(line["val_loss"] for line in whole or lines(tmp_path))
    assert held(tmp_path / "best.pth")["step"] in [
        line["step"] for line in whole or lines(tmp_path)
    ]


def test_a_lower_loss_within_an_epoch_takes_nothing_from_the_best_one(tmp_path):
    options = {"lr": 0.01}
    result = run(tmp_path, max_steps=4, **options)
    first, last = (line["val_loss"] for line in lines(tmp_path))
    assert last < first == result.best
    run(tmp_path, resume="auto", **options)
    best = min(lines(tmp_path), key=lambda line: line["val_loss"])
    assert held(tmp_path / "best.pth")["step"] == best["step"]


def test_the_schedule_ends_with_the_last_step(tmp_path):
    run(tmp_path, max_steps=5, schedule="linear", lr=0.01)
    assert lines(tmp_path)[-1]["lr"] == pytest.approx(0.01 / 5)


def test_weights_that_are_no_numbers_take_no_checkpoint_s_place(tmp_path):
    run(tmp_path, optimizer="sgd", epochs=1)
    before = (tmp_path / "last.pth").read_bytes()
    with pytest.raises(TrainingError, match=r"^a weight is not finite after step 4: last was not"):
        run(tmp_path, optimizer="sgd", resume="auto", lr=1e38, weight_decay=1e9, max_steps=4)
    assert (tmp_path / "last.pth").read_bytes() == before


@pytest.mark.parametrize("device", ["xpu", "vulkan", "lazy"])
def test_a_device_that_this_torch_is_made_without_is_told(tmp_path, device):
    with pytest.raises(TrainingError, match=f"^{device} is not available") as caught:
        run(tmp_path, device=device)
    assert caught.value.hint == "use --device cpu"


def test_a_folder_in_the_place_of_the_figures(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TargetExists, match=r"metrics\.jsonl: is a folder"):
        run(tmp_path)


def poisoned(row):
    given = data()
    inputs = given.train.tensors[0].clone()
    inputs[row] = math.nan
    return TrainData(
        TensorDataset(inputs, given.train.tensors[1]), given.validation, given.loss, (3,), 1
    )


def test_a_loss_that_is_no_number_stops_before_the_weights_change(tmp_path):
    bad = next(Batches(22, 4, 2, 0).iterate_epoch(0, first=2))[0][0]  # in the third step
    after_two = net()
    run(tmp_path / "two", model=after_two, max_steps=2)
    model = net()
    with pytest.raises(TrainingError, match=r"(?m)^the loss is nan at step 3$") as caught:
        run(tmp_path / "bad", model=model, given=poisoned(bad), save_every=1)
    assert "--lr" in caught.value.hint
    assert not differences(model.state_dict(), after_two.state_dict())
    assert files(tmp_path / "bad") == ["step-00000001.pth", "step-00000002.pth"]
    kept = held(tmp_path / "bad" / "step-00000002.pth")["state_dict"]
    assert not differences(dict(kept), dict(after_two.state_dict()))


class Root(nn.Module):
    """Its output at 0 is 0, and its gradient there no number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.weight.sqrt() * 0 + x.sum(1, keepdim=True) * 0


def test_a_gradient_that_is_no_number_stops_as_well(tmp_path):
    model = Root()
    with pytest.raises(TrainingError, match=r"(?m)^a gradient is not finite at step 1$"):
        run(tmp_path, model=model)
    assert model.weight.tolist() == [0.0]
    assert files(tmp_path) == []


def test_an_infinite_gradient_of_fp16_is_skipped(tmp_path):
    """The first scale is 65536: losses above 1 are infinite in half precision."""
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(30.0)
    told = BytesDone()
    result = run(tmp_path, told, model=model, amp="fp16", schedule="linear", ema=0.5)
    tree = held(tmp_path / "last.pth")
    assert result.step == 9
    skipped = 9 - tree["scheduler"]["last_epoch"]
    assert skipped > 0
    assert tree["scaler"]["scale"] == 65536.0 / 2**skipped
    assert result.skipped == skipped
    assert sum(int(note.split(" of 3 steps of epoch ")[0]) for note in told.notes) == skipped
    assert all(
        note.endswith(" were skipped, because their gradients overflowed in fp16")
        for note in told.notes
    )


def test_a_run_whose_steps_were_all_skipped_has_failed(tmp_path):
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(30.0)
    told = BytesDone()
    with pytest.raises(
        TrainingError, match=r"^all 3 steps were skipped, because their grad"
    ) as caught:
        run(tmp_path, told, model=model, amp="fp16", epochs=1)
    assert "--amp bf16" in caught.value.hint
    assert told.notes == [
        "3 of 3 steps of epoch 1 were skipped, because their gradients overflowed in fp16"
    ]
    assert model.weight.tolist() == [[30.0] * 3]


def test_a_validation_loss_that_is_no_number_is_no_best_one(tmp_path):
    given = data()
    held_out = TensorDataset(given.validation.tensors[0] * math.nan, given.validation.tensors[1])
    given = TrainData(given.train, held_out, given.loss, (3,), 1)
    told = BytesDone()
    result = run(tmp_path, told, given=given, epochs=9, patience=2)
    assert [line["val_loss"] for line in lines(tmp_path)] == [None, None]
    assert told.notes == [
        "the validation loss of epoch 1 is nan",
        "the validation loss of epoch 2 is nan",
        "training stopped after epoch 2: no finite loss in 2 epochs",
    ]
    assert files(tmp_path) == ["last.pth"]
    assert result.best == math.inf


@pytest.mark.parametrize("options", [{"amp": "bf16"}, {"clip": 0.1}, {"accumulate": 5}])
def test_all_of_it_at_once_trains(tmp_path, options):
    result = run(tmp_path, epochs=10, model=net(dropout=0.0), **options)
    assert result.best < lines(tmp_path)[0]["val_loss"]


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, outputs, targets):
        return (self.weight * (outputs - targets) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda outputs, targets: 1.0, "the loss returned a float, expected a tensor"),
        (
            lambda outputs, targets: torch.tensor(1.0),
            "the loss returned a tensor without a gradient",
        ),
        (
            lambda outputs, targets: (outputs - targets) ** 2,
            r"the loss returned a tensor of shape \(4,",
        ),
        (nn.MSELoss(reduction="none"), "the loss has reduction='none', expected 'mean'"),
        (nn.MSELoss(reduction="sum"), "the loss has reduction='sum', expected 'mean'"),
        (Weighted(), "the loss has parameters, which"),
    ],
)
def test_a_loss_that_nothing_is_learned_from_is_told(tmp_path, loss, told):
    given = data()
    given = TrainData(given.train, given.validation, loss)
    with pytest.raises(CheckpointError, match=f"^{told}"):
        run(tmp_path, given=given)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (nn.Linear, "^model is a type, expected a torch.nn.Module$"),
        ("net", "^model is a str, expected a torch.nn.Module$"),
        (nn.Sequential(nn.LazyLinear(1)), "^parameter 0.weight is not initialized"),
        (nn.Linear(3, 1, device="meta"), "^parameter weight is on the meta device"),
        (nn.Linear(3, 1, dtype=torch.complex64), "^parameter weight is complex$"),
    ],
)
def test_a_model_that_is_none_yet_is_told(tmp_path, model, told):
    with pytest.raises(UsageError, match=f"(?m){told}"):
        run(tmp_path, model=model)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"lr": "0.1"}, "lr='0.1' must be of type float"),
        ({"epochs": 1.5}, "epochs=1.5 must be of type int"),
        ({"epochs": None}, "epochs=None must be of type int"),
        ({"max_steps": True}, "max_steps=True must be of type int | None"),
        ({"sharded": "no"}, "sharded='no' must be of type bool"),
        ({"devices": "cpu"}, "devices='cpu' must be of type tuple[str, ...]"),
        ({"devices": ("cpu", 1)}, "devices=('cpu', 1) must be of type tuple[str, ...]"),
        ({"device_ids": ["0"]}, "device_ids=['0'] must be of type tuple[int, ...]"),
        ({"resume": 5}, "resume=5 must be of type str | None"),
        ({"lr": 1e39}, "lr=1e+39 must be a finite float32 number"),
        ({"keep": 5}, "keep=5 needs an interval such as save_every=100"),
        ({"save": "module", "ema": 0.9}, "ema=0.9 needs save='full', not save='module'"),
    ],
)
def test_an_option_that_is_wrong_or_does_nothing_is_told(tmp_path, option, told):
    with pytest.raises(UsageError, match=f"(?m)^{re.escape(told)}$"):
        run(tmp_path, **option)


def test_a_compiled_model_is_the_same_one(tmp_path):
    run(tmp_path / "plain", model=net(dropout=0.0), epochs=1)
    run(tmp_path / "compiled", model=net(dropout=0.0), epochs=1, compile=True)
    one, two = (held(tmp_path / out / "last.pth") for out in ("plain", "compiled"))
    assert list(one["state_dict"]) == list(two["state_dict"])
    for name, tensor in one["state_dict"].items():
        torch.testing.assert_close(two["state_dict"][name], tensor)


def test_an_observer_is_told_how_far_the_validation_is(tmp_path):
    told = BytesDone()
    run(tmp_path, told, epochs=1)
    assert [(one.done, one.samples) for one in told.of("Validating")] == [(0, 6), (4, 6)]
