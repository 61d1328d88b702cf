"""The model that the user's own code builds: `module:factory`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckptool.errors import CheckpointError, TrainingError, UsageError
from ckptool.factories import HINT, a_class, at_home, named, run
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.data.datasets import TrainData, collated
from ckptool.trainer.trees import moved, shape

__all__ = ["own_model"]


def own_model(config: TrainConfig, data: TrainData) -> nn.Module:
    """What `module:factory` is, or returns without arguments, tried on one sample.

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
    """One sample goes through it; layers that learn their size from data have it afterwards."""
    dtype = getattr(torch, config.dtype)
    inputs, _ = collated(data.train, [0], dtype)
    wanted = (1, data.outputs)
    given = shape(inputs)
    outputs = _outputs(model.to(dtype), inputs, f"{config.model} does not take a batch of {given}")
    if not data.inputs:  # a dataset of the user's: what its loss takes is not known
        return
    if not (isinstance(outputs, torch.Tensor) and tuple(outputs.shape) == wanted):
        what = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else a_class(outputs)
        raise TrainingError(
            f"{config.model} makes {what} of a batch of {given}, and --data {config.data} wants "
            f"{wanted}"
        )


def _outputs(model: nn.Module, inputs: Any, what: str) -> Any:
    """What it gives in evaluation mode; nothing that is random is used up."""
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return model(moved(inputs, device))
    except CheckpointError:
        raise
    except Exception as error:  # whatever it raises, it is the user's own code
        said = " ".join(str(error).split())
        raise TrainingError(f"{what}: {type(error).__name__}: {said}") from error
    finally:
        model.train(was_training)
