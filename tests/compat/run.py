"""Whether old torch reads what ckptool writes: `make compat`, or `python tests/compat/run.py`.

Makes an environment for each old torch under `build/compat` (some gigabytes, once), writes every
fixture as torch-zip and as torch-legacy with wrappers stripped and devices moved to the CPU, edits
a copy of it in place in the same way, loads the result there and holds it against the fixture's
oracle. Files of `ckptool.save` are loaded too, into models and optimizers that are built there, and
hold what they held when they were saved. Prints a table; exit code 1 where anything differs. An
interpreter is looked for as `python3.8` on the PATH and among pyenv's.

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
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import saved  # noqa: E402

import ckptool  # noqa: E402
from ckptool.core.checkpoint import Checkpoint  # noqa: E402
from ckptool.core.model import TensorRef  # noqa: E402
from ckptool.files.editing import apply_patch  # noqa: E402
from ckptool.formats import EditableFormat, load_format  # noqa: E402
from ckptool.inspection.listing import list_tensors  # noqa: E402

FIXTURES = ROOT / "fixtures"
EDITED = "edited in place"
FORMATS = ("torch-zip", "torch-legacy", EDITED)
SAVED = "ckptool.save"
PYTHONS = {"1.6.0": "3.8", "1.13.1": "3.9", "2.14.1": "3.11"}
FIRST = {
    "lazy conjugation": (2, 0),
    "bytes in the other order": (2, 1),
    "compressed sparse layouts": (2, 0),
    "whether a sparse tensor is coalesced": (2, 1),
    "sparse tensors in a stream": (1, 7),  # 1.6 checks them before it has read their bytes
    "parts of tensors, which need the other processes": (99, 0),
}
"""What a file may hold, and the first torch that reads it."""


@dataclass
class Written:
    """A file that ckptool wrote from a fixture, and what an old torch must find in it."""

    fixture: str
    path: str
    names: list[str]
    """Classes and functions in its pickle."""
    expected: dict[str, dict[str, Any]]
    """Path in the file -> row of the oracle; tensors inside objects left out."""
    features: list[str]
    """What it holds that a torch may not read, whatever it can import: see `FIRST`."""


@dataclass
class Outcome:
    """What became of the files of one format in one torch."""

    agree: int = 0
    differ: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def write(fixture: str, format: str, folder: Path) -> Written | str:
    """The fixture rewritten in `format` (or edited), or why ckptool refuses to."""
    source = FIXTURES / fixture
    oracle = json.loads(Path(f"{source}.oracle.json").read_text())
    target = folder / f"{fixture.replace('/', '-')}.{format}"
    whole_module = oracle["modules"] == [[]]
    try:
        if format == EDITED:
            edit(source, target)
        else:
            ckptool.convert(
                source,
                target,
                ckptool.Take(model_only=whole_module),
                ckptool.Strip(),
                ckptool.Remap("cpu"),
                format=format,
            )
    except (ckptool.CheckpointError, ckptool.UsageError) as error:
        return f"not written: {type(error).__name__}"
    with ckptool.open(source) as before, ckptool.open(target) as after:
        renamed = dict(zip(paths(before), paths(after), strict=True))
        features = sorted({found for _, ref in after.tensors() for found in demands(ref, format)})
        names = list(after.details.globals)
    objects = [tuple(path) for path, _ in oracle["objects"]]
    expected = {
        json.dumps([str(key) for key in renamed.get(tuple(row["path"]), row["path"])]): row
        for row in oracle["tensors"]
        if not any(tuple(row["path"][: len(top)]) == top for top in objects)
    }
    return Written(fixture, str(target), names, expected, features)


def edit(source: Path, target: Path) -> None:
    """Edit a copy of the fixture in place.

    Raises:
        CheckpointError: that takes a new file, or is no change that can be made.
    """
    if source.is_dir() or Path(f"{source}.tensors").is_dir():
        raise ckptool.NotRepresentable("several files are no file to edit")
    shutil.copyfile(source, target)
    with ckptool.open(target) as checkpoint:
        changed = checkpoint.strip_module().remap({"*": "cpu"})
        known = load_format(checkpoint.format)
        plan = known.plan_edit(changed) if isinstance(known, EditableFormat) else None
        if checkpoint.format != "torch-zip" or not plan:
            raise ckptool.NotRepresentable("no torch zip that can be edited")
        apply_patch(changed.sources[0], plan.patch)


def demands(tensor: TensorRef, format: str) -> Iterator[str]:
    """What in `FIRST` a tensor needs."""
    if tensor.flags:
        yield "lazy conjugation"
    if tensor.storage is not None and tensor.storage.byteorder == "big":
        yield "bytes in the other order"
    if tensor.kind.startswith("sparse_") and tensor.kind != "sparse_coo":
        yield "compressed sparse layouts"
    if tensor.kind == "sparse_coo" and "is_coalesced" in (tensor.parts or {}):
        yield "whether a sparse tensor is coalesced"
    if tensor.kind == "sparse_coo" and format == "torch-legacy":
        yield "sparse tensors in a stream"
    if tensor.kind == "subclass" and tensor.storage is None:
        yield "parts of tensors, which need the other processes"


def paths(checkpoint: Checkpoint) -> list[tuple[str | int, ...]]:
    """The paths of its tensors in order; rewriting changes names, never the order."""
    return [row.path for row in list_tensors(checkpoint).tensors]


def hold(written: Written, version: str, found: dict[str, Any], outcome: Outcome) -> None:
    """Count one file by what the old torch said of it."""
    number = tuple(int(part) for part in version.split(".")[:2])
    reasons = [f"needs {name}" for name in found.get("missing", ())]
    reasons += [feature for feature in written.features if number < FIRST[feature]]
    differences = [] if reasons else list(differing(written, found))
    if reasons:
        outcome.left_out[reasons[0]] += 1
    elif differences:
        outcome.differ.append(f"{written.fixture}: {differences[0]}")
    else:
        outcome.agree += 1


def differing(written: Written, found: dict[str, Any]) -> Iterator[str]:
    """Where an old torch read something else than the oracle has."""
    if "error" in found:
        yield found["error"]
        return
    rows = {json.dumps(row[0]): row[1:] for row in found["tensors"]}
    for path, want in written.expected.items():
        dtype, shape, device, sha256 = rows.get(path, (None, None, None, None))
        if (dtype, shape) != (want["dtype"], want["shape"]):
            yield f"{path} is {dtype} {shape}, not {want['dtype']} {want['shape']}"
        if want.get("sha256") and sha256 != want["sha256"]:
            yield f"{path} has other bytes"
        if device not in ("cpu", "meta"):
            yield f"{path} is on {device}"


def take_back(version: str, files: list[saved.Saved]) -> Outcome:
    """What an old torch made of what `ckptool.save` wrote."""
    found = told(environment(version), "take_back.py", {file.path: file.case for file in files})
    outcome = Outcome()
    for file in files:
        differences = list(saved.differing(file, found[file.path]))
        outcome.differ += [f"{file.case}: {differences[0]}"] if differences else []
        outcome.agree += not differences
    return outcome


def environment(version: str) -> str:
    """The Python of an environment with that torch."""
    return installed(f"torch-{version}", PYTHONS[version], f"torch=={version}", "numpy<2")


def installed(name: str, version: str, *packages: str) -> str:
    """The Python of an environment with these packages, made where there is none yet.

    Raises:
        CalledProcessError: pip has no such packages for that version of Python.
    """
    home = ROOT / "build" / "compat" / name
    python = home / "bin" / "python"
    if (home / ".ready").exists():
        return str(python)
    print(f"setting up {home} ...", file=sys.stderr)
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([interpreter(version), "-m", "venv", home], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *packages], check=True)
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


def told(python: str, script: str, files: dict[str, Any]) -> dict[str, Any]:
    """What a script says of each file in the old torch."""
    run = subprocess.run(
        [python, "-B", Path(__file__).with_name(script)],
        input=json.dumps(files),
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
    parser.add_argument("--only", default="*", help="only fixtures, or cases, of such a name")
    parser.add_argument("-v", "--verbose", action="store_true", help="say why files are left out")
    options = parser.parse_args()
    outcomes: dict[tuple[str, str], Outcome] = {}
    oracles = sorted(FIXTURES.rglob("*.oracle.json"))
    names = [str(path.relative_to(FIXTURES)).removesuffix(".oracle.json") for path in oracles]
    names = [name for name in names if fnmatch(name, options.only)]
    with tempfile.TemporaryDirectory() as folder:
        for format in FORMATS if names else ():
            files = {name: write(name, format, Path(folder)) for name in names}
            refused = Counter(why for why in files.values() if isinstance(why, str))
            written = [file for file in files.values() if isinstance(file, Written)]
            for version in options.torch or PYTHONS:
                outcome = outcomes[version, format] = Outcome(left_out=Counter(refused))
                names_of = {file.path: file.names for file in written}
                found = told(environment(version), "read_back.py", names_of)
                for file in written:
                    hold(file, version, found[file.path], outcome)
        taken = saved.save_all(Path(folder), options.only)
        for version in (options.torch or PYTHONS) if taken else ():
            outcomes[version, SAVED] = take_back(version, taken)
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
