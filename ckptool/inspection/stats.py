"""What the numbers in a checkpoint are like, tensor by tensor and over all: `ckptool stats`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from ckptool._lazy import Result
from ckptool.errors import NotFound, UnsupportedFormat, UsageError, without_query
from ckptool.files.source import Progress
from ckptool.formats import Source, opened
from ckptool.inspection.listing import RepeatedBytes, StorageNames, TensorRow, tensor_row
from ckptool.inspection.values import json_value, shape_text
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.model import Path, TensorRef
from ckptool.names import families
from ckptool.tensors.statistics import Histogram, Measurer, Measures, Moments, measurable
from ckptool.tree import is_within, name_of, resolve, selected, walk
from ckptool.words import counted, listed, printable, shell

if TYPE_CHECKING:
    from ckptool.tensors.statistics import Measures, Number

__all__ = ["SORTABLE", "DtypeRange", "Stats", "TensorStats", "Totals", "stats"]

BINS = 16


@dataclass(frozen=True, slots=True)
class TensorStats:
    """The figures of one tensor, or of `count` that were folded into one row."""

    row: TensorRow
    measures: Measures | None
    """None where there are no figures; `reason` says why."""
    reason: str | None = None
    tie: str | None = None
    """The name of a tensor before that is the same one."""
    flags: tuple[str, ...] = ()
    """`constant`, `all-zero`, `nan`, `inf`, and what it has otherwise than tensors of its role:
    `dtype-outlier`, `shape-outlier`, `device-outlier`, `norm-outlier`, `std-outlier`."""
    remarks: tuple[str, ...] = ()
    """A sentence for what is otherwise."""
    count: int = 1
    flagged: tuple[int, ...] = ()
    """Of a folded row, of how many tensors each flag is."""

    @property
    def flag_counts(self) -> dict[str, int]:
        """Each flag, and of how many of the tensors it is."""
        return dict(zip(self.flags, self.flagged or [1] * len(self.flags), strict=True))

    @property
    def name(self) -> str:
        """The tensor's address; of folded ones, the pattern of their names."""
        return self.row.name

    def to_dict(self) -> dict[str, Any]:
        """Return the row of `ckptool.stats/1`."""
        row, measures = self.row, self.measures
        figures = {name: _figure(measures, field) for name, field in _FIGURES.items()}
        drawn = measures.histogram if measures else None
        histogram = drawn and {
            "low": json_value(drawn.low),
            "high": json_value(drawn.high),
            "counts": drawn.counts,
        }
        return {
            "path": row.path,
            "name": row.name,
            "dtype": row.dtype,
            "shape": row.shape,
            "device": row.device,
            "nbytes": row.nbytes,
            "kind": row.kind,
            "elements": row.numel,
            **figures,
            "histogram": histogram,
            "reason": self.reason,
            "tie": self.tie,
            "count": self.count,
            "flags": self.flags,
            "flag_counts": self.flag_counts,
            "remarks": self.remarks,
        }


_FIGURES = {
    "min": "minimum",
    "max": "maximum",
    "mean": "mean",
    "std": "std",
    "zeros": "zeros",
    "nan": "nan",
    "infinite": "infinite",
    "norm": "norm",
}
"""What the figures are called in JSON, and where they are."""


def _figure(measures: Measures | None, field: str) -> Any:
    return None if measures is None else json_value(getattr(measures, field))


@dataclass(frozen=True, slots=True)
class DtypeRange:
    """What the tensors of one type span, ties once."""

    dtype: str
    tensors: int
    elements: int
    minimum: Number | None
    maximum: Number | None

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `ckptool.stats/1`."""
        return {
            "dtype": self.dtype,
            "tensors": self.tensors,
            "elements": self.elements,
            "min": json_value(self.minimum),
            "max": json_value(self.maximum),
        }


@dataclass(frozen=True, slots=True)
class Totals:
    """Over all tensors that have figures, ties once."""

    tensors: int
    elements: int
    zeros: int
    nan: int
    infinite: int
    norm: float
    dtypes: tuple[DtypeRange, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `ckptool.stats/1`."""
        return {
            "tensors": self.tensors,
            "elements": self.elements,
            "zeros": self.zeros,
            "nan": self.nan,
            "infinite": self.infinite,
            "norm": json_value(self.norm),
            "dtypes": [dtype.to_dict() for dtype in self.dtypes],
        }


@dataclass(frozen=True, slots=True, repr=False)
class Stats(Result):
    """The figures of every tensor that was asked for, in the order of the file."""

    file: str
    """As it was given."""
    format: str
    """As `Checkpoint.format`."""
    tensors: tuple[TensorStats, ...]
    """In the order of the file; folded layers are one."""
    totals: Totals
    """Over all of them."""

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.stats/1`."""
        return {
            "schema": "ckptool.stats/1",
            "file": self.file,
            "format": self.format,
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "totals": self.totals.to_dict(),
        }

    def sorted_by(self, column: str) -> Stats:
        """Return the same rows in the order of a column: largest number first, names from A to Z.

        Raises:
            UsageError: it is none of `SORTABLE`.
        """
        if column not in SORTABLE:
            raise UsageError(f"cannot sort by {column!r}; there are {listed(SORTABLE)}")
        if column == "name":
            return replace(self, tensors=tuple(sorted(self.tensors, key=lambda one: one.name)))
        value = SORTABLE[column]
        known = [one for one in self.tensors if _sortable(value(one))]
        rest = [one for one in self.tensors if not _sortable(value(one))]
        return replace(self, tensors=(*sorted(known, key=value, reverse=True), *rest))

    def folded(self) -> Stats:
        """Return the same with one row for tensors whose names differ only in numbers.

        Of equal type, shape, device and kind; figures are of all their elements together.
        """
        return replace(self, tensors=tuple(_folded(self.tensors)))


def _sortable(value: Any) -> bool:
    return value is not None and value == value


def _by(field: str) -> Callable[[TensorStats], Any]:
    return lambda one: None if one.measures is None else getattr(one.measures, field)


def _share_of_zeros(one: TensorStats) -> float | None:
    measures = one.measures
    return None if measures is None else measures.zeros / max(measures.elements, 1)


SORTABLE: dict[str, Callable[[TensorStats], Any]] = {
    "name": lambda one: one.name,
    "elements": lambda one: one.row.numel,
    "min": _by("minimum"),
    "max": _by("maximum"),
    "mean": _by("mean"),
    "std": _by("std"),
    "zeros": _share_of_zeros,
    "nan": _by("nan"),
    "inf": _by("infinite"),
    "norm": _by("norm"),
    "flags": lambda one: len(one.flags),
}
"""What rows can be sorted by: zeros by their share, flags by their number."""


def stats(
    source: Source,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    key: Any = None,
    bins: int = BINS,
    progress: Progress | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Stats:
    """Measure the tensors of a checkpoint, ties once: range, mean, zeros, NaN, histogram.

    Args:
        source: A path, or an open checkpoint.
        include: Globs of the tensors to measure; with a `/` of whole names, others of the last key.
        exclude: Globs of the tensors to leave out.
        key: The address of what to measure: a section, a container or a tensor.
        bins: The number of bins of each histogram.
        progress: Called with the bytes done and the bytes in all.
        limits: Bounds for nesting and for strides that repeat bytes.

    Raises:
        UnreadableFile, LimitExceeded: the path cannot be opened, or bytes cannot be read.
        NotFound: there is no tensor at `key` (`AmbiguousName`: there are several nodes).
        UsageError: `bins` is less than 1, or a text is given in place of a list of globs.
    """
    for given in (include, exclude):
        if isinstance(given, str):
            raise UsageError(f"a list of globs is wanted, not {given!r}", hint=f"[{given!r}]")
    measuring = _Measuring(bins, limits, progress)
    with opened(source) as checkpoint:
        below: Path = () if key is None else resolve(checkpoint, key)[0]
        globs, unless = tuple(include), tuple(exclude)
        leaves = [
            (path, leaf)
            for path, leaf in walk(checkpoint.root, limits)
            if isinstance(leaf, TensorRef)
            and is_within(path, below)
            and selected(path, globs, unless)
        ]
        if key is not None and not leaves:
            raise NotFound(
                f"there is no tensor to measure under {printable(name_of(below))!r}",
                file=checkpoint.path or None,
                hint=f"ckptool list {shell(checkpoint.path)}" if checkpoint.path else None,
            )
        rows = [_flagged(row) for row in measuring.rows(leaves)]
        optimizers = [part.path for part in checkpoint.sections if part.kind == "optimizer"]
        models = [
            at
            for at, (path, _) in enumerate(leaves)
            if not any(is_within(path, o) for o in optimizers)
        ]
        for place, oddity in outliers([(rows[at].row, rows[at].measures) for at in models]):
            row = rows[models[place]]
            rows[models[place]] = replace(
                row, flags=(*row.flags, *oddity.flags), remarks=(*row.remarks, oddity.remark)
            )
        return Stats(without_query(checkpoint.path), checkpoint.format, tuple(rows), _totals(rows))


def _flagged(row: TensorStats) -> TensorStats:
    return row if row.measures is None else replace(row, flags=own_flags(row.measures))


class _Measuring:
    """Rows of tensors, those that are one tensor measured once."""

    def __init__(self, bins: int, limits: Limits, progress: Progress | None) -> None:
        self._measurer = Measurer(bins)
        self._repeated = RepeatedBytes(limits)
        self._progress = progress
        self._names = StorageNames()
        self._known: dict[Any, TensorStats] = {}
        self._done = self._all = 0

    def rows(self, leaves: Sequence[tuple[Path, TensorRef]]) -> Iterator[TensorStats]:
        """Yield a row for each tensor, in order."""
        keys = [tensor.place for _, tensor in leaves]
        each_once = dict(zip(keys, (tensor for _, tensor in leaves), strict=True))
        uses = Counter(keys)
        self._all = sum(one.nbytes for one in each_once.values() if measurable(one) is None)
        for (path, tensor), key in zip(leaves, keys, strict=True):
            known = None if key is None else self._known.get(key)
            tied = key is not None and uses[key] > 1
            row = tensor_row(path, tensor, self._names, tied=tied)
            if known is not None:
                yield replace(known, row=row, tie=known.name)
                continue
            made = self._made(path, tensor, row)
            self._known[key] = made
            yield made

    def _made(self, path: Path, tensor: TensorRef, row: TensorRow) -> TensorStats:
        reason = measurable(tensor)
        if reason is not None:
            return TensorStats(row, None, reason)
        self._repeated.add(path, tensor.unrepeated)
        try:
            return TensorStats(row, self._measurer.measure(tensor, self._told))
        except UnsupportedFormat as error:  # a type that this torch does not have
            return TensorStats(row, None, error.message)

    def _told(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._all)


def _totals(rows: Iterable[TensorStats]) -> Totals:
    """Return the totals of the rows with figures, ties counted once."""
    found = [(row.row.dtype, row.measures) for row in rows if row.measures and row.tie is None]
    every = [measures for _, measures in found]
    types = dict.fromkeys(dtype for dtype, _ in found)
    return Totals(
        tensors=len(every),
        elements=sum(one.elements for one in every),
        zeros=sum(one.zeros for one in every),
        nan=sum(one.nan for one in every),
        infinite=sum(one.infinite for one in every),
        norm=math.hypot(*(one.norm for one in every)),
        dtypes=tuple(_range(dtype, [one for own, one in found if own == dtype]) for dtype in types),
    )


def _range(dtype: str, found: Sequence[Measures]) -> DtypeRange:
    lows = [one.minimum for one in found if one.minimum is not None]
    highs = [one.maximum for one in found if one.maximum is not None]
    elements = sum(one.elements for one in found)
    return DtypeRange(
        dtype, len(found), elements, min(lows, default=None), max(highs, default=None)
    )


_MOST_NAMED = 8
_SAID: dict[str, Callable[[Measures], str]] = {
    "nan": lambda found: f"{found.nan:,} NaN of {counted(found.elements, 'element')}",
    "inf": lambda found: f"{found.infinite:,} infinite of {counted(found.elements, 'element')}",
    "all-zero": lambda found: "all zero",
    "constant": lambda found: f"constant, {found.minimum:.6g}",
}
"""What is said of one tensor of a folded row that has the flag."""


def _folded(rows: Sequence[TensorStats]) -> Iterator[TensorStats]:
    """Yield a row for each family of tensors of equal type, shape, device and kind, in order."""
    by_name: dict[str, list[TensorStats]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    heads = (
        (row.name, (row.row.dtype, row.row.shape, row.row.device, row.row.kind, row.reason))
        for row in rows
    )
    for family in families(dict(heads).items()):
        members = [row for name in family.names for row in by_name[name]]
        yield members[0] if len(members) == 1 else _one(family.label, members)


def _one(label: str, members: Sequence[TensorStats]) -> TensorStats:
    first = members[0]
    measures = [member.measures for member in members if member.measures is not None]
    flags = Counter(flag for member in members for flag in member.flags)
    return replace(
        first,
        row=replace(
            first.row,
            name=label,
            nbytes=sum(member.row.nbytes for member in members),
            numel=sum(member.row.numel for member in members),
        ),
        measures=_together(measures) if measures else None,
        tie=None,
        flags=tuple(flags),
        flagged=tuple(flags.values()),
        remarks=(
            *_oddities(label, members),
            *(f"{member.name}: {remark}" for member in members for remark in member.remarks),
        ),
        count=len(members),
    )


def _oddities(label: str, members: Sequence[TensorStats]) -> Iterator[str]:
    """Yield which of the tensors are odd by themselves, if not all are."""
    for flag, said in _SAID.items():
        odd = [(one.name, one.measures) for one in members if one.measures and flag in one.flags]
        if len(odd) == len(members):
            continue
        for name, found in odd[:_MOST_NAMED]:
            yield f"{name}: {said(found)}"
        if len(odd) > _MOST_NAMED:
            yield f"{label}: {len(odd) - _MOST_NAMED:,} more are flagged {flag}"


def _together(parts: Sequence[Measures]) -> Measures:
    """Return the figures of all elements of several tensors.

    The histogram is drawn from theirs: each bin is put where its middle lies.
    """
    moments = Moments()
    for part in parts:
        if part.mean is not None and part.std is not None:
            moments.add(Moments(part.finite, part.mean, part.std * part.std * part.finite))
    lows = [part.minimum for part in parts if part.minimum is not None]
    highs = [part.maximum for part in parts if part.maximum is not None]
    low, high = min(lows, default=None), max(highs, default=None)
    drawn = [part.histogram for part in parts if part.histogram is not None]
    return Measures(
        elements=sum(part.elements for part in parts),
        minimum=low,
        maximum=high,
        mean=moments.mean if lows else None,
        std=math.sqrt(moments.squares / moments.count) if lows else None,
        zeros=sum(part.zeros for part in parts),
        nan=sum(part.nan for part in parts),
        infinite=sum(part.infinite for part in parts),
        norm=math.hypot(*(part.norm for part in parts)),
        histogram=None if low is None or high is None else _merged(drawn, low, high),
    )


def _merged(parts: Sequence[Histogram], low: float, high: float) -> Histogram:
    bins = max(len(part.counts) for part in parts)
    counts = [0] * bins
    half = high / 2 - low / 2  # whole, it may be beyond float64
    for part in parts:
        step = (part.high / 2 - part.low / 2) / len(part.counts)
        for place, count in enumerate(part.counts):
            share = (part.low / 2 - low / 2 + step * (place + 0.5)) / half if half else 0.5
            counts[min(int(share * bins), bins - 1)] += count
    return Histogram(low, high, tuple(counts))


FEWEST = 3
"""Tensors of a role of which one can be unlike the others."""
MAJORITY = 2 / 3
"""The share of them that must be alike for the rest to be odd."""
TIMES = 10
"""How far off the median a norm or a standard deviation is odd."""

Subject = tuple[TensorRow, "Measures | None"]


@dataclass(frozen=True, slots=True)
class Oddity:
    """What one tensor has otherwise than the others of its role."""

    flags: tuple[str, ...]
    remark: str
    """Without a full stop."""


def own_flags(measures: Measures) -> tuple[str, ...]:
    """Return the flags of a tensor by itself: `nan`, `inf`, `all-zero`, `constant`.

    A single element is neither of the last two.
    """
    flags = [name for name, found in (("nan", measures.nan), ("inf", measures.infinite)) if found]
    if measures.elements > 1 and measures.finite == measures.elements:
        if measures.zeros == measures.elements:
            flags.append("all-zero")
        elif measures.minimum == measures.maximum:
            flags.append("constant")
    return tuple(flags)


def outliers(subjects: Sequence[Subject]) -> Iterator[tuple[int, Oddity]]:
    """Yield the flags of tensors that differ from the others of one role, by position.

    Of one role are tensors whose names differ only in numbers, with as many dimensions:
    `layers.{0..31}.mlp.weight`. Numbers are compared among those of one shape.
    """
    places: dict[str, list[int]] = {}
    for place, (row, _) in enumerate(subjects):
        places.setdefault(row.name, []).append(place)
    for family in families((name, None) for name in places):
        members = [place for name in family.names for place in places[name]]
        if len(members) < FEWEST:
            continue
        for role in _grouped(members, lambda place: len(subjects[place][0].shape)):
            yield from _other_headers(subjects, role, family.label)
        for role in _grouped(members, lambda place: subjects[place][0].shape):
            yield from _other_numbers(subjects, role, family.label)


def _grouped(members: Iterable[int], by: Callable[[int], Hashable]) -> list[list[int]]:
    """Return groups of equal members that are large enough to compare."""
    groups: dict[Hashable, list[int]] = {}
    for member in members:
        groups.setdefault(by(member), []).append(member)
    return [group for group in groups.values() if len(group) >= FEWEST]


_HEADERS: tuple[tuple[str, Callable[[TensorRow], Any], Callable[[Any], str]], ...] = (
    ("dtype", lambda row: row.dtype, str),
    ("shape", lambda row: row.shape, shape_text),
    ("device", lambda row: row.device, lambda device: f"on {device}"),
)
"""What tensors of a role have in common, and how it is said."""


def _other_headers(
    subjects: Sequence[Subject], role: list[int], label: str
) -> Iterator[tuple[int, Oddity]]:
    for word, read, said in _HEADERS:
        values = {place: read(subjects[place][0]) for place in role}
        [(usual, count)] = Counter(values.values()).most_common(1)
        if count == len(role) or count < MAJORITY * len(role):
            continue
        for place, value in values.items():
            if value != usual:
                remark = f"{said(value)}, where {count:,} of {label} are {said(usual)}"
                yield place, Oddity((f"{word}-outlier",), remark)


def _other_numbers(
    subjects: Sequence[Subject], role: list[int], label: str
) -> Iterator[tuple[int, Oddity]]:
    measured = [(place, found) for place in role if (found := subjects[place][1]) is not None]
    known = [(place, found) for place, found in measured if found.std is not None]
    if len(known) < FEWEST:
        return
    norms, deviations = [one.norm for _, one in known], [one.std or 0.0 for _, one in known]
    usual = {"norm": median(norms), "std": median(deviations)}
    for (place, _), norm, deviation in zip(known, norms, deviations, strict=True):
        own = {"norm": norm, "std": deviation}
        odd = [word for word in own if _is_far(own[word], usual[word])]
        if odd:
            facts = " and ".join(
                f"{word} {own[word]:.4g} against {usual[word]:.4g}" for word in odd
            )
            remark = f"{facts}, the median of {counted(len(known), 'tensor')} of {label}"
            yield place, Oddity(tuple(f"{word}-outlier" for word in odd), remark)


def _is_far(own: float, usual: float) -> bool:
    """Return True if a figure is far from the others; zeros have flags of their own."""
    return own > 0 and not usual / TIMES <= own <= usual * TIMES
