"""`metrics.jsonl`: whole lines, whatever a kill has left."""

import json
import math

import pytest

from ckptool.errors import WriteError
from ckptool.trainer.events import EpochEnded
from ckptool.trainer.metrics import Metrics


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
    assert not list(metrics.lines())
    for epoch in (1, 2):
        metrics.add(ended(epoch))
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert told == [ended(1).to_dict(), ended(2).to_dict()]
    assert list(metrics.lines())


def test_a_number_that_is_none_is_null(tmp_path):
    Metrics(tmp_path).add(ended(1, val_loss=math.nan, train_loss=-math.inf))
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (line["val_loss"], line["train_loss"]) == (None, None)


def test_what_comes_again_is_cut_off(tmp_path):
    metrics = Metrics(tmp_path)
    for epoch in (1, 2, 3):
        metrics.add(ended(epoch))
    metrics.cut(2)
    metrics.add(ended(3, step=99))
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["epoch"], line["step"]) for line in told] == [(1, 3), (2, 6), (3, 99)]


@pytest.mark.parametrize("rest", ['{"epoch": 2, "st', '{"epoch": 2}', "\n", "7\n", "\xff\0{}\n"])
def test_half_a_line_goes(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    whole = json.dumps(ended(1).to_dict()) + "\n"
    path.write_bytes((whole + rest).encode("latin-1"))
    Metrics(tmp_path).cut(9)
    assert path.read_text() == whole


def test_a_run_without_figures_has_an_empty_file(tmp_path):
    Metrics(tmp_path).cut(0)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    for act in (lambda: Metrics(tmp_path).add(ended(1)), lambda: Metrics(tmp_path).cut(0)):
        with pytest.raises(WriteError, match=r"metrics\.jsonl"):
            act()
