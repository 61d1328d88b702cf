"""What the stream at hand can show: colour, width."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TextIO

__all__ = ["PLAIN", "Look", "columns_of", "look_of"]


@dataclass(frozen=True, slots=True)
class Look:
    """How to draw: `width` in characters (None: as wide as it gets), `colour` with ANSI codes.

    With `fmt`, a format of `table_formats`, what is drawn is the tables alone.
    """

    width: int | None = None
    colour: bool = False
    fmt: str | None = None

    def bold(self, text: str) -> str:
        """Return a heading."""
        return f"\x1b[1m{text}\x1b[0m" if self.colour else text

    def faint(self, text: str) -> str:
        """Something by the way."""
        return f"\x1b[2m{text}\x1b[0m" if self.colour else text

    def alarm(self, text: str) -> str:
        """Something wrong."""
        return f"\x1b[31m{text}\x1b[0m" if self.colour else text


PLAIN = Look()


def look_of(stream: TextIO) -> Look:
    """Return the look for a stream: colour and a width on a terminal only, NO_COLOR obeyed."""
    if not stream.isatty():
        return PLAIN
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return Look(columns_of(stream), not plain)


def columns_of(stream: TextIO) -> int | None:
    """How many columns a terminal has, or COLUMNS says that it has; None where nobody knows."""
    stated = os.environ.get("COLUMNS", "")
    if stated.isdecimal() and int(stated) > 0:
        return int(stated)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None
