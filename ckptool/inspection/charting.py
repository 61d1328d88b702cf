"""What two checkpoints have otherwise, tensor by tensor in the order of the first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptool.checkpoint import Checkpoint
from ckptool.inspection.aligning import Alignment, Entry
from ckptool.inspection.diff_result import Changed, Diff
from ckptool.model import Path, TensorRef
from ckptool.tree import name_of

if TYPE_CHECKING:
    from ckptool.tensors.comparing import Difference

__all__ = ["Bar", "bars", "relative_change"]


@dataclass(frozen=True, slots=True)
class Bar:
    """One tensor of either file: in which way it differs, and how much."""

    name: str
    """As a diff has it: wrapper components are off."""
    address: str
    """Its whole address in its file, in the first of the two where both have it."""
    status: str
    """`=` where nothing that counts differs, else as in a diff: `A`, `D`, `M`, `R`, `T`."""
    change: float | None = None
    """As `relative_change`."""


def bars(
    a: Checkpoint,
    b: Checkpoint,
    alignment: Alignment,
    diff: Diff,
    norms: Mapping[str, float | None],
) -> tuple[Bar, ...]:
    """Return a bar for each tensor of A, in its order, with those of B alone in between.

    Args:
        a: The first checkpoint.
        b: The other one.
        alignment: Which of their entries stand for each other.
        diff: What differs, of as many entries.
        norms: The length of each tensor of A as a vector, by its address, where it is known.
    """
    renamed = {row.b.name for row in diff.renamed}
    added = {
        entry.path: Bar(entry.name, name_of(entry.path), "A")
        for entry in alignment.only_b
        if isinstance(entry.leaf, TensorRef) and entry.name not in renamed
    }
    partner = {pair.b.path: pair.a.path for pair in alignment.pairs}
    drawn = _drawn(alignment, diff, norms)
    after: dict[Path | None, list[Bar]] = {}
    before = None
    for path, _ in b.tensors():
        before = partner.get(path, before)
        if path in added:
            after.setdefault(before, []).append(added[path])
    return tuple(_merged(a, drawn, after))


def _merged(
    a: Checkpoint, drawn: Mapping[Path, Bar], after: Mapping[Path | None, list[Bar]]
) -> Iterator[Bar]:
    """Yield the bars of A, each followed by the tensors that B alone has behind it."""
    yield from after.get(None, ())
    for path, _ in a.tensors():
        if path in drawn:
            yield drawn[path]
        yield from after.get(path, ())


def _drawn(alignment: Alignment, diff: Diff, norms: Mapping[str, float | None]) -> dict[Path, Bar]:
    """Return the bars of A's tensors by path."""
    changed = {row.a.name: row for row in diff.changed if row.counts}
    renamed = {row.a.name for row in diff.renamed}
    drawn = {
        pair.a.path: _compared(pair.a, changed.get(name_of(pair.a.path)), norms)
        for pair in alignment.pairs
        if isinstance(pair.a.leaf, TensorRef)
    }
    for entry in alignment.only_a:
        if isinstance(entry.leaf, TensorRef):
            status = "R" if entry.name in renamed else "D"
            drawn[entry.path] = Bar(entry.name, name_of(entry.path), status)
    return drawn


def _compared(entry: Entry, changed: Changed | None, norms: Mapping[str, float | None]) -> Bar:
    address = name_of(entry.path)
    if changed is None:
        return Bar(entry.name, address, "=")
    change = relative_change(changed.difference, norms.get(address))
    return Bar(entry.name, address, changed.status, change)


def relative_change(difference: Difference | None, norm: float | None) -> float | None:
    """Return the length of the difference of two tensors, relative to the first one.

    0.01 says that a hundredth of it has changed. Infinite where the first is all zero, or where
    NaN or infinite elements have come or gone; None where the values were not compared, or the
    length of the first is not known.
    """
    if difference is None or norm is None:
        return None
    odd_a = difference.nan_a, difference.inf_a
    if odd_a != (difference.nan_b, difference.inf_b):
        return math.inf
    length = (difference.rmse or 0.0) * math.sqrt(difference.elements - sum(odd_a))
    if norm == 0:
        return math.inf if length else 0.0
    return length / norm
