"""Running the command line inside the test's own process."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from ckptool.cli import main
from tests.sources import PROJECT


@dataclass(frozen=True)
class Done:
    """What a run left: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def document(self):
        return json.loads(self.out)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, 8, 3)
        self.bn1 = torch.nn.BatchNorm2d(8)
        self.fc = torch.nn.Linear(8, 10)


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def ckptool(capsys):
    """Run `ckptool` with these arguments."""

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def process(tmp_path):
    """Run `ckptool` as a process of its own."""

    def run(*arguments, stdout=subprocess.PIPE, code=None, **environment):
        command = [sys.executable, *(code or ("-m", "ckptool")), *map(str, arguments)]
        path = os.pathsep.join([str(PROJECT), environment.pop("PYTHONPATH", "")]).strip(os.pathsep)
        done = subprocess.run(
            command,
            cwd=tmp_path,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


EACH_IN_A_FORK = """
import gc, json, os, sys, torch
from ckptool.cli import main

codes = []
gc.freeze()
for words in json.loads(sys.argv[1]):
    if not os.fork():
        code = main(words)
        if sys.stdout:
            sys.stdout.flush()
        os._exit(code)
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
with open("codes.json", "w") as file:
    json.dump(codes, file)
"""


def unheard(commands, shell):
    """The exit codes of commands, in a shell that hears them not, and what is on stderr.

    `shell` is a line with `EACH` in it: Python, which forks into a process for each command.
    """
    each = shlex.join([sys.executable, "-c", EACH_IN_A_FORK, json.dumps(commands)])
    done = subprocess.run(
        ["bash", "-c", shell.replace("EACH", each)],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=100,
    )
    with open("codes.json") as file:
        return json.load(file), done.stderr


@pytest.fixture
def model(tmp_path):
    """A DataParallel checkpoint: `{epoch, state_dict, optim_dict}`."""
    net = torch.nn.DataParallel(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    path = tmp_path / "model.pth"
    torch.save(
        {"epoch": 7, "state_dict": net.state_dict(), "optim_dict": optimizer.state_dict()}, path
    )
    return path


@pytest.fixture
def forbidden(monkeypatch):
    """Have the system refuse to open a file; root may open every file, so it is played."""
    access, open_file = os.access, os.open

    def forbid(secret):
        def allowed(path, *mode, **options):
            return os.fspath(path) != str(secret) and access(path, *mode, **options)

        def opened(path, *flags, **options):
            if path == str(secret):
                raise PermissionError(13, "Permission denied", path)
            return open_file(path, *flags, **options)

        monkeypatch.setattr(os, "access", allowed)
        monkeypatch.setattr(os, "open", opened)

    return forbid
