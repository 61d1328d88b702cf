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
from contextlib import contextmanager, suppress
from itertools import islice
from types import FrameType, TracebackType
from typing import Any, TextIO

import click

from ckptool.cli.group import cli
from ckptool.errors import CheckpointError, CheckpointWarning, WorkerFailed
from ckptool.render.text import Look, columns_of, look_of, size
from ckptool.words import clean, clean_lines, listed, shell

__all__ = [
    "EXIT_CODE",
    "WORDS",
    "Ended",
    "Interrupts",
    "Progress",
    "complain",
    "flush",
    "in_words",
    "note_none",
    "print_document",
    "print_lines",
    "run",
    "say",
    "settle",
    "stdout_look",
]


class Ended(SystemExit):
    """A signal asks the process to end: what is half done is cleaned up on the way out."""


class Interrupts:
    """A handler of signals that raises KeyboardInterrupt or `Ended`, and keeps in mind that it did.

    Code that swallows every exception swallows that too: what was interrupted ends as interrupted
    all the same, and a second Ctrl-C kills.
    """

    came = 0
    """The number of the first signal."""

    def handle(self, number: int, _: FrameType | None) -> None:
        """Raise at the first signal; a second Ctrl-C ends the process."""
        if self.came:
            if number == signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.came = number
        if number != signal.SIGINT:
            raise Ended(128 + number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the second is heard in C as well
        raise KeyboardInterrupt


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
    """Say of what the system refuses that it is standard output, and no file."""
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
        print(f"{look.bold('hint:')} {clean(_as_found(hint))}", file=sys.stderr)


def _as_found(hint: str) -> str:
    """Return a hint with commands that this shell finds, the script being on its path or not."""
    from shutil import which

    if which("ckptool"):
        return hint
    by_module = os.path.basename(sys.argv[0]) == "__main__.py"
    program = "python -m ckptool" if by_module else shell(sys.argv[0])
    verbs = "|".join(cli.list_commands(click.Context(cli)))
    return re.sub(rf"(?<![\w./-])ckptool(?= (--|({verbs})\b))", lambda _: program, hint)


ERROR, INTERRUPTED = 2, 130
WORDS = "ckptool.words"
"""Where the context keeps what follows `ckptool` on the command line."""
_NEEDED = frozenset(
    ("__main__", "", "ckptool", "click", "numpy", "safetensors", "sklearn", "tabulate", "torch")
)
"""The top-level modules of ckptool and of what it needs."""
_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that ask for an end, as far as the system has them."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` spell and return the exit code; nothing escapes.

    Click's own `main` is passed by: it answers 1 to wrong usage and takes every EOFError, a
    truncated file among them, for an interruption.
    """
    _mend_streams()
    # A tree of a million nodes is all kept to the end: looking for cycles in it costs a third.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _signals_raise() as interrupts, _warnings_told(), _traffic_told():
            code = _run(arguments, interrupts)
            if interrupts.came == signal.SIGINT:
                with suppress(OSError):
                    complain("interrupted; nothing is left half written", None)
        return 128 + interrupts.came if interrupts.came else code  # one that was swallowed, too
    except Ended as ended:
        return int(ended.args[0])
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _signals_raise() -> Iterator[Interrupts]:
    """SIGTERM and SIGHUP clean up as Ctrl-C does, unless they are ignored or handled already."""
    interrupts = Interrupts()
    before: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():  # no other may set a handler
            for number in _ENDING:
                if signal.getsignal(number) == signal.SIG_DFL:
                    before[number] = signal.signal(number, interrupts.handle)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                before[signal.SIGINT] = signal.signal(signal.SIGINT, interrupts.handle)
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _warnings_told() -> Iterator[None]:
    """Print a `CheckpointWarning` as a sentence on stderr, not as a line of our source."""
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


@contextmanager
def _traffic_told() -> Iterator[None]:
    """Tell, where CKPTOOL_DEBUG is set, what was asked of other machines."""
    begun, before = time.monotonic(), _traffic()
    yield
    requests, length = (now - then for now, then in zip(_traffic(), before, strict=True))
    if requests and os.environ.get("CKPTOOL_DEBUG"):
        seconds = time.monotonic() - begun
        say([f"{requests:,} requests, {length:,} bytes, {seconds:.2f} s"])


def _traffic() -> tuple[int, int]:
    """Return the requests of this process, and their bytes; local files import none of it."""
    remote = sys.modules.get("ckptool.files.remote")
    return (remote.TRAFFIC.requests, remote.TRAFFIC.bytes) if remote else (0, 0)


def _run(arguments: Sequence[str] | None, interrupts: Interrupts) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    settled: dict[str, Any] = {}
    try:
        _invoke(words, settled)
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
    return int(settled.get(EXIT_CODE, 0))


def _invoke(words: list[str], settled: dict[str, Any]) -> None:
    """Run the command; `settled` has its exit code as soon as that is known, if it is not 0."""
    if "_CKPTOOL_COMPLETE" in os.environ:
        cli.main(words, prog_name="ckptool")
    try:
        with cli.make_context("ckptool", list(words)) as context:
            context.meta[WORDS] = words
            context.call_on_close(lambda: settled.update(context.meta))
            cli.invoke(context)
    except click.exceptions.Exit as exit_:
        settled[EXIT_CODE] = exit_.exit_code


def _report(error: BaseException) -> None:
    """Say what went wrong on stderr."""
    if os.environ.get("CKPTOOL_DEBUG"):
        import traceback

        traceback.print_exception(error)
    if (
        isinstance(error, WorkerFailed) and error.traceback
    ):  # of another process: not to be had again
        print(clean_lines(error.traceback.rstrip()), file=sys.stderr)
    complain(*in_words(error))
    try:
        sys.stdout.flush()
    except OSError:  # a full disk, say: that was told above, once is enough
        _forget_stdout()


def in_words(error: BaseException) -> tuple[str, str | None]:
    """Return one sentence about an error, and its hint."""
    if isinstance(error, CheckpointError) and error.remedy is not None:
        from ckptool.render.remedies import as_options

        return error.sentence, as_options(error.remedy)
    if isinstance(error, CheckpointError):
        return error.sentence, error.hint
    if isinstance(error, click.ClickException):
        return _usage(error)
    for kind, words in _SENTENCES.items():
        if isinstance(error, kind):
            return words(error), None
    what = f"{type(error).__name__}: {error}"
    if (place := _place_of_others(error)) is not None:
        return (
            f"the code at {place} fails: {what}",
            "this code is not part of ckptool; CKPTOOL_DEBUG=1 shows the traceback",
        )
    return (
        f"an unexpected error: {what}",
        "this is a bug in ckptool; CKPTOOL_DEBUG=1 shows the traceback",
    )


def _place_of_others(error: BaseException) -> str | None:
    """Return the last line of a user's code, a model's, among the calls that led to an error."""
    from traceback import walk_tb  # imported here: little goes wrong so

    place = None
    for frame, line in walk_tb(error.__traceback__):
        home = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if home not in _NEEDED and home not in sys.stdlib_module_names:
            place = f"{frame.f_code.co_filename}:{line}"
    return place


def _usage(error: click.ClickException) -> tuple[str, str | None]:
    context = error.ctx if isinstance(error, click.UsageError) else None
    return error.format_message(), f"{context.command_path} --help" if context else None


def _system_error(error: BaseException) -> str:
    """Return an OSError in words: the file that it names, then the system's reason."""
    name = getattr(error, "filename", None)
    reason = getattr(error, "strerror", None) or str(error)
    return f"{os.fsdecode(name)}: {reason}" if isinstance(name, (str, bytes)) else reason


_SENTENCES: dict[type[Exception], Callable[[BaseException], str]] = {
    MemoryError: lambda _: "there is not enough memory for this",
    RecursionError: lambda _: "the file nests deeper than can be followed",
    OSError: _system_error,
}


def _mend_streams() -> None:
    """Streams that are closed lead nowhere; names that an encoding lacks are escaped."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _forget_stdout() -> None:
    """Nobody reads any more: keep the interpreter from saying so when it flushes at its end."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # stdout is no file
        return
