"""Whole processes, run in turn: wall time and peak memory of each."""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Command", "Measured", "Sample", "measure", "ratio", "warm"]

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
"""Modules are compiled once, as for an installed package: torch's own are, whatever this says."""

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""`ru_maxrss` is in bytes on macOS and in KiB elsewhere."""


@dataclass(frozen=True, slots=True)
class Command:
    """A process to measure; `label` is how the report calls it."""

    label: str
    arguments: tuple[str, ...]
    ends: int = 0
    """The exit code of a run that went well."""
    tells: bool = False
    """Whether its last line of output is how many seconds the part took that counts."""

    @classmethod
    def ckptool(cls, *arguments: object, ends: int = 0) -> Command:
        """The command line, by this interpreter."""
        words = tuple(map(str, arguments))
        return cls("ckptool " + words[0], (sys.executable, "-m", "ckptool", *words), ends)

    @classmethod
    def far(cls, verb: str, source: Path, *arguments: object) -> Command:
        """The command line on a file at an address, on a slow line."""
        words = (sys.executable, "-m", "benchmarks.line", verb, str(source), *map(str, arguments))
        return cls(f"ckptool {verb} http://", words, tells=True)

    @classmethod
    def system(cls, label: str, *arguments: object) -> Command:
        """A program of the system."""
        return cls(label, tuple(map(str, arguments)))

    @classmethod
    def into(cls, folder: Path) -> Callable[..., Command]:
        """Programs of the system that write into a folder, which is made for them."""

        def command(label: str, *arguments: object) -> Command:
            script = 'mkdir -p "$0" && exec "$@"'
            return cls.system(label, "sh", "-c", script, folder, *arguments)

        return command

    @classmethod
    def program(cls, label: str, text: str, *arguments: object, tells: bool = False) -> Command:
        """A Python program given as text."""
        words = (sys.executable, "-c", text.strip(), *map(str, arguments))
        return cls(label, words, tells=tells)

    @classmethod
    def copy(cls, source: Path, target: Path) -> Command:
        """The floor for anything that writes the file anew and means it."""
        script = 'cp "$1" "$2" && sync "$2"'
        return cls("cp && sync", ("sh", "-c", script, "sh", str(source), str(target)))


@dataclass(frozen=True, slots=True)
class Sample:
    """One run: seconds of wall time, bytes of peak resident memory."""

    seconds: float
    peak: int


@dataclass(frozen=True, slots=True)
class Measured:
    """All runs of one command, in order."""

    command: Command
    samples: tuple[Sample, ...]

    @property
    def seconds(self) -> float:
        """The median wall time."""
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def peak(self) -> int:
        """The highest peak memory of any run, in bytes."""
        return max(sample.peak for sample in self.samples)


def measure(
    commands: Sequence[Command], repeats: int, before: Callable[[], None]
) -> tuple[Measured, ...]:
    """Run the commands in turn, `repeats` times: A B A B, so that a busy moment hits both.

    `before` is called ahead of every run, outside its time.
    """
    runs: list[list[Sample]] = [[] for _ in commands]
    for _ in range(repeats):
        for command, samples in zip(commands, runs, strict=True):
            before()
            samples.append(run(command))
    return tuple(
        Measured(command, tuple(samples)) for command, samples in zip(commands, runs, strict=True)
    )


def run(command: Command) -> Sample:
    """One run; its output goes nowhere, unless it tells its time.

    Raises:
        RuntimeError: it ended otherwise than it should; its standard error is in the message.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        command.arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if command.tells else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )
    with process:
        output = process.stdout.read() if process.stdout else b""
        error = process.stderr.read() if process.stderr else b""
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode != command.ends:
        words = shlex.join(command.arguments)
        raise RuntimeError(f"{words} exited {process.returncode}: {error.decode()[-2000:]}")
    told = float(output.split()[-1]) if command.tells else seconds
    return Sample(told, usage.ru_maxrss * RSS_UNIT)


def ratio(ours: Measured, theirs: Measured) -> float:
    """The median of the rounds' own ratios: what disturbed a round disturbed both its runs."""
    pairs = zip(ours.samples, theirs.samples, strict=True)
    return statistics.median(a.seconds / b.seconds for a, b in pairs)


def warm(path: Path) -> None:
    """Bring a file, or those of a folder, into the page cache."""
    if path.is_dir():
        for one in path.iterdir():
            warm(one)
        return
    buffer = bytearray(1 << 22)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
