"""TensorBoard's files, where it is installed."""

import pytest

from ckptool.trainer import TrainConfig
from ckptool.trainer.events import EpochEnded
from ckptool.trainer.metrics import Scalars
from tests.trainer.runs import lines, run

FIGURES = {"loss/train": 0.5, "loss/validation": 0.25, "lr": 0.125, "samples_per_s": 64.0}


def written(out, epochs, *, step=0, val_loss=0.25):
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
    written(tmp_path, (1, 2))
    assert shown(tmp_path) == {tag: [(3, value), (6, value)] for tag, value in FIGURES.items()}


def test_what_comes_again_is_shown_once(tmp_path):
    pytest.importorskip("tensorboard")
    written(tmp_path, (1, 2, 3))
    written(tmp_path, (2, 3), step=3)
    assert [step for step, _ in shown(tmp_path)["lr"]] == [3, 6, 9]


def test_without_validation_there_is_no_such_curve(tmp_path):
    pytest.importorskip("tensorboard")
    written(tmp_path, (1,), val_loss=None)
    assert "loss/validation" not in shown(tmp_path)


def test_it_is_not_asked_for_where_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptool.trainer.metrics.find_spec", lambda name: None)
    written(tmp_path, (1,))
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
