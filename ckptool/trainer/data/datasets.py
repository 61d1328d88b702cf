"""`TrainData`, and which module makes it for which word."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, default_collate

from ckptool.errors import CheckpointError, TrainingError, UsageError
from ckptool.factories import FACTORY, a_class, at_home, named, run
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.randomness import seed_all
from ckptool.trainer.trees import as_dtype
from ckptool.trainer.words import csv_path

__all__ = ["Dataset", "Loss", "Rows", "TrainData", "collated", "data_of", "split"]

Loss = Callable[[Any, Any], torch.Tensor]
"""Outputs and targets of some samples to a scalar, their mean."""


class Dataset(Protocol):
    """A map-style dataset, as `torch.utils.data` has it: pairs of inputs and targets, or dicts."""

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

    def __post_init__(self) -> None:
        """Check that there is something to learn from.

        Raises:
            TrainingError: a dataset is not map-style, or there is no sample to learn from.
        """
        for dataset in [self.train, *([] if self.validation is None else [self.validation])]:
            if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
                raise TrainingError(
                    f"a {type(dataset).__name__} is no map-style dataset: it needs a length, and "
                    "samples by number",
                    hint="a torch.utils.data.Dataset with __len__ and __getitem__; batches are "
                    "made of it here",
                )
        if not len(self.train):
            raise TrainingError("the dataset to learn from has no sample")

    @property
    def mean_loss(self) -> Loss:
        """The loss as a function.

        Raises:
            UsageError: there is none of that name, it has parameters to train, or is no mean.
        """
        loss: Any = self.loss
        if isinstance(loss, str):
            with at_home():
                own = FACTORY.fullmatch(loss)
                loss = named(loss) if own else getattr(functional, loss, None)
        if not callable(loss):
            raise UsageError(
                f"loss is {self.loss!r}, and no function of torch.nn.functional",
                hint="a function of outputs and targets, a name as mse_loss, or module:function",
            )
        if isinstance(loss, nn.Module) and any(one.requires_grad for one in loss.parameters()):
            raise UsageError(
                "the loss has parameters of its own, which nothing would train or save",
                hint="make them a part of the model, or requires_grad_(False)",
            )
        if getattr(loss, "reduction", "mean") != "mean":
            raise UsageError(
                f"the loss has reduction={loss.reduction!r}, and a mean over samples is wanted: "
                "batches that are shared, or accumulated, weigh as many samples as they have",
                hint=f"{type(loss).__name__}(reduction='mean')",
            )
        return cast("Loss", loss)


def collated(dataset: Dataset, rows: Sequence[int], dtype: torch.dtype) -> tuple[Any, Any]:
    """Inputs and targets of some samples, stacked; what is no whole number as `dtype`.

    A sample that is a dict is both: the model is given the batch of them, and so is the loss.

    Raises:
        TrainingError: samples are not alike, or no pairs.
    """
    if isinstance(dataset, Rows):
        return dataset.__getitems__(rows)
    samples = [dataset[row] for row in rows]
    pairs = [(one, one) if isinstance(one, Mapping) else one for one in samples]
    for row, pair in zip(rows, pairs, strict=True):
        if not (isinstance(pair, Sequence) and len(pair) == 2):
            raise TrainingError(
                f"sample {row} of the dataset is {_said(pair)}, and no pair of inputs and targets",
                hint="return inputs, targets; or one dict, which model and loss are both given",
            )
    try:
        batch: tuple[Any, Any] = tuple(default_collate(pairs))
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        said = " ".join(str(error).split())
        raise TrainingError(
            f"samples {_listed(rows)} of the dataset cannot be stacked to one batch: {said}",
            hint="give every sample the same shapes and types",
        ) from error
    inputs, targets = (as_dtype(one, dtype) for one in batch)
    return inputs, targets


def prepared(
    dataset: Dataset,
    rows: Sequence[Sequence[int]],
    dtype: torch.dtype,
    *,
    workers: int,
    seed: int,
    is_pinned: bool,
) -> Iterator[tuple[Any, Any]]:
    """The batches of these rows, in their order; of no rows the first sample, for its types.

    Without `workers` each is made when it is asked for. With them it is made ahead, and what the
    dataset draws at random follows from `seed` and its place alone, whichever worker makes it.

    Raises:
        TrainingError: samples are not alike, or no pairs.
    """
    if not workers:
        yield from (collated(dataset, one or [0], dtype) for one in rows)
        return
    for batch in DataLoader(
        cast("Any", _Batch(dataset, rows, dtype, seed)),
        batch_size=None,
        num_workers=workers,
        pin_memory=is_pinned,
        generator=torch.Generator(),  # of its own: a run that goes on draws the same numbers
    ):
        if isinstance(batch, CheckpointError):
            raise batch
        yield batch


class _Batch:
    """A dataset whose samples are batches; an error of ours is one, too, raised when it comes."""

    def __init__(
        self, dataset: Dataset, rows: Sequence[Sequence[int]], dtype: torch.dtype, seed: int
    ) -> None:
        self._dataset, self._rows, self._dtype, self._seed = dataset, rows, dtype, seed

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: int) -> tuple[Any, Any] | CheckpointError:
        seed_all(self._seed + at)
        try:
            return collated(self._dataset, self._rows[at] or [0], self._dtype)
        except CheckpointError as error:
            return error


def _said(sample: Any) -> str:
    kind = type(sample).__name__
    return f"a {kind} of {len(sample)}" if isinstance(sample, (list, tuple)) else f"a {kind}"


def _listed(rows: Sequence[int]) -> str:
    return ", ".join([*map(str, rows[:4]), *(["..."] if len(rows) > 4 else [])])


def split(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows to learn from, four fifths of all, and the others, chosen by the seed."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(samples, generator=generator)
    return order[: samples * 4 // 5], order[samples * 4 // 5 :]


def data_of(config: TrainConfig) -> TrainData:
    """The data that `config.data` names.

    Raises:
        FileMissing, FileDenied: a file cannot be read.
        TrainingError: it cannot be learned from; the message says in which line why.
    """
    path = csv_path(config.data)
    if path is not None:
        from ckptool.trainer.data.columns import csv_columns

        return csv_columns(config, path)
    if FACTORY.fullmatch(config.data):
        return _own_data(config)
    if config.data == "digits":
        from ckptool.trainer.data.digits import digits

        return digits(config)
    if config.data == "random":
        from ckptool.trainer.data.random_features import random_features

        return random_features(config)
    from ckptool.trainer.data.friedman import friedman

    return friedman(config)


_HINT = "a TrainData, a map-style dataset, or a pair of them: to learn from, and to validate with"


def _own_data(config: TrainConfig) -> TrainData:
    """What `module:factory` of the user's is, or returns without arguments.

    Raises:
        UsageError: the code raised; or what it gives is no data, or has no loss.
    """
    text = config.data
    with at_home():
        made = named(text)
        if callable(made):
            made = run(made, f"{text} raised", _HINT)
    if isinstance(made, TrainData):
        return made
    pair = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not hasattr(pair[0], "__getitem__"):
        raise UsageError(f"{text} gives {a_class(made)}, and no data", hint=_HINT)
    if config.loss is None:
        raise UsageError(
            f"{text} gives a dataset, and nothing says what is minimised", hint="--loss mse_loss"
        )
    return TrainData(pair[0], pair[1], config.loss)
