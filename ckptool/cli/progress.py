"""A bar on stderr for work that takes longer than half a second, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TextIO

from ckptool.render.terminal import columns_of
from ckptool.render.text import size

__all__ = ["Progress"]

_PATIENCE = 0.5
_INTERVAL = 0.1
_MINUTES = 120  # seconds; more are told as minutes
_WIDTH = 24
_WIDE = 80  # columns, where the terminal does not say
_NARROWEST = 4
"""Characters of a bar; a narrower terminal has the text alone."""


class Progress:
    """A context whose instance is told what is done and what there is; leaving it wipes the bar."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        phases: Sequence[str] = (),
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draw on `stream` (stderr), where it is a terminal and not `quiet`.

        `phases` are words for what is done, the next one wherever the bytes begin anew.
        """
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._shown = not quiet and self._stream.isatty()
        self._next = clock() + _PATIENCE
        self._drawn = 0
        self._phases = list(phases)
        self._done = 0
        self._begun = clock()

    def __enter__(self) -> Progress:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave an empty line behind, for the message that follows."""
        self.wipe()

    def wipe(self) -> None:
        """Take the bar away, until it is drawn again."""
        if self._drawn:
            self._stream.write("\r" + " " * self._drawn + "\r")
            self._stream.flush()
            self._drawn = 0

    def __call__(self, done: int, total: int, text: str | None = None) -> None:
        """Draw, where it is time to; behind the bar is `text`, or where there is none bytes."""
        now = self._clock()
        if done < self._done:
            self._begun, self._phases = now, self._phases[1:]
        self._done = done
        if not self._shown or now < self._next:
            return
        self._next = now + _INTERVAL
        room = (columns_of(self._stream) or _WIDE) - 1  # in the last column a terminal may wrap
        line = _line(done, total, text or self._told(done, total, now, room), room)
        self._stream.write(f"\r{line:<{min(self._drawn, room)}}")
        self._stream.flush()
        self._drawn = len(line)

    def _told(self, done: int, total: int, now: float, room: int) -> str:
        """Return `writing 1.0 GiB of 2.0 GiB, 12 s left`, the time where there is room for it."""
        text = " ".join([*self._phases[:1], f"{size(done)} of {size(total)}"])
        spent = now - self._begun
        if not 0 < done < total or spent < _PATIENCE:
            return text
        left = round(spent * (total - done) / done)
        shown = f"{left} s" if left < _MINUTES else f"{round(left / 60)} min"
        timed = f"{text}, {shown} left"
        return timed if len(timed) + _NARROWEST < room - 2 else text


def _line(done: int, total: int, text: str, room: int) -> str:
    """`[####----] 1.0 GiB of 2.0 GiB`, the bar as long as there is room for."""
    width = min(_WIDTH, room - len(text) - len("[] "))
    if width < _NARROWEST:
        return text[:room]
    filled = width * done // total if total else width
    return f"[{'#' * filled:-<{width}}] {text}"
