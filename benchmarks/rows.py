"""A row: a piece of work, by ckptool and by what people use today; its bounds and its runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.timing import Command, Measured, measure, ratio, warm

__all__ = ["MB", "Growth", "Result", "Row", "clear", "run_row"]

MB = 10**6
SLACK = 1.02
"""On the memory of another process that loads torch as well: the code of ckptool itself."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Where a row stands among those that do the same to more and more."""

    work: str
    by: str
    """What grows: `bytes` or `tensors`."""
    amount: int


@dataclass(frozen=True, slots=True)
class Row:
    """One piece of work. The first command is ours; a bound that is None is not held.

    `most_times` bounds our time as a multiple of the command named `beside`'s, `most_seconds` and
    `most_bytes` bound our own, `peak_beside` bounds our memory by that command's too.
    """

    work: str
    source: Path
    commands: tuple[Command, ...]
    second: Path | None = None
    """Another file that is read."""
    output: Path | None = None
    beside: str = ""
    most_times: float | None = None
    most_seconds: float | None = None
    most_bytes: int | None = None
    peak_beside: bool = False
    edits: bool = False
    """The source is edited: what each run appends to it is cut off again."""
    hollow: bool = False
    """The source takes no room, and fills no cache."""
    growth: Growth | None = None

    def bounds(self) -> Iterator[str]:
        """Each bound in words."""
        if self.most_seconds is not None:
            yield f"<= {self.most_seconds:g} s"
        if self.most_times is not None:
            yield f"<= {self.most_times:g} x {self.beside}"
        if self.most_bytes is not None:
            yield f"<= {self.most_bytes // MB} MB"
        if self.peak_beside:
            yield "no more memory"


@dataclass(frozen=True, slots=True)
class Result:
    """A row, measured."""

    row: Row
    measured: tuple[Measured, ...]

    @property
    def ours(self) -> Measured:
        """The runs of ckptool."""
        return self.measured[0]

    @property
    def theirs(self) -> tuple[Measured, ...]:
        """The runs of the others."""
        return self.measured[1:]

    def misses(self) -> Iterator[str]:
        """Each bound that was not kept, in words."""
        row, ours = self.row, self.ours
        if row.most_seconds is not None and ours.seconds > row.most_seconds:
            yield f"{ours.seconds:.2f} s, at most {row.most_seconds:g} s wanted"
        if row.most_bytes is not None and ours.peak > row.most_bytes:
            yield f"{ours.peak / MB:.0f} MB, at most {row.most_bytes / MB:.0f} MB wanted"
        for other in self.theirs:
            if other.command.label != row.beside:
                continue
            times = ratio(ours, other)
            if row.most_times is not None and times > row.most_times:
                yield f"{times:.2f} x {row.beside}, at most {row.most_times:g} x wanted"
            if row.peak_beside and ours.peak > SLACK * other.peak:
                yield f"{ours.peak / MB:.0f} MB, at most {other.peak / MB:.0f} MB wanted"


def run_row(row: Row, repeats: int) -> Result:
    """Measure a row: its source warm, its output gone before each run."""
    length = row.source.stat().st_size

    def before() -> None:
        clear(row, length)
        if not (row.edits or row.hollow):  # an edit reads the header alone
            warm(row.source)
            if row.second is not None:
                warm(row.second)

    try:
        return Result(row, measure(row.commands, repeats, before))
    finally:
        clear(row, length)


def clear(row: Row, length: int) -> None:
    """Remove what the last run wrote; `length` is the source's own."""
    if row.edits:
        os.truncate(row.source, length)
    if row.output is not None and row.output.is_dir():
        shutil.rmtree(row.output)
    elif row.output is not None:
        row.output.unlink(missing_ok=True)
