"""The kinds of checkpoints, as other programs read them."""

import os
import threading

import pytest
import torch
from torch import nn

import ckptool
from ckptool.errors import CheckpointError, TrainingError
from tests.trainer.runs import data, net, run

STRATEGIES = ("single", "dp")
PREFIX = {"single": "", "dp": "module."}
NAMES = ["0.weight", "0.bias", "3.weight", "3.bias"]


def saved(out, kind, **options):
    model = net()
    run(out, model=model, save=kind, epochs=1, **options)
    return model, out / "last.pth"


def assert_loads(path, model):
    """`path` gives an equal model, by ckptool, whatever names and wrappers are in it."""
    x = torch.randn(5, 3)
    for read in (ckptool.load_state_dict, None):
        other = net(seed=9)
        if read is None:
            ckptool.load_into(other, path)
        else:
            other.load_state_dict(read(path))
        assert torch.equal(other.eval()(x), model.eval()(x))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_wrapped_is_what_scripts_save(tmp_path, strategy):
    model, path = saved(tmp_path, "wrapped", strategy=strategy)
    tree = torch.load(path, weights_only=True)
    assert list(tree) == ["epoch", "state_dict", "optim_dict"]
    assert tree["epoch"] == 1
    assert list(tree["state_dict"]) == [PREFIX[strategy] + name for name in NAMES]
    assert tree["state_dict"]._metadata[""] == {"version": 1}
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(tree["optim_dict"])
    assert set(optimizer.state[model[0].weight]) == {"step", "exp_avg", "exp_avg_sq"}
    wrapped = nn.DataParallel(net(seed=9)) if strategy == "dp" else net(seed=9)
    wrapped.load_state_dict(tree["state_dict"])
    assert_loads(path, model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unwrapped_has_the_names_of_the_bare_model(tmp_path, strategy):
    model, path = saved(tmp_path, "unwrapped", strategy=strategy)
    tree = torch.load(path, weights_only=True)
    assert list(tree) == ["state_dict_model"]
    assert list(tree["state_dict_model"]) == NAMES
    assert list(tree["state_dict_model"]._metadata) == ["", "0", "1", "2", "3"]
    assert_loads(path, model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_module_is_the_whole_of_it_pickled(tmp_path, strategy):
    model, path = saved(tmp_path, "module", strategy=strategy)
    assert ckptool.info(path).blockers
    whole = torch.load(path, weights_only=False)
    assert type(whole) is (nn.DataParallel if strategy == "dp" else nn.Sequential)
    assert_loads(path, model)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_is_plain_and_all_there_is(tmp_path, strategy):
    model, path = saved(tmp_path, "full", strategy=strategy, ema=0.5, amp="fp16")
    tree = torch.load(path, weights_only=True)
    assert list(tree["state_dict"]) == NAMES
    assert {"optimizer", "epoch", "step", "scheduler", "scaler", "ema", "rng", "sampler"} <= set(
        tree
    )
    assert tree["sampler"] == {
        "samples": 22,
        "batch_size": 4,
        "accumulate": 2,
        "seed": 0,
        "position": 0,
    }
    assert tree["config"]["strategy"] == strategy
    assert_loads(path, model)


class Local(nn.Linear):
    """One that holds what no other process can have."""

    def __init__(self):
        super().__init__(3, 1)
        self.lock = threading.Lock()


def test_a_module_that_cannot_be_pickled(tmp_path):
    with pytest.raises(TrainingError, match=r"the module cannot be pickled: .*lock") as caught:
        run(tmp_path, model=Local(), save="module", epochs=1)
    assert caught.value.hint == "use --save full, which does not pickle the class"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["wrapped", "unwrapped", "module", "full"])
def test_a_write_that_fails_leaves_the_file_before(tmp_path, kind, monkeypatch):
    saved(tmp_path, kind)
    before = (tmp_path / "last.pth").read_bytes()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ckptool.files.atomic.reserve", refuse)
    with pytest.raises(CheckpointError, match=r"last\.pth: cannot be written \(No space left"):
        run(tmp_path, save=kind, resume="auto")
    assert (tmp_path / "last.pth").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["best.pth", "last.pth", "metrics.jsonl"]


@pytest.mark.parametrize("kind", ["wrapped", "unwrapped", "module", "full"])
def test_a_disk_that_is_full_in_the_middle_leaves_the_file_before(tmp_path, kind, monkeypatch):
    saved(tmp_path, kind)
    before = [(tmp_path / name).read_bytes() for name in ("last.pth", "best.pth")]

    def refuse(fd, data, offset):
        if bytes(data[:2]) == b"PK":  # the figures are written before
            raise OSError(28, "No space left on device")
        os.pwrite(fd, data, offset)

    monkeypatch.setattr("ckptool.files.atomic.write_at", refuse)
    with pytest.raises(CheckpointError, match=r"best\.pth: cannot be written \(No space left"):
        run(tmp_path, save=kind, resume="auto")
    assert [(tmp_path / name).read_bytes() for name in ("last.pth", "best.pth")] == before
    assert sorted(os.listdir(tmp_path)) == ["best.pth", "last.pth", "metrics.jsonl"]


def test_what_a_writer_is_killed_in_is_no_checkpoint(tmp_path):
    """Half a file has another name, and the next run removes it."""
    saved(tmp_path, "wrapped")
    debris = tmp_path / ".last.pth.ckptool-0123456789ab.tmp"
    debris.write_bytes(b"PK")
    run(tmp_path, save="wrapped", resume="auto", given=data())
    assert not debris.exists()
