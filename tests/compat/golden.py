"""Record what every verb answers and writes for each fixture, or compare two records.

    python -m tests.compat.golden record RECORD.json [FOLDER ...]
    python -m tests.compat.golden compare BEFORE.json AFTER.json

A record holds exit codes, JSON documents and the SHA-256 of written files, so that a change of the
code can prove that nothing else changed. Folders are those of fixtures, `fixtures/` by default.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

READING = {
    "list": ["list", "--hash", "--json"],
    "info": ["info", "--json"],
    "verify": ["verify", "--json"],
    "stats": ["stats", "--json"],
    "doctor": ["doctor", "--quick", "--json", "--devices", "cpu"],
}
WRITING = {
    "strip-module": (["strip-module"], "out.pth"),
    "remap": (["remap", "--to", "cpu"], "out.pth"),
    "convert": (["convert"], "out.pth"),
    "safetensors": (["convert"], "out.safetensors"),
    "plain": (["convert", "--plain"], "out.pth"),
    "cast": (["cast", "--dtype", "bfloat16"], "out.pth"),
    "extract": (["extract", "--model-only"], "out.pth"),
    "compact": (["compact"], "out.pth"),
}
NOT_FIXTURES = (".oracle.json", ".py", ".md", ".json")


def files_of(folders: list[Path]) -> list[Path]:
    """Return the files of the folders that may be checkpoints, and the folders that hold some."""
    found: list[Path] = []
    for folder in folders:
        places = sorted(folder.rglob("*"))
        found.extend(place for place in places if place.is_dir() or _may_be_one(place.name))
    return [place for place in found if "make" not in place.parts]


def _may_be_one(name: str) -> bool:
    return not name.endswith(NOT_FIXTURES) or name.endswith(".index.json")


def run(arguments: list[str]) -> tuple[int, str, str]:
    """Run one command in this process: exit code, standard output, standard error."""
    from ckptool.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def digest(path: Path) -> str | None:
    """Return the SHA-256 of a file, None where there is no file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def recorded(place: Path, name: str, folder: Path) -> dict[str, Any]:
    """Return what each verb answers for one file."""
    result: dict[str, Any] = {}
    for verb, words in READING.items():
        code, out, err = run([*words, str(place)])
        text = out.replace(str(place), name)
        result[verb] = {"code": code, "json": _loaded(text), "err": err.replace(str(place), name)}
    for verb, (words, target) in WRITING.items():
        out_path = folder / target
        asked = (
            [str(place), str(out_path)]
            if words[0] == "convert"
            else [str(place), "-o", str(out_path)]
        )
        code, _, err = run([*words, *asked])
        err = err.replace(str(out_path), target).replace(str(place), name)
        result[verb] = {"code": code, "sha256": digest(out_path), "err": err}
        out_path.unlink(missing_ok=True)
    return result


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def record(target: Path, folders: list[Path]) -> None:
    """Write the record of all files of the folders."""
    answers = {}
    with tempfile.TemporaryDirectory() as work:
        for root in folders:
            for place in files_of([root]):
                name = f"{root.name}/{place.relative_to(root)}"
                answers[name] = recorded(place, name, Path(work))
    target.write_text(json.dumps(answers, indent=1, sort_keys=True))


def compare(before: Path, after: Path) -> int:
    """Print each difference between two records, and how many there are for each verb."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    counts: Counter[str] = Counter()
    for name in sorted(old.keys() & new.keys()):
        for verb in old[name]:
            a, b = old[name][verb], new[name].get(verb, {})
            for field in a:
                if a[field] != b.get(field):
                    counts[f"{verb}.{field}"] += 1
                    if field != "err" or os.environ.get("WORDS"):
                        print(f"{name}  {verb}.{field}")
                        for line in _differences(a[field], b.get(field)):
                            print("     ", line)
    print(
        dict(counts),
        "missing:",
        sorted(old.keys() - new.keys())[:20],
        "new:",
        len(new.keys() - old.keys()),
    )
    return 1 if counts else 0


def _differences(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            line
            for key in sorted({*a, *b})
            if a.get(key) != b.get(key)
            for line in _differences(a.get(key), b.get(key), f"{path}.{key}")
        ][:6]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [
            line
            for at, (x, y) in enumerate(zip(a, b, strict=True))
            if x != y
            for line in _differences(x, y, f"{path}[{at}]")
        ][:6]
    return [f"{path}: {str(a)[:150]!r} -> {str(b)[:150]!r}"]


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(
            Path(sys.argv[2]),
            [Path(word).resolve() for word in sys.argv[3:]] or [Path("fixtures").resolve()],
        )
    else:
        sys.exit(compare(Path(sys.argv[2]), Path(sys.argv[3])))
