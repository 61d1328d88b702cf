"""`ckptool scan` as text: a line for each file, its calls below it, and a summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ckptool.inspection.deeds import CANNOT_TELL, DATA, RUNS, VERDICTS
from ckptool.inspection.scan import Scan, Stream
from ckptool.render.text import PLAIN, Look, files_line, first_lines
from ckptool.words import clean, counted, listed

__all__ = ["result_lines", "summary_line"]

_SCREEN = 20
"""The most calls of one file."""


def result_lines(found: Scan, look: Look = PLAIN) -> Iterator[str]:
    """Yield `model.pth: runs` or another verdict, and each call that decides it."""
    name = look.bold(clean(found.file))
    if found.skipped:
        yield f"{name}: {'Python code, not judged' if found.code else 'no pickle in it'}"
    elif found.verdict == DATA:
        yield f"{name}: data ({counted(found.pickles, 'pickle')})"
    else:
        bad = found.verdict in (RUNS, CANNOT_TELL)
        modules = f" (imports {listed(found.modules)})" if found.modules else ""
        yield f"{name}: {look.alarm(found.verdict) if bad else found.verdict}{modules}"
    lines = (line for stream in found.streams for line in _lines(stream))
    yield from (f"  {line}" for line in first_lines(lines, _SCREEN))


def _lines(stream: Stream) -> Iterator[str]:
    place = f"{clean(stream.where)}, " * bool(stream.where)
    for deed in stream.deeds:
        yield f"{place}byte {deed.offset:,}, {deed.opcode}: {clean(deed.text)}"
    if stream.fault:
        yield f"{place}byte {stream.offset:,}: {clean(stream.fault)}"


def summary_line(results: Sequence[Scan], errors: int, look: Look) -> str:
    """Return `3 files: 1 runs, 2 data`, the worst first."""
    counts = Counter("without a pickle" if one.skipped else one.verdict for one in results)
    parts = [
        look.alarm(f"{counts[verdict]:,} {verdict}")
        if verdict in (RUNS, CANNOT_TELL)
        else f"{counts[verdict]:,} {verdict}"
        for verdict in (*reversed(VERDICTS), "without a pickle")
        if counts[verdict]
    ]
    code = sum(bool(one.code) for one in results)
    if code:
        parts.append(f"{code:,} with Python code, which is not judged")
    return files_line(len(results), errors, parts)
