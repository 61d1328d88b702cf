"""What is fuzzed: each target takes bytes, and may refuse them with a `CheckpointError` alone."""

import contextlib
import io
import os
import sys
import warnings
import zipfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ckptool
from ckptool.cli import main
from ckptool.core.sections import find_sections
from ckptool.core.tree import walk
from ckptool.symbolic.encoder import find_blockers
from ckptool.transforms.plain import find_rejected
from tests.sources import PROJECT
from tests.symbolic.pickles import read

FIXTURES = PROJECT / "fixtures"
LONGEST = 24 << 10
"""Bytes of an input: beyond it nothing new happens, only slower."""
COMMANDS = (
    ["list"],
    ["list", "--tree", "--json"],
    ["info"],
    ["doctor", "--devices", "cpu"],
    ["verify", "--values"],
    ["list", "--hash"],
    ["strip-module", "-o", "out.pth", "--force"],
    ["convert", "--to", "cpu", "--force", "out.safetensors"],
    ["convert", "--plain", "--drop-objects", "--force", "out.pth"],
    ["diff", "other.pth"],
)
"""Which one it is, the first byte of an input decides; the file's name comes after the verb."""
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")


class WasRun(BaseException):
    """Something of a file was called."""


def watch():
    """Make anything that a file could want to do an error that nothing catches."""

    def seen(event, arguments):
        if event in FORBIDDEN:
            raise WasRun(f"{event} {arguments}")

    sys.addaudithook(seen)


def a_pickle(data: bytes) -> None:
    """The machine alone, and what is asked of every tree."""
    with contextlib.suppress(ckptool.CheckpointError):
        root = read(data).root
        for asked in (walk, find_sections, find_rejected, find_blockers):
            deque(asked(root), maxlen=0)


def in_a_zip(data: bytes) -> None:
    """The pickle of a torch zip that has three small storages."""
    with zipfile.ZipFile("zip.pth", "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/byteorder", "little")
        for key in range(3):
            archive.writestr(f"archive/data/{key}", bytes(range(64)))
        archive.writestr("archive/version", "3\n")
    _opened("zip.pth")


def a_file(data: bytes) -> None:
    """The file of some reader: its header, and what its tensors hold."""
    Path("file").write_bytes(data)
    _opened("file")


def _opened(path: str) -> None:
    with contextlib.suppress(ckptool.CheckpointError), ckptool.open(path) as checkpoint:
        deque(checkpoint.sections, maxlen=0)
        for _, tensor in checkpoint.tensors():
            if tensor.has_content and tensor.nbytes <= 1 << 16:
                with contextlib.suppress(ckptool.CheckpointError):
                    tensor.read()


def a_command(data: bytes) -> None:
    """A command on a file: a sentence and an exit code, whatever is in it."""
    verb, *options = COMMANDS[data[0] % len(COMMANDS)] if data else COMMANDS[0]
    Path("file.pth").write_bytes(data[1:])
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        code = main([verb, "file.pth", *options])
    assert code in (0, 1, 2), code
    assert "a bug in ckptool" not in said.getvalue(), said.getvalue()
    for name in ("out.pth", "out.safetensors"):
        if Path(name).exists():
            os.remove(name)


@dataclass(frozen=True)
class Target:
    """A check, and the files that its inputs are made from."""

    check: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


def fixtures(*patterns: str) -> list[bytes]:
    """The content of small fixtures."""
    paths = sorted(path for pattern in patterns for path in FIXTURES.glob(pattern))
    contents = [path.read_bytes() for path in paths if path.stat().st_size <= LONGEST]
    assert contents, patterns
    return contents


def pickles() -> list[bytes]:
    """Those inside zips, and bare ones."""
    found = fixtures("streams/*.pkl")
    for path in sorted(FIXTURES.rglob("*.pth")):
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            found += [archive.read(name) for name in names]
    return [one for one in found if len(one) <= LONGEST]


def commands() -> list[bytes]:
    """Each with a file of each format."""
    files = fixtures("torch-2.13.0/single.pth", "safetensors/*.safetensors", "numpy/jax.npz")
    files += fixtures("torch-1.4.0/dp.pth", "values/objects.pth", "streams/tensors_protocol2.pkl")
    return [bytes([number]) + one for number in range(len(COMMANDS)) for one in files]


TARGETS = {
    "pickle machine": Target(a_pickle, pickles),
    "pickle in a torch zip": Target(in_a_zip, pickles),
    "torch zip": Target(a_file, lambda: fixtures("archives/*.pth", "torch-2.13.0/*.pth")),
    "legacy stream": Target(a_file, lambda: fixtures("torch-1.4.0/*.pth", "tensors/*_legacy.pth")),
    "tar": Target(a_file, lambda: fixtures("streams/*.tar", "torch-1.4.0/single_full.tar")),
    "bare pickle": Target(a_file, lambda: fixtures("streams/*.pkl")),
    "safetensors": Target(a_file, lambda: fixtures("safetensors/*.safetensors")),
    "numpy": Target(a_file, lambda: fixtures("numpy/*.npz")),
    "TorchScript": Target(a_file, lambda: fixtures("torchscript/*.pt", "torchscript/*.ptl")),
    "PT2": Target(a_file, lambda: fixtures("torch-2.*/exported.pt2")),
    "command line": Target(a_command, commands),
}


def prepare() -> None:
    """What targets need beside the input, in the current folder."""
    warnings.simplefilter("ignore")
    Path("other.pth").write_bytes((FIXTURES / "torch-2.13.0" / "single.pth").read_bytes())
