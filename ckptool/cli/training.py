"""Printing the events of a training run: a line an epoch, a bar and notes, or one JSON document."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

from ckptool.cli.console import Screen, flush, print_lines
from ckptool.render.training import (
    end_lines,
    epoch_line,
    event_line,
    heading,
    progress_text,
    stopped_line,
    trace_line,
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

if TYPE_CHECKING:
    from ckptool.trainer import TrainResult

__all__ = ["Teller"]

Event = TypeVar("Event")


class Teller(Observer):
    """Prints the events in rank 0, and in every process the shapes that its replica sees."""

    def __init__(self, config: TrainConfig, screen: Screen, *, rank: int | None) -> None:
        """Store the options; `rank` is None in a process that no launcher started."""
        self._config, self._screen, self._rank = config, screen, rank
        self._bar = screen.progress()
        self._events: list[Any] = []
        self._started: Started | None = None
        self._first: tuple[float, int] | None = None

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
            if isinstance(event, Started):
                self._started = event
            if isinstance(event, EpochEnded) and not self._screen.as_json:
                is_first = not any(isinstance(one, EpochEnded) for one in self._events)
                self._print([heading(self._screen.look)] * is_first + [epoch_line(event)])
            elif isinstance(event, (Started, Resumed, Note)):
                self._screen.say([event_line(event)])
            self._events.append(event)

    def _text(self, event: Stepped) -> str:
        now, total = time.monotonic(), self._total
        began, first = self._first = self._first or (now, event.step)
        left = None
        if event.step > first:
            left = (now - began) / (event.step - first) * (total - event.step)
        return progress_text(event, total, self._started.epochs if self._started else 0, left)

    def _all(self, kind: type[Event]) -> list[Event]:
        return [event for event in self._events if isinstance(event, kind)]

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
        steps = self._started.steps * self._started.epochs if self._started else 0
        return min(steps, self._config.max_steps or steps)

    @property
    def _there(self) -> list[Saved]:
        """The checkpoints that still exist, the last written one at the end."""
        saved = self._all(Saved)
        last = {one.path: one for one in saved}
        return [one for one in saved if one is last[one.path] and os.path.exists(one.path)]

    def end(self, result: TrainResult) -> None:
        """Print how the run ended, and its checkpoints."""
        self._bar.wipe()
        if self._rank:
            return
        there = self._there
        if result.stopped is not None and there:
            self._screen.say([stopped_line(there[-1])])
        elif not self._screen.as_json:
            print_lines(end_lines(there, result))

    def document(self) -> dict[str, Any]:
        """Return the events as plain data."""
        return {
            **(self._started.to_dict() if self._started else {}),
            "resumed": next((one.to_dict() for one in self._all(Resumed)), None),
            "history": [one.to_dict() for one in self._all(EpochEnded)],
            "checkpoints": [one.to_dict() for one in self._there],
            "notes": [note.text for note in self._all(Note)],
        }
