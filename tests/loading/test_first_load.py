"""A process that loads one model waits for what that takes, and for nothing else."""

import importlib.util
import subprocess
import sys

import pytest
import torch

LOAD = """
import sys
import torch
import ckptool
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
assert ckptool.load_into(model, sys.argv[1]).coverage == 1
print(*[name for name in sys.modules if name.startswith("ckptool.")])
"""
SELDOM = {
    "files that are none": ["ckptool.formats.identify"],
    "optimizers": ["ckptool.loading.optimizer"],
    "edits": ["ckptool.files.recovery", "ckptool.files.editing", "ckptool.files.atomic"],
    "writers": ["ckptool.writing", "ckptool.symbolic.encoder"],
}


@pytest.fixture(scope="module", params=["pth", "safetensors"])
def imported(request, tmp_path_factory):
    """What is imported for a file whose names are wrapped."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = {f"module.net.{name}": value for name, value in model.state_dict().items()}
    file = tmp_path_factory.mktemp("first") / f"model.{request.param}"
    if request.param == "pth":
        torch.save(state, file)
    else:
        pytest.importorskip("safetensors.torch").save_file(state, file)
    run = subprocess.run([sys.executable, "-c", LOAD, file], capture_output=True, check=True)
    return set(run.stdout.decode().split())


@pytest.mark.parametrize("what", SELDOM)
def test_it_imports_nothing_that_is_seldom_needed(imported, what):
    assert "ckptool.matching.match" in imported
    assert all(importlib.util.find_spec(name) for name in SELDOM[what])
    assert not imported.intersection(SELDOM[what])


@pytest.mark.parametrize("imported", ["safetensors"], indirect=True)
def test_of_a_file_without_a_pickle_no_pickle_is_read(imported):
    assert "ckptool.formats.safetensors" in imported
    assert not [name for name in imported if name.startswith("ckptool.symbolic")]
