"""Friedman's first regression function: five features that count, five that do not."""

from __future__ import annotations

import math

import torch

from ckptool.trainer.config import TrainConfig
from ckptool.trainer.data.datasets import Rows, TrainData

__all__ = ["friedman"]

_SAMPLES, _FEATURES, _NOISE = 500, 10, 1.0


def friedman(config: TrainConfig) -> TrainData:
    """500 samples of 10 features in [0, 1), 400 to learn from.

    Targets: 10 sin(pi x0 x1) + 20 (x2 - 1/2)^2 + 10 x3 + 5 x4 + N(0, 1)

    (J. Friedman, Multivariate adaptive regression splines, Annals of Statistics 19, 1991).
    """
    dtype = getattr(torch, config.dtype)
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.rand(_SAMPLES, _FEATURES, generator=generator, dtype=torch.float64)
    noise = torch.randn(_SAMPLES, generator=generator, dtype=torch.float64)
    y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = (y + 10 * x[:, 3] + 5 * x[:, 4] + _NOISE * noise).unsqueeze(1).to(dtype)
    x = x.to(dtype)
    learned = _SAMPLES * 4 // 5
    return TrainData(
        Rows(x[:learned], y[:learned]), Rows(x[learned:], y[learned:]), "mse_loss", (_FEATURES,), 1
    )
