"""Where a verb writes: results on stdout, messages and progress on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import click

from ckptool.paths import listed
from ckptool.render.terminal import Look, look_of
from ckptool.render.text import clean

__all__ = [
    "EXIT_CODE",
    "complain",
    "flush",
    "note_none",
    "print_document",
    "print_lines",
    "say",
    "settle",
    "stdout_look",
]

EXIT_CODE = "ckptool.exit_code"
"""What the exit code is called in the `meta` of a command's context."""
_BATCH = 1000


def stdout_look(fmt: str | None = None) -> Look:
    """How results are drawn; with `fmt`, tables alone, in that format."""
    return Look(fmt=fmt) if fmt else look_of(sys.stdout)


def print_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout as they come, many at a time."""
    flow: Iterator[str] = iter(lines)
    while batch := list(islice(flow, _BATCH)):
        with _named():
            sys.stdout.write("\n".join(batch) + "\n")


def flush() -> None:
    """Have all of stdout where it goes."""
    with _named():
        sys.stdout.flush()


@contextmanager
def _named() -> Iterator[None]:
    """What the system refuses is of standard output, and no file's."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def settle(code: int) -> None:
    """Say what the exit code will be before anything is printed, lest nobody reads to the end."""
    click.get_current_context().meta[EXIT_CODE] = code


def print_document(document: Mapping[str, Any]) -> None:
    """Write one JSON document to stdout."""
    from ckptool.render.text import json_lines

    print_lines(json_lines(document))


def say(lines: Iterable[str], *, quiet: bool = False) -> None:
    """Write messages to stderr, unless `quiet`; where they cannot be, what was done is done."""
    if not quiet:
        with suppress(OSError):
            for line in lines:
                print(line, file=sys.stderr)


def note_none(what: str, include: Sequence[str], exclude: Sequence[str], *, quiet: bool) -> None:
    """Say on stderr, unless `quiet`, that the globs that were given let nothing through."""
    given = [f"--include {glob!r}" for glob in include] + [
        f"--exclude {glob!r}" for glob in exclude
    ]
    if given:
        say([f"note: {what} is left by {clean(listed(given))}"], quiet=quiet)


def complain(message: str, hint: str | None) -> None:
    """Write to stderr what went wrong, and what helps."""
    look = look_of(sys.stderr)
    print(f"{look.alarm('ckptool:')} {clean(message)}", file=sys.stderr)
    if hint:
        print(f"{look.bold('hint:')} {clean(hint)}", file=sys.stderr)
