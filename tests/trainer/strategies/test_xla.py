"""Where torch_xla is not installed, a run says so before anything else."""

import importlib.util

import pytest

from ckptool.errors import TrainingError
from tests.trainer.runs import run


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="it is installed")
def test_without_torch_xla_it_is_told_how_to_get_it(tmp_path):
    with pytest.raises(TrainingError, match="torch_xla, which cannot be imported") as caught:
        run(tmp_path / "out", strategy="xla")
    assert caught.value.hint.startswith("pip install 'torch_xla[tpu]")
    assert not (tmp_path / "out").exists()
