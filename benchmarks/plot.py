"""How time and memory grow with what a file holds: one SVG of small charts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.rows import MB, Result

__all__ = ["draw"]

MARKS = ("o", "s", "^", "v", "D")


def draw(results: Sequence[Result], path: Path) -> None:
    """A column a work that grows, seconds above megabytes, a line a command."""
    works = list(dict.fromkeys((g.work, g.by) for g in (r.row.growth for r in results) if g))
    with matplotlib.rc_context({"svg.hashsalt": "ckptool", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(3 * len(works), 5), layout="constrained")
        charts = figure.subplots(2, len(works), squeeze=False, sharey="row")
        for column, (work, by) in enumerate(works):
            rows = [r for r in results if r.row.growth and _is_of(r, work, by)]
            for chart, unit in zip(charts[:, column], ("seconds", "peak MB"), strict=True):
                _lines(chart, rows, unit)
                chart.set_xscale("log")
                chart.set_yscale("log")
                chart.minorticks_off()
                chart.set_xlabel(by)
                chart.set_ylabel(unit)
            charts[0][column].set_title(work)
            charts[0][column].legend(fontsize=6)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _is_of(result: Result, work: str, by: str) -> bool:
    growth = result.row.growth
    return growth is not None and (growth.work, growth.by) == (work, by)


def _lines(chart: Any, rows: Sequence[Result], unit: str) -> None:
    """A line for each command that was run at all, ours first."""
    points: dict[str, list[tuple[int, float]]] = {}
    for result in rows:
        assert result.row.growth is not None
        for number, measured in enumerate(result.measured):
            label = measured.command.label if number else "ckptool"
            value = measured.seconds if unit == "seconds" else measured.peak / MB
            points.setdefault(label, []).append((result.row.growth.amount, value))
    for (label, line), mark in zip(points.items(), MARKS, strict=False):
        chart.plot(*zip(*line, strict=True), marker=mark, markersize=4, label=label)
