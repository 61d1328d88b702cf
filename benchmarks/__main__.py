"""`python -m benchmarks`: make the inputs, measure every row, print the table, keep it.

A whole run (neither --quick nor --only) writes docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.kept import Kept
from benchmarks.peer_environment import PEERS, SCANNERS, installed, versions
from benchmarks.rows import Result, run_row
from benchmarks.works import HOLLOW, Inputs, rows

FOLDER = Path("build/bench").absolute()
PAGE = Path("docs/benchmarks.md")
PLOT = Path("docs/growth.svg")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--size", type=int, default=5 * 10**9, help="bytes of the large file")
    parser.add_argument(
        "--tensors",
        type=int,
        default=100_000,
        help="most tensors in one file (default %(default)s)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tenth of both, one run of each, no other tools; below two minutes",
    )
    parser.add_argument("--repeats", type=int, help="runs of each command (default 5)")
    parser.add_argument("--only", metavar="REGEX", help="rows whose work matches")
    parser.add_argument(
        "--go-on",
        action="store_true",
        help="rows that a run with --keep has measured are not again",
    )
    parser.add_argument("--keep", action="store_true", help=f"leave the inputs in {FOLDER}")
    return parser.parse_args()


def make(kind: str, path: Path, amount: int) -> Path:
    """One input, by a process that may grow as it likes; kept if it is there already."""
    if not path.exists():
        print(f"making {path} ...", file=sys.stderr)
        part = path.with_suffix(".part")
        command = [sys.executable, "-m", "benchmarks.inputs", kind, str(part), str(amount)]
        subprocess.run(command, check=True)
        part.rename(path)
    return path


def copied(source: Path, path: Path) -> Path:
    """A copy of a file, kept if it is there already."""
    if not path.exists():
        part = path.with_suffix(".part")
        subprocess.run(["cp", str(source), str(part)], check=True)
        part.rename(path)
    return path


def inputs(size: int, tensors: int, peers: Path | None) -> Inputs:
    """All inputs, made where they are missing.

    Raises:
        SystemExit: the disk has no room for the large files and what is written.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(FOLDER).free < 8 * size:
        raise SystemExit(f"{FOLDER} needs {8 * size:,} free bytes; try --quick")
    counts = (tensors // 10, tensors // 2, tensors)
    edited = {
        length: make("large", FOLDER / f"large-{length}.pth", length) for length in lengths(size)
    }
    edited[HOLLOW] = make("hollow", FOLDER / f"hollow-{HOLLOW}.pth", HOLLOW)
    return Inputs(
        edited[size],
        copied(edited[size], FOLDER / f"twin-{size}.pth"),
        make("single", FOLDER / f"single-{size}.pth", size),
        make("single", FOLDER / f"other-{size}.pth", size),
        edited,
        {count: make("many", FOLDER / f"many-{count}.pth", count) for count in counts},
        make("renamed", FOLDER / f"renamed-{tensors}.pth", tensors),
        make("zero", FOLDER / f"zero-{size}", size),
        FOLDER,
        make("folder", FOLDER / f"folder-{size}", size),
        make("shards", FOLDER / "shards", HOLLOW // 10),
        make("files", FOLDER / "files", 1000),
        size,
        peers,
    )


def lengths(size: int) -> tuple[int, ...]:
    """Of the files that are edited: up to that of the large one."""
    return (size // 500, size // 5, size)


def main() -> int:
    """Run; 1 where a bound was missed."""
    wanted = arguments()
    scale = 10 if wanted.quick else 1
    repeats = wanted.repeats or (1 if wanted.quick else 5)
    try:
        python = None if wanted.quick else installed()
        programs = Path(python).parent if python else None
        made = inputs(wanted.size // scale, wanted.tensors // scale, programs)
        results: list[Result] = []
        kept = Kept(FOLDER / "results.json", read=wanted.go_on)
        for row in rows(made):
            if re.search(wanted.only or "", row.work):
                print(f"{row.work} ...", file=sys.stderr)
                results.append(kept.result(row, repeats) or run_row(row, repeats))
                kept.add(results[-1])
        # Imported when nothing is left to measure: a child's peak counts what its parent holds.
        from benchmarks.report import page, table

        print(table(results, "simple"))
        if wanted.quick:
            print("\nThe bounds are those of the whole size.")
            return 0
        misses = [f"{r.row.work}: {miss}" for r in results for miss in r.misses()]
        print("", *misses or ["Every bound was kept."], sep="\n")
        if python and not wanted.only:
            peers = versions(python, [*PEERS.values(), *SCANNERS])
            text = page(results, made.large.stat().st_size, repeats, peers)
            PAGE.write_text(text, encoding="utf-8")
            from benchmarks.plot import draw

            draw(results, PLOT)
        return 1 if misses else 0
    finally:
        if not wanted.keep:
            shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
