"""Whether old torch reads what ckptool writes: `make compat`, or `python tests/compat/run.py`.

Makes an environment for each old torch under `build/compat` (some gigabytes, once), writes every
fixture as torch-zip and as torch-legacy with wrappers stripped and devices moved to the CPU, loads
the result there and holds it against the fixture's oracle. Prints a table; exit code 1 where
anything differs. An interpreter is looked for as `python3.8` on the PATH and among pyenv's.

    python tests/compat/run.py [-v] [--torch 1.6.0 ...] [--only GLOB]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import ckptool  # noqa: E402
from ckptool.checkpoint import Checkpoint  # noqa: E402
from ckptool.inspection import list_tensors  # noqa: E402

FIXTURES = ROOT / "fixtures"
FORMATS = ("torch-zip", "torch-legacy")
PYTHONS = {"1.6.0": "3.8", "1.13.1": "3.9"}
COMPRESSED = {"sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"}


@dataclass
class Written:
    """A file that ckptool wrote from a fixture, and what an old torch must find in it."""

    fixture: str
    path: str
    names: list[str]
    """Classes and functions in its pickle."""
    expected: dict[str, dict[str, Any]]
    """Path in the file -> row of the oracle; tensors inside objects left out."""
    newer: str
    """What it holds that no torch before 2.0 reads, whatever it can import."""


@dataclass
class Outcome:
    """What became of the files of one format in one torch."""

    agree: int = 0
    differ: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def write(fixture: str, format: str, folder: Path) -> Written | str:
    """The fixture rewritten in `format`, or why ckptool refuses to."""
    source = FIXTURES / fixture
    oracle = json.loads(Path(f"{source}.oracle.json").read_text())
    target = folder / f"{fixture.replace('/', '-')}.{format}"
    whole_module = oracle["modules"] == [[]]
    try:
        ckptool.convert(
            source, target, wrappers="strip", to="cpu", format=format, model_only=whole_module
        )
    except (ckptool.CheckpointError, ckptool.UsageError) as error:
        return f"not written: {type(error).__name__}"
    with ckptool.open(source) as before, ckptool.open(target) as after:
        renamed = dict(zip(paths(before), paths(after), strict=True))
        kinds = {ref.kind for _, ref in after.tensors()}
        flags = {flag for _, ref in after.tensors() for flag in ref.flags}
        names = list(after.details.globals)
    objects = [tuple(path) for path, _ in oracle["objects"]]
    expected = {
        json.dumps([str(key) for key in renamed[tuple(row["path"])]]): row
        for row in oracle["tensors"]
        if not any(tuple(row["path"][: len(top)]) == top for top in objects)
    }
    newer = "compressed sparse layouts" if kinds & COMPRESSED else ""
    newer = "lazy conjugation" if flags else newer
    return Written(fixture, str(target), names, expected, newer)


def paths(checkpoint: Checkpoint) -> list[tuple[str | int, ...]]:
    """The paths of its tensors in order; rewriting changes names, never the order."""
    return [row.path for row in list_tensors(checkpoint).tensors]


def hold(written: Written, found: dict[str, Any], outcome: Outcome) -> None:
    """Count one file by what the old torch said of it."""
    if found.get("missing"):
        outcome.left_out[f"needs {found['missing'][0]}"] += 1
        return
    if written.newer:
        outcome.left_out[written.newer] += 1
        return
    differences = [found["error"]] if "error" in found else []
    rows = {json.dumps(row[0]): row for row in found.get("tensors", [])}
    for path, want in written.expected.items() if not differences else ():
        if path not in rows:
            differences.append(f"{path} is missing")
            continue
        _, dtype, shape, device, sha256 = rows[path]
        if want.get("sha256") and sha256 != want["sha256"]:
            differences.append(f"{path} has other bytes")
        if (dtype, shape) != (want["dtype"], want["shape"]):
            differences.append(f"{path} is {dtype} {shape}, not {want['dtype']} {want['shape']}")
        if device not in ("cpu", "meta"):
            differences.append(f"{path} is on {device}")
    if differences:
        outcome.differ.append(f"{written.fixture}: {differences[0]}")
    else:
        outcome.agree += 1


def environment(version: str) -> str:
    """The Python of an environment with that torch, made where there is none yet."""
    home = ROOT / "build" / "compat" / f"torch-{version}"
    python = home / "bin" / "python"
    if (home / ".ready").exists():
        return str(python)
    print(f"setting up {home} ...", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([interpreter(PYTHONS[version]), "-m", "venv", home], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, f"torch=={version}", "numpy<2"], check=True)
    (home / ".ready").touch()
    return str(python)


def interpreter(version: str) -> str:
    """A Python of that version, from the PATH or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    kept = sorted(str(path) for path in pyenv.glob(f"{version}.*/bin/python"))
    found = kept[-1] if kept else shutil.which(f"python{version}")
    if found is None:
        raise SystemExit(f"there is no python{version} on the PATH or among pyenv's")
    return found


def read_back(python: str, files: list[Written]) -> dict[str, Any]:
    """What the old torch reads from each file."""
    run = subprocess.run(
        [python, "-B", Path(__file__).with_name("read_back.py")],
        input=json.dumps({written.path: written.names for written in files}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def main() -> int:
    """Run all of it; 1 where anything differs."""
    parser = argparse.ArgumentParser(description="Whether old torch reads what ckptool writes.")
    parser.add_argument("--torch", action="append", choices=PYTHONS, help="only this version")
    parser.add_argument("--only", default="*", help="only fixtures whose name matches this glob")
    parser.add_argument("-v", "--verbose", action="store_true", help="say why files are left out")
    options = parser.parse_args()
    outcomes: dict[tuple[str, str], Outcome] = {}
    oracles = sorted(FIXTURES.rglob("*.oracle.json"))
    names = [str(path.relative_to(FIXTURES)).removesuffix(".oracle.json") for path in oracles]
    names = [name for name in names if fnmatch(name, options.only)]
    with tempfile.TemporaryDirectory() as folder:
        for format in FORMATS:
            files = {name: write(name, format, Path(folder)) for name in names}
            refused = Counter(why for why in files.values() if isinstance(why, str))
            written = [file for file in files.values() if isinstance(file, Written)]
            for version in options.torch or PYTHONS:
                outcome = outcomes[version, format] = Outcome(left_out=Counter(refused))
                found = read_back(environment(version), written)
                for file in written:
                    hold(file, found[file.path], outcome)
    return report(outcomes, verbose=options.verbose)


def report(outcomes: dict[tuple[str, str], Outcome], *, verbose: bool) -> int:
    """Print the table and what differs; the exit code."""
    table = [
        [f"torch {version}", format, outcome.agree, outcome.left_out.total(), len(outcome.differ)]
        for (version, format), outcome in outcomes.items()
    ]
    print(tabulate(table, headers=["reader", "format", "agree", "left out", "differ"]))
    for (version, format), outcome in outcomes.items():
        for difference in outcome.differ:
            print(f"torch {version}, {format}: {difference}")
        if verbose:
            for reason, count in outcome.left_out.most_common():
                print(f"torch {version}, {format}: {count} left out: {reason}")
    return 1 if any(outcome.differ or not outcome.agree for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
