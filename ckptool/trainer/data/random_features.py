"""What the tutorial of `nn.DataParallel` trains on: noise of size 5, to 2 numbers."""

from __future__ import annotations

import torch

from ckptool.trainer.config import TrainConfig
from ckptool.trainer.data.datasets import Rows, TrainData

__all__ = ["random_features"]

_SAMPLES, _FEATURES, _OUTPUTS = 100, 5, 2


def random_features(config: TrainConfig) -> TrainData:
    """100 samples of 5 features from N(0, 1), all to learn from, none to validate with.

    Targets, which the tutorial has none of, are a linear map of them, its weights from N(0, 1).
    """
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.randn(_SAMPLES, _FEATURES, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(_FEATURES, _OUTPUTS, generator=generator, dtype=torch.float64)
    dtype = getattr(torch, config.dtype)
    return TrainData(Rows(x.to(dtype), y.to(dtype)), None, "mse_loss", (_FEATURES,), _OUTPUTS)
