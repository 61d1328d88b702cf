"""A table of numbers in a text file, as the standard `csv` module reads it."""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from ckptool.errors import FileDenied, FileMissing, TrainingError
from ckptool.words import printable

__all__ = ["Table", "read_table"]

_DELIMITERS = "\t;,"
"""Candidates for the delimiter; the comma last, as it is also found in numbers and in names."""


@dataclass(frozen=True)
class Table:
    """Names of the columns, all different, and the numbers below them: rows x columns, float64."""

    columns: tuple[str, ...]
    values: torch.Tensor


def read_table(path: str) -> Table:
    """Read columns of numbers, separated by commas, semicolons or tabs.

    The first row is a header if some of its cells are no numbers, and its numbers are whole ones
    as 2019. A column without a name is called by its number, from 1. Blank lines are skipped.

    Raises:
        FileMissing, FileDenied: the file cannot be read.
        TrainingError: a cell is no finite number, or rows differ in length; the message names line
            and column.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            head = list(islice(file, 10))
            rows = csv.reader(
                chain(head, file), delimiter=_delimiter(head), strict=True, skipinitialspace=True
            )
            try:
                return _table(path, rows)
            except csv.Error as error:
                raise TrainingError(
                    f"line {rows.line_num} is no CSV ({error})", file=path
                ) from error
    except UnicodeDecodeError as error:
        raise TrainingError("is not UTF-8", file=path, hint="save it as UTF-8") from error
    except FileNotFoundError as error:
        raise FileMissing("there is no such file", file=path) from error
    except OSError as error:
        raise FileDenied(f"cannot be read: {error.strerror or error}", file=path) from error


def _delimiter(head: Sequence[str]) -> str:
    """Return the first delimiter that both lines have, or else the most frequent one."""
    lines = [line for line in head if line.strip()][:2]
    counts = {one: [line.count(one) for line in lines] for one in _DELIMITERS}
    in_both = (one for one in _DELIMITERS if all(counts[one]))
    return next(in_both, max(reversed(_DELIMITERS), key=lambda one: sum(counts[one])))


def _table(path: str, reader: Any) -> Table:
    def fault(what: str, hint: str | None = None) -> TrainingError:
        return TrainingError(f"line {reader.line_num}{what}", file=path, hint=hint)

    rows: Iterator[list[str]] = (row for row in reader if len(row) > 1 or "".join(row).strip())
    first = next(rows, None)
    if first is None:
        raise TrainingError("is empty", file=path)
    columns = tuple(map(str, range(1, len(first) + 1)))
    if _is_header(first):
        columns = tuple(cell.strip() or own for cell, own in zip(first, columns, strict=True))
        if len(set(columns)) < len(columns):
            twice = max(columns, key=columns.count)
            raise fault(f", two columns are named {printable(twice)!r}")
    else:
        rows = chain([first], rows)
    values = array("d")
    for row in rows:
        if len(row) != len(columns):
            count = f"{len(row)} cell{'s' * (len(row) > 1)}"
            raise fault(f" has {count}, and the lines before have {len(columns)}")
        for column, cell in zip(columns, row, strict=True):
            number = _number(cell)
            if number is None or not math.isfinite(number):
                where = f", column {printable(column)!r}"
                if not cell.strip():
                    raise fault(f"{where} is empty", "fill the holes, or leave out their rows")
                is_comma = re.fullmatch(r"\s*[+-]?\d+,\d+\s*", cell)
                shown = printable(cell if len(cell) <= 40 else f"{cell[:40]}...")
                raise fault(
                    f"{where} has {shown!r}, which is no finite number",
                    "1.5, with a point" if is_comma else None,
                )
            values.append(number)
    if not values:
        raise TrainingError("has names of columns and no row below them", file=path)
    numbers = torch.frombuffer(values, dtype=torch.float64)
    return Table(columns, numbers.view(-1, len(columns)))


def _is_header(first: Sequence[str]) -> bool:
    words = [cell for cell in map(str.strip, first) if cell and not cell.isdecimal()]
    return bool(words) and all(_number(word) is None for word in words)


def _number(cell: str) -> float | None:
    try:
        return None if "_" in cell else float(cell)
    except ValueError:
        return None
