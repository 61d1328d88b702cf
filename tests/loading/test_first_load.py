"""A process that loads one model waits for what that takes, and for nothing else."""

import importlib.util
import subprocess
import sys

import torch
from safetensors.torch import save_file

from tests.files.faults import needs_fork

LOAD = """
import os
import sys
import torch
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
for path in sys.argv[1:]:  # each in a process of its own, which has torch already
    if not os.fork():
        import ckptool
        assert ckptool.load_into(model, path).coverage == 1
        print(*[name for name in sys.modules if name.startswith("ckptool.")])
        break
    assert os.wait()[1] == 0
"""
SELDOM = {
    "files that are none": ["ckptool.formats.identify"],
    "optimizers": ["ckptool.loading.optimizer"],
    "edits": ["ckptool.files.recovery", "ckptool.files.editing", "ckptool.files.atomic"],
    "writers": ["ckptool.writing", "ckptool.symbolic.encoder"],
}


@needs_fork
def test_it_imports_nothing_that_is_seldom_needed_and_without_a_pickle_no_machine(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = {f"module.net.{name}": value for name, value in model.state_dict().items()}
    files = tmp_path / "model.pth", tmp_path / "model.safetensors"
    torch.save(state, files[0])
    save_file(state, files[1])
    run = subprocess.run([sys.executable, "-c", LOAD, *files], capture_output=True, check=True)
    pickled, plain = (set(line.split()) for line in run.stdout.decode().splitlines())
    for imported in (pickled, plain):
        assert "ckptool.matching.match" in imported
        for what, names in SELDOM.items():
            assert all(map(importlib.util.find_spec, names)), what
            assert not imported.intersection(names), what
    assert "ckptool.formats.safetensors" in plain
    assert not [name for name in plain if name.startswith("ckptool.symbolic")]
