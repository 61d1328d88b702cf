"""Which model a word means."""

from __future__ import annotations

import math
from itertools import pairwise

from torch import nn

from ckptool.errors import UsageError
from ckptool.factories import FACTORY
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.data.datasets import TrainData
from ckptool.trainer.models.own import own_model
from ckptool.trainer.words import hidden_widths

__all__ = ["model_of"]


def model_of(config: TrainConfig, data: TrainData) -> nn.Module:
    """The model that `config.model` names, for `data`, its weights as torch's random state has it.

    Raises:
        UsageError: none can be made for such data; or the user's own code raised.
        TrainingError: the user's own model does not take these data.
    """
    if not data.inputs and not FACTORY.fullmatch(config.model):
        raise UsageError(
            f"how large a model {config.model} is to be follows from the data, and their shape is "
            "not known",
            hint="Trainer(model=...), --model module:factory, or TrainData(inputs=(10,), "
            "outputs=1, ...)",
        )
    if config.model == "cnn":
        return _cnn(data)
    widths = [] if config.model == "linear" else hidden_widths(config.model)
    return own_model(config, data) if widths is None else _mlp(data, widths)


def _mlp(data: TrainData, widths: list[int]) -> nn.Sequential:
    """Hidden layers of these widths, each with a ReLU; without any it is linear."""
    sizes = [math.prod(data.inputs), *widths]
    layers: list[nn.Module] = [nn.Flatten()]
    try:
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], data.outputs))
    except (RuntimeError, MemoryError) as error:
        raise UsageError(f"layers of {', '.join(map(str, widths))} do not fit in memory") from error


def _cnn(data: TrainData) -> nn.Sequential:
    """Two convolutions of 3 x 3, each halving height and width after it, and a linear layer."""
    if len(data.inputs) != 3 or min(data.inputs[1:]) < 4:
        raise UsageError(
            "model cnn takes images (channels x height x width, from 4 x 4 on), and a sample of "
            f"the data is {' x '.join(map(str, data.inputs))}",
            hint="--data digits, or --model mlp:16,32",
        )
    channels, height, width = data.inputs
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (height // 4) * (width // 4), data.outputs),
    )
