"""A table of numbers in a text file, read with the standard `csv` module."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch

from ckptool.errors import FileDenied, FileMissing, TrainingError
from ckptool.words import counted, printable

__all__ = ["Table", "read_table"]

_DELIMITERS = "\t;,"
"""Candidates for the delimiter; the comma last, as numbers and names may contain it."""
_HINT = "numbers such as 1.5 in every cell, names only in the first line"


class _Fault(Exception):
    pass


@dataclass(frozen=True)
class Table:
    """The names of the columns, all different, and the numbers: rows x columns, float64."""

    columns: tuple[str, ...]
    values: torch.Tensor


def read_table(path: str) -> Table:
    """Read columns of numbers, separated by commas, semicolons or tabs.

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
                chain(head, file), delimiter=_delimiter(head), strict=True, skipinitialspace=True
            )
            try:
                return _table(row for row in rows if len(row) > 1 or "".join(row).strip())
            except (csv.Error, _Fault) as error:
                text = f"line {rows.line_num}: {error}"
                raise TrainingError(text, file=path, hint=_HINT) from error
    except UnicodeDecodeError as error:
        raise TrainingError("is not UTF-8", file=path, hint="save it as UTF-8") from error
    except FileNotFoundError as error:
        raise FileMissing("there is no such file", file=path) from error
    except OSError as error:
        raise FileDenied(f"cannot be read: {error.strerror or error}", file=path) from error


def _delimiter(head: Sequence[str]) -> str:
    """Return the first delimiter that the first two lines have, or else the most frequent one."""
    lines = [line for line in head if line.strip()][:2]
    counts = {one: [line.count(one) for line in lines] for one in _DELIMITERS}
    in_both = (one for one in _DELIMITERS if all(counts[one]))
    return next(in_both, max(reversed(_DELIMITERS), key=lambda one: sum(counts[one])))


def _table(rows: Iterator[list[str]]) -> Table:
    first = next(rows, None)
    if first is None:
        raise _Fault("there is no row")
    columns = tuple(map(str, range(1, len(first) + 1)))
    if _is_header(first):
        columns = tuple(cell.strip() or own for cell, own in zip(first, columns, strict=True))
        if len(set(columns)) < len(columns):
            raise _Fault(f"two columns are named {printable(max(columns, key=columns.count))!r}")
    else:
        rows = chain([first], rows)
    values = array("d")
    for row in rows:
        if len(row) != len(columns):
            raise _Fault(f"{counted(len(row), 'cell')}, but {len(columns)} in the lines before")
        for column, cell in zip(columns, row, strict=True):
            number = _number(cell)
            if number is None or not math.isfinite(number):
                shown = printable(cell if len(cell) <= 40 else f"{cell[:40]}...")
                raise _Fault(f"{shown!r} in column {printable(column)!r} is not a finite number")
            values.append(number)
    if not values:
        raise _Fault("there is no row below the names of the columns")
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
