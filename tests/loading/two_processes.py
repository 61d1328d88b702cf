"""Two processes of one distributed run, each of which goes through the scenes of a module."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.sources import PROJECT

needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_gloo_available() or os.name == "nt", reason="needs gloo"
)


def run_by_two(module, folder):
    """The folder in which two processes went through all scenes."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, folder, str(rank)],
            cwd=PROJECT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors
    return folder


def told_to_each(folder):
    """What each rank was told, scene by scene."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
