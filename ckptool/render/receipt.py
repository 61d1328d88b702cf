"""What a change did and what was written, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from ckptool.checkpoint import Change
from ckptool.files.recovery import Recovery
from ckptool.render.text import first_lines, size
from ckptool.words import clean, counted
from ckptool.writing import Receipt

__all__ = ["receipt_line", "receipt_lines", "recovery_lines"]

SCREEN = 40
"""Lines that are printed of one kind."""
WORST = 3
"""Tensors that are named for each way of losing what they held."""


def receipt_lines(receipt: Receipt) -> Iterator[str]:
    """Yield what changed, what was left out, what stays in the way, and the file."""
    for kind, alike in groupby(receipt.changes, key=lambda change: change.kind):
        mark = "warning: " if kind == "warning" else ""
        yield from first_lines((clean(mark + one.text) for one in alike), SCREEN)
    if not receipt.left_out and {one.kind for one in receipt.changes} <= {"warning", "format"}:
        yield f"names, values and devices stay as they are in {clean(receipt.source)}"
    yield from _told(receipt.outcomes)
    yield from first_lines((f"left out: {clean(text)}" for text in receipt.left_out), SCREEN)
    for text in receipt.notes:
        yield f"note: {clean(text)}"
    for text in receipt.blockers:
        yield f"weights_only=True will not load it: {clean(text)}"
    for path, length in receipt.files:
        yield f"{clean(path)}  {size(length)}"
    yield receipt_line(receipt)


def _told(outcomes: Sequence[Change]) -> Iterator[str]:
    """Yield what the computation told; of overflow and underflow only the worst tensors.

    That a tensor loses precision is what a cast is for: the totals say how much.
    """
    worst = {"overflow": WORST, "underflow": WORST, "precision": 0}
    seen = Counter(outcome.kind for outcome in outcomes)
    for outcome in outcomes:
        left = worst.get(outcome.kind, 1)
        if left:
            yield clean(f"warning: {outcome.text}" if outcome.kind == "warning" else outcome.text)
        if outcome.kind in worst:
            worst[outcome.kind] = max(left - 1, 0)
    for kind in ("overflow", "underflow"):
        if seen[kind] > WORST:
            yield f"{kind} in {counted(seen[kind] - WORST, 'more tensor')} (--json names them)"


def receipt_line(receipt: Receipt) -> str:
    """Return what was done to the file, and how large it is."""
    present, past = ("edit", "edited") if receipt.edited else ("write", "wrote")
    if not receipt.written:
        present, past = "leave", "left"
    done = f"would {present}" if receipt.dry_run else past
    facts = [receipt.format, counted(receipt.tensors, "tensor"), size(receipt.size)]
    if receipt.edited:
        facts.append(f"{size(receipt.written)} of it new")
    if receipt.verified:
        facts.append("verified")
    as_it_is = "" if receipt.written else " as it is"
    return f"{done} {clean(receipt.path)}{as_it_is} ({', '.join(facts)})"


def recovery_lines(recovery: Recovery) -> Iterator[str]:
    """Yield what became of a file and its journal."""
    yield f"{clean(recovery.path)}: {clean(recovery.text)}"
