"""The models of `--model`: `linear`, `mlp:16,32`, `cnn`, and `module:factory` of the user."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn

from ckptool.errors import CheckpointError, TrainingError, UsageError
from ckptool.factories import FACTORY, HINT, import_object, run_user_code, use_working_directory
from ckptool.trainer.config import TrainConfig, parse_hidden_widths
from ckptool.trainer.data import TrainData, collate, first_shape, move_tensors
from ckptool.words import a_class


def make_model(config: TrainConfig, data: TrainData) -> nn.Module:
    """Return the model that `config.model` names, with weights from torch's random state.

    Raises:
        UsageError: the model does not fit the data, or the user's code raised an error.
        TrainingError: the user's model does not accept a sample, or returns another shape.
    """
    is_built_in = not FACTORY.fullmatch(config.model)
    if is_built_in and not data.inputs:
        raise UsageError(
            f"model {config.model} needs the shape of the data, which is unknown",
            hint="use Trainer(model=...), --model module:factory, or TrainData(inputs=(10,), "
            "outputs=1, ...)",
        )
    if config.model == "cnn":
        return _make_cnn(data)
    if config.model == "linear":
        return _make_mlp(data, hidden_widths=[])
    widths = parse_hidden_widths(config.model)
    return _call_model_factory(config, data) if widths is None else _make_mlp(data, widths)


def _make_mlp(data: TrainData, hidden_widths: list[int]) -> nn.Sequential:
    """Build linear layers with ReLU between them, from the inputs of the data to its outputs."""
    widths = [math.prod(data.inputs), *hidden_widths]
    layers: list[nn.Module] = [nn.Flatten()]
    try:
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], data.outputs))
    except (RuntimeError, MemoryError) as error:
        shown = ", ".join(map(str, hidden_widths))
        raise UsageError(f"layers of {shown} do not fit in memory") from error


def _make_cnn(data: TrainData) -> nn.Sequential:
    """Build two convolutions of 3 x 3, each followed by pooling, and a linear layer."""
    if len(data.inputs) != 3 or min(data.inputs[1:]) < 4:
        raise UsageError(
            "model cnn needs images (channels x height x width, at least 4 x 4), but the "
            "samples are "
            f"{' x '.join(map(str, data.inputs))}",
            hint="use --data digits, or --model mlp:16,32",
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


def _call_model_factory(config: TrainConfig, data: TrainData) -> nn.Module:
    """Return the model that `module:factory` names or returns, after a try with one sample."""
    text = config.model
    with use_working_directory():
        model = import_object(text)
        if callable(model) and not isinstance(model, nn.Module):
            model = run_user_code(model, f"{text} raised", HINT)
        if not isinstance(model, nn.Module):
            raise UsageError(f"{text} returns {a_class(model)}, expected a model", hint=HINT)
        _require_fit(model, config, data)
    return model


def _require_fit(model: nn.Module, config: TrainConfig, data: TrainData) -> None:
    """Pass one sample through the model in evaluation mode, which also sizes lazy layers.

    The random state is restored.
    """
    dtype = getattr(torch, config.dtype)
    inputs, _ = collate(data.train, [0], dtype)
    model.to(dtype)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = model(move_tensors(inputs, device))
    except CheckpointError:
        raise
    except Exception as error:  # of the user's code
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise TrainingError(
            f"{config.model} does not accept a batch of {first_shape(inputs)}: {message}"
        ) from error
    finally:
        model.train(was_training)
    expected = (1, data.outputs)
    is_tensor = isinstance(outputs, torch.Tensor)
    # The shape that the loss of the user's own dataset needs is not known.
    if data.inputs and not (is_tensor and tuple(outputs.shape) == expected):
        raise TrainingError(
            f"{config.model} returns {tuple(outputs.shape) if is_tensor else a_class(outputs)} for "
            f"a batch of {first_shape(inputs)}, but --data {config.data} needs {expected}"
        )
