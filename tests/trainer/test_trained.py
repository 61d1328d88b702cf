"""`fixtures/trained/`: what every strategy saves, in every kind of checkpoint, is one model."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptool
from ckptool.inspection.listing import list_tensors
from ckptool.trainer.config import SAVES, STRATEGIES
from tests.forks import finished

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
TRAINED = FIXTURES / "trained"
FILES = sorted(TRAINED.glob("*.pth"))
NAMES = ["1.weight", "1.bias", "3.weight", "3.bias"]


def plain():
    """A model of the same architecture, its weights its own."""
    return nn.Sequential(nn.Flatten(), nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 1))


def assert_answers(model):
    """It answers what torch found the trained model to answer."""
    told = json.loads((TRAINED / "answers.json").read_text())
    with torch.no_grad():
        outputs = model(torch.tensor(told["inputs"]))
    torch.testing.assert_close(outputs, torch.tensor(told["outputs"]), rtol=1e-5, atol=1e-5)


def read_by_torch(path):
    """What torch reads, a pickled module included, and the devices that the file names."""
    devices = set()

    def remember(storage, tag):
        devices.add(tag)
        return storage

    return torch.load(path, map_location=remember, weights_only=False), devices


def state_dict_in(tree):
    """Where each kind of checkpoint has the model."""
    if isinstance(tree, nn.Module):
        return tree.state_dict()
    return tree["state_dict"] if "state_dict" in tree else tree["state_dict_model"]


def test_all_that_can_be_saved_here_is_there():
    strategies = set(STRATEGIES) - {"xla"}
    every = {f"{strategy}_{save}" for strategy in strategies for save in SAVES}
    assert {file.stem for file in FILES} == every - {"fsdp_module"}
    assert max(file.stat().st_size for file in FILES) < 40_000


def test_names_are_those_of_the_wrapper_where_it_saves_them():
    for file in FILES:
        strategy, save = file.stem.split("_")
        front = "module." if strategy in ("dp", "ddp") and save in ("wrapped", "module") else ""
        with ckptool.open(file) as held:
            names = [str(row.path[-1]) for row in list_tensors(held).tensors]
        own = [front + name for name in NAMES]
        assert [name for name in names if "." in name] == own, file


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_it_becomes_a_plain_model_that_answers_the_same(file, memory_path):
    state_dict = ckptool.load_state_dict(file)
    assert list(state_dict) == NAMES
    model = plain()
    model.load_state_dict(state_dict)
    assert_answers(model)
    model = plain()
    report = ckptool.load_into(model, file)
    assert report.fits
    assert_answers(model)
    far, near = memory_path / "far.pth", memory_path / "near.pth"
    with ckptool.open(file) as held:
        held.strip_module().remap({"*": "cuda:1"}).save(far)
    with ckptool.open(far) as held:
        held.remap({"*": "cpu"}).save(near)
    assert read_by_torch(far)[1] == {"cuda:1"}
    tree, devices = read_by_torch(near)
    assert devices == {"cpu"}
    assert list(state_dict_in(tree)) == NAMES
    model = plain()
    model.load_state_dict(state_dict_in(tree))
    assert_answers(model)


def test_all_but_pickled_modules_torch_reads_with_weights_only():
    for file in FILES:
        if file.stem.endswith("_module"):
            with pytest.raises(Exception, match="weights_only"):
                torch.load(file, weights_only=True)
        else:
            assert state_dict_in(torch.load(file, weights_only=True)), file


def test_a_pickled_ddp_is_no_use_without_processes_until_it_is_stripped(folder):
    file = TRAINED / "ddp_module.pth"
    with pytest.raises(ValueError, match="process group"):
        torch.load(file, weights_only=False)
    with ckptool.open(file) as held:
        held.strip_module().save(folder.with_suffix(".pth"))
    model = torch.load(folder.with_suffix(".pth"), weights_only=False)
    assert type(model) is nn.Sequential
    assert_answers(model)


def script():
    """What makes the fixtures."""
    path = FIXTURES / "make" / "trained.py"
    spec = importlib.util.spec_from_file_location("fixtures_trained", path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def test_made_again_it_is_the_same_model(tmp_path, monkeypatch):
    made = script()
    monkeypatch.setattr(
        made.subprocess, "run", lambda words, cwd, **_: finished(*words[2:], cwd=cwd)
    )
    made.train("dp_wrapped", tmp_path)
    one, other = (torch.load(folder / "dp_wrapped.pth") for folder in (tmp_path, TRAINED))
    torch.testing.assert_close(one, other)  # another processor may round otherwise


def test_make_fixtures_makes_them():
    done = subprocess.run(
        ["make", "-n", "fixtures"], cwd=FIXTURES.parent, capture_output=True, text=True, timeout=60
    )
    assert "fixtures/make/trained.py fixtures/trained" in done.stdout
