"""A process that waits in the middle of its work, before any call to the system."""

import fcntl
import itertools
import os
import signal
import sys
import traceback
import warnings
from contextlib import suppress

from tests.files.faults import CALLS

READS = ("listdir", "lstat", "open", "pread", "preadv", "read", "stat")
NEVER = sys.maxsize


class Paused:
    """A forked process that does something, and waits before one of its calls."""

    def __init__(self, action, number=NEVER, calls=CALLS):
        """Start `action` (its result is text); wait until it has come to that one of `calls`."""
        self._up, up = os.pipe()
        down, self._down = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other threads do not matter to the child
            self.pid = os.fork()
        if not self.pid:
            os._exit(_work(action, number, calls, up, down))
        os.close(up)
        os.close(down)
        self.call = self._line()
        """The name of the call; empty where the action has come to its end before."""

    def finish(self):
        """Let it go on to its end; what came of it."""
        with suppress(BrokenPipeError):  # it has come to its end before
            os.write(self._down, b"\n")
        with open(self._up, encoding="utf-8") as pipe:
            text = pipe.read()
        os.close(self._down)
        _, status = os.waitpid(self.pid, 0)
        assert status == 0, text
        return text

    def kill(self):
        """End it where it waits."""
        os.kill(self.pid, signal.SIGKILL)
        os.close(self._up)
        os.close(self._down)
        os.waitpid(self.pid, 0)

    def _line(self):
        """What it says first, up to the end of the line."""
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self._up, 1) or b"\n"
        return line.decode().strip()


def pauses(action, prepare, calls=CALLS):
    """`action` in a process that waits at its first call, its second, ...: a `Paused` for each."""
    for number in itertools.count(1):
        prepare()
        paused = Paused(action, number, calls)
        yield paused
        if not paused.call:
            return


def _work(action, number, calls, up, down):
    """The child: its exit status."""
    write, read = os.write, os.read
    count = itertools.count(1)

    def counted(name, call):
        def wrapped(*arguments, **keywords):
            if next(count) == number:
                write(up, f"{name}\n".encode())
                read(down, 1)
            return call(*arguments, **keywords)

        return wrapped

    for name in calls:
        if hasattr(os, name):
            setattr(os, name, counted(name, getattr(os, name)))
    fcntl.flock = counted("flock", fcntl.flock)
    status = 0
    try:
        text = action()
    except BaseException:
        text, status = traceback.format_exc(), 1
    if next(count) <= number:
        write(up, b"\n")
    write(up, text.encode())
    return status
