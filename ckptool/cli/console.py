"""One run of a command: its streams, its bar, its signals, its errors and its exit code."""

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
    as_options,
    columns_of,
    duration,
    json_lines,
    look_of,
    runnable,
    size,
)
from ckptool.words import clean, clean_lines, listed, shell


class Document(Protocol):
    """A result that has a JSON document."""

    def to_dict(self) -> dict[str, Any]:
        """Return the document."""


class Ended(SystemExit):
    """A signal that asks the process to end; temporary files are removed on the way out."""


class Interrupts:
    """Signal handlers of a `with` block: Ctrl-C raises KeyboardInterrupt, other ends `Ended`.

    Signals that are ignored or handled already stay so. A second Ctrl-C kills the process.
    """

    came = 0
    """The first signal, also if the code that it interrupted has swallowed the exception."""

    def __enter__(self) -> Interrupts:
        """Install the handlers, which only the main thread can do."""
        self._before: dict[int, Any] = {}
        defaults = {"SIGTERM": signal.SIG_DFL, "SIGHUP": signal.SIG_DFL}
        for name, default in {**defaults, "SIGINT": signal.default_int_handler}.items():
            number = getattr(signal, name, None)
            is_main = threading.current_thread() is threading.main_thread()
            if number is not None and is_main and signal.getsignal(number) == default:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.came:
            if number == signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.came = number
        if number != signal.SIGINT:
            raise Ended(128 + number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # C code sees the second Ctrl-C as well
        raise KeyboardInterrupt


_PATIENCE = 0.5
_INTERVAL = 0.1
_WIDTH = 24
_WIDE = 80  # columns, where the terminal does not say
_NARROWEST = 4
"""Characters of a bar; a narrower terminal has the text alone."""


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A progress bar: a context that is called with the work done and the total."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        phases: Sequence[str] = (),
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draw on `stream` (stderr) if it is a terminal and not `quiet`.

        `phases` name the work; the next phase begins when the work done becomes smaller.
        """
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._shown = not quiet and self._stream.isatty()
        self._begun = clock()
        self._next = self._begun + _PATIENCE
        self._drawn = 0
        self._phases = list(phases)
        self._done = 0

    def __exit__(self, *_: object) -> None:
        """Wipe the bar, for the message that follows."""
        self.wipe()

    def wipe(self) -> None:
        """Remove the bar until it is drawn again."""
        if self._drawn:
            self._stream.write("\r" + " " * self._drawn + "\r")
            self._stream.flush()
            self._drawn = 0

    def __call__(self, done: int, total: int, text: str | None = None) -> None:
        """Draw a bar with `text`, or else with bytes and the time left, unless it is too soon."""
        now = self._clock()
        if done < self._done:
            self._begun, self._phases = now, self._phases[1:]
        self._done = done
        if not self._shown or now < self._next:
            return
        self._next = now + _INTERVAL
        if text is None:
            text = " ".join([*self._phases[:1], f"{size(done)} of {size(total)}"])
            spent = now - self._begun
            if 0 < done < total and spent >= _PATIENCE:
                text += f", {duration(spent * (total - done) / done)} left"
        room = (columns_of(self._stream) or _WIDE) - 1  # in the last column a terminal may wrap
        width = min(_WIDTH, room - len(text) - len("[] "))
        line = text[:room]
        if width >= _NARROWEST:
            line = f"[{'#' * (width * done // total if total else width):-<{width}}] {text}"
        self._stream.write(f"\r{line:<{min(self._drawn, room)}}")
        self._stream.flush()
        self._drawn = len(line)


EXIT_CODE = "ckptool.exit_code"
"""The key of the exit code in the `meta` of a command's context."""
_BATCH = 1000


def print_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout in batches."""
    flow: Iterator[str] = iter(lines)
    while batch := list(islice(flow, _BATCH)):
        with _named():
            sys.stdout.write("\n".join(batch) + "\n")


def flush() -> None:
    """Flush stdout."""
    with _named():
        sys.stdout.flush()


@contextmanager
def _named() -> Iterator[None]:
    """Name standard output in an error of the system, instead of a file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def set_exit_code(code: int) -> None:
    """Set the exit code before anything is printed, because a reader may close the pipe."""
    click.get_current_context().meta[EXIT_CODE] = code


def print_document(document: Mapping[str, Any]) -> None:
    """Write one JSON document to stdout."""
    print_lines(json_lines(document))


@dataclass(frozen=True, slots=True)
class Screen:
    """The options of a verb about its output, and what they decide."""

    as_json: bool
    quiet: bool
    fmt: str | None = None

    @property
    def look(self) -> Look:
        """The look of stdout; with `fmt` results are only tables in that format."""
        return Look(fmt=self.fmt) if self.fmt else look_of(sys.stdout)

    def progress(self, *phases: str) -> ProgressBar:
        """Return a progress bar."""
        return ProgressBar(quiet=self.quiet, phases=phases)

    def print(self, result: Document, lines: Iterable[str]) -> None:
        """Write a result to stdout: its lines, or its JSON document."""
        if self.as_json:
            print_document(result.to_dict())
        else:
            print_lines(lines)

    def say(self, lines: Iterable[str]) -> None:
        """Write messages to stderr, unless quiet."""
        say(lines, quiet=self.quiet)

    def report_unmatched(self, unmatched: Iterable[str]) -> None:
        """Write to stderr which names and globs match nothing; the exit code is 1 then."""
        for sentence in unmatched:
            set_exit_code(1)
            self.say([f"warning: {clean(sentence)}"])

    def note_none(self, what: str, include: Iterable[str], exclude: Iterable[str]) -> None:
        """Write to stderr that no name passes the given globs."""
        given = [f"--include {glob!r}" for glob in include]
        given += [f"--exclude {glob!r}" for glob in exclude]
        if given:
            self.say([f"note: {what} passes {clean(listed(given))}"])

    def tell(self, result: Document, lines: Iterable[str]) -> None:
        """Write a receipt: its lines to stderr, its JSON document to stdout if asked for."""
        self.say(lines)
        if self.as_json:
            print_document(result.to_dict())


def files_document(
    schema: str, results: Iterable[Document], errors: Iterable[CheckpointError], *, ok: bool
) -> dict[str, Any]:
    """Return the document of a verb that looks at many files."""
    return {
        "schema": schema,
        "ok": ok,
        "files": [result.to_dict() for result in results],
        "errors": [
            {"file": error.file, "text": error.message, "hint": error.hint} for error in errors
        ],
    }


def say(lines: Iterable[str], *, quiet: bool = False) -> None:
    """Write messages to stderr unless `quiet`; a stderr that is closed is no error."""
    if not quiet:
        with suppress(OSError):
            for line in lines:
                print(line, file=sys.stderr)


def complain(message: str, hint: str | None) -> None:
    """Write an error and its hint to stderr."""
    look = look_of(sys.stderr)
    print(f"{look.alarm('ckptool:')} {clean(message)}", file=sys.stderr)
    if hint:
        print(f"{look.bold('hint:')} {runnable(_as_found(hint))}", file=sys.stderr)


def _as_found(hint: str) -> str:
    """Return a hint whose commands this shell finds, also if ckptool is not on its path."""
    from shutil import which

    if which("ckptool"):
        return hint
    by_module = os.path.basename(sys.argv[0]) == "__main__.py"
    program = "python -m ckptool" if by_module else shell(sys.argv[0])
    verbs = "|".join(cli.list_commands(click.Context(cli)))
    return re.sub(rf"(?<![\w./-])ckptool(?= (--|({verbs})\b))", lambda _: program, hint)


ERROR, INTERRUPTED = 2, 130
WORDS = "ckptool.words"
"""The key of the arguments of `ckptool` in the `meta` of a command's context."""
_NEEDED = frozenset(
    ("__main__", "", "ckptool", "click", "numpy", "safetensors", "sklearn", "tabulate", "torch")
)
"""The top-level modules of ckptool and of what it needs."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; no exception escapes.

    Click's own `main` is not called: it returns 1 for wrong usage, and takes the EOFError of a
    truncated file for an interruption.
    """
    _mend_streams()
    # The garbage collector takes a third of the time for a tree of a million nodes.
    collecting = gc.isenabled()
    gc.disable()
    try:
        begun = time.monotonic()
        with Interrupts() as interrupts, _warnings_told():
            code = _run(arguments, interrupts)
            remote = sys.modules.get("ckptool.files.remote")
            if remote and remote.TRAFFIC.requests and os.environ.get("CKPTOOL_DEBUG"):
                traffic, seconds = remote.TRAFFIC, time.monotonic() - begun
                say([f"{traffic.requests:,} requests, {traffic.bytes:,} bytes, {seconds:.2f} s"])
            if interrupts.came == signal.SIGINT:
                with suppress(OSError):
                    complain("interrupted; nothing is left half written", None)
        return 128 + interrupts.came if interrupts.came else code
    except Ended as ended:
        return int(ended.args[0])
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _warnings_told() -> Iterator[None]:
    """Print a `CheckpointWarning` as a sentence on stderr, without a line of source code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", CheckpointWarning)
        others = warnings.showwarning

        def tell(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, CheckpointWarning):
                others(message, category, *place, **more)
                return
            context = click.get_current_context(silent=True)
            quiet = context is not None and bool(context.params.get("quiet"))
            say([f"{look_of(sys.stderr).bold('warning:')} {clean(str(message))}"], quiet=quiet)

        warnings.showwarning = tell
        yield


def _run(arguments: Sequence[str] | None, interrupts: Interrupts) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    known: dict[str, Any] = {}  # has the exit code as soon as a verb knows it
    try:
        if "_CKPTOOL_COMPLETE" in os.environ:
            cli.main(words, prog_name="ckptool")
        try:
            with cli.make_context("ckptool", list(words)) as context:
                known = context.meta
                known[WORDS] = words
                cli.invoke(context)
        except click.exceptions.Exit as exit_:
            known[EXIT_CODE] = exit_.exit_code
        flush()
    except BrokenPipeError:
        _forget_stdout()
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except SystemExit:
        raise
    except BaseException as error:  # the last place that can say it in a sentence
        with suppress(OSError):  # nobody listens
            if not interrupts.came:
                _report(error)
        return ERROR
    return int(known.get(EXIT_CODE, 0))


def _report(error: BaseException) -> None:
    if os.environ.get("CKPTOOL_DEBUG"):
        import traceback

        traceback.print_exception(error)
    if isinstance(error, WorkerFailed) and error.traceback:  # of a process that has ended
        print(clean_lines(error.traceback.rstrip()), file=sys.stderr)
    complain(*in_words(error))
    try:
        sys.stdout.flush()
    except OSError:  # a full disk, say: that was printed above, once is enough
        _forget_stdout()


def in_words(error: BaseException) -> tuple[str, str | None]:
    """Return an error as one sentence, and its hint."""
    if isinstance(error, CheckpointError):
        if error.remedy is None:
            return error.sentence, error.hint
        return error.sentence, as_options(error.remedy)
    if isinstance(error, click.ClickException):
        return _usage_in_words(error)
    if isinstance(error, MemoryError):
        return "there is not enough memory for this", None
    if isinstance(error, RecursionError):
        return "the file nests deeper than can be followed", None
    if isinstance(error, OSError):
        named = isinstance(error.filename, (str, bytes))
        file = f"{os.fsdecode(error.filename)}: " if named else ""
        return f"{file}{error.strerror or error}", None
    what = f"{type(error).__name__}: {error}"
    place = _place_of_others(error)
    if place is None:
        what, owner = f"an unexpected error: {what}", "a bug in ckptool"
    else:
        what, owner = f"the code at {place} fails: {what}", "not a fault of ckptool"
    return what, f"this is {owner}; CKPTOOL_DEBUG=1 shows the traceback"


def _usage_in_words(error: click.ClickException) -> tuple[str, str | None]:
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f"{context.command_path} --help" if context else None
    if isinstance(error, click.NoSuchOption):
        verb = context.info_name if context else None
        now = RENAMED_OPTIONS.get((verb or "", error.option_name))
        if now is not None:
            return error.format_message().partition(" Did you")[0], f"it is now called {now}"
        from difflib import get_close_matches

        near = error.possibilities or []  # click counts the dashes: --json for --to
        wanted = [error.option_name.lstrip("-")]
        near[:] = [one for one in near if get_close_matches(one.lstrip("-"), wanted)]
        for word in context.meta.get(WORDS, ()) if context else ():
            if word.startswith(error.option_name) and os.path.lexists(word):
                hint = f"{shell(word)} is the file of that name"
    return error.format_message(), hint


def _place_of_others(error: BaseException) -> str | None:
    """Return the last line of the user's own code, such as a model's, that led to an error."""
    from traceback import walk_tb

    place = None
    for frame, line in walk_tb(error.__traceback__):
        home = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if home not in _NEEDED and home not in sys.stdlib_module_names:
            place = f"{frame.f_code.co_filename}:{line}"
    return place


def _mend_streams() -> None:
    """Open closed streams on the null device, and escape what their encoding lacks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for good
        if reconfigure := getattr(getattr(sys, name), "reconfigure", None):
            reconfigure(errors="backslashreplace")


def _forget_stdout() -> None:
    """Redirect a broken stdout, so that the interpreter can flush it when it exits."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # stdout is no file
        return
