"""Hostile pickles: nothing runs, nothing is imported, and little is paid for them."""

import importlib
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from contextlib import suppress

import pytest

import ckptool
from ckptool.core.model import Opaque
from ckptool.core.tree import walk
from ckptool.errors import CheckpointError, LimitExceeded
from tests.symbolic.pickles import read


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def call(module: str, name: str, *args: bytes) -> bytes:
    """GLOBAL, the arguments, REDUCE."""
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(args) + b"tR"


COMMAND = "touch EXECUTED"
PAYLOADS = {
    "REDUCE of os.system": b"\x80\x02" + call("os", "system", text(COMMAND)) + b".",
    "REDUCE of eval": b"\x80\x02" + call("builtins", "eval", text("open('EXECUTED', 'w')")) + b".",
    "STACK_GLOBAL": b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + text(COMMAND) + b"\x85R.",
    "INST": b"(S'touch EXECUTED'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch EXECUTED'\no.",
    "NEWOBJ": b"\x80\x02csubprocess\nPopen\n" + text(COMMAND) + b"\x85\x81.",
    "NEWOBJ_EX": b"\x80\x04csubprocess\nPopen\n" + text(COMMAND) + b"\x85}\x92.",
    "getattr chain": b"\x80\x02"
    + call("builtins", "getattr", b"cos\nsystem\n", text("__call__"))
    + text(COMMAND)
    + b"\x85R.",
    "pkgutil.resolve_name": b"\x80\x02"
    + call("pkgutil", "resolve_name", text("os:system"))
    + text(COMMAND)
    + b"\x85R.",
    "apply through a recognized function": b"\x80\x02"
    + b"ctorch._tensor\n_rebuild_from_type_v2\n(cos\nsystem\ncos\nsystem\n"
    + text(COMMAND)
    + b"\x85NtR.",
    "BUILD with __setstate__": b"\x80\x02ccode\nInteractiveInterpreter\n)\x81}"
    + text("__setstate__")
    + b"cos\nsystem\nsb"
    + text(COMMAND)
    + b"b.",
    "dill's loader": b"\x80\x02" + call("dill._dill", "_load_type", text("CodeType")) + b".",
    "torch.load inside": b"\x80\x02" + call("torch.serialization", "load", text("x")) + b".",
    "torch.hub": b"\x80\x02" + call("torch.hub", "load", text("evil/repo")) + b".",
    "runpy": b"\x80\x02" + call("runpy", "_run_code", text("open('EXECUTED','w')"), b"}") + b".",
    "copyreg extension": b"\x80\x02\x82\x01.",
}


def as_files(folder, payload: bytes):
    """The payload as a bare pickle, in a torch zip, in a legacy stream, and beside real data."""
    bare = folder / "bare.pkl"
    bare.write_bytes(payload)
    zipped = folder / "zipped.pth"
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/version", "3\n")
    legacy = folder / "legacy.pth"
    head = b"".join(pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {}))
    legacy.write_bytes(head + payload + pickle.dumps([], 2))
    return bare, zipped, legacy


def test_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    importlib.import_module("torch")  # which `load` needs, and which imports much of its own
    before = set(sys.modules)
    for name, payload in PAYLOADS.items():
        for file in as_files(tmp_path, payload):
            with suppress(CheckpointError), ckptool.open(file) as checkpoint:
                list(walk(checkpoint.root))
                ckptool.info(checkpoint)
                checkpoint.save(tmp_path / "out.pth", overwrite=True)
            with suppress(CheckpointError):
                ckptool.load(file)
        assert not os.path.exists("EXECUTED"), name
    named = {"code", "dill", "dill._dill", "pkgutil", "runpy", "subprocess", "torch.hub"}
    assert not (set(sys.modules) - before) & named


def test_the_payloads_are_real(tmp_path):
    """Python's unpickler does run them, so a test that finds nothing run means something."""
    (tmp_path / "p").write_bytes(PAYLOADS["REDUCE of os.system"])
    code = "import pickle; pickle.load(open('p', 'rb'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert (tmp_path / "EXECUTED").exists()


def doubling(levels: int) -> bytes:
    """`a = [1]; a = [a, a]; ...`: few bytes that spell 2**levels items."""
    return (
        b"\x80\x02](K\x01e"
        + b"".join(b"q%c0](h%ch%ce" % (level, level, level) for level in range(levels))
        + b"."
    )


def test_trees_that_explode_meet_a_limit():
    nested = [b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b"." for depth in (400, 100_000)]
    for payload in (doubling(100), *nested):
        tree = read(payload).root
        with pytest.raises(LimitExceeded):
            for _ in walk(tree):
                pass


def test_lengths_that_lie_take_no_memory():
    for payload in (
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b".",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b".",
        b"\x80\x02T" + struct.pack("<i", -5) + b"abc.",
        b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b".",
        b"\x80\x02\x8b" + struct.pack("<i", -1) + b"....",
        b"\x80\x02B\xff\xff\xff\xffabc.",
    ):
        with pytest.raises(CheckpointError):
            read(payload)


def test_an_object_holding_itself_is_listed_once():
    payload = b"\x80\x02cbuiltins\nobject\n)\x81q\x00}" + text("me") + b"h\x00sb."
    tree = read(payload).root
    leaves = list(walk(tree))
    assert [type(leaf) for _, leaf in leaves] == [Opaque]
