"""Everything that a page about a checkpoint tells, and about what another one has otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptool.core.addressing import resolve
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Path, TensorRef
from ckptool.core.tree import is_within, name_of
from ckptool.diagnosis.info import Info, info
from ckptool.errors import NotRepresentable, TorchMissing
from ckptool.files.source import Progress
from ckptool.inspection.listing import tensor_rows
from ckptool.inspection.stats import TensorStats, stats

if TYPE_CHECKING:
    from ckptool.comparison.aligning import Alignment
    from ckptool.comparison.diff import Diff

BINS = 24


@dataclass(frozen=True, slots=True)
class Report:
    """What the page is drawn from."""

    info: Info
    tensors: tuple[TensorStats, ...]
    """Those of the first file, without figures where values were not asked for."""
    measured: bool
    """Whether values were read."""
    key: str | None = None
    """The only part whose tensors are told of."""
    other: Info | None = None
    diff: Diff | None = None
    chart: tuple[Bar, ...] = ()
    """Every tensor of either file, in the order of the first."""
    notes: tuple[str, ...] = ()


def report(
    checkpoint: Checkpoint,
    other: Checkpoint | None = None,
    *,
    key: str | None = None,
    values: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Look at a checkpoint, and at what `other` has otherwise.

    Args:
        checkpoint: Open.
        other: Open, to compare with.
        key: The address of the only part whose tensors are told of.
        values: Read the tensors; else, and without torch, all figures are left out.
        progress: Told bytes done and bytes in all.

    Raises:
        NotFound: nothing, or several things (`AmbiguousName`), answer to `key`.
        NameCollision: two entries of one file would be compared under one name.
        CorruptFile: values that cannot be read.
        LimitExceeded: nesting, or strides that repeat bytes, beyond what real files have.
    """
    notes: list[str] = []
    found = None
    if values:
        try:
            found = stats(checkpoint, key=key, bins=BINS, progress=progress).tensors
        except (TorchMissing, NotRepresentable) as error:
            notes.append(f"there are no figures of values: {error.message}")
    else:
        notes.append("the values of the tensors were not read")
    head = Report(
        info=info(checkpoint),
        tensors=tuple(_tensors(checkpoint, key)) if found is None else found,
        measured=found is not None,
        key=key,
        notes=tuple(notes),
    )
    if other is None:
        return head
    return _compared(head, checkpoint, other, structure=not values, progress=progress)


def _tensors(checkpoint: Checkpoint, key: str | None) -> Iterator[TensorStats]:
    """Yield the tensors below `key`, without figures."""
    below: Path = () if key is None else resolve(checkpoint, key)[0]
    chosen = [(path, tensor) for path, tensor in checkpoint.tensors() if is_within(path, below)]
    first: dict[Any, str] = {}
    for (_, tensor), row in zip(chosen, tensor_rows(chosen), strict=True):
        tie = None if tensor.place is None else first.get(tensor.place)
        first.setdefault(tensor.place, row.name)
        yield TensorStats(row, None, tie=tie)


def _compared(
    one: Report,
    checkpoint: Checkpoint,
    other: Checkpoint,
    *,
    structure: bool,
    progress: Progress | None,
) -> Report:
    """Return the report with the differences from another file."""
    from ckptool.comparison.aligning import align
    from ckptool.comparison.diff import diff

    found = diff(checkpoint, other, key=one.key, structure=structure, progress=progress)
    alignment = align(checkpoint, other, key=one.key)
    return replace(
        one,
        other=info(other),
        diff=found,
        chart=bars(checkpoint, other, alignment, found),
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """One tensor of either file: in which way it differs, and how much."""

    name: str
    """As a diff has it: wrapper components are off."""
    status: str
    """`=` where nothing that counts differs, else as in a diff: `A`, `D`, `M`, `R`, `T`."""
    change: float | None = None
    """`Difference.rel_norm`; None where the values were not compared."""


def bars(a: Checkpoint, b: Checkpoint, alignment: Alignment, diff: Diff) -> tuple[Bar, ...]:
    """Return a bar for each tensor of A, in its order, with those of B alone in between.

    Args:
        a: The first checkpoint.
        b: The other one.
        alignment: Which of their entries stand for each other.
        diff: What differs, of as many entries.
    """
    changed = {row.a.name: row for row in diff.changed if row.counts}
    renamed = [{row.a.name for row in diff.renamed}, {row.b.name for row in diff.renamed}]
    drawn: dict[Path, Bar] = {}
    for pair in alignment.pairs:
        if isinstance(pair.a.leaf, TensorRef):
            row = changed.get(name_of(pair.a.path))
            change = row.difference.rel_norm if row and row.difference else None
            drawn[pair.a.path] = Bar(pair.name, row.status if row else "=", change)
    for entry in alignment.only_a:
        if isinstance(entry.leaf, TensorRef):
            drawn[entry.path] = Bar(entry.name, "R" if entry.name in renamed[0] else "D")
    added = {
        entry.path: Bar(entry.name, "A")
        for entry in alignment.only_b
        if isinstance(entry.leaf, TensorRef) and entry.name not in renamed[1]
    }
    partner = {pair.b.path: pair.a.path for pair in alignment.pairs}
    after: dict[Path | None, list[Bar]] = {}
    before = None
    for path, _ in b.tensors():
        before = partner.get(path, before)
        if path in added:
            after.setdefault(before, []).append(added[path])
    found = after.get(None, [])
    for path, _ in a.tensors():
        found += [drawn[path]] if path in drawn else []
        found += after.get(path, ())
    return tuple(found)
