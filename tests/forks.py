"""Processes that need not import torch: they are forked from one that has."""

import multiprocessing
import os
import re
import runpy
import shlex
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from tests.sources import PROJECT

FORKS = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")
STARTED = []
"""The processes of the test that is running; they die with it (`tests/conftest.py`)."""


def start(module, *arguments, environment, said, printed=None, cwd=PROJECT, are_workers_warm=True):
    """A process that does what `python -m MODULE ARGUMENTS` does; what it says is in a file.

    In place of a module it may be the path of a program, or `-c`.

    What it prints is there too, or goes to `printed`, another file or the writing end of a pipe.
    The workers that a launcher starts are forks of it, unless they are to be new interpreters.
    """
    _serve()
    kind = [] if module == "-c" or module.endswith(".py") else ["-m"]
    words = [*kind, module, *map(str, arguments)]
    environment = {name: str(value) for name, value in environment.items()}
    given = (words, environment, said, printed or said, cwd, are_workers_warm)
    return _begun(FORKS, _run, *given)


def _serve():
    if os.name == "posix":
        forkserver.set_forkserver_preload(["tests.warm"])
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # as `launch` has it: read where torch is imported
        with patch.dict(os.environ, PYTHONPATH=str(PROJECT), OMP_NUM_THREADS="1", **quiet):
            forkserver.ensure_running()


def _begun(context, target, *arguments):
    process = context.Process(target=target, args=arguments)
    process.start()
    STARTED.append(process)
    return process


def _run(words, environment, said, printed, cwd, are_workers_warm):
    os.environ.update({"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", **environment})
    os.chdir(cwd)
    for number, one in enumerate((printed, said), start=1):
        with one if isinstance(one, Connection) else Path(one).open("ab") as opened:
            os.dup2(opened.fileno(), number)
    if are_workers_warm and os.name == "posix":
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        SubprocessHandler._popen = lambda _, *given: Worker(
            *given, context=multiprocessing.get_context("fork")
        )
    _interpret(words, buffering=1 if printed == said else -1)  # in the order in which it comes


def _interpret(words, buffering=-1):
    """Do what Python does with these words."""
    sys.stdout = open(1, "w", buffering, closefd=False)  # noqa: SIM115 - for the process
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    kind, *words = words if words[0] in ("-m", "-c") else ["", *words]
    sys.argv = words
    sys.path.insert(0, os.getcwd() if kind else os.path.dirname(os.path.abspath(words[0])))
    try:
        if kind == "-c":
            exec(words[0], {"__name__": "__main__"})
        elif kind:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.stdout.flush()


class Worker:
    """What torch's launcher starts, with what the launcher asks of a `subprocess.Popen`."""

    def __init__(self, words, environment, context=FORKS):
        if context is FORKS:
            _serve()
        _, *words = (word for word in words if word != "-u")
        begun, told = context.Pipe(duplex=False)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)  # none is for both of them
        self._process = _begun(context, _work, words, environment, told, mask)
        self.pid = self._process.pid
        told.close()
        begun.poll(None)
        begun.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return self.poll()


_ASKING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


def _work(words, environment, told, mask):
    """Be as new a process as one that a program was loaded into."""
    os.setsid()
    for number in _ASKING:
        taken = signal.getsignal(number)
        signal.signal(number, signal.SIG_IGN)  # what came to both of them
        if taken != signal.SIG_IGN:
            is_ctrl_c = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    told.close()
    for number in range(3, 1024):  # those of the launcher's store
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)
    os.environ.clear()
    os.environ.update(environment)
    _interpret(words, buffering=1)


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


def finished(module, *arguments, cwd, timeout=300, together=False, **more):
    """What `subprocess.run` would tell of it; `together`: of both streams, in `stdout`."""
    with TemporaryDirectory() as folder:
        printed, said = (Path(folder) / name for name in ("printed", "said"))
        said = printed if together else said
        where = {"said": said, "printed": printed, "cwd": cwd}
        process = start(module, *arguments, environment={}, **where, **more)
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
    program, *words = shlex.split(line, comments=True)
    bare = re.sub(r"""'[^']*'|"[^"$`]*\"""", "", line).partition("#")[0]
    if not installed and program in ("ckptool", "python") and not set("|<>*?;&$`") & set(bare):
        words = words if program == "python" else [program, *words]
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
