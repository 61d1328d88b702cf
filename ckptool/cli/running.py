"""One run of the command line: what goes wrong becomes a sentence, a hint and an exit code."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

from ckptool.cli.console import EXIT_CODE, complain, flush, say
from ckptool.cli.group import cli
from ckptool.cli.interrupts import Ended, Interrupts
from ckptool.errors import CheckpointError, CheckpointWarning, WorkerFailed
from ckptool.render.terminal import look_of
from ckptool.render.text import clean, clean_lines

__all__ = ["in_words", "run"]

ERROR, INTERRUPTED = 2, 130
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
        with _signals_raise() as interrupts, _warnings_told():
            code = _run(arguments, interrupts)
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
        interrupts.end()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _warnings_told() -> Iterator[None]:
    """A `CheckpointWarning` is a sentence on stderr, not a line of our source."""
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
        with cli.make_context("ckptool", words) as context:
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
    """One sentence about an error, and what helps."""
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
            "that is none of ckptool; CKPTOOL_DEBUG=1 shows how it came there",
        )
    return (
        f"something unexpected happened, {what}",
        "this is a fault of ckptool; CKPTOOL_DEBUG=1 shows where it lies",
    )


def _place_of_others(error: BaseException) -> str | None:
    """The line, among the calls that led to an error, of code that a user has named: a model's."""
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
    """An OSError in words: the file that it names, then the system's reason."""
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
