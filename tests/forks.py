"""Processes that need not import torch: they are forked from one that has."""

import multiprocessing
import os
import runpy
import shlex
import subprocess
import sys
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from tests.sources import PROJECT

FORKS = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")


def start(module, *arguments, environment, said, printed=None, cwd=PROJECT):
    """A process that does what `python -m MODULE ARGUMENTS` does; what it says is in a file.

    What it prints is there too, or goes to `printed`, another file or the writing end of a pipe.
    """
    if os.name == "posix":
        forkserver.set_forkserver_preload(["tests.warm"])
        with patch.dict(os.environ, PYTHONPATH=str(PROJECT), OMP_NUM_THREADS="1"):
            forkserver.ensure_running()
    words = [module, *map(str, arguments)]
    environment = {name: str(value) for name, value in environment.items()}
    process = FORKS.Process(target=_run, args=(words, environment, said, printed or said, cwd))
    process.start()
    return process


def _run(words, environment, said, printed, cwd):
    os.environ.update({"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", **environment})
    os.chdir(cwd)
    for number, one in enumerate((printed, said), start=1):
        with one if isinstance(one, Connection) else Path(one).open("ab") as opened:
            os.dup2(opened.fileno(), number)
    sys.argv = words
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()


def ended(processes, *, timeout):
    """The exit codes of processes, none of which goes on after `timeout` seconds."""
    try:
        for process in processes:
            process.join(timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def wait_for(number, pipe):
    """Comes back when a process has printed that number, in a line of its own."""
    with os.fdopen(pipe.fileno(), closefd=False) as lines:
        for line in lines:
            if int(line) == number:
                return
    raise AssertionError(f"ended before {number}")


def finished(module, *arguments, cwd, timeout=300, together=False):
    """What `subprocess.run` would tell of it; `together`: of both streams, in `stdout`."""
    with TemporaryDirectory() as folder:
        printed, said = (Path(folder) / name for name in ("printed", "said"))
        said = printed if together else said
        process = start(module, *arguments, environment={}, said=said, printed=printed, cwd=cwd)
        (code,) = ended([process], timeout=timeout)
        both = (printed.read_text(), "" if together else said.read_text())
        return subprocess.CompletedProcess(arguments, code, *both)


def in_shell(line, cwd, *, together=False):
    """What a line of a shell comes to, in which `ckptool` and `python` are the tests' own.

    `together`: what goes to both streams is in `stdout`, in the order in which it came.
    `CKPTOOL_PROGRAMS` names the folder of an environment's programs to take in their place.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    installed = environment.pop("CKPTOOL_PROGRAMS", None)
    if installed:
        environment["PATH"] = f"{installed}{os.pathsep}{environment['PATH']}"
        environment.pop("PYTHONPATH", None)
    else:
        environment["PYTHONPATH"] = str(PROJECT)
    words = shlex.split(line, comments=True)
    if not installed and words[0] == "ckptool" and not set("|<>*?;&$`") & set("".join(words)):
        return finished(*words, cwd=cwd, together=together)
    own = f'python() {{ "{sys.executable}" "$@"; }}; ckptool() {{ python -m ckptool "$@"; }}'
    return subprocess.run(
        ["sh", "-c", line if installed else f"{own}\n{line}"],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
        text=True,
        check=False,
        timeout=300,
    )
