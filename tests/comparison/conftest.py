"""What tests of several modules here ask for."""

import json

import pytest
import torch

import ckptool


@pytest.fixture
def compare(tmp_path):
    """Save two objects with torch and compare the files."""

    def run(a, b, **options):
        torch.save(a, tmp_path / "a.pth")
        torch.save(b, tmp_path / "b.pth")
        found = ckptool.diff(tmp_path / "a.pth", tmp_path / "b.pth", **options)
        json.dumps(found.to_dict(), allow_nan=False)
        return found

    return run
