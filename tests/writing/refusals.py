"""Writes of every kind where the system refuses something: a full disk, a limit, a folder."""

import ctypes
import os
import shutil
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

from tests.files.pauses import Paused
from tests.writing.kinds import KINDS, debris, visible
from tests.writing.meetings import outcome

NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000
PRIVATE = 0x44000
"""Of a mount and all below it (`MS_REC | MS_PRIVATE`)."""
NOBODY = 65534
SIZE = 2 << 20
PAGE = 4096


@dataclass(frozen=True)
class Refused:
    """What came of a write."""

    room: int
    """Bytes that there was room for."""
    said: str
    state: int | None
    """Which of the right states the files are in: 0 is the old one, -1 the new one."""
    left: list[str]


def under_limits(name, folder, found_early):
    """A write where no file may have more than so many bytes.

    `found_early`: whether the system can be asked for room before a byte is written.
    """
    kind = KINDS[name]
    states = kind.states(folder)
    old, new = (max(map(len, files.values())) for files in (states[0], states[-1]))
    rooms = [100, 1000, 70_000, old + 100, new - 1]
    return [limited(kind, states, folder, room, found_early) for room in rooms]


def limited(kind, states, folder, room, found_early):
    """What comes of it under one limit."""
    kind.lay(folder)
    said = Paused(partial(run_limited, kind, folder, room, found_early)).finish()
    return result(kind, states, folder, room, said)


def run_limited(kind, folder, room, found_early):
    import resource

    if not found_early:
        del os.posix_fallocate
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    return outcome(kind.run, folder)


def result(kind, states, folder, room, said):
    left = debris(folder)
    there = visible(folder)
    state = states.index(there) if there in states else None
    return Refused(room, said, -1 if there == states[-1] else state, left)


def on_small_disk(names, above, promised):
    """Writes on a disk of its own that has little room; None where none may be mounted.

    `promised`: room that the disk claims to have beside, as one with quotas does.
    """
    found = {}

    def run():
        if not mount(above):
            return "no mount"
        if promised:
            del os.posix_fallocate
            shutil.disk_usage = lambda folder: SimpleNamespace(free=SIZE)
        for name in names:
            found[name] = [filled(name, above, pages * PAGE) for pages in (0, 1, 2, 20)]
        return repr(found)

    said = Paused(run).finish()
    return None if said == "no mount" else eval(said, {"Refused": Refused})


def filled(name, above, room):
    """What comes of a write on a disk with so much room."""
    kind, folder, filler = KINDS[name], above / "files", above / "filler"
    states = kind.states(folder)
    kind.lay(folder)
    free = os.statvfs(above)
    with open(filler, "wb") as file:
        os.truncate(file.fileno(), 0)
        file.write(bytes(free.f_bavail * free.f_frsize - room))
    said = outcome(kind.run, folder)
    filler.unlink()
    return result(kind, states, folder, room, said)


def mount(folder):
    """A small disk in memory over a folder, for this process alone; whether we may have one."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_MOUNTS | (NEW_USERS if user else 0)):
        return False
    maps = {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}
    try:
        for file, line in maps.items() if user else ():
            with open(f"/proc/self/{file}", "w") as mapping:
                mapping.write(line)
    except OSError:
        return False
    target = os.fsencode(folder)
    private = libc.mount(b"none", b"/", None, PRIVATE, None)
    return not (private or libc.mount(b"tmpfs", target, b"tmpfs", 0, b"size=%d" % SIZE))


def denied(name, folder, writable):
    """A write by one who may not write to the folder, or (`writable`) to no file in it."""
    kind = KINDS[name]
    states = kind.states(folder)
    kind.lay(folder)
    for above, _, files in os.walk(folder):
        for file in files:
            os.chmod(os.path.join(above, file), 0o444, follow_symlinks=True)
        os.chmod(above, 0o777 if writable else 0o555)
    os.chmod(folder.parent, 0o755)

    def run():
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return outcome(kind.run, folder)

    said = Paused(run).finish()
    for above, _, _ in os.walk(folder):
        os.chmod(above, 0o755)
    return result(kind, states, folder, 0, said)
