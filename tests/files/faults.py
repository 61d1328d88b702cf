"""A process that ends in the middle of changing files: at every call that changes something.

`crashes` runs an action in a forked child again and again, each time with its end at the next call
to the system, before it or (a write) in the middle of it. The end after a call is the same as that
before the next one, and the last end is the one after everything. With it the power may fail: what
was not synced by then is lost, or comes back torn.

What is counted goes through the functions of `os` (and `fcntl.flock`), so `open` counts with an
opener that calls `os.open`, and a write by a file object does not count at all: the library has
none such.
"""

import errno
import fcntl
import itertools
import os
import random
import stat
import traceback
import warnings
from dataclasses import dataclass

import pytest

CALLS = (
    "chmod", "chown", "copy_file_range", "fchmod", "fchown", "fdatasync", "fsync", "ftruncate",
    "link", "mkdir", "open", "posix_fadvise", "posix_fallocate", "pwrite", "remove", "rename",
    "replace", "rmdir", "sendfile", "symlink", "truncate", "unlink", "utime", "write",
)  # fmt: skip
LENGTHS = {"write": None, "pwrite": None, "copy_file_range": 2, "sendfile": 3}
"""The calls that can be cut short, each with the place of the length among its arguments."""
TARGETS = {
    "copy_file_range": 1, "ftruncate": 0, "posix_fallocate": 0, "pwrite": 0, "sendfile": 0,
    "write": 0,
}  # fmt: skip
"""The calls that change a file's content, each with the place of its descriptor."""
CHANGING = os.O_CREAT | os.O_WRONLY | os.O_RDWR | os.O_TRUNC
SECTOR = 512

needs_fork = pytest.mark.skipif(
    not hasattr(os, "fork") or not os.path.isdir("/proc/self/fd"), reason="Linux"
)


@dataclass(frozen=True)
class Loss:
    """What a loss of power takes that was not synced: names in folders, data of files."""

    names: bool = False
    data: bool = False
    torn: int | None = None
    """The data sector by sector, lost or not as this seed says."""


KILL = None
"""The process ends, and the system goes on."""
POWER = (
    Loss(data=True), Loss(names=True), Loss(names=True, data=True), Loss(torn=1), Loss(torn=2),
    Loss(names=True, torn=3),
)  # fmt: skip
"""The system ends."""


@dataclass(frozen=True)
class Crash:
    """How a run of an action ended."""

    number: int
    """Of the call at which it ended, from 1."""
    call: str
    """The name of that call; empty where the action came to its end before."""
    half: bool = False
    """Half of that call was done, none otherwise."""
    loss: Loss | None = KILL

    @property
    def completed(self):
        return not self.call


@dataclass(frozen=True)
class Raised:
    """What an action made of an error that one of its calls raised."""

    number: int
    call: str
    error: str
    """The name of the class that the action raised; empty where it went on to its end."""


def crashes(action, prepare, losses=(KILL,)):
    """End `action` at each of its calls, `prepare` having been called; a `Crash` for each.

    The last ones are those after the action has ended. What is changed lies in a folder of its own:
    the one above is used meanwhile.
    """
    for number in itertools.count(1):
        for loss in losses:
            crash = crash_at(action, prepare, number, loss=loss)
            yield crash
            if crash.call in LENGTHS:
                yield crash_at(action, prepare, number, half=True, loss=loss)
        if crash.completed:
            return


def crash_at(action, prepare, number, *, half=False, loss=KILL):
    """End `action` at one of its calls."""
    prepare()

    def end(calls, name, call, arguments):
        if half:
            calls.disk.before(name, arguments)
            call(*shortened(name, arguments))
        calls.disk.lose(loss, number)
        calls.report(name)

    def run(calls):
        action()
        calls.disk.lose(loss, number)
        return ""

    return Crash(number, in_child(run, number, end), half, loss)


def raising(action, prepare, error=None, *, after=False):
    """Raise `error` (default: a full disk) at each call of `action`; a `Raised` for each."""
    error = error or OSError(errno.ENOSPC, "No space left on device")

    def fail(calls, name, call, arguments):
        calls.name = name
        if after:
            call(*arguments)
        raise error

    def run(calls):
        try:
            action()
        except BaseException as raised:
            return f"{calls.name} {type(raised).__name__}"
        return f"{calls.name} "

    for number in itertools.count(1):
        prepare()
        name, _, raised = in_child(run, number, fail).partition(" ")
        if not name:
            return
        yield Raised(number, name, raised)


def in_child(run, number, fault):
    """What a child says of `run`, in which the call of this number meets `fault`."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other threads do not matter to the child
        pid = os.fork()
    if not pid:
        calls = Calls(number, fault, write)
        try:
            calls.intercept()
            text = run(calls)
        except BaseException:
            text = "!" + traceback.format_exc()
        calls.report(text)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child died of {status}"
    assert not text.startswith("!"), text
    return text


class Calls:
    """The calls of a child, counted."""

    def __init__(self, number, fault, pipe):
        self.number, self.fault, self.pipe = number, fault, pipe
        self.count, self.name = 0, ""
        self.real = {name: getattr(os, name) for name in CALLS if hasattr(os, name)}
        self.exit = os._exit
        self.disk = Disk(self.real)

    def intercept(self):
        for name, call in self.real.items():
            setattr(os, name, self.counted(name, call))
        fcntl.flock = self.counted("flock", fcntl.flock)

    def counted(self, name, call):
        def wrapped(*arguments, **keywords):
            if name == "open" and not arguments[1] & CHANGING:
                return call(*arguments, **keywords)
            self.count += 1
            if self.count == self.number:
                self.fault(self, name, call, arguments)
            note = self.disk.before(name, arguments)
            result = call(*arguments, **keywords)
            self.disk.after(name, arguments, note)
            return result

        return wrapped

    def report(self, text):
        """End the child, and tell the parent why."""
        self.disk.forget()
        self.real["write"](self.pipe, text.encode())
        self.exit(0)


def shortened(name, arguments):
    """The arguments of a write that does half of the work."""
    place, done = LENGTHS[name], list(arguments)
    if place is None:
        done[1] = memoryview(done[1])[: len(done[1]) // 2]
    else:
        done[place] //= 2
    return done


class Disk:
    """What is on the disk for good, beside what is only in the system's memory."""

    def __init__(self, real):
        self.real = real
        self.files = {}
        """By inode: a descriptor, and the content that was synced."""
        self.undo = []
        """What is not synced of folders: the folder, and a call that undoes it."""
        self.held = []
        """Names of files that have lost their own, in the folder above."""

    def before(self, name, arguments):
        """Keep what the call is about to change."""
        if name in TARGETS:
            self.keep(arguments[TARGETS[name]])
        elif name in ("replace", "rename"):
            return self.hold(arguments[1])
        elif name in ("unlink", "remove"):
            return self.hold(arguments[0])
        elif name == "open":
            return os.path.lexists(arguments[0])
        return None

    def after(self, name, arguments, note):
        """Remember how to undo the call, or that it can be undone no more."""
        real = self.real
        if name in ("fsync", "fdatasync"):
            self.sync(arguments[0])
        elif name in ("replace", "rename"):
            source, target = arguments[:2]
            self.later(
                target, lambda: (real["replace"](target, source), self.restore(note, target))
            )
        elif name in ("unlink", "remove"):
            self.later(arguments[0], lambda: self.restore(note, arguments[0]))
        elif name == "open" and not note:
            self.later(arguments[0], lambda: real["unlink"](arguments[0]))
        elif name in ("link", "symlink"):
            self.later(arguments[1], lambda: real["unlink"](arguments[1]))
        elif name == "mkdir":
            self.later(arguments[0], lambda: real["rmdir"](arguments[0]))
        elif name == "rmdir":
            self.later(arguments[0], lambda: real["mkdir"](arguments[0]))

    def keep(self, fd):
        """The content that a file had when it was last synced."""
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_ino not in self.files:
            own = self.real["open"](f"/proc/self/fd/{fd}", os.O_RDWR)
            self.files[status.st_ino] = own, os.pread(own, status.st_size, 0)

    def hold(self, path):
        """A second name for a file that loses its own."""
        if not os.path.lexists(path):
            return None
        above = os.path.dirname(os.path.dirname(path))
        held = os.path.join(above, f".held-{os.getpid()}-{len(self.held)}")
        self.held.append(held)
        self.real["link"](path, held, follow_symlinks=False)
        return held

    def restore(self, held, path):
        if held is not None:
            self.real["link"](held, path, follow_symlinks=False)

    def forget(self):
        for held in self.held:
            self.real["unlink"](held)

    def later(self, path, undo):
        self.undo.append((os.stat(os.path.dirname(path)).st_ino, undo))

    def sync(self, fd):
        inode = os.fstat(fd).st_ino
        self.undo = [entry for entry in self.undo if entry[0] != inode]
        self.files.pop(inode, None)

    def lose(self, loss, salt):
        """End the system here."""
        if loss is None:
            return
        for own, synced in self.files.values():
            now = os.pread(own, os.fstat(own).st_size, 0)
            if loss.data:
                now = synced
            elif loss.torn is not None:
                now = torn(synced, now, random.Random(100 * loss.torn + salt))
            self.real["ftruncate"](own, 0)
            self.real["pwrite"](own, now, 0)
        if loss.names:
            for _, undo in reversed(self.undo):
                undo()


def torn(synced, now, chance):
    """A mixture of the sectors of two states of a file, and of their lengths."""
    short, long = sorted([len(synced), len(now)])
    size = chance.choice([short, long, chance.randint(short, long)])
    old, new = synced.ljust(size, b"\0"), now + synced[len(now) :]
    starts = range(0, size, SECTOR)
    return b"".join(chance.choice([old, new])[at : at + SECTOR] for at in starts)[:size]
