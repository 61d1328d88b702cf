"""SIGTERM and Ctrl-C ask a run to save and end: at its next step, all processes together."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

__all__ = ["ASKING", "Signals", "ended_at_once", "handled", "leave_to_system"]

ASKING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def handled(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """Give both signals to `handler` inside; what took them before does so again afterwards."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # no other may set a handler
        before = {one: signal.signal(one, handler) for one in ASKING}
    try:
        yield
    finally:
        for one, other in before.items():
            if other is not None:  # None: none of Python's, which cannot be set again
                signal.signal(one, other)


def leave_to_system() -> None:
    """Have both end this process at once, which has nothing left to do."""
    if threading.current_thread() is threading.main_thread():
        for one in ASKING:
            signal.signal(one, signal.SIG_DFL)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """Have both end this process where nobody else takes them, with the exit code of a shell.

    One that is ignored stays so. It is a thread that ends it: a handler of Python's would not be
    called while torch waits for other processes, and what it raises in the middle of an import may
    be swallowed, by half.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: set[int] = set()
    ignored = {int(one) for one in ASKING if signal.getsignal(one) == signal.SIG_IGN}
    own = os.getpid()

    def take(number: int, _: FrameType | None) -> None:
        if number not in ignored:
            came.add(number)

    def forget() -> None:
        if os.getpid() != own and signal.getsignal(signal.SIGTERM) is take:
            signal.set_wakeup_fd(-1)
            leave_to_system()

    def end() -> None:
        while number := os.read(read_end, 1)[0]:
            is_ours = signal.getsignal(number) is take and number not in ignored
            if is_ours or number in came:
                os._exit(128 + number)

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    watcher = threading.Thread(target=end, daemon=True)
    watcher.start()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)  # it has no such thread, and our pipe
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        with handled(take):
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(write_end, b"\0")
        watcher.join()
        os.close(write_end)
        os.close(read_end)


class Signals:
    """Which of the two has come; a vote for each, that processes add up."""

    def __init__(self, *, is_patient: bool | None = None) -> None:
        """`is_patient`: a second Ctrl-C is the same one, which a launcher has sent on.

        None: where one has started this process. A terminal sends Ctrl-C to launcher and workers.
        """
        self._is_patient = "LOCAL_RANK" in os.environ if is_patient is None else is_patient
        self._came: set[int] = set()
        is_torch = "TORCHELASTIC_RUN_ID" in os.environ
        self._launcher = os.getppid() if is_torch else None

    def watched(self) -> AbstractContextManager[None]:
        """Take the two inside."""
        return handled(self._take)

    def _take(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._came and not self._is_patient:
            raise KeyboardInterrupt
        self._came.add(number)

    @property
    def votes(self) -> list[float]:
        """1 for each that has come to this process.

        Where torch's launcher has gone, killed without a word, nobody else will ever end this one.
        """
        if self._launcher is not None and os.getppid() != self._launcher:
            self._came.add(signal.SIGTERM)
        return [float(one in self._came) for one in ASKING]

    @staticmethod
    def asked(votes: Sequence[float]) -> int | None:
        """The signal that any process has voted for; None: to go on."""
        return next((one for one, vote in zip(ASKING, votes, strict=False) if vote), None)
