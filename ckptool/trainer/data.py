"""The data of a run: datasets, the order of their batches, and the datasets of `--data`."""

from __future__ import annotations

import csv
import difflib
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, TensorDataset, default_collate

from ckptool.errors import CheckpointError, FileDenied, FileMissing, TrainingError, UsageError
from ckptool.factories import FACTORY, import_object, run_user_code, use_working_directory
from ckptool.trainer.config import TrainConfig, parse_csv_path
from ckptool.trainer.tuning import seed_all
from ckptool.words import a_class, counted, listed, printable


def move_tensors(value: Any, device: torch.device) -> Any:
    """Return the tree with every tensor on `device`."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return the tree with every floating-point tensor as `dtype`."""
    return tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor,
        value,
    )


def sum_outputs(value: Any) -> torch.Tensor:
    """Return the sum of all tensors in a tree, through which gradients reach the parameters."""
    return sum(
        (tensor.sum() for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor)),
        torch.zeros(()),
    )


def first_shape(value: Any) -> tuple[int, ...]:
    """Return the shape of the first tensor in a tree; () without one."""
    return next((tuple(leaf.shape) for leaf in tree_leaves(value) if hasattr(leaf, "shape")), ())


def first_device(value: Any) -> str:
    """Return the device of the first tensor in a tree; "" without one."""
    return next((str(leaf.device) for leaf in tree_leaves(value) if hasattr(leaf, "device")), "")


@dataclass(frozen=True)
class Batches:
    """The steps of an epoch, each of one or more global batches of row numbers.

    The order follows from `seed` and the epoch only, so that a run that is resumed inside an
    epoch, on other devices, sees the same batches. The last batch and the last step may be
    smaller; every row comes once.
    """

    samples: int
    batch_size: int
    accumulate: int
    seed: int

    @property
    def steps(self) -> int:
        """Steps of the optimizer in one epoch, with a smaller last one."""
        return math.ceil(self.samples / (self.batch_size * self.accumulate))

    def iterate_epoch(self, epoch: int, first: int = 0) -> Iterator[list[list[int]]]:
        """Yield the steps of `epoch` (from 0), from `first` on: lists of batches of row numbers."""
        epoch_seed = (self.seed << 20) + epoch  # unique for epochs below 2**20
        generator = torch.Generator().manual_seed(epoch_seed % 2**63)  # torch's seeds have 64 bits
        order = torch.randperm(self.samples, generator=generator).tolist()
        size = self.batch_size
        batches = [order[start : start + size] for start in range(0, self.samples, size)]
        for step in range(first, self.steps):
            yield batches[step * self.accumulate : (step + 1) * self.accumulate]


def select_share(rows: Sequence[int], rank: int, size: int) -> list[int]:
    """Return the rows of a batch that process `rank` of `size` computes, maybe none.

    The batch is split as by `torch.chunk` and `DataParallel`: equal parts rounded up, the last one
    smaller (30 over 4: 8, 8, 8, 6; 10 over 8: five times 2, and three times 0).
    """
    share = math.ceil(len(rows) / size)
    return list(rows[rank * share : (rank + 1) * share])


Loss = Callable[[Any, Any], torch.Tensor]
"""A function of outputs and targets that returns the mean loss over samples."""


class Dataset(Protocol):
    """A map-style dataset, as in `torch.utils.data`: pairs of inputs and targets, or dicts."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return inputs and targets of a sample."""
        ...


@dataclass(frozen=True)
class TrainData:
    """The data of a run and its loss.

    Attributes:
        train: The training samples, at least one.
        validation: The samples for the validation loss of each epoch, or None.
        loss: A function of outputs and targets that returns the mean over samples, or the name of
            a function in `torch.nn.functional`.
        inputs: The shape of one sample's features, for the built-in models.
        outputs: The number of outputs of the model for one sample.
        statistics: Plain data that belongs to the model (means, deviations, column names);
            every `full` checkpoint contains it as `data`.
    """

    train: Dataset
    validation: Dataset | None
    loss: Loss | str
    inputs: tuple[int, ...] = ()
    outputs: int = 1
    statistics: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the datasets.

        Raises:
            TrainingError: if a dataset is not map-style, or the training dataset is empty.
        """
        for dataset in [self.train, *([] if self.validation is None else [self.validation])]:
            if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
                raise TrainingError(
                    f"{a_class(dataset)} is not a map-style dataset",
                    hint="give a torch.utils.data.Dataset with __len__ and __getitem__, "
                    "without batching",
                )
        if not len(self.train):
            raise TrainingError("the training dataset is empty")

    @property
    def mean_loss(self) -> Loss:
        """The loss as a function.

        Raises:
            UsageError: if there is no such function, it has trainable parameters, or is not a mean.
        """
        loss: Any = self.loss
        if isinstance(loss, str):
            with use_working_directory():
                is_factory = FACTORY.fullmatch(loss)
                loss = import_object(loss) if is_factory else getattr(functional, loss, None)
        if not callable(loss):
            raise UsageError(
                f"loss {self.loss!r} is not a function in torch.nn.functional",
                hint="give a function of outputs and targets, a name such as mse_loss, or "
                "module:function",
            )
        if isinstance(loss, nn.Module) and any(
            parameter.requires_grad for parameter in loss.parameters()
        ):
            raise UsageError(
                "the loss has parameters, which would not be trained or saved",
                hint="move them to the model, or freeze them with requires_grad_(False)",
            )
        if getattr(loss, "reduction", "mean") != "mean":
            raise UsageError(
                f"the loss has reduction={loss.reduction!r}, expected 'mean': batches are "
                "weighted by "
                "their number of samples",
                hint=f"use {type(loss).__name__}(reduction='mean')",
            )
        return cast("Loss", loss)


def collate(dataset: Dataset, rows: Sequence[int], dtype: torch.dtype) -> tuple[Any, Any]:
    """Return the inputs and targets of some samples, stacked, floating-point numbers as `dtype`.

    A sample that is a dict is both: the model and the loss get the same batch of dicts.

    Raises:
        TrainingError: a sample is not a pair, or the samples cannot be stacked.
    """
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:  # it can index many rows
        return cast("tuple[Any, Any]", cast_floats(dataset[rows], dtype))
    samples = [dataset[row] for row in rows]
    pairs = [(sample, sample) if isinstance(sample, Mapping) else sample for sample in samples]
    for row, pair in zip(rows, pairs, strict=True):
        if not (isinstance(pair, Sequence) and len(pair) == 2):
            raise TrainingError(
                f"sample {row} of the dataset is {a_class(pair)}, expected a pair (inputs, "
                "targets)",
                hint="return a pair (inputs, targets), or a dict, which is passed to model "
                "and loss",
            )
    try:
        inputs, targets = default_collate(pairs)
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        raise TrainingError(
            f"samples {listed(map(str, rows), 4)} of the dataset cannot be stacked: "
            f"{' '.join(str(error).split())}",
            hint="give every sample the same shapes and types",
        ) from error
    return cast_floats(inputs, dtype), cast_floats(targets, dtype)


def load_batches(
    dataset: Dataset,
    rows: Sequence[Sequence[int]],
    dtype: torch.dtype,
    *,
    workers: int,
    seed: int,
    is_pinned: bool,
) -> Iterator[tuple[Any, Any]]:
    """Yield a batch for each item of `rows`, a list of row numbers, in order.

    A process may have no rows of a batch. For such an item the batch is the first sample, which
    shows the caller the types of inputs and targets.

    With `workers` the batches are made ahead, and the random numbers of the dataset follow from
    `seed` and the position of the batch only, in any worker.

    Raises:
        TrainingError: as `collate`.
    """
    if not workers:
        yield from (collate(dataset, row_numbers or [0], dtype) for row_numbers in rows)
        return
    for batch in DataLoader(
        cast("Any", _BatchDataset(dataset, rows, dtype, seed)),
        batch_size=None,  # an item of the dataset is a batch
        num_workers=workers,
        pin_memory=is_pinned,
        generator=torch.Generator(),  # not the default one, which a resumed run continues
    ):
        if isinstance(batch, CheckpointError):  # that making this batch raised in a worker
            raise batch
        yield batch


class _BatchDataset:
    """A dataset of batches, or of errors: as values they are sent unchanged to the main process."""

    def __init__(
        self, dataset: Dataset, rows: Sequence[Sequence[int]], dtype: torch.dtype, seed: int
    ) -> None:
        self._dataset, self._rows, self._dtype, self._seed = dataset, rows, dtype, seed

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, Any] | CheckpointError:
        """Return a batch, or the error that making it raised.

        Without rows it is the first sample, which shows the types of inputs and targets.
        """
        seed_all(self._seed + index)
        try:
            return collate(self._dataset, self._rows[index] or [0], self._dtype)
        except CheckpointError as error:
            return error


def split_rows(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the training rows, four fifths of all, and the validation rows, by the seed."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(samples, generator=generator)
    return order[: samples * 4 // 5], order[samples * 4 // 5 :]


def make_data(config: TrainConfig) -> TrainData:
    """Return the data of `config.data`.

    Raises:
        FileMissing, FileDenied: a file cannot be read.
        TrainingError: a file is not a table of numbers, or scikit-learn is missing.
    """
    path = parse_csv_path(config.data)
    if path is not None:
        return load_csv(config, path)
    if FACTORY.fullmatch(config.data):
        return _call_data_factory(config)
    makers = {
        "digits": load_digit_images,
        "random": make_random_features,
        "friedman": make_friedman,
    }
    return makers[config.data](config)


_HINT = "return a TrainData, a map-style dataset, or a pair of training and validation datasets"


def _call_data_factory(config: TrainConfig) -> TrainData:
    """Return the data that the user's `module:factory` names or returns.

    It is a `TrainData`, or a training dataset, or a pair of training and validation datasets; the
    last two get the loss of the options.
    """
    text = config.data
    with use_working_directory():
        result = import_object(text)
        if callable(result):
            result = run_user_code(result, f"{text} raised", _HINT)
    if isinstance(result, TrainData):
        return result
    training, validation = result, None
    if isinstance(result, tuple) and len(result) == 2:
        training, validation = result
    if not hasattr(training, "__getitem__"):
        raise UsageError(f"{text} returns {a_class(result)}, expected data", hint=_HINT)
    if config.loss is None:
        raise UsageError(f"{text} returns a dataset without a loss", hint="add --loss mse_loss")
    return TrainData(training, validation, config.loss)


def make_friedman(config: TrainConfig) -> TrainData:
    """Return 500 samples of 10 features in [0, 1), 400 of them for training.

    Targets: 10 sin(pi x0 x1) + 20 (x2 - 1/2)^2 + 10 x3 + 5 x4 + N(0, 1)

    (J. Friedman, Multivariate adaptive regression splines, Annals of Statistics 19, 1991).
    """
    dtype = getattr(torch, config.dtype)
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.rand(500, 10, generator=generator, dtype=torch.float64)
    noise = torch.randn(500, generator=generator, dtype=torch.float64)
    y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = (y + 10 * x[:, 3] + 5 * x[:, 4] + noise).unsqueeze(1).to(dtype)
    x = x.to(dtype)
    training, validation = TensorDataset(x[:400], y[:400]), TensorDataset(x[400:], y[400:])
    return TrainData(training, validation, "mse_loss", (10,), 1)


def make_random_features(config: TrainConfig) -> TrainData:
    """Return 100 training samples of 5 features from N(0, 1), as in the DataParallel tutorial.

    The tutorial has no targets; here they are a linear map of the features, weights from N(0, 1).
    """
    dtype = getattr(torch, config.dtype)
    generator = torch.Generator().manual_seed(config.seed)
    x = torch.randn(100, 5, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(5, 2, generator=generator, dtype=torch.float64)
    train = TensorDataset(x.to(dtype), y.to(dtype))
    return TrainData(train, validation=None, loss="mse_loss", inputs=(5,), outputs=2)


def load_digit_images(config: TrainConfig) -> TrainData:
    """Return 1797 images of 1 x 8 x 8 in [0, 1], four fifths of them for training, and digits.

    Raises:
        TrainingError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise TrainingError(
            f"this data needs scikit-learn, which cannot be imported ({error})",
            hint="pip install scikit-learn",
        ) from error
    loaded = load_digits()
    dtype = getattr(torch, config.dtype)
    largest_pixel = 16.0
    images = torch.as_tensor(loaded.images).unsqueeze(1).to(dtype) / largest_pixel
    labels = torch.as_tensor(loaded.target).long()
    training, validation = (
        TensorDataset(images[rows], labels[rows]) for rows in split_rows(len(labels), config.seed)
    )
    return TrainData(
        training,
        validation,
        loss="cross_entropy",
        inputs=(1, 8, 8),
        outputs=10,
        statistics={"largest": largest_pixel},
    )


def load_csv(config: TrainConfig, path: str) -> TrainData:
    """Return a table whose column `config.target`, or the last, is predicted from the others.

    All columns, the target too, are standardized with the mean and deviation (over n) of the
    training rows, so that the loss of a model that always predicts the mean is 1. A constant column
    becomes 0. `statistics` has the means and deviations: a model's output y stands for
    `y * target_std + target_mean`.

    Raises:
        FileMissing, FileDenied: the file cannot be read.
        TrainingError: it is not a table of numbers, or has too few rows or columns.
    """
    columns, values = read_table(path)
    target = _find_target_column(columns, config.target, path)
    samples = len(values)
    if samples < 5:
        raise TrainingError(
            f"has {counted(samples, 'row')} of numbers, expected at least 5",
            file=path,
        )
    training, validation = (values[rows] for rows in split_rows(samples, config.seed))
    std, mean = torch.std_mean(training, dim=0, correction=0)
    # A constant column becomes 0: its mean must be exact, and its deviation is not a divisor.
    is_constant = (training == training[0]).all(0)
    mean, std = torch.where(is_constant, training[0], mean), torch.where(is_constant, 1.0, std)
    is_invalid = ~(mean.isfinite() & std.isfinite() & (std > 0))  # for each column
    if is_invalid.any():
        name = columns[int(is_invalid.nonzero()[0])]
        raise TrainingError(
            f"column {printable(name)!r} cannot be standardized: its numbers are too large or too "
            "close to each other",
            file=path,
        )
    features = [index for index in range(len(columns)) if index != target]

    def scale_rows(values: torch.Tensor) -> TensorDataset:
        """Return rows as a dataset of standardized features and target."""
        scaled = ((values - mean) / std).to(getattr(torch, config.dtype))
        return TensorDataset(scaled[:, features], scaled[:, [target]])

    statistics = {
        "columns": [columns[index] for index in features],
        "mean": mean[features].tolist(),
        "std": std[features].tolist(),
        "target": columns[target],
        "target_mean": mean[target].item(),
        "target_std": std[target].item(),
    }
    return TrainData(
        scale_rows(training),
        scale_rows(validation),
        loss="mse_loss",
        inputs=(len(features),),
        outputs=1,
        statistics=statistics,
    )


def _find_target_column(columns: Sequence[str], name: str | None, path: str) -> int:
    """Return the index of the target column: the named one, or the last."""
    if len(columns) == 1:
        raise TrainingError(
            f"has only one column, {printable(columns[0])!r}, so there is nothing to predict "
            "it from",
            file=path,
            hint="separate columns by commas, semicolons or tabs",
        )
    if name is None:
        return len(columns) - 1
    if name in columns:
        return columns.index(name)
    similar = difflib.get_close_matches(name, columns, n=1) or columns[-1:]
    raise TrainingError(
        f"has no column {printable(name)!r}; its columns: {listed(columns)}",
        file=path,
        hint=f"use --target {printable(similar[0])}",
    )


_DELIMITERS = "\t;,"
"""Candidates for the delimiter; the comma last, as numbers and names may contain it."""


class _TableError(Exception):
    pass


def read_table(path: str) -> tuple[tuple[str, ...], torch.Tensor]:
    """Read columns of numbers, separated by commas, semicolons or tabs.

    Return the names of the columns, all different, and the numbers: rows x columns, float64.

    The first row is a header if some of its cells are not numbers, and its numbers are whole, such
    as 2019. A column without a name is called by its number, from 1. Blank lines are skipped.

    Raises:
        FileMissing, FileDenied: the file cannot be read.
        TrainingError: a cell is not a finite number, or rows differ in length; the message names
            line and column.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            head = list(islice(file, 10))
            rows = csv.reader(
                chain(head, file),
                delimiter=_detect_delimiter(head),
                strict=True,
                skipinitialspace=True,
            )
            try:
                return _parse_table(row for row in rows if not _is_blank_line(row))
            except (csv.Error, _TableError) as error:
                text = f"line {rows.line_num}: {error}"
                hint = "write numbers such as 1.5 in every cell, and names only in the first line"
                raise TrainingError(text, file=path, hint=hint) from error
    except UnicodeDecodeError as error:
        raise TrainingError("is not UTF-8", file=path, hint="save it as UTF-8") from error
    except FileNotFoundError as error:
        raise FileMissing("no such file", file=path) from error
    except OSError as error:
        raise FileDenied(f"cannot be read: {error.strerror or error}", file=path) from error


def _detect_delimiter(head: Sequence[str]) -> str:
    """Return the delimiter of a table whose first lines are `head`.

    The first one that is in both of the first two lines, or else the most frequent one there.
    """
    lines = [line for line in head if line.strip()][:2]
    for delimiter in _DELIMITERS:
        if all(delimiter in line for line in lines):
            return delimiter
    # Of delimiters that are equally frequent `max` returns the first: here the comma.
    return max(reversed(_DELIMITERS), key="".join(lines).count)


def _is_blank_line(row: Sequence[str]) -> bool:
    """Return True for the row of an empty line; a line of delimiters is a row of empty cells."""
    return len(row) <= 1 and not "".join(row).strip()


def _parse_table(rows: Iterator[list[str]]) -> tuple[tuple[str, ...], torch.Tensor]:
    """Return the column names and the numbers of a table, rows x columns."""
    first = next(rows, None)
    if first is None:
        raise _TableError("the file has no rows")
    columns = tuple(str(number) for number in range(1, len(first) + 1))
    if _is_header(first):
        columns = tuple(cell.strip() or number for cell, number in zip(first, columns, strict=True))
        if len(set(columns)) < len(columns):
            repeated = max(columns, key=columns.count)
            raise _TableError(f"two columns have the name {printable(repeated)!r}")
    else:
        rows = chain([first], rows)
    values = array("d")
    for row in rows:
        if len(row) != len(columns):
            raise _TableError(f"has {counted(len(row), 'cell')}, expected {len(columns)}")
        for column, cell in zip(columns, row, strict=True):
            number = _parse_number(cell)
            if number is None or not math.isfinite(number):
                shown = printable(cell if len(cell) <= 40 else f"{cell[:40]}...")
                raise _TableError(
                    f"{shown!r} in column {printable(column)!r} is not a finite number"
                )
            values.append(number)
    if not values:
        raise _TableError("the file has no rows after the header")
    numbers = torch.frombuffer(values, dtype=torch.float64)
    return columns, numbers.view(-1, len(columns))


def _is_header(first: Sequence[str]) -> bool:
    """Return True if a row has words, and no number other than whole ones, such as 2019."""
    cells = [cell.strip() for cell in first]
    others = [cell for cell in cells if cell and not cell.isdecimal()]  # neither empty nor whole
    return bool(others) and all(_parse_number(cell) is None for cell in others)


def _parse_number(cell: str) -> float | None:
    """Return the number in a cell, or None. Python's `1_000` is not one."""
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None
