"""What a change did and what was written, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckptool.checkpoint import Change
from ckptool.render.text import clean, plural, size
from ckptool.writing import Receipt
from ckptool.writing.save import LEFT_OUT

__all__ = ["receipt_document", "receipt_lines"]


def receipt_lines(source: str, changes: Sequence[Change], receipt: Receipt) -> Iterator[str]:
    """What changed, what was left out, what stays in the way, and the file."""
    done = _done(changes)
    for change in done:
        yield clean(f"warning: {change.text}" if change.kind == "warning" else change.text)
    if all(change.kind == "warning" for change in done):
        yield f"nothing to change in {clean(source)}"
    for text in receipt.left_out:
        yield f"left out: {clean(text)}"
    for text in receipt.notes:
        yield f"note: {clean(text)}"
    for text in receipt.blockers:
        yield f"weights_only=True will not load it: {clean(text)}"
    word = "would write" if receipt.dry_run else "wrote"
    facts = f"{receipt.format}, {plural(receipt.tensors, 'tensor')}, {size(receipt.size)}"
    yield f"{word} {clean(receipt.path)} ({facts})"


def receipt_document(source: str, changes: Sequence[Change], receipt: Receipt) -> dict[str, Any]:
    """The document `ckptool.receipt/1`."""
    return {
        "schema": "ckptool.receipt/1",
        "source": source,
        "file": receipt.path,
        "format": receipt.format,
        "size": receipt.size,
        "tensors": receipt.tensors,
        "dry_run": receipt.dry_run,
        "changes": [
            {"kind": change.kind, "text": change.text, "count": change.count}
            for change in _done(changes)
        ],
        "left_out": list(receipt.left_out),
        "notes": list(receipt.notes),
        "weights_only_blockers": list(receipt.blockers),
    }


def _done(changes: Sequence[Change]) -> list[Change]:
    """The changes but those that the receipt tells among what was left out."""
    return [change for change in changes if change.kind != LEFT_OUT]
