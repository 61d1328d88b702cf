"""The columns of a CSV: one is predicted from the others."""

from __future__ import annotations

import difflib

import torch

from ckptool.errors import TrainingError
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.data.datasets import Rows, TrainData, split
from ckptool.trainer.data.tables import Table, read_table
from ckptool.words import printable

__all__ = ["csv_columns"]

_FEWEST = 5
"""Rows of which a fifth can be kept apart."""


def csv_columns(config: TrainConfig, path: str) -> TrainData:
    """The table in a file: `config.target`, or the last column, is predicted from the others.

    Four fifths of the rows, chosen by the seed, are learned from. All columns, the target too, are
    standardised with the mean and deviation (over n) of these: a loss of 1 is that of who always
    says the mean. `statistics` have both, so that a model's output y means
    `y * target_std + target_mean`. A column that is the same in all of them becomes 0.

    Raises:
        FileMissing, FileDenied: the file cannot be read.
        TrainingError: there is nothing to learn in it.
    """
    table = read_table(path)
    target = _target(table, config.target, path)
    samples = len(table.values)
    if samples < _FEWEST:
        raise TrainingError(
            f"has {samples} row{'s' * (samples > 1)} of numbers, too few to keep a fifth of them "
            f"apart for validation",
            file=path,
            hint=f"{_FEWEST} rows at least",
        )
    learned, held = (table.values[rows] for rows in split(samples, config.seed))
    mean, std = _statistics(learned, table, path)
    features = [number for number in range(len(table.columns)) if number != target]

    def rows(values: torch.Tensor) -> Rows:
        scaled = ((values - mean) / std).to(getattr(torch, config.dtype))
        return Rows(scaled[:, features], scaled[:, [target]])

    statistics = {
        "columns": [table.columns[number] for number in features],
        "mean": mean[features].tolist(),
        "std": std[features].tolist(),
        "target": table.columns[target],
        "target_mean": mean[target].item(),
        "target_std": std[target].item(),
    }
    return TrainData(rows(learned), rows(held), "mse_loss", (len(features),), 1, statistics)


def _target(table: Table, name: str | None, path: str) -> int:
    """The number of the column that is predicted."""
    columns = table.columns
    if len(columns) == 1:
        raise TrainingError(
            f"has one column, {printable(columns[0])!r}, and nothing to predict it from",
            file=path,
            hint="a comma, a semicolon or a tab between the columns",
        )
    if name is None:
        return len(columns) - 1
    if name in columns:
        return columns.index(name)
    alike = difflib.get_close_matches(name, columns, n=1) or columns[-1:]
    raise TrainingError(
        f"has no column named {printable(name)!r}, but {_listed(columns)}",
        file=path,
        hint=f"--target {printable(alike[0])}",
    )


def _listed(columns: tuple[str, ...]) -> str:
    shown = ", ".join(map(printable, columns[:12]))
    return f"{shown} and {len(columns) - 12} others" if len(columns) > 12 else shown


def _statistics(
    learned: torch.Tensor, table: Table, path: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of each column; of one that is always the same, that and 1."""
    std, mean = torch.std_mean(learned, dim=0, correction=0)
    same = (learned == learned[0]).all(0)
    mean, std = torch.where(same, learned[0], mean), torch.where(same, 1.0, std)
    for column, *found in zip(table.columns, mean.tolist(), std.tolist(), strict=True):
        if not (abs(found[0]) < torch.inf and 0 < found[1] < torch.inf):
            raise TrainingError(
                f"the numbers in column {printable(column)!r} are too large or too close to zero "
                "to be standardised",
                file=path,
            )
    return mean, std
