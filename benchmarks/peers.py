"""`python -m benchmarks.peers`: what others make of the fixtures, and what ckptool makes of them.

Each tool gets each file that torch once wrote, in a process of its own, and gives what tensors it
finds; the oracle beside the file is the judge. A file that would leave a mark if it were run tells
who runs it. The others are installed into an environment below build/. Writes docs/peers.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tabulate import tabulate

from benchmarks.inputs import marking
from benchmarks.peer_environment import ENVIRONMENT, PEERS, PROJECT, installed, versions

__all__ = ["OURS", "OUTCOMES", "asked", "columns", "fixtures", "judged"]

FIXTURES = PROJECT / "fixtures"
PAGE = PROJECT / "docs" / "peers.md"
PATIENCE = 60
"""Seconds for one file."""

OURS = "ckptool"
OUTCOMES = {
    "right": "every tensor, with the numbers that torch reads",
    "part": "some, or none, and no word about the others",
    "wrong": "numbers that are not in the file",
    "refused": "an error",
    "died": "killed, or nothing for a minute",
}
PAGE_TEXT = """# What other tools make of the fixtures

`python -m benchmarks.peers` made this page: {count} files of `fixtures/`, all that torch {versions}
wrote and whose tensors are plain arrays. Each tool gets each file in a process of its own;
`NAME.oracle.json`, what torch itself reads from the file, is the judge of the state dict that
stands first in it. The files were collected for ckptool: odd ones are many among them.
{date}; {tools}.

{table}

{legend}

"Runs the file": a file was left behind by a checkpoint whose pickle calls `open`. "Imports torch":
it was loaded when the answer came. ckptkit gives names and shapes alone: these are judged. What
each is asked for is in `benchmarks/peer_readers.py`.

## Where others refuse or err

{details}
"""


OTHERS = (".safetensors", ".pkl", ".pt2", ".gguf", ".h5", ".keras", ".msgpack", ".index")
"""Endings of fixtures that `torch.save` did not write; nor did it all of a file of torch_xla's."""


def fixtures() -> dict[str, Path]:
    """Oracles by the file that they judge: one of `torch.save`'s, no other arrays than tensors."""
    found = {}
    for oracle in sorted(FIXTURES.rglob("*.oracle.json")):
        name = str(oracle.relative_to(FIXTURES)).removesuffix(".oracle.json")
        told = json.loads(oracle.read_text(encoding="utf-8"))
        plain = all("sha256" in row and "kind" not in row for row in told["tensors"])
        arrays = any(kind == "numpy.ndarray" for _, kind in told["objects"])
        by_save = (
            told.get("by", "torch").startswith("torch")
            and not name.endswith(OTHERS)
            and "torchscript" not in told
        )
        alone = (FIXTURES / name).is_file() and not (FIXTURES / f"{name}.tensors").is_dir()
        if plain and not arrays and told["tensors"] and by_save and alone:
            found[name] = oracle
    return found


def judged(given: Sequence[Sequence[object]], oracle: Mapping[str, list[dict[str, object]]]) -> str:
    """The outcome for tensors, each its sizes and hash (None: it has not been asked for)."""
    rows = oracle["tensors"]
    first = _parent(rows[0])
    known = {(str(row["shape"]), row["sha256"]) for row in rows}
    shapes = {shape for shape, _ in known}
    for shape, sha256 in given:
        if str(shape) not in shapes or (sha256 and (str(shape), sha256) not in known):
            return "wrong"
    wanted = Counter(str(row["shape"]) for row in rows if _parent(row) == first)
    got = Counter(str(shape) for shape, _ in given)
    return "right" if wanted <= got else "part"


def _parent(row: Mapping[str, object]) -> tuple[object, ...]:
    path = row["path"]
    assert isinstance(path, list)
    return tuple(path[:-1])


def asked(
    tool: str, paths: Sequence[Path], python: str = sys.executable
) -> Iterator[dict[str, object]]:
    """What a tool answers for each file: `tensors` or `error`, and whether it has `torch`."""
    command = [python, str(Path(__file__).with_name("peer_readers.py")), tool, str(PATIENCE)]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT) if tool == OURS else ""}
    done = subprocess.run(
        command,
        input="\n".join(map(str, paths)),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{tool}: {done.stderr[-2000:]}")
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def columns(
    tool: str, folder: Path, python: str = sys.executable
) -> tuple[dict[str, str], dict[str, str]]:
    """A tool's column of the table, and the outcome by file."""
    judges = fixtures()
    answers = asked(tool, [FIXTURES / name for name in judges], python)
    outcomes, has_torch = {}, False
    for (name, judge), answer in zip(judges.items(), answers, strict=True):
        has_torch |= bool(answer.get("torch"))
        if "tensors" in answer:
            told = json.loads(judge.read_text(encoding="utf-8"))
            outcomes[name] = judged(answer["tensors"], told)  # type: ignore[arg-type]
        else:
            outcomes[name] = "died" if answer.get("signal") else "refused"
    counts = Counter(outcomes.values())
    column = {outcome: str(counts[outcome] or "") for outcome in OUTCOMES}
    column["runs the file"] = "yes" if _runs(tool, folder, python) else "no"
    column["imports torch"] = "yes" if has_torch else "no"
    return column, outcomes


def _runs(tool: str, folder: Path, python: str) -> bool:
    """Whether a file whose pickle makes one has made it, in any of three layouts."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f"{tool.split()[0]}.mark"
    mark.unlink(missing_ok=True)
    list(asked(tool, marking(folder, mark), python))
    return mark.exists()


def main() -> int:
    """Run all; 1 where ckptool's own column is not all right."""
    argparse.ArgumentParser(prog="benchmarks.peers", description=__doc__).parse_args()
    python = installed()
    folder = ENVIRONMENT / "marks"
    found = {OURS: columns(OURS, folder)}
    for tool in PEERS:
        print(f"{tool} ...", file=sys.stderr)
        found[tool] = columns(tool, folder, python)
    rows = [
        [row, *(column[row] for column, _ in found.values())]
        for row in (*OUTCOMES, "runs the file", "imports torch")
    ]
    table = tabulate(rows, ["", *found], tablefmt="github", disable_numparse=True)
    print(table)
    judges = fixtures()
    folders = {name.split("/")[0] for name in judges if name.startswith("torch-")}
    released = sorted({folder.split("-")[1] for folder in folders}, key=_order)
    text = PAGE_TEXT.format(
        count=len(judges),
        versions=f"{released[0]} to {released[-1]}",
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        tools=versions(python, PEERS.values()),
        table=table,
        legend="\n".join(f"- {word}: {what}" for word, what in OUTCOMES.items()),
        details="\n".join(_details({tool: found[tool][1] for tool in PEERS})),
    )
    PAGE.write_text(text, encoding="utf-8")
    return 0 if found[OURS][0]["right"] == str(len(judges)) else 1


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _details(outcomes: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """By tool, the files of each outcome but `right`, by folder."""
    for tool, by_file in outcomes.items():
        parts = []
        for outcome in OUTCOMES:
            folders = Counter(
                name.split("/")[0] for name, got in by_file.items() if got == outcome != "right"
            )
            if folders:
                parts.append(f"{outcome} {', '.join(f'{f} ({n})' for f, n in folders.items())}")
        yield f"- {tool}: {'; '.join(parts) or 'nothing'}"


if __name__ == "__main__":
    raise SystemExit(main())
