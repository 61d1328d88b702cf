"""What the words for data and models may be."""

import subprocess
import sys

import pytest

from ckptool.errors import UsageError
from ckptool.trainer.config import TrainConfig, parse_csv_path, parse_hidden_widths


def test_data_that_there_are():
    for word in ["random", "friedman", "digits", "csv:a.csv", "csv:C:\\a.csv", "net:data"]:
        assert TrainConfig(out="-", data=word).data == word, word


@pytest.mark.parametrize("word", ["", "csv", "csv:", "Digits", "random:", "a.csv"])
def test_data_that_there_are_not(word):
    with pytest.raises(UsageError, match="must be random, friedman, digits, csv:PATH or module:"):
        TrainConfig(out="-", data=word)


def test_losses_that_there_are_and_are_not():
    for word in ("mse_loss", "net:loss"):
        assert TrainConfig(out="-", loss=word).loss == word
    with pytest.raises(UsageError, match="or module:function"):
        TrainConfig(out="-", loss="mse-loss")


def test_options_that_mean_something_with_another_alone():
    for options, said in (
        ({"updates": "synchronous"}, "needs strategy='parameter-server'"),
        ({"sync_batchnorm": True}, "needs strategy='ddp'"),
        (
            {"workers": 2, "strategy": "parameter-server"},
            "does not work with strategy='parameter-server'",
        ),
        ({"compile": True, "strategy": "xla"}, "does not work with strategy='xla'"),
    ):
        with pytest.raises(UsageError, match=said):
            TrainConfig(out="-", **options)


def test_a_path_may_have_colons():
    assert parse_csv_path("csv:C:\\a.csv") == "C:\\a.csv"


WIDTHS = {"mlp": [16, 32], "mlp:7": [7], "mlp:16,32,8": [16, 32, 8]}


def test_widths_are_read():
    for word in WIDTHS:
        assert parse_hidden_widths(word) == WIDTHS[word], word


def test_other_models():
    for word in ["linear", "cnn", "net:Net", "a.b:C.d", "mlp:Net", "linear:f"]:
        assert TrainConfig(out="-", model=word).model == word, word
        assert parse_hidden_widths(word) is None, word


NO_WIDTHS = ["mlp:", "mlp:0", "mlp:-1", "mlp:1,,2", "mlp:1,", "mlp:1.5", "mlp:\u0663"]


@pytest.mark.parametrize("word", [*NO_WIDTHS, pytest.param(f"mlp:{'9' * 5000}", id="long")])
def test_widths_that_are_none(word):
    with pytest.raises(UsageError, match=r"mlp:16,32 \(widths from 1\)"):
        TrainConfig(out="-", model=word)


@pytest.mark.parametrize("word", ["", "vgg", "net.py", "a b:c", ":f", "cnn:3"])
def test_models_that_there_are_not(word):
    with pytest.raises(UsageError, match=r"must be linear, cnn, mlp:16,32 .* or module:factory"):
        TrainConfig(out="-", model=word)


def test_a_target_is_a_column():
    with pytest.raises(
        UsageError, match="target='price' needs data='csv:PATH', not data='friedman'"
    ):
        TrainConfig(out="-", target="price")


def test_no_word_needs_torch():
    code = "import sys, ckptool.trainer.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
