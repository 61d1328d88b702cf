"""`metrics.jsonl`: whole lines, whatever a kill has left; TensorBoard's, where it is installed."""

import json
import math

import pytest

from ckptool.errors import WriteError
from ckptool.trainer import TrainConfig
from ckptool.trainer.events import EpochEnded
from ckptool.trainer.metrics import Metrics, Scalars
from tests.trainer.runs import lines, run


def ended(epoch, **values):
    return EpochEnded(
        **{
            "epoch": epoch,
            "step": 3 * epoch,
            "train_loss": 0.1 + 0.2,
            "val_loss": None,
            "lr": 1e-3,
            "samples_per_s": 10.0,
            **values,
        }
    )


def test_a_line_an_epoch(tmp_path):
    metrics = Metrics(tmp_path)
    assert not list(metrics.read_lines())
    for epoch in (1, 2):
        metrics.add(ended(epoch))
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert told == [ended(1).to_dict(), ended(2).to_dict()]
    assert list(metrics.read_lines())


def test_a_number_that_is_none_is_null(tmp_path):
    Metrics(tmp_path).add(ended(1, val_loss=math.nan, train_loss=-math.inf))
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (line["val_loss"], line["train_loss"]) == (None, None)


def test_what_comes_again_is_cut_off(tmp_path):
    metrics = Metrics(tmp_path)
    for epoch in (1, 2, 3):
        metrics.add(ended(epoch))
    metrics.truncate(2)
    metrics.add(ended(3, step=99))
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["step"]) for line in told] == [(1, 3), (2, 6), (3, 99)]


@pytest.mark.parametrize("rest", ['{"epoch": 2, "st', '{"epoch": 2}', "\n", "7\n", "\xff\0{}\n"])
def test_half_a_line_goes(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps(ended(1).to_dict()) + "\n"
    path.write_bytes((whole + rest).encode("latin-1"))
    Metrics(tmp_path).truncate(9)
    assert path.read_text() == whole


def test_a_run_without_figures_has_an_empty_file(tmp_path):
    Metrics(tmp_path).truncate(0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    for act in (lambda: Metrics(tmp_path).add(ended(1)), lambda: Metrics(tmp_path).truncate(0)):
        with pytest.raises(WriteError, match=r"metrics\.jsonl"):
            act()


FIGURES = {"loss/train": 0.5, "loss/validation": 0.25, "lr": 0.125, "samples_per_s": 64.0}


def to_tensorboard(out, epochs, *, step=0, val_loss=0.25):
    config = TrainConfig(out=str(out), strategy="dp")
    scalars = Scalars(config, step=step, is_wanted=True)
    for epoch in epochs:
        scalars.add(EpochEnded(epoch, 3 * epoch, 0.5, val_loss, 0.125, 64.0))
    scalars.close()


def shown(out):
    """Steps and values by tag, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard" / "dp"))
    events.Reload()
    return {
        tag: [(one.step, one.value) for one in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_each_epoch_is_shown_by_its_last_step(tmp_path):
    pytest.importorskip("tensorboard")
    to_tensorboard(tmp_path, (1, 2))
    assert shown(tmp_path) == {tag: [(3, value), (6, value)] for tag, value in FIGURES.items()}


def test_an_epoch_that_comes_again_is_shown_once(tmp_path):
    pytest.importorskip("tensorboard")
    to_tensorboard(tmp_path, (1, 2, 3))
    to_tensorboard(tmp_path, (2, 3), step=3)
    assert [step for step, _ in shown(tmp_path)["lr"]] == [3, 6, 9]


def test_without_validation_there_is_no_such_curve(tmp_path):
    pytest.importorskip("tensorboard")
    to_tensorboard(tmp_path, (1,), val_loss=None)
    assert "loss/validation" not in shown(tmp_path)


def test_it_is_not_asked_for_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptool.trainer.metrics.find_spec", lambda name: None)
    to_tensorboard(tmp_path, (1,))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"tensorboard": False}, {"is_wanted": False}])
def test_where_it_is_not_wanted_nothing_is_written(tmp_path, options):
    wanted = options.pop("is_wanted", True)
    scalars = Scalars(TrainConfig(out=str(tmp_path), **options), step=0, is_wanted=wanted)
    scalars.add(EpochEnded(1, 3, 0.5, None, 0.125, 64.0))
    scalars.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_shows_its_figures(tmp_path):
    pytest.importorskip("tensorboard")
    run(tmp_path, strategy="dp", tensorboard=True)
    figures = lines(tmp_path)
    told = shown(tmp_path)
    for tag, name in (("loss/train", "train_loss"), ("loss/validation", "val_loss"), ("lr", "lr")):
        wanted = [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in figures]
        assert told[tag] == wanted
