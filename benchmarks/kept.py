"""Rows that are measured, in a file: a run that was cut short goes on behind them."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.rows import Result, Row
from benchmarks.timing import Measured, Sample

__all__ = ["Kept"]


class Kept:
    """The runs of each row by its work, written as they come."""

    def __init__(self, path: Path, *, read: bool) -> None:
        """With what is in the file, if that is to be read."""
        self.path = path
        self.runs: dict[str, list[list[tuple[float, int]]]] = {}
        if read and path.exists():
            self.runs = json.loads(path.read_text(encoding="utf-8"))

    def result(self, row: Row, repeats: int) -> Result | None:
        """What is known of a row, if it was measured as often."""
        runs = self.runs.get(row.work, [])
        if [len(samples) for samples in runs] != [repeats] * len(row.commands):
            return None
        return Result(
            row,
            tuple(
                Measured(command, tuple(Sample(*sample) for sample in samples))
                for command, samples in zip(row.commands, runs, strict=True)
            ),
        )

    def add(self, result: Result) -> None:
        """Write one more row."""
        self.runs[result.row.work] = [
            [(sample.seconds, sample.peak) for sample in measured.samples]
            for measured in result.measured
        ]
        self.path.write_text(json.dumps(self.runs), encoding="utf-8")
