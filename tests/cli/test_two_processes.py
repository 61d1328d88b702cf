"""Two processes on one file: one waits at each of its calls, and whatever the other does, neither
corrupts what the other made; the one that is refused says whom it has to wait for."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from tests.files.faults import needs_fork
from tests.sources import PROJECT
from tests.writing.meetings import meetings

pytestmark = needs_fork

SERIAL = {
    (True, True): {"12", "21"},
    (True, False): {"1"},
    (False, True): {"2"},
}
"""Whether each came to its good end: the orders in which they may seem to have run."""

BUSY = "FileBusy: "
MEANWHILE = (
    "changed while it was read", "was replaced during the edit", "was removed during the edit",
    "was replaced by another file", "was removed during the run",
    "already exists", "is being rewritten",
)  # fmt: skip
"""What is said of something that the other did and finished."""


WRITERS = [
    ("file", "edit", "edit-otherwise"),
    ("header", "header", "header-otherwise"),
    ("file", "edit", "rewrite"),
    ("file", "rewrite", "edit"),
    ("file", "edit", "replace"),
    ("file", "replace", "edit"),
    ("file", "rewrite", "replace"),
    ("file", "new", "new-otherwise"),
    ("file", "new", "force-otherwise"),
    ("target", "force", "force-otherwise"),
    ("set", "shards", "shards-otherwise"),
    ("no-set", "shards-new", "shards-otherwise"),
    ("set", "shards-in-place", "shards"),
    ("bins", "bins", "shard"),
    ("bins", "shard", "bins"),
]


@pytest.mark.parametrize(("before", "first", "second"), WRITERS)
def test_two_writers_at_once(before, first, second, folder, light):
    """One after the other, in whatever order, or one of them alone."""
    found = light(meetings, before, first, second, folder)
    for meeting in found:
        done = not meeting.first, not meeting.second
        assert meeting.states & SERIAL[done], meeting
        assert meeting.left == [], meeting
        for said in filter(None, (meeting.first, meeting.second)):
            named = said.startswith(BUSY) and said.endswith(f"by process {meeting.pid}")
            assert named or any(words in said for words in MEANWHILE), meeting
    assert any(meeting.second.startswith(BUSY) for meeting in found)


KILLED = [
    ("file", "edit", "edit-otherwise"),
    ("file", "edit", "replace"),
    ("file", "replace", "edit"),
    ("file", "rewrite", "edit"),
    ("header", "header", "header-otherwise"),
    ("set", "shards", "shards-otherwise"),
    ("bins", "shard", "bins"),
]


@pytest.mark.parametrize(("before", "first", "second"), KILLED)
def test_one_is_killed_once_the_other_is_done(before, first, second, folder, light):
    """What the other made is there; what the killed one made is there whole, or not at all."""
    for meeting in light(partial(meetings, killed=True), before, first, second, folder):
        whole = {"2", "12", "21"} if not meeting.second else {"", "1"}
        assert meeting.states & whole, meeting
        assert meeting.left == [], meeting


READERS = [
    ("file", "edit", "read"),
    ("file", "replace", "read"),
    ("header", "header", "read-header"),
    ("set", "shards-in-place", "read-shards"),
]


@pytest.mark.parametrize(("before", "writer", "reader"), READERS)
def test_a_reader_beside_a_writer(before, writer, reader, folder, light):
    """It sees what was there, or what comes, or is told who writes; the writer goes on."""
    found = light(meetings, before, writer, reader, folder)
    old, new = found[0].second, found[-1].second
    assert old != new
    for meeting in found:
        busy = meeting.second.startswith(BUSY)
        assert busy or meeting.second in (old, new), meeting
        assert not busy or meeting.second.endswith(f"by process {meeting.pid}"), meeting
        assert not meeting.first, meeting
        assert "1" in meeting.states, meeting
    for meeting in light(meetings, before, reader, writer, folder):
        anew = meeting.first.endswith("is being rewritten with all its shards")
        assert meeting.first in (old, new) or anew, meeting
        assert not meeting.second, meeting


STOPPING = """
import os, signal, sys
from ckptool.cli import main
call, number, *arguments = sys.argv[1:]
real, count = getattr(os, call), [int(number)]
def stopping(*given, **more):
    count[0] -= 1
    if not count[0]:
        os.kill(os.getpid(), signal.SIGSTOP)
    return real(*given, **more)
setattr(os, call, stopping)
sys.exit(main(arguments))
"""


@contextmanager
def stopped(call, number, *arguments):
    """A `ckptool` of its own that is stopped before one of its calls, until the block ends."""
    command = [sys.executable, "-c", STOPPING, call, str(number), *map(str, arguments)]
    process = subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.PIPE, text=True)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), process.communicate()
    yield process
    os.kill(process.pid, signal.SIGCONT)
    _, err = process.communicate()
    assert process.returncode == 0, err


def names(path):
    return list(torch.load(path, weights_only=True)["state_dict"])


def test_the_second_edit_says_who_edits(model, ckptool):
    with stopped("fsync", 2, "strip-module", "--in-place", model) as first:
        second = ckptool("add-module", "--in-place", model)
        listed = ckptool("list", model)
    said = f"ckptool: {model}: is being edited by process {first.pid}\nhint: try again "
    for done in (second, listed):
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(said)
        assert done.err.count("\n") == 2
    assert ckptool("list", model).code == 0
    assert names(model)[0] == "conv1.weight"
    assert os.listdir(model.parent) == [model.name]


def test_an_edit_beside_a_file_that_is_written_anew(model, ckptool):
    with stopped("replace", 1, "compact", "--in-place", model) as first:
        second = ckptool("strip-module", "--in-place", model)
    assert second.code == 2
    assert f"{model}: is being edited by process {first.pid}\n" in second.err
    assert names(model)[0] == "module.conv1.weight"
    assert ckptool("strip-module", "--in-place", model).code == 0
    assert names(model)[0] == "conv1.weight"


def test_two_that_write_one_new_file(model, ckptool):
    target = model.with_name("out.pth")
    with stopped("replace", 1, "strip-module", model, "-o", target) as first:
        second = ckptool("add-module", model, "-o", target)
    assert second.code == 2
    assert f"{target}: is being written by process {first.pid}\n" in second.err
    assert names(target)[0] == "conv1.weight"
    assert sorted(os.listdir(model.parent)) == [model.name, target.name]


def test_two_that_write_one_set_of_shards(model, ckptool):
    index = model.with_name("out.safetensors.index.json")
    command = ("convert", model, index, "--max-shard-size", "1KB", "-q")
    with stopped("replace", 3, *command) as first:
        second = ckptool(*command, "--force")
        listed = ckptool("list", index)
    assert (second.code, listed.code) == (2, 2)
    assert f"{index}: is being written with its files by process {first.pid}\n" in second.err
    assert f"by process {first.pid}\n" in listed.err
    assert ckptool("list", index).code == 0
    assert not [name for name in os.listdir(model.parent) if name.startswith(".")]
