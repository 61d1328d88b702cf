"""Processes that need not import torch: they are forked from one that has."""

import multiprocessing
import os
import runpy
import sys
from multiprocessing import forkserver
from unittest.mock import patch

from tests.sources import PROJECT

FORKS = multiprocessing.get_context("forkserver" if os.name == "posix" else "spawn")


def start(module, *arguments, environment, said, steps=None):
    """A process that does what `python -m MODULE ARGUMENTS` does; all that it says is in a file.

    What it prints goes to `steps` where that is given, the writing end of a pipe.
    """
    if os.name == "posix":
        forkserver.set_forkserver_preload(["tests.trainer.warm"])
        with patch.dict(os.environ, PYTHONPATH=str(PROJECT), OMP_NUM_THREADS="1"):
            forkserver.ensure_running()
    words = [module, *map(str, arguments)]
    environment = {name: str(value) for name, value in environment.items()}
    process = FORKS.Process(target=_run, args=(words, environment, str(said), steps), daemon=True)
    process.start()
    return process


def _run(words, environment, said, steps):
    os.environ.update(environment)
    os.chdir(PROJECT)
    with open(said, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 2)
        os.dup2(steps.fileno() if steps else file.fileno(), 1)
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
