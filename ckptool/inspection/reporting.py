"""Everything that a page about a checkpoint tells, and about what another one has otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import TorchMissing
from ckptool.inspection.listing import Progress, StorageNames, TensorRow, tensor_row
from ckptool.inspection.summary import Info, info
from ckptool.model import Path
from ckptool.tree import resolve

if TYPE_CHECKING:
    from ckptool.inspection.charting import Bar
    from ckptool.inspection.diff_result import Diff
    from ckptool.inspection.stats import TensorStats
    from ckptool.tensors.statistics import Measures

__all__ = ["Report", "ReportedTensor", "report"]

BINS = 24


@dataclass(frozen=True, slots=True)
class ReportedTensor:
    """One tensor of the first file."""

    row: TensorRow
    tie: int | None = None
    """Which of the tensors before is the same one, under another name."""
    measures: Measures | None = None
    """None where values were not asked for, or are no plain array."""
    flags: tuple[str, ...] = ()
    """As `stats` has them: `constant`, `all-zero`, `nan`, `dtype-outlier`, ..."""
    remarks: tuple[str, ...] = ()
    """A sentence on each flag that needs one, and on why there are no figures."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the page is drawn from."""

    info: Info
    tensors: tuple[ReportedTensor, ...]
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
    found = _measured(checkpoint, key, progress, notes) if values else None
    if not values:
        notes.append("the values of the tensors were not read")
    tensors = tuple(_tensors(checkpoint, key, found))
    head = Report(
        info=info(checkpoint),
        tensors=tensors,
        measured=found is not None,
        key=key,
        notes=tuple(notes),
    )
    if other is None:
        return head
    return _compared(head, checkpoint, other, structure=not values, progress=progress)


def _measured(
    checkpoint: Checkpoint, key: str | None, progress: Progress | None, notes: list[str]
) -> tuple[TensorStats, ...] | None:
    """Return the figures of each tensor below `key`, or None and a note without torch."""
    from ckptool.inspection.stats import stats

    try:
        return stats(checkpoint, key=key, bins=BINS, progress=progress).tensors
    except TorchMissing as error:
        notes.append(f"there are no figures of values: {error.message}")
        return None


def _tensors(
    checkpoint: Checkpoint, key: str | None, found: Sequence[TensorStats] | None
) -> Iterator[ReportedTensor]:
    """Yield the tensors below `key`, each with its known figures."""
    below: Path = () if key is None else resolve(checkpoint, key)[0]
    chosen = [
        (path, tensor) for path, tensor in checkpoint.tensors() if path[: len(below)] == below
    ]
    keys = [tensor.place for _, tensor in chosen]
    names, first, uses = StorageNames(), dict[Any, int](), Counter(keys)
    known: Iterable[TensorStats | None] = repeat(None, len(chosen)) if found is None else found
    for i, ((path, tensor), tie, stated) in enumerate(zip(chosen, keys, known, strict=True)):
        one = i if tie is None else first.setdefault(tie, i)
        row = tensor_row(path, tensor, names, tied=tie is not None and uses[tie] > 1)
        if stated is None:
            yield ReportedTensor(row, None if one == i else one)
            continue
        yield ReportedTensor(
            row,
            tie=None if one == i else one,
            measures=stated.measures,
            flags=stated.flags,
            remarks=(*stated.remarks, *filter(None, [stated.reason])),
        )


def _compared(
    one: Report,
    checkpoint: Checkpoint,
    other: Checkpoint,
    *,
    structure: bool,
    progress: Progress | None,
) -> Report:
    """Return the report with the differences from another file."""
    from ckptool.inspection.aligning import align
    from ckptool.inspection.charting import bars
    from ckptool.inspection.diff import diff

    found = diff(checkpoint, other, key=one.key, structure=structure, progress=progress)
    norms = {row.row.name: row.measures.norm for row in one.tensors if row.measures}
    alignment = align(checkpoint, other, key=one.key)
    return replace(
        one,
        other=info(other),
        diff=found,
        chart=bars(checkpoint, other, alignment, found, norms),
    )
