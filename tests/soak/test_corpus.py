"""The corpus that fuzzing has left takes the same ways without harm; with it, what once broke."""

import subprocess
import sys

import pytest

from tests.soak.fuzz import CORPUS, keep, kept
from tests.soak.targets import COMMANDS, TARGETS, WasRun, a_command, prepare


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_that_is_kept_is_read_or_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare()
    inputs = kept(name)
    assert inputs, f"{CORPUS} has none"
    for data in inputs:
        TARGETS[name].check(data)


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_is_read_or_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare()
    for data in TARGETS[name].seeds():
        TARGETS[name].check(data)


def test_a_fault_of_a_command_is_seen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prepare()
    a_command(b"\0nothing")

    def broken(arguments):
        raise KeyError(arguments[1])

    monkeypatch.setattr("tests.soak.targets.main", broken)
    with pytest.raises(KeyError):
        a_command(bytes([len(COMMANDS)]) + b"nothing")


def test_a_file_that_was_run_is_seen():
    script = (
        "import os\nfrom tests.soak.targets import WasRun, watch\nwatch()\n"
        "try:\n    os.system('true')\nexcept WasRun as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.startswith("os.system"), done.stderr
    assert not issubclass(WasRun, Exception)


def test_what_is_kept_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.soak.fuzz.CORPUS", tmp_path)
    keep("numpy", [b"two", b"one", b"longer"])
    first = (tmp_path / "numpy.zip").read_bytes()
    assert kept("numpy") == [b"one", b"two", b"longer"]
    keep("numpy", [b"longer", b"one", b"two"])
    assert (tmp_path / "numpy.zip").read_bytes() == first
    assert kept("pickle machine") == []
