"""Small runs, and what is left of them."""

import json

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ckptool.errors import CheckpointError
from ckptool.trainer import Observer, TrainConfig, TrainData, Trainer


class BytesDone(Observer):
    """Keeps every event; `act` is called with each, and may raise."""

    def __init__(self, act=lambda event: None):
        self.events, self._act = [], act

    def tell(self, event):
        self.events.append(event)
        self._act(event)

    def of(self, name):
        return [event for event in self.events if type(event).__name__ == name]

    @property
    def notes(self):
        return [event.text for event in self.of("Note")]


class Crash(Exception):
    """What ends a run that has a bug in it."""


def crash(_event):
    raise Crash


def when(act, name, **wanted):
    """An observer that calls `act` with each event of that name and with these values."""

    def tell(event):
        values = {key: getattr(event, key, None) for key in wanted}
        if type(event).__name__ == name and values == wanted:
            act(event)

    return BytesDone(tell)


def crash_at(step):
    """An observer that does not let a run come to the end of that step."""
    return when(crash, "Stepped", step=step)


def config(out, **options):
    """Options of a run on the CPU, without TensorBoard."""
    return TrainConfig(out=str(out), **{"device": "cpu", "tensorboard": False, **options})


def data(samples=22, *, dtype="float32", validation=6):
    """Three features, one target; steps of an epoch are not all of one size."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples + validation, 3, generator=generator).to(getattr(torch, dtype))
    y = x.sum(1, keepdim=True).sin()
    held = TensorDataset(x[samples:], y[samples:]) if validation else None
    return TrainData(TensorDataset(x[:samples], y[:samples]), held, "mse_loss", (3,), 1)


def net(*, seed=0, width=8, dropout=0.3):
    """Weights from a seed; what is random in it is dropout."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 1))


def trainer(out, observer=None, *, model=None, given=None, **options):
    """One that trains `net` on `data`: 3 steps an epoch, the last a smaller one."""
    chosen = config(out, **{"epochs": 3, "batch_size": 4, "accumulate": 2, **options})
    given = given or data(dtype=chosen.dtype)
    return Trainer(chosen, model=model or net(), data=given, observer=observer)


def run(out, observer=None, **options):
    return trainer(out, observer, **options).fit()


def losses_of(out, **options):
    """The loss of each step of a run, then the validation loss of each epoch."""
    told = BytesDone()
    run(out, told, **options)
    steps, epochs = told.of("Stepped"), told.of("EpochEnded")
    return [one.loss for one in steps] + [one.val_loss for one in epochs]


def refusal(out, told=None, **options):
    """The error of a run that fails, and how many steps it took."""
    told = told or BytesDone()
    try:
        run(out, told, **options)
    except CheckpointError as error:
        return [type(error).__name__, error.message, len(told.of("Stepped"))]
    return None


def held(path):
    """A checkpoint, but for what another run of the same has otherwise."""
    tree = torch.load(path, weights_only=True)
    del tree["progress"]["seconds"]
    for name in ("out", "resume", "save_every", "overwrite", "strategy", "max_steps", "staleness"):
        tree["config"].pop(name)
    return tree


def differences(one, other, path=""):
    """Where two trees are not equal to the bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other):
            return [f"{path}: {list(one)} {list(other)}"]
        pairs = [(key, one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)) and type(one) is type(other) and len(one) == len(other):
        pairs = [(key, *pair) for key, pair in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return [] if one.dtype == other.dtype and torch.equal(one, other) else [path]
    else:
        return [] if type(one) is type(other) and one == other else [f"{path}: {one} {other}"]
    return [place for key, *pair in pairs for place in differences(*pair, f"{path}/{key}")]


def lines(out):
    """The figures, but for the speed."""
    told = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in told:
        del line["samples_per_s"]
    return told


def assert_same_run(one, other):
    """Two folders are of one run."""
    for name in ("last.pth", "best.pth"):
        different = differences(held(one / name), held(other / name))
        assert not different, f"{name}: {different}"
    different = differences(lines(one), lines(other))
    assert not different, f"metrics.jsonl: {different}"
