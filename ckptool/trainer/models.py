"""Models by name: `linear`, `mlp:16,32`, `cnn`, and the `module:factory` of the user."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn

from ckptool.errors import CheckpointError, TrainingError, UsageError
from ckptool.factories import FACTORY, HINT, a_class, at_home, named, run
from ckptool.trainer.config import TrainConfig, hidden_widths
from ckptool.trainer.data import TrainData, collated, moved, shape

__all__ = ["model_of", "own_model"]


def model_of(config: TrainConfig, data: TrainData) -> nn.Module:
    """Return the model that `config.model` names, its weights from torch's random state.

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
    sizes = [math.prod(data.inputs), *widths]
    layers: list[nn.Module] = [nn.Flatten()]
    try:
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], data.outputs))
    except (RuntimeError, MemoryError) as error:
        raise UsageError(f"layers of {', '.join(map(str, widths))} do not fit in memory") from error


def _cnn(data: TrainData) -> nn.Sequential:
    """Build two convolutions of 3 x 3, each followed by pooling, and a linear layer."""
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


def own_model(config: TrainConfig, data: TrainData) -> nn.Module:
    """Return what `module:factory` is, or returns without arguments, tried on one sample.

    Raises:
        UsageError: the code raised; or what it names is no model and makes none.
        TrainingError: the model raises over a sample, or gives something else than its targets.
    """
    text = config.model
    with at_home():
        node = named(text)
        made: nn.Module = node
        if not isinstance(node, nn.Module):
            if not callable(node):
                raise UsageError(
                    f"{text} is {a_class(node)}, and neither a model nor what makes one", hint=HINT
                )
            made = run(node, f"{text} raised", HINT)
            if not isinstance(made, nn.Module):
                raise UsageError(f"{text} returned {a_class(made)}, and no model", hint=HINT)
        _require_fit(made, config, data)
    return made


def _require_fit(model: nn.Module, config: TrainConfig, data: TrainData) -> None:
    """Pass one sample through the model, which also gives lazy layers their size.

    It is tried in evaluation mode, and nothing that is random is used up.
    """
    dtype = getattr(torch, config.dtype)
    inputs, _ = collated(data.train, [0], dtype)
    model.to(dtype)
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = model(moved(inputs, device))
    except CheckpointError:
        raise
    except Exception as error:  # whatever it raises, it is the user's own code
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise TrainingError(
            f"{config.model} does not take a batch of {shape(inputs)}: {said}"
        ) from error
    finally:
        model.train(was_training)
    wanted = (1, data.outputs)
    is_tensor = isinstance(outputs, torch.Tensor)
    # What the loss of the user's own dataset takes is not known.
    if data.inputs and not (is_tensor and tuple(outputs.shape) == wanted):
        raise TrainingError(
            f"{config.model} makes {tuple(outputs.shape) if is_tensor else a_class(outputs)} of a "
            f"batch of {shape(inputs)}, and --data {config.data} wants {wanted}"
        )
