"""Signals while a command runs: not in the middle of an import, never forgotten."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from types import FrameType

__all__ = ["Ended", "Interrupts"]

_IMPORTS = "<frozen importlib._bootstrap>"
_PAUSE = 0.02
"""Seconds between looks at whether an import is through."""


class Ended(SystemExit):
    """A signal asks the process to end: what is half done is cleaned up on the way out."""


class Interrupts:
    """A handler of signals that raises KeyboardInterrupt or `Ended`, and keeps in mind that it did.

    Code that swallows every exception swallows that too, and torch's import does worse: it goes on
    with half of numpy. So the first waits until no import is under way. Once is enough, but that a
    second Ctrl-C kills.
    """

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.came = 0
        """The number of the first signal."""
        self._through = False
        """Whether the import is through that the first had to wait for."""
        self._over = threading.Event()
        self._watcher: threading.Thread | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise now or after the import; a second Ctrl-C ends the process."""
        if self.came and not self._through:
            if number == signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.came = self.came or number
        if self._through or not _is_importing(frame):
            self._through = False
            if self.came != signal.SIGINT:
                raise Ended(128 + self.came)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the second is heard in C as well
            raise KeyboardInterrupt
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def end(self) -> None:
        """Raise nothing any more."""
        self._over.set()
        if self._watcher is not None:
            self._watcher.join()

    def _watch(self) -> None:
        main = threading.main_thread().ident or 0
        while not self._over.wait(_PAUSE):
            if not _is_importing(sys._current_frames().get(main)):
                self._through = True
                _thread.interrupt_main(signal.Signals(self.came))
                return


def _is_importing(frame: FrameType | None) -> bool:
    """Whether an import is among the calls that led here."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTS:
            return True
        frame = frame.f_back
    return False
