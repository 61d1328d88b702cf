"""Two processes at work on the same files: one stops at each of its calls, the other goes first."""

import hashlib
import json
import os
from dataclasses import dataclass
from functools import partial

from ckptool.errors import CheckpointError
from ckptool.files import recovery
from ckptool.formats import open_checkpoint
from ckptool.inspection.listing import list_tensors
from tests.files.faults import CALLS
from tests.files.pauses import READS, pauses
from tests.writing.kinds import (
    BIN,
    KINDS,
    SHARDED,
    Kind,
    debris,
    quietly,
    remap,
    rename,
    shards,
    strip,
    visible,
    write,
)


def reading(target):
    """What a reader sees: names, values, and the hash of every tensor."""

    def act(folder):
        with open_checkpoint(folder / target) as checkpoint:
            document = list_tensors(checkpoint, hash=True).to_dict()
        for entry in document["tensors"]:
            del entry["storage"]
        return hashlib.sha256(json.dumps(document).encode()).hexdigest()

    return act


def recovering(folder):
    recovery.recover(folder / "model.pth")


def append(path):
    with open(path, "ab") as file:
        file.write(b"x")


def overwrite(path):
    """Other bytes in the place of some, where a tensor lies."""
    status = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(40_000)
        file.write(b"other elements")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def shorten(path):
    os.truncate(path, 50_000)


CHANGES = {"append": append, "overwrite": overwrite, "shorten": shorten}

SHARD = "model-00001-of-00002.bin"
TWO = (("model.pth", "zip"), ("other.pth", "other"))
BEFORE = {
    "file": Kind((), before=TWO, target="model.pth"),
    "target": Kind((), before=(*TWO, ("out.pth", "old"))),
    "header": Kind((), before=(("model.safetensors", "safetensors"),), target="model.safetensors"),
    "set": Kind((), first=shards(100_000), target=SHARDED),
    "bins": Kind((), first=shards(100_000, "model.pth", BIN), target=BIN),
    "no-set": Kind((), target=SHARDED),
}
"""What lies there before two meet."""
ACTS = {
    "edit": write("model.pth", "model.pth", strip, in_place=True),
    "edit-otherwise": write("model.pth", "model.pth", rename, in_place=True),
    "header": write("model.safetensors", "model.safetensors", strip, in_place=True),
    "header-otherwise": write("model.safetensors", "model.safetensors", rename, in_place=True),
    "rewrite": write("model.pth", "model.pth", rename, in_place=True, rewrite=True),
    "replace": write("other.pth", "model.pth", overwrite=True),
    "new": write("model.pth", "out.pth", strip),
    "new-otherwise": write("other.pth", "out.pth"),
    "force": write("model.pth", "out.pth", strip, overwrite=True),
    "force-otherwise": write("other.pth", "out.pth", overwrite=True),
    "shards": shards(100_000, "model.pth", SHARDED, strip, overwrite=True),
    "shards-otherwise": shards(75_000, "model.pth", SHARDED, rename, overwrite=True),
    "shards-new": shards(100_000, "model.pth", SHARDED, strip),
    "shards-in-place": shards(100_000, SHARDED, SHARDED, rename, in_place=True),
    "bins": shards(100_000, "model.pth", BIN, strip, overwrite=True),
    "shard": write(SHARD, SHARD, remap, in_place=True),
    "read": reading("model.pth"),
    "read-header": reading("model.safetensors"),
    "read-out": reading("out.pth"),
    "read-shards": reading(SHARDED),
    "recover": recovering,
}


@dataclass(frozen=True)
class Meeting:
    """How it ended."""

    call: str
    """Before which the first one waited; empty: it had ended."""
    pid: int
    """Of the first one."""
    first: str
    """What came of it: what it returned, or its error."""
    second: str
    states: frozenset[str]
    """The orders of the acts (`""`: none of them, `"21"`: the second first) that leave the same."""
    left: list[str]
    """What lay beside the files."""


def outcome(act, folder):
    """What an act returns, or its error, as text."""
    try:
        with quietly():
            return act(folder) or ""
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"


def meetings(before, first, second, folder, *, killed=False):
    """Each meeting of two acts; where it is a reader that waits, it does so at its reads."""
    recovery._PAUSES = ()
    kind, acts = BEFORE[before], {"1": ACTS[first], "2": ACTS[second]}
    calls = READS if first.startswith("read") else CALLS
    right = {order: after(order, acts, kind, folder) for order in ("", "1", "2", "12", "21")}
    found = []
    for paused in pauses(partial(outcome, acts["1"], folder), partial(kind.lay, folder), calls):
        second_said = outcome(acts["2"], folder)
        first_said = paused.kill() if killed else paused.finish()
        kind.open(folder)
        there = visible(folder)
        states = frozenset(order for order, files in right.items() if files == there)
        if killed:
            kind.write_again(folder)
        left = debris(folder)
        found.append(Meeting(paused.call, paused.pid, first_said, second_said, states, left))
    return found


def after(order, acts, kind, folder):
    """The files after these acts, one after the other; None where one is refused."""
    kind.lay(folder)
    said = [outcome(acts[number], folder) for number in order]
    return None if any(": " in text for text in said) else visible(folder)


@dataclass(frozen=True)
class Disturbance:
    """What came of a write when a program that asks for no lock changed what it reads."""

    call: str
    """Before which it did."""
    said: str
    kept: bool
    """Whether all other files are as they were before the write."""
    right: bool
    """Whether all other files are as they would be without the disturbance."""
    left: list[str]


def disturbances(name, change, source, folder):
    """A write of a kind, one of whose sources is changed before each of its calls."""
    kind, found = KINDS[name], []
    states = [without(files, source) for files in kind.states(folder)]
    for paused in pauses(partial(outcome, kind.run, folder), partial(kind.lay, folder)):
        if paused.call == "open" and not found:  # the sources are just being opened
            paused.finish()
            continue
        CHANGES[change](folder / source)
        said = paused.finish()
        there = without(visible(folder), source)
        kept, right = there == states[0], there == states[-1]
        found.append(Disturbance(paused.call, said, kept, right, debris(folder)))
    return found


def without(files, name):
    return {other: content for other, content in files.items() if other != name}
