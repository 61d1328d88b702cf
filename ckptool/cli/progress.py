"""A bar on stderr for work that takes longer than half a second, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from ckptool.render.text import size

__all__ = ["Progress"]

_PATIENCE = 0.5
_INTERVAL = 0.1
_WIDTH = 24


class Progress:
    """A context whose instance is told bytes done and bytes in all; leaving it wipes the bar."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draw on `stream` (stderr), where it is a terminal and not `quiet`."""
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._shown = not quiet and self._stream.isatty()
        self._next = clock() + _PATIENCE
        self._drawn = 0

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
        if self._drawn:
            self._stream.write("\r" + " " * self._drawn + "\r")
            self._stream.flush()

    def __call__(self, done: int, total: int) -> None:
        """Draw, where it is time to."""
        if not self._shown or self._clock() < self._next:
            return
        self._next = self._clock() + _INTERVAL
        filled = _WIDTH * done // total if total else _WIDTH
        line = f"[{'#' * filled:-<{_WIDTH}}] {size(done)} of {size(total)}"
        self._stream.write(f"\r{line:<{self._drawn}}")
        self._stream.flush()
        self._drawn = len(line)
