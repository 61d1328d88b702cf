"""Which model a word means."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from ckptool.errors import UsageError
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.data.datasets import TrainData

__all__ = ["model_of"]


def model_of(config: TrainConfig, data: TrainData) -> nn.Module:
    """The model that `config.model` names, for `data`, its weights as torch's random state has it.

    Raises:
        UsageError: no such model, or none for such data.
    """
    word, _, rest = config.model.partition(":")
    features = math.prod(data.inputs)
    if word == "linear" and not rest:
        return nn.Sequential(nn.Flatten(), nn.Linear(features, data.outputs))
    if word == "mlp":
        widths = [int(width) for width in rest.split(",")] if rest else [16, 32]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise([features, *widths]):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], data.outputs))
    raise UsageError(f"model is {config.model!r}, and not linear, mlp:16,32, cnn or module:factory")
