"""`ckptool verify` as text: a line for each file, its problems below it, and a summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptool.errors import CheckpointError
from ckptool.inspection.verify import ManifestOutcome, Verdict
from ckptool.render.table import table
from ckptool.render.text import PLAIN, Look, files_line, size, wrapped
from ckptool.words import clean, counted

__all__ = ["manifest_line", "summary_line", "verdict_lines", "verdict_table"]

SCREEN = 40
"""The most problems of one file."""


def verdict_lines(verdict: Verdict, look: Look = PLAIN) -> Iterator[str]:
    """Yield `model.pth: fine (...)`, or the number of problems and the problems."""
    name = look.bold(clean(verdict.file))
    if verdict.ok:
        yield f"{name}: fine ({', '.join(_facts(verdict))})"
        return
    yield f"{name}: {look.alarm(counted(len(verdict.problems), 'problem'))}"
    hints = set()
    for problem in verdict.problems[:SCREEN]:
        place = f"{clean(problem.place)}: " if problem.place else ""
        yield from wrapped(f"  {place}{clean(problem.text)}", look.width, indent="    ")
        if problem.hint and problem.hint not in hints:
            hints.add(problem.hint)
            yield f"    {look.faint('hint:')} {clean(problem.hint)}"
    hidden = len(verdict.problems) - SCREEN
    if hidden > 0:
        yield f"  and {counted(hidden, 'problem')} more (--json has them all)"


def _facts(verdict: Verdict) -> Iterator[str]:
    if verdict.shards:
        yield counted(verdict.shards, "shard")
    if verdict.records:
        yield counted(verdict.records, "record")
    else:
        yield counted(verdict.tensors, "tensor")
    yield size(verdict.size)
    if verdict.summed and verdict.checked:
        of = "" if verdict.summed == verdict.records else f" of {verdict.summed:,}"
        yield f"CRC-32{of}"
    elif not verdict.manifest:
        yield "no CRC-32 in it" if verdict.records else "no checksums in this format"
    if verdict.manifest:
        yield "SHA-256 as in the manifest"
    if verdict.values:
        yield "no NaN, no Inf"


def summary_line(verdicts: Sequence[Verdict], errors: int, look: Look) -> str:
    """Return `3 files: 2 fine, 1 with 2 problems`."""
    wrong = [verdict for verdict in verdicts if not verdict.ok]
    parts = [f"{len(verdicts) - len(wrong):,} fine"]
    if wrong:
        count = sum(len(verdict.problems) for verdict in wrong)
        parts.append(look.alarm(f"{len(wrong):,} with {counted(count, 'problem')}"))
    return files_line(len(verdicts), errors, parts)


def manifest_line(outcome: ManifestOutcome) -> str:
    """Return whether the manifest was written or compared."""
    name = clean(outcome.file)
    if outcome.reason == "problem":
        return f"{name} not written: a manifest of damaged files would call them fine"
    if outcome.reason == "error":
        return f"{name} not written: files that could not be read would be missing"
    held = f"{counted(outcome.tensors, 'tensor')} in {counted(outcome.files, 'file')}"
    if outcome.action == "written":
        without = (
            f"; {outcome.unhashed:,} of them without one: they are sparse, quantised or the like"
            if outcome.unhashed
            else ""
        )
        return f"wrote {name} (SHA-256 of {held}{without})"
    return f"compared {held} with {name}"


def verdict_table(results: Iterable[Verdict | CheckpointError], look: Look) -> Iterator[str]:
    """Return a row for each file without problems, and for each problem."""
    rows = [row for result in results for row in _rows(result)]
    return table(["file", "verdict", "place", "what"], rows, look, flexible=3)


def _rows(result: Verdict | CheckpointError) -> list[list[str]]:
    if isinstance(result, CheckpointError):
        return [[clean(result.file or ""), "error", "", clean(result.message)]]
    if result.ok:
        return [[clean(result.file), "fine", "", ", ".join(_facts(result))]]
    return [
        [clean(result.file), problem.kind, clean(problem.place), clean(problem.text)]
        for problem in result.problems
    ]
