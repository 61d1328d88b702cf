"""The results as a table for people, and the page that keeps them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from itertools import pairwise
from pathlib import Path

from tabulate import tabulate

from benchmarks.rows import MB, Result
from benchmarks.timing import ratio

__all__ = ["Step", "page", "steps", "table"]

HEADERS = ("work", "who", "median s", "peak MB", "ckptool / it", "wanted")
PAGE = """# Benchmarks

`make bench` made this page: whole processes, run in turn (A B A B ...), {repeats} times each.
Seconds are medians of wall time; "ckptool / it" is the median of the rounds' own ratios, below 1
where ckptool is faster. Memory is the highest peak of any run. Inputs lie in the page cache. What
ckptool and `cp && sync` write is on the disk when they end; the torch idioms do not sync. Of what
fills a model or matches names the seconds are those of that part alone, inside a process that has
imported torch and built the model before.

{machine}
Other tools: {peers}.

Large file: {size:,} bytes, 225 float16 tensors, names with `module.`, storages tagged `cuda:3`.

{table}

`list` as the number of tensors grows: {growth}.

![seconds and megabytes by size and number of tensors](growth.svg)

{verdict}

On a file system that shares blocks (XFS or btrfs, whose `cp` takes no time) a new file shares
those of the source: `python -m benchmarks.sharing` makes an XFS in a file and measures it.
2026-11-25, 2 cores, 5 GB: `strip-module` 0.12 s, `remap` 0.13 s, `rename` 0.17 s, `add-module`
0.17 s and 1.1 MB of the disk each, `extract --model-only` of a training checkpoint 0.17 s and
1.0 MB; `cp --reflink` 0.002 s.

Files that are not in the page cache: `python -m benchmarks.cold` drops the cache before each run.
2026-11-27, 2 cores, 2 GB: `load_state_dict` 0.98 s, torch.load 1.93 s; `verify` 0.85 s; `convert`
1.87 s, `cp && sync` 2.29 s; `stats` 2.62 s, of which the import of torch, cold as well, is 1.5 s.
One `dd` reads the file in 0.85 s, four at once in 0.54 s.

To repeat: `make bench`; `make bench ARGS=--quick` takes a tenth of the size, one run of each and
two minutes. The programs run beside ckptool are in `benchmarks/idioms.py`.
"""


def table(results: Sequence[Result], style: str = "github") -> str:
    """Every row and every command that was run for it."""
    lines = [line for result in results for line in lines_of(result)]
    return tabulate(lines, HEADERS, tablefmt=style, disable_numparse=True)


def lines_of(result: Result) -> Iterator[tuple[str, ...]]:
    """Ours first, then each of the others with our time as a multiple of its."""
    ours = result.ours
    wanted = "; ".join(result.row.bounds())
    yield (result.row.work, "ckptool", seconds(ours.seconds), memory(ours.peak), "", wanted)
    for other in result.theirs:
        times = f"{ratio(ours, other):.2f}"
        yield ("", other.command.label, seconds(other.seconds), memory(other.peak), times, "")


def seconds(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def memory(value: int) -> str:
    """Bytes as MB."""
    return f"{value / MB:,.0f}"


@dataclass(frozen=True, slots=True)
class Step:
    """What one more tensor costs between two files, in seconds and bytes."""

    fewer: int
    more: int
    seconds: float
    peak: float

    def __str__(self) -> str:
        """For a line of the report."""
        return (
            f"{self.fewer:,} to {self.more:,} tensors: {self.seconds * 1e6:.1f} us "
            f"and {self.peak:,.0f} bytes a tensor"
        )


def steps(results: Sequence[Result]) -> tuple[Step, ...]:
    """From file to file, as the number of tensors grows: equal where the cost is linear."""
    found = [(r.row.growth, r.ours) for r in results if r.row.growth]
    ours = sorted(((g.amount, m) for g, m in found if g.by == "tensors"), key=lambda one: one[0])
    return tuple(
        Step(few, many, (b.seconds - a.seconds) / (many - few), (b.peak - a.peak) / (many - few))
        for (few, a), (many, b) in pairwise(ours)
    )


def page(results: Sequence[Result], size: int, repeats: int, peers: str) -> str:
    """The whole page in Markdown."""
    misses = [f"- {result.row.work}: {miss}" for result in results for miss in result.misses()]
    verdict = "\n".join(["Missed:", "", *misses]) if misses else "Every bound was kept."
    linear = "; ".join(map(str, steps(results)))
    return PAGE.format(
        repeats=repeats,
        machine=machine(),
        peers=peers,
        size=size,
        table=table(results),
        growth=linear,
        verdict=verdict,
    )


def machine() -> str:
    """Date, hardware and versions in one line."""
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("torch", "safetensors", "click")
    )
    memory_size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{datetime.now(UTC):%Y-%m-%d}; {processor()}, {os.cpu_count()} cores, "
        f"{memory_size:.0f} GiB memory, {file_system(Path.cwd())}, {platform.system()} "
        f"{platform.release()}; Python {platform.python_version()}, {versions}."
    )


def processor() -> str:
    """The processor's own name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def file_system(path: Path) -> str:
    """The kind of file system that the files lie on."""
    command = ["stat", "-f", "-c", "%T", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or sys.platform
