"""`TrainData`, and which module makes it for which word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from ckptool.errors import UsageError
from ckptool.trainer.config import TrainConfig

__all__ = ["Dataset", "Loss", "Rows", "TrainData", "collated", "data_of"]

Loss = Callable[[Any, Any], torch.Tensor]
"""Outputs and targets of some samples to a scalar, their mean."""


class Dataset(Protocol):
    """A map-style dataset, as `torch.utils.data` has it: pairs of inputs and targets."""

    def __len__(self) -> int:
        """How many samples there are."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """The inputs and targets of one sample."""
        ...


class Rows:
    """A dataset of two tensors whose first dimension is the samples'."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Keep the two, which are equally long."""
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and targets of one sample."""
        return self.inputs[index], self.targets[index]

    def __getitems__(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of several samples at once, stacked already."""
        return self.inputs[rows], self.targets[rows]


@dataclass(frozen=True)
class TrainData:
    """What a run is over.

    Attributes:
        train: The samples to learn from; at least one.
        validation: Samples for the loss of each epoch; None: there is none.
        loss: Mean over samples of outputs against targets; a function, or a name in
            `torch.nn.functional`.
        inputs: The shape of one sample's features, for the built-in models.
        outputs: How many numbers a model gives for one sample.
        statistics: Plain data that belongs to the model (means, deviations, names of columns): kept
            in every `full` checkpoint as `data`.
    """

    train: Dataset
    validation: Dataset | None
    loss: Loss | str
    inputs: tuple[int, ...] = ()
    outputs: int = 1
    statistics: Mapping[str, Any] = field(default_factory=dict)


def collated(dataset: Dataset, rows: Sequence[int]) -> tuple[Any, Any]:
    """Inputs and targets of some samples, stacked."""
    if isinstance(dataset, Rows):
        return dataset.__getitems__(rows)
    inputs, targets = default_collate([dataset[row] for row in rows])
    return inputs, targets


def data_of(config: TrainConfig) -> TrainData:
    """The data that `config.data` names.

    Raises:
        UsageError: no such data.
        TrainingError: a file that cannot be learned from; the message says in which line why.
    """
    word = config.data.partition(":")[0]
    if word == "friedman":
        from ckptool.trainer.data.friedman import friedman

        return friedman(config)
    if word == "random":
        from ckptool.trainer.data.random_features import random_features

        return random_features(config)
    raise UsageError(f"data is {config.data!r}, and not random, friedman, digits or csv:PATH")
