"""DataParallel; what replicas do is shown where there are GPUs.

What is saved, and goes on elsewhere: `test_saving.py`, `test_resuming.py`.
"""

import pytest
import torch
from torch import nn

from ckptool.errors import TrainingError, UsageError
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.events import Observer
from ckptool.trainer.strategies.data_parallel import DataParallel
from tests.trainer.runs import BytesDone, run

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def dp(**options):
    return DataParallel(TrainConfig(out="out", strategy="dp", **options), Observer())


def test_each_batch_is_told_from_inside_and_outside_and_the_model_keeps_no_hook(tmp_path):
    told = BytesDone()
    model = nn.Linear(3, 1)
    run(tmp_path, told, model=model, strategy="dp", trace_batches=True, epochs=1, save="module")
    traced = [(one.outside, one.inputs, one.outputs) for one in told.of("Traced")]
    sizes = [4, 4, 4, 4, 4, 2]
    assert traced == [(way, (size, 3), (size, 1)) for size in sizes for way in (False, True)]
    assert not model._forward_hooks


@pytest.mark.parametrize("options", [{"device_ids": (97, 98)}, {"device": "cuda:97"}])
def test_a_gpu_that_is_not_there(options):
    with pytest.raises(TrainingError, match="cuda:97 is not available"):
        dp(**options).wrap(nn.Linear(1, 1))


def test_gpus_and_the_cpu():
    with pytest.raises(UsageError, match="need GPUs, but device is cpu"):
        dp(device_ids=(0,), device="cpu").wrap(nn.Linear(1, 1))


@needs_gpu
def test_replicas_on_a_gpu(tmp_path):
    told = BytesDone()
    run(tmp_path, told, strategy="dp", device="cuda", trace_batches=True, epochs=1)
    assert {one.device for one in told.of("Traced") if not one.outside} == {
        f"cuda:{number}" for number in range(min(4, torch.cuda.device_count()))
    }
    with pytest.raises(TrainingError, match="which has no replica"):
        dp(device_ids=(0,), output_device=97).wrap(nn.Linear(1, 1))
