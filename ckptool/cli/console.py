"""Run one command: streams, progress bar, signals, errors and exit code."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any, Protocol, TextIO

import click

from ckptool.cli.group import cli
from ckptool.errors import CheckpointError, CheckpointWarning, WorkerFailed
from ckptool.renamed import RENAMED_OPTIONS
from ckptool.render.text import (
    Look,
    detect_columns,
    detect_look,
    format_duration,
    format_size,
    json_lines,
    make_pasteable,
    to_options_text,
)
from ckptool.words import clean, clean_lines, listed, shell


class Document(Protocol):
    """A result that has a JSON document."""

    def to_dict(self) -> dict[str, Any]:
        """Return the document."""


class Ended(SystemExit):
    """A signal that ends the process; temporary files are removed on the way out."""


class Interrupts:
    """Signal handlers of a `with` block: Ctrl-C raises KeyboardInterrupt, the others `Ended`.

    Signals that are already ignored or handled are left alone. A second Ctrl-C kills the process.
    """

    received = 0
    """The first signal, even if the interrupted code swallowed the exception."""

    def __enter__(self) -> Interrupts:
        """Install the handlers, if this is the main thread."""
        self._previous: dict[int, Any] = {}
        defaults = {"SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
        for name, default in {**defaults, "SIGINT": signal.default_int_handler}.items():
            number = getattr(signal, name, None)
            is_main = threading.current_thread() is threading.main_thread()
            if number is not None and is_main and signal.getsignal(number) == default:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        """Raise on the first signal; a second Ctrl-C ends the process; others do nothing."""
        if self.received:
            if number == signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.received = number
        if number != signal.SIGINT:
            raise Ended(128 + number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # C code sees the second Ctrl-C as well
        raise KeyboardInterrupt


_DELAY = 0.5
"""Seconds before the bar appears."""
_REDRAW_INTERVAL = 0.1
"""Seconds between two drawings."""
_BAR_WIDTH = 24
_DEFAULT_COLUMNS = 80
"""The width of a terminal that does not report it."""
_MIN_BAR_WIDTH = 4
"""Characters of the narrowest bar; a narrower terminal shows only the text."""


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A progress bar: a context manager, called with the work done and the total."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        phases: Sequence[str] = (),
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draw on `stream` (stderr) if it is a terminal and not `quiet`.

        `phases` are labels; the next one begins when the work done decreases.
        """
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._is_shown = not quiet and self._stream.isatty()
        self._started = clock()
        """When the current phase began."""
        self._next_draw = self._started + _DELAY
        """The earliest time of the next drawing."""
        self._drawn_width = 0
        """The characters on the line, which the next drawing covers; 0 after `wipe`."""
        self._phases = list(phases)
        """The labels of the current phase and the later ones."""
        self._last_done = 0

    def __exit__(self, *_: object) -> None:
        """Remove the bar, to make room for the next message."""
        self.wipe()

    def wipe(self) -> None:
        """Remove the bar until it is drawn again."""
        if self._drawn_width:
            self._stream.write("\r" + " " * self._drawn_width + "\r")
            self._stream.flush()
            self._drawn_width = 0

    def __call__(self, done: int, total: int, text: str | None = None) -> None:
        """Draw the bar with `text`, or with bytes and time left, unless it was drawn just now."""
        now = self._clock()
        if done < self._last_done:  # the next phase
            self._started, self._phases = now, self._phases[1:]
        self._last_done = done
        if not self._is_shown or now < self._next_draw:
            return
        self._next_draw = now + _REDRAW_INTERVAL
        if text is None:
            text = " ".join([*self._phases[:1], f"{format_size(done)} of {format_size(total)}"])
            elapsed = now - self._started
            if 0 < done < total and elapsed >= _DELAY:
                text += f", {format_duration(elapsed * (total - done) / done)} left"
        # Without the last column, in which a terminal may wrap.
        columns = (detect_columns(self._stream) or _DEFAULT_COLUMNS) - 1
        width = min(_BAR_WIDTH, columns - len(text) - len("[] "))
        line = text[:columns]
        if width >= _MIN_BAR_WIDTH:
            filled = width * done // total if total else width
            line = f"[{'#' * filled:-<{width}}] {text}"
        self._stream.write(f"\r{line:<{min(self._drawn_width, columns)}}")
        self._stream.flush()
        self._drawn_width = len(line)


EXIT_CODE = "ckptool.exit_code"
"""The key of the exit code in the command context's `meta`."""
_BATCH_LINES = 1000


def print_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout in batches."""
    remaining: Iterator[str] = iter(lines)
    while batch := list(islice(remaining, _BATCH_LINES)):
        with _name_stdout_in_errors():
            sys.stdout.write("\n".join(batch) + "\n")


def flush() -> None:
    """Flush stdout."""
    with _name_stdout_in_errors():
        sys.stdout.flush()


@contextmanager
def _name_stdout_in_errors() -> Iterator[None]:
    """Make an OSError report standard output as its file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def set_exit_code(code: int) -> None:
    """Set the exit code. Call it before printing, because the reader may close the pipe."""
    click.get_current_context().meta[EXIT_CODE] = code


def print_document(document: Mapping[str, Any]) -> None:
    """Write one JSON document to stdout."""
    print_lines(json_lines(document))


@dataclass(frozen=True, slots=True)
class Screen:
    """The output options of a verb."""

    as_json: bool
    quiet: bool
    fmt: str | None = None

    @property
    def look(self) -> Look:
        """The style of stdout; with `fmt`, results are only tables in that format."""
        return Look(fmt=self.fmt) if self.fmt else detect_look(sys.stdout)

    def progress(self, *phases: str) -> ProgressBar:
        """Return a progress bar."""
        return ProgressBar(quiet=self.quiet, phases=phases)

    def print(self, result: Document, lines: Iterable[str]) -> None:
        """Write a result to stdout, as lines or as JSON."""
        if self.as_json:
            print_document(result.to_dict())
        else:
            print_lines(lines)

    def say(self, lines: Iterable[str]) -> None:
        """Write messages to stderr, unless quiet."""
        say(lines, quiet=self.quiet)

    def report_unmatched(self, unmatched: Iterable[str]) -> None:
        """Warn about names and globs that match nothing, and set the exit code to 1."""
        for sentence in unmatched:
            set_exit_code(1)
            self.say([f"warning: {clean(sentence)}"])

    def note_if_filtered(
        self, subject: str, include: Iterable[str], exclude: Iterable[str]
    ) -> None:
        """Write a note that the filters, if any, leave nothing; `subject` is `no tensor` or so."""
        filters = [f"--include {glob!r}" for glob in include]
        filters += [f"--exclude {glob!r}" for glob in exclude]
        if filters:
            self.say([f"note: {subject} is left after {clean(listed(filters))}"])

    def print_receipt(self, result: Document, lines: Iterable[str]) -> None:
        """Write a receipt to stderr as lines, and with --json to stdout as well."""
        self.say(lines)
        if self.as_json:
            print_document(result.to_dict())


def make_files_document(
    schema: str, results: Iterable[Document], errors: Iterable[CheckpointError], *, ok: bool
) -> dict[str, Any]:
    """Return the JSON document of a verb that reads many files."""
    return {
        "schema": schema,
        "ok": ok,
        "files": [result.to_dict() for result in results],
        "errors": [
            {"file": error.file, "text": error.message, "hint": error.hint} for error in errors
        ],
    }


def say(lines: Iterable[str], *, quiet: bool = False) -> None:
    """Write messages to stderr, unless `quiet`. A closed stderr is not an error."""
    if not quiet:
        with suppress(OSError):
            for line in lines:
                print(line, file=sys.stderr)


def print_error(message: str, hint: str | None) -> None:
    """Write an error and its hint to stderr."""
    look = detect_look(sys.stderr)
    print(f"{look.alarm('ckptool:')} {clean(message)}", file=sys.stderr)
    if hint:
        print(f"{look.bold('hint:')} {make_pasteable(_replace_program(hint))}", file=sys.stderr)


def _replace_program(hint: str) -> str:
    """Return the hint with commands that work even if ckptool is not on PATH."""
    from shutil import which

    if which("ckptool"):
        return hint
    by_module = os.path.basename(sys.argv[0]) == "__main__.py"
    program = "python -m ckptool" if by_module else shell(sys.argv[0])
    verbs = "|".join(cli.list_commands(click.Context(cli)))
    return re.sub(rf"(?<![\w./-])ckptool(?= (--|({verbs})\b))", lambda _: program, hint)


ERROR, INTERRUPTED = 2, 130
ARGUMENTS = "ckptool.arguments"
"""The key of the command line arguments in the command context's `meta`."""
_KNOWN_MODULES = frozenset(
    ("__main__", "", "ckptool", "click", "numpy", "safetensors", "sklearn", "tabulate", "torch")
)
"""The top-level modules of ckptool and its dependencies."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; no exception escapes.

    Click's `main` is not used: it returns 1 for wrong usage, and treats the EOFError of a
    truncated file as an interruption.
    """
    _repair_streams()
    # The garbage collector takes a third of the time for a tree of a million nodes.
    collecting = gc.isenabled()
    gc.disable()
    try:
        started = time.monotonic()
        with Interrupts() as interrupts, _print_warnings():
            code = _run_command(arguments, interrupts)
            if os.environ.get("CKPTOOL_DEBUG"):
                _report_traffic(time.monotonic() - started)
            if interrupts.received == signal.SIGINT:
                with suppress(OSError):
                    print_error("interrupted; no file is left half-written", None)
        return 128 + interrupts.received if interrupts.received else code
    except Ended as ended:  # by a signal, with 128 + its number
        return int(ended.args[0])
    finally:
        if collecting:
            gc.enable()


def _report_traffic(seconds: float) -> None:
    """Print the requests and bytes of remote files, if there were any."""
    remote = sys.modules.get("ckptool.files.remote")
    if remote and remote.TRAFFIC.requests:
        traffic = remote.TRAFFIC
        say([f"{traffic.requests:,} requests, {traffic.bytes:,} bytes, {seconds:.2f} s"])


@contextmanager
def _print_warnings() -> Iterator[None]:
    """Print each `CheckpointWarning` to stderr without its line of source code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", CheckpointWarning)
        original = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            """Print a `CheckpointWarning` in one line, unless quiet; other warnings as usual."""
            if not issubclass(category, CheckpointWarning):
                original(message, category, *where, **more)
                return
            context = click.get_current_context(silent=True)
            quiet = context is not None and bool(context.params.get("quiet"))
            say([f"{detect_look(sys.stderr).bold('warning:')} {clean(str(message))}"], quiet=quiet)

        warnings.showwarning = show
        yield


def _run_command(arguments: Sequence[str] | None, interrupts: Interrupts) -> int:
    """Run a command, print its error, if any, and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    meta: dict[str, Any] = {}  # contains the exit code as soon as the verb sets it
    try:
        if "_CKPTOOL_COMPLETE" in os.environ:
            cli.main(arguments, prog_name="ckptool")  # completes for a shell, and exits
        try:
            with cli.make_context("ckptool", list(arguments)) as context:
                meta = context.meta
                meta[ARGUMENTS] = arguments
                cli.invoke(context)
        except click.exceptions.Exit as exit_:
            meta[EXIT_CODE] = exit_.exit_code
        flush()
    except BrokenPipeError:
        _discard_stdout()
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except SystemExit:
        raise
    except BaseException as error:  # nothing above us would print it
        with suppress(OSError):  # stderr is closed
            if not interrupts.received:
                _report_error(error)
        return ERROR
    return int(meta.get(EXIT_CODE, 0))


def _report_error(error: BaseException) -> None:
    """Print an error with its hint, and with the traceback of a worker or with CKPTOOL_DEBUG."""
    if os.environ.get("CKPTOOL_DEBUG"):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, WorkerFailed) and error.traceback:  # the process has ended
        print(clean_lines(error.traceback.rstrip()), file=sys.stderr)
    print_error(*describe_error(error))
    try:
        sys.stdout.flush()
    except OSError:  # such as a full disk, which was reported above
        _discard_stdout()


def describe_error(error: BaseException) -> tuple[str, str | None]:
    """Return the sentence and the hint of an error.

    An error that none of us expected is a bug in ckptool, or in the code of the user's model.
    """
    if isinstance(error, CheckpointError):
        if error.remedy is None:
            return error.sentence, error.hint
        return error.sentence, to_options_text(error.remedy)
    if isinstance(error, click.ClickException):
        return _describe_usage_error(error)
    if isinstance(error, MemoryError):
        return "not enough memory", None
    if isinstance(error, RecursionError):
        return "the file is nested too deeply to read", None
    if isinstance(error, OSError):
        named = isinstance(error.filename, (str, bytes))
        file = f"{os.fsdecode(error.filename)}: " if named else ""
        return f"{file}{error.strerror or error}", None
    text = f"{type(error).__name__}: {error}"
    location = _find_user_code_line(error)
    if location is None:
        text, owner = f"unexpected error: {text}", "a bug in ckptool"
    else:
        text, owner = f"the code at {location} raised {text}", "not caused by ckptool"
    return text, f"this is {owner}; set CKPTOOL_DEBUG=1 to see the traceback"


def _describe_usage_error(error: click.ClickException) -> tuple[str, str | None]:
    """Return the sentence of click and a hint: a renamed option, a file like one, or the help.

    Options that click proposes but that are not similar are removed from the sentence.
    """
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f"{context.command_path} --help" if context else None
    if isinstance(error, click.NoSuchOption):
        verb = context.info_name if context else None
        new_option = RENAMED_OPTIONS.get((verb or "", error.option_name))
        if new_option is not None:
            sentence, *_ = re.split(r" \(?Did you", error.format_message())  # no other proposals
            return sentence, f"use {new_option} instead"
        from difflib import get_close_matches

        options = error.possibilities or []  # click counts the dashes: it proposes --json for --to
        typed = [error.option_name.lstrip("-")]
        # In place: `format_message` lists them.
        options[:] = [name for name in options if get_close_matches(name.lstrip("-"), typed)]
        for word in context.meta.get(ARGUMENTS, ()) if context else ():
            if word.startswith(error.option_name) and os.path.lexists(word):
                hint = f"write {shell(word)} for the file with that name"
    return error.format_message(), hint


def _find_user_code_line(error: BaseException) -> str | None:
    """Return the last line of user code, such as a model, in the traceback of an error."""
    from traceback import walk_tb

    location = None
    for frame, line in walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in _KNOWN_MODULES and module not in sys.stdlib_module_names:
            location = f"{frame.f_code.co_filename}:{line}"
    return location


def _repair_streams() -> None:
    """Open closed streams on the null device, and escape characters they cannot encode."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for good
        if reconfigure := getattr(getattr(sys, name), "reconfigure", None):
            reconfigure(errors="backslashreplace")


def _discard_stdout() -> None:
    """Redirect a broken stdout, so that the interpreter can flush it at exit."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):  # stdout is not a file
        return
