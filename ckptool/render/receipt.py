"""Receipts of changes and writes as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from ckptool.core.checkpoint import Change
from ckptool.files.recovery import Recovery
from ckptool.render.text import format_size, limit_lines
from ckptool.words import clean, counted
from ckptool.writing import Receipt

MAX_LINES = 40
"""The most lines of one kind."""
MAX_NAMED_TENSORS = 3
"""The most tensors that are named for each kind of loss."""


def receipt_lines(receipt: Receipt) -> Iterator[str]:
    """Yield all lines of a receipt, in the order of the work; the last one is about the file.

    Of each kind of change, and of the left-out parts, the first lines are shown.
    """
    for kind, changes in groupby(receipt.changes, key=lambda change: change.kind):
        mark = "warning: " if kind == "warning" else ""
        yield from limit_lines((clean(mark + change.text) for change in changes), MAX_LINES)
    kinds = {change.kind for change in receipt.changes}
    # A change of any other kind is one of the content.
    has_same_content = not receipt.left_out and kinds <= {"warning", "format"}
    if receipt.source and has_same_content:
        yield "keys, values and devices are unchanged"
    yield from _outcome_lines(receipt.outcomes)
    yield from limit_lines((f"left out: {clean(text)}" for text in receipt.left_out), MAX_LINES)
    for text in receipt.notes:
        yield f"note: {clean(text)}"
    for text in receipt.blockers:
        yield f"weights_only=True rejects it: {clean(text)}"
    for path, length in receipt.files:
        yield f"{clean(path)}  {format_size(length)}"
    yield receipt_line(receipt)


def _outcome_lines(outcomes: Sequence[Change]) -> Iterator[str]:
    """Yield the results of computations, and the tensors that overflow or underflow most.

    Tensors that lose precision are only in the totals.
    """
    max_named = {"overflow": MAX_NAMED_TENSORS, "underflow": MAX_NAMED_TENSORS, "precision": 0}
    seen = Counter[str]()
    for outcome in outcomes:
        seen[outcome.kind] += 1
        if seen[outcome.kind] <= max_named.get(outcome.kind, len(outcomes)):
            yield clean(f"warning: {outcome.text}" if outcome.kind == "warning" else outcome.text)
    for kind in ("overflow", "underflow"):
        if seen[kind] > MAX_NAMED_TENSORS:
            hidden = counted(seen[kind] - MAX_NAMED_TENSORS, "more tensor")
            yield f"{kind} in {hidden} (--json lists all)"


def receipt_line(receipt: Receipt) -> str:
    """Return the line about the file: written or edited, its format and its size."""
    path = clean(receipt.path)
    present, past = ("edit", "edited") if receipt.edited else ("write", "wrote")
    done = f"{f'would {present}' if receipt.dry_run else past} {path}"
    size = format_size(receipt.size)
    if len(receipt.files) > 1:
        size += f" in {len(receipt.files):,} files"
    facts = [receipt.format, counted(receipt.tensors, "tensor"), size]
    if receipt.edited:
        facts.append(f"{format_size(receipt.written)} written")
        done += " in place"
    if receipt.verified:
        facts.append("verified")
    if not receipt.written:
        done = f"{path} {'would be' if receipt.dry_run else 'is'} unchanged"
    return f"{done} ({', '.join(facts)})"


def recovery_lines(recovery: Recovery) -> Iterator[str]:
    """Yield the result of recovering a file."""
    yield f"{clean(recovery.path)}: {clean(recovery.text)}"
