"""Printing the events of a training run: a line an epoch, a bar and notes, or one JSON document."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from ckptool.cli.console import Screen, flush, print_lines
from ckptool.render.training import (
    end_lines,
    epoch_line,
    heading,
    progress_text,
    resumed_line,
    started_line,
    stopped_line,
    trace_line,
    trained_line,
    validating_text,
)
from ckptool.trainer.config import TrainConfig
from ckptool.trainer.events import (
    EpochEnded,
    Note,
    Observer,
    Resumed,
    Saved,
    Started,
    Stepped,
    Traced,
    Validating,
)
from ckptool.words import clean

if TYPE_CHECKING:
    from ckptool.trainer import TrainResult

__all__ = ["Teller"]


class Teller(Observer):
    """Prints the events in rank 0, and in every process the shapes that its replica sees."""

    def __init__(self, config: TrainConfig, screen: Screen, *, rank: int | None) -> None:
        """Store the options; `rank` is None in a process that no launcher started."""
        self._config, self._screen, self._rank = config, screen, rank
        self._bar = screen.progress()
        self._started: Started | None = None
        self._resumed: Resumed | None = None
        self._first: tuple[float, int] | None = None
        self._epochs: list[EpochEnded] = []
        self._saved: dict[str, Saved] = {}
        self._notes: list[str] = []

    def tell(self, event: Any) -> None:
        """Print an event, or store it for the document."""
        if isinstance(event, Traced):
            self._trace(event)
        elif self._rank:
            return
        elif isinstance(event, Stepped):
            self._bar(event.step, self._total, self._text(event))
        elif isinstance(event, Validating):
            self._bar(event.done, event.samples, validating_text(event))
        else:
            self._bar.wipe()
            self._take(event)

    def _text(self, event: Stepped) -> str:
        """Return the text behind the bar, with an estimate of the time left."""
        now, total = time.monotonic(), self._total
        began, first = self._first = self._first or (now, event.step)
        left = None
        if event.step > first:
            left = (now - began) / (event.step - first) * (total - event.step)
        return progress_text(event, total, self._started.epochs if self._started else 0, left)

    def _take(self, event: Any) -> None:
        """Print an event that comes once an epoch or less often."""
        if isinstance(event, Started):
            self._started = event
            self._screen.say([started_line(event)])
        elif isinstance(event, Resumed):
            self._resumed = event
            self._screen.say([resumed_line(event)])
        elif isinstance(event, EpochEnded):
            if not self._screen.as_json:
                first = [] if self._epochs else [heading(self._screen.look)]
                self._print([*first, epoch_line(event)])
            self._epochs.append(event)
        elif isinstance(event, Saved):
            self._saved.pop(event.path, None)
            self._saved[event.path] = event
        elif isinstance(event, Note):
            self._notes.append(event.text)
            self._screen.say([f"note: {clean(event.text)}"])

    def _trace(self, traced: Traced) -> None:
        """Print shapes on stdout, as the tutorials do, or on stderr with `--json`."""
        self._bar.wipe()
        lines = [trace_line(traced, self._rank)]
        if self._screen.as_json:
            self._screen.say(lines)
        else:
            self._print(lines)

    @staticmethod
    def _print(lines: list[str]) -> None:
        """Print lines at once: the next may be minutes away."""
        print_lines(lines)
        flush()

    @property
    def _total(self) -> int:
        """The number of steps of the run."""
        if self._started is None:
            return 0
        steps = self._started.steps * self._started.epochs
        return min(steps, self._config.max_steps or steps)

    @property
    def _there(self) -> list[Saved]:
        """The checkpoints that still exist, the last written one at the end."""
        return [one for one in self._saved.values() if os.path.exists(one.path)]

    def end(self, result: TrainResult) -> None:
        """Print how the run ended, and its checkpoints."""
        self._bar.wipe()
        if self._rank:
            return
        there = self._there
        if result.stopped is not None and there:
            self._screen.say([stopped_line(there[-1].step, there[-1].path)])
        elif not self._screen.as_json:
            print_lines(end_lines(there))
            print_lines([trained_line(result.step, result.epoch, result.best)])

    def document(self) -> dict[str, Any]:
        """Return the events as plain data."""
        started, resumed = self._started, self._resumed
        return {
            **({} if started is None else started.to_dict()),
            "resumed": None if resumed is None else resumed.to_dict(),
            "history": [one.to_dict() for one in self._epochs],
            "checkpoints": [one.to_dict() for one in self._there],
            "notes": self._notes,
        }
