"""A table of numbers in a text file, as the standard `csv` module reads it."""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ckptool.errors import FileDenied, FileMissing, TrainingError
from ckptool.words import printable

__all__ = ["Table", "read_table"]

_DELIMITERS = "\t;,"
"""What may stand between cells; the comma last, as it is also found in numbers and in names."""
_UTF8 = "save it as UTF-8"


@dataclass(frozen=True)
class Table:
    """Names of the columns, all different, and the numbers below them: rows x columns, float64."""

    columns: tuple[str, ...]
    values: torch.Tensor


def read_table(path: str) -> Table:
    """Read columns of numbers; there may be a line of names above them.

    The first line is one of names where some cell is no number, and all numbers in it are whole
    ones as 2019. A column without a name is called by its number, from 1. Between cells is a comma,
    a semicolon or a tab; blank lines are passed over.

    Raises:
        FileMissing, FileDenied: it cannot be read.
        TrainingError: a cell is no finite number, or lines are not of one length; the message
            names line and column.
    """
    with _opened(path) as text:
        rows = _Rows(path, text)
        values = array("d")
        for row in rows:
            values.extend(rows.numbers(row))
    if not values:
        raise TrainingError("has names of columns and no row below them", file=path)
    numbers = torch.frombuffer(values, dtype=torch.float64)
    return Table(rows.columns, numbers.view(-1, len(rows.columns)))


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """The text; a byte that is no UTF-8 is a surrogate in it, which is found in its cell."""
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            yield file
    except FileNotFoundError as error:
        raise FileMissing("there is no such file", file=path) from error
    except OSError as error:
        raise FileDenied(f"cannot be read: {error.strerror or error}", file=path) from error


class _Rows:
    """The rows of a text, each as long as the first; `columns` are their names."""

    def __init__(self, path: str, text: Iterator[str]) -> None:
        """Read the first lines: which delimiter they have, and whether they name the columns."""
        self._path = path
        lines: list[str] = []
        while len([line for line in lines if line.strip()]) < 2 and (line := next(text, "")):
            lines.append(line)
        self._reader = csv.reader(
            chain(lines, text), delimiter=_delimiter(lines), strict=True, skipinitialspace=True
        )
        first = self._next()
        if first is None:
            raise TrainingError("is empty", file=path)
        has_names = _is_header(first)
        self.columns = self._names(first if has_names else [""] * len(first))
        self._first = None if has_names else first

    def __iter__(self) -> Iterator[list[str]]:
        """Those with numbers."""
        row = self._first or self._next()
        while row is not None:
            if len(row) != len(self.columns):
                count = f"{len(row)} cell{'s' * (len(row) > 1)}"
                raise self._error(f"has {count}, and the lines before have {len(self.columns)}")
            yield row
            row = self._next()

    def _next(self) -> list[str] | None:
        """The next one that is not blank."""
        try:
            return next((row for row in self._reader if len(row) > 1 or "".join(row).strip()), None)
        except csv.Error as error:
            raise self._error(f"is no CSV ({error})") from error

    def _names(self, cells: Sequence[str]) -> tuple[str, ...]:
        names = [cell.strip() or str(number) for number, cell in enumerate(cells, 1)]
        for position, name in enumerate(names):
            if not _is_utf8(name):
                raise self._error(f"the name of column {position + 1} is not UTF-8", hint=_UTF8)
            if name in names[:position]:
                raise self._error(f"two columns are named {printable(name)!r}")
        return tuple(names)

    def numbers(self, row: Sequence[str]) -> list[float]:
        """The row that was read last, as numbers."""
        with suppress(ValueError):
            found = [float(cell) for cell in row]
            if all(map(math.isfinite, found)) and "_" not in "".join(row):
                return found
        position = next(place for place, cell in enumerate(row) if not _is_number(cell))
        raise self._no_number(self.columns[position], row[position])

    def _no_number(self, column: str, cell: str) -> TrainingError:
        where = f"column {printable(column)!r}"
        if not _is_utf8(cell):
            return self._error(f"{where} is not UTF-8", hint=_UTF8)
        if not cell.strip():
            return self._error(f"{where} is empty", hint="fill the holes, or leave out their rows")
        comma = "1.5, with a point" if re.fullmatch(r"\s*[+-]?\d+,\d+\s*", cell) else None
        shown = printable(cell if len(cell) <= 40 else f"{cell[:40]}...")
        return self._error(f"{where} has {shown!r}, which is no finite number", hint=comma)

    def _error(self, what: str, *, hint: str | None = None) -> TrainingError:
        """What is wrong with the line that was read last."""
        line = f"line {self._reader.line_num}"
        between = " " if what.startswith(("has ", "is ")) else ", "
        return TrainingError(f"{line}{between}{what}", file=self._path, hint=hint)


def _delimiter(lines: Sequence[str]) -> str:
    """The first that splits both lines into equally many cells, and into more than one.

    Where none does, the lines are no table; then the one that finds most cells tells it best.
    """
    counts: dict[str, list[int]] = {one: [] for one in _DELIMITERS}
    for one, found in counts.items():
        with suppress(csv.Error):  # whoever reads the lines says it
            rows = csv.reader(lines, delimiter=one, skipinitialspace=True)
            found.extend(len(row) for row in rows if row)
    for one, found in counts.items():
        if len(set(found)) == 1 and found[0] > 1:
            return one
    return max(reversed(_DELIMITERS), key=lambda one: counts[one][:1])


def _is_header(first: Sequence[str]) -> bool:
    """Whether cells are names: some are no numbers, and the others might be names, as 2019."""
    words = [cell for cell in map(str.strip, first) if cell and not cell.isdecimal()]
    return bool(words) and not any(_is_number(word, finite=False) for word in words)


def _is_number(cell: str, *, finite: bool = True) -> bool:
    try:
        number = float(cell)
    except ValueError:
        return False
    return "_" not in cell and (math.isfinite(number) or not finite)


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
