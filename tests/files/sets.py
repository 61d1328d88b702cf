"""Sets of files for tests: written, half written, read back."""

import os
import subprocess
import sys
import textwrap

import pytest

from ckptool.files import renames
from ckptool.files.atomic import open_atomic_set
from ckptool.files.journal import read_journal

INDEX = "model.safetensors.index.json"
OLD = {"model-1.bin": b"old one", "model-2.bin": b"old two, longer", INDEX: b"old index"}
NEW = {"model-1.bin": b"new 1", "model-2.bin": b"new 2", "model-3.bin": b"", INDEX: b"{new}"}
FEWER = {"model-1.bin": b"the only one", INDEX: b"{fewer}"}
needs_refusals = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root is refused nothing"
)
needs_posix = pytest.mark.skipif(os.name != "posix", reason="POSIX permissions, locks, signals")


def lay(folder, contents):
    """Put files into an empty folder."""
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return folder


def write(folder, contents, sizes=None, **options):
    """Write a set into `folder`; the index is the last."""
    sizes = sizes or {os.path.join(folder, name): len(data) for name, data in contents.items()}
    with open_atomic_set(list(sizes)[-1], sizes, **options) as output_of:
        for name, data in contents.items():
            with output_of(os.path.join(folder, name)) as output:
                output.write(data)


def content(folder):
    """Every file of the folder by name."""
    found = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            found[name] = file.read()
    return found


def run_child(code, *arguments):
    """A process that runs `code` with the helpers of this module."""
    head = "import os, sys\nfrom ckptool.errors import *\nfrom tests.files.sets import *\n"
    command = [sys.executable, "-c", head + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Killed(BaseException):
    """Stands for the end of the process."""


def killed(folder, new, renamed, **options):
    """The set as a kill leaves it after so many renames; what its journal says."""

    def carry_out(target, moves):
        for move in moves[:renamed]:
            move.carry_out(os.path.dirname(target))
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(renames, "_carry_out_all", carry_out)
        patch.setattr(renames, "_settle_renames", lambda *_: None)
        with pytest.raises(Killed):
            write(folder, new, **options)
    return read_journal(os.path.join(folder, INDEX))
