"""`make soak`: kills, damage, fuzzing and property tests on random examples."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from tabulate import tabulate

from tests.damage import SAMPLES
from tests.soak.damage import damage
from tests.soak.fuzz import fuzz_all
from tests.soak.killing import soak
from tests.soak.works import MIXED, WORKS, make_sources

USUAL = [kind for kind in (*WORKS, MIXED) if kind != "average"]
"""Without one that takes as long as many others: torch is imported each time, as for `cast`."""
COLUMNS = {
    "kills": "kills",
    "cut": "while it wrote",
    "old": "old",
    "new": "new",
    "settled": "settled",
    "refused": "refused",
}
FUZZED = ["fuzzed", "inputs", "crashes", "hangs", "slowest s", "peak MB", "corpus"]
DAMAGES = ["format", "bits", "cuts", "splices", "found", "in bytes that nothing covers", "failures"]


def run(options, above):
    """Every kind, some at a time; the tallies in order."""
    sources = above / "sources"
    sources.mkdir()
    make_sources(sources)
    tallies = {}
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        futures = [
            pool.submit(soak, kind, options.kills, sources, above / f"{number}", options.seed)
            for number, kind in enumerate(options.kinds)
        ]
        for future in as_completed(futures):
            tally = future.result()
            tallies[tally.kind] = tally
            print(
                f"{tally.kind}: {dict(tally.found)}", *tally.failures, sep="\n  ", file=sys.stderr
            )
    return [tallies[kind] for kind in options.kinds]


def damaged(options, above):
    """Files of every format, damaged; what came of it, in order."""
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        futures = [
            pool.submit(damage, kind, options.damages, above, options.seed) for kind in SAMPLES
        ]
        found = [future.result() for future in futures]
    for one in found:
        print(*one.failures, sep="\n", end="\n" if one.failures else "", file=sys.stderr)
    return found


def explored(options):
    """Run the property tests on other examples in each round; return the rounds that failed.

    Tests that state their number of examples run that many in a round.
    """
    words = f"-q -m hypothesis --hypothesis-profile=explore -n {options.jobs} tests".split()
    command = [sys.executable, "-m", "pytest", *words]
    return [one for one in range(options.explore) if subprocess.run(command).returncode]


def parsed():
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of each kind")
    parser.add_argument(
        "--kinds", nargs="+", choices=[*WORKS, MIXED], default=USUAL, metavar="KIND"
    )
    parser.add_argument(
        "--damages", type=int, default=1000, help="bits turned over, cuts, splices of each format"
    )
    parser.add_argument(
        "--fuzz", type=int, default=600, metavar="SECONDS", help="of all targets together"
    )
    parser.add_argument(
        "--explore", type=int, default=3, metavar="ROUNDS", help="of the property tests"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="kinds at a time")
    parser.add_argument("--folder", help="where the files are (default: build/)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    options = parsed()
    os.makedirs(options.folder or "build", exist_ok=True)
    above = Path(tempfile.mkdtemp(prefix="soak-", dir=options.folder or "build")).absolute()
    begin = time.perf_counter()
    try:
        tallies = run(options, above) if options.kills else []
        seconds = time.perf_counter() - begin
        damages = damaged(options, above) if options.damages else []
        fuzzed = fuzz_all(options.fuzz, options.jobs, above) if options.fuzz else []
        failed = explored(options)
    finally:
        if not any(above.rglob("tally-*")):  # inputs that went wrong are kept
            shutil.rmtree(above)
    rows = [
        [tally.kind, *(tally.found[name] for name in COLUMNS), len(tally.failures)]
        for tally in tallies
    ]
    if rows:
        print(tabulate(rows, ["kind", *COLUMNS.values(), "failures"], tablefmt="github"))
        print(f"\n{sum(row[1] for row in rows):,} kills in {seconds:.0f} s\n")
    if damages:
        rows = [
            [one.kind, *([one.count] * 3), *one.columns(), len(one.failures)] for one in damages
        ]
        print(tabulate(rows, DAMAGES, tablefmt="github"))
    if fuzzed:
        rows = [
            [
                *(one.kind, f"{one.inputs:,}", one.crashes, one.hangs, f"{one.slowest:.2f}"),
                *(one.peak // 10**6, one.corpus),
            ]
            for one in fuzzed
        ]
        print("", tabulate(rows, FUZZED, tablefmt="github"), sep="\n")
        print(*(reason for one in fuzzed for reason in one.failures), sep="\n", file=sys.stderr)
    if options.explore:
        print(f"\nproperty tests: {len(failed)} of {options.explore} rounds failed")
    return 1 if failed or any(one.failures for one in (*tallies, *damages, *fuzzed)) else 0


if __name__ == "__main__":
    sys.exit(main())
