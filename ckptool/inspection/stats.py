"""Statistics of the values in a checkpoint, for each tensor and in total: `ckptool stats`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from ckptool._lazy import Result
from ckptool.core.addressing import NameIndex, resolve, select
from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Path, TensorRef
from ckptool.core.names import group_families
from ckptool.core.placeholders import find_placeholders, refuse_placeholders
from ckptool.core.quantizers import Quantized, find_quantized
from ckptool.core.reading import Meter, RepeatedBytes
from ckptool.core.sections import MODEL_KINDS
from ckptool.core.tree import drop_ties, is_within, name_of, walk
from ckptool.core.values import format_shape, to_document, to_json_value
from ckptool.errors import NotFound, UnsupportedFormat, UsageError, without_query
from ckptool.files.source import Progress
from ckptool.formats import Source, open_or_reuse
from ckptool.inspection.listing import TensorRow, make_tensor_rows
from ckptool.limits import DEFAULT_LIMITS, Limits
from ckptool.tensors.statistics import Histogram, Measurer, Measures, Moments, find_obstacle
from ckptool.words import are, counted, listed, printable, shell

if TYPE_CHECKING:
    from ckptool.tensors.statistics import Measures, Number

BINS = 16


@dataclass(frozen=True, slots=True)
class TensorStats:
    """The statistics of one tensor, or of `count` tensors folded into one row."""

    row: TensorRow
    measures: Measures | None
    """The statistics; None without them, with the `reason`."""
    reason: str | None = None
    tie: str | None = None
    """The path of an earlier tensor that it is tied to."""
    flags: tuple[str, ...] = ()
    """`constant`, `all-zero`, `nan`, `inf`, and differences from similar tensors:
    `dtype-outlier`, `shape-outlier`, `device-outlier`, `norm-outlier`, `std-outlier`."""
    remarks: tuple[str, ...] = ()
    """A sentence about each difference."""
    count: int = 1
    flagged: tuple[int, ...] = ()
    """The number of tensors with each flag, in a folded row."""

    @property
    def flag_counts(self) -> dict[str, int]:
        """The number of tensors with each flag."""
        return dict(zip(self.flags, self.flagged or [1] * len(self.flags), strict=True))

    @property
    def name(self) -> str:
        """The path of the tensor, or the pattern of folded ones."""
        return self.row.name

    def to_dict(self) -> dict[str, Any]:
        """Return the row of `ckptool.stats/1`."""
        row, measures = self.row, self.measures
        figures = {  # all None without measures
            key: to_json_value(getattr(measures, field, None))
            for key, field in _FIELD_BY_KEY.items()
        }
        histogram = measures.histogram if measures else None
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
            "histogram": to_document(histogram) if histogram else None,
            "reason": self.reason,
            "tie": self.tie,
            "count": self.count,
            "flags": self.flags,
            "flag_counts": self.flag_counts,
            "remarks": self.remarks,
        }


_FIELD_BY_KEY = {
    "min": "minimum",
    "max": "maximum",
    "mean": "mean",
    "std": "std",
    "zeros": "zeros",
    "nan": "nan",
    "infinite": "infinite",
    "norm": "norm",
}
"""The statistics by their JSON key."""


@dataclass(frozen=True, slots=True)
class DtypeRange:
    """The range of the tensors of one dtype, tied ones once."""

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
            "min": to_json_value(self.minimum),
            "max": to_json_value(self.maximum),
        }


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals over all measured tensors, tied ones once."""

    tensors: int
    elements: int
    zeros: int
    nan: int
    infinite: int
    norm: float
    dtypes: tuple[DtypeRange, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of `ckptool.stats/1`."""
        return to_document(self)


@dataclass(frozen=True, slots=True, repr=False)
class Stats(Result):
    """The statistics of every selected tensor, in the order of the file."""

    file: str
    """The given path."""
    format: str
    """As `Checkpoint.format`."""
    tensors: tuple[TensorStats, ...]
    """The rows in the order of the file, one for folded layers."""
    totals: Totals
    """Over all of them."""
    unmatched: tuple[str, ...] = ()
    """A sentence on each name or glob that matches nothing, with the nearest names."""

    def to_dict(self) -> dict[str, Any]:
        """Return the document `ckptool.stats/1`."""
        return {"schema": "ckptool.stats/1", **to_document(self, "unmatched")}

    def sorted_by(self, column: str) -> Stats:
        """Return the same rows in the order of a column: largest number first, names from A to Z.

        Raises:
            UsageError: the column is not in `SORTABLE`.
        """
        if column not in SORTABLE:
            raise UsageError(f"cannot sort by {column!r}; choose one of {listed(SORTABLE)}")
        if column == "name":
            return replace(self, tensors=tuple(sorted(self.tensors, key=lambda row: row.name)))
        read_figure = SORTABLE[column]

        def sort_key(row: TensorStats) -> tuple[bool, float]:
            """Return a key to sort in reverse: rows without a figure are the last."""
            figure = read_figure(row)
            has_figure = figure is not None and not math.isnan(figure)
            return (True, figure) if has_figure else (False, 0)

        return replace(self, tensors=tuple(sorted(self.tensors, key=sort_key, reverse=True)))

    def folded(self) -> Stats:
        """Return the same with one row for tensors whose keys differ only in numbers.

        They have equal dtype, shape, device and kind. The statistics are over all their elements.
        """
        return replace(self, tensors=tuple(_fold_rows(self.tensors)))


def _read_measure(field: str) -> Callable[[TensorStats], Any]:
    """Return a function that returns one statistic of a row; None for a row without statistics."""
    return lambda row: getattr(row.measures, field, None)


SORTABLE: dict[str, Callable[[TensorStats], Any]] = {
    "name": lambda row: row.name,
    "elements": lambda row: row.row.numel,
    "min": _read_measure("minimum"),
    "max": _read_measure("maximum"),
    "mean": _read_measure("mean"),
    "std": _read_measure("std"),
    "zeros": lambda row: row.measures and row.measures.zeros / max(row.measures.elements, 1),
    "nan": _read_measure("nan"),
    "inf": _read_measure("infinite"),
    "norm": _read_measure("norm"),
    "flags": lambda row: len(row.flags),
}
"""Reads the figure of a row by column: zeros are sorted by their share, flags by their number."""


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
    """Measure the tensors of a checkpoint: range, mean, zeros, NaN, histogram.

    Args:
        source: A path, or an open checkpoint.
        include: Names and globs of the tensors to measure: a path, a key, the end of a path, a
            glob of whole keys, or one of whole paths with a `/`; wrapper prefixes are ignored.
        exclude: Names and globs of the tensors to leave out.
        key: The path of the section, container or tensor to measure.
        bins: The number of bins of each histogram.
        progress: Called with the bytes done and the total bytes.
        limits: Limits for nesting and for strides that repeat bytes.

    Raises:
        UnreadableFile, LimitExceeded: the path cannot be opened, or bytes cannot be read.
        NotFound: no tensor is at `key` (`AmbiguousName`: `key` is ambiguous).
        NotRepresentable: the tensors to measure are placeholders (ZeRO-3).
        UsageError: `bins` is less than 1, or a list of globs is a string.
    """
    for patterns in (include, exclude):
        if isinstance(patterns, str):
            raise UsageError(f"expected a list of globs, not {patterns!r}", hint=f"[{patterns!r}]")
    with open_or_reuse(source) as checkpoint:
        index = _index_tensors(checkpoint, key, limits)
        selection = select(index, tuple(include), tuple(exclude), endings=True)
        leaves = list(selection.pick_from(index))
        _refuse_selected_placeholders(checkpoint, leaves)
        rows = list(_measure_tensors(leaves, Measurer(bins), limits, progress))
        _flag_outliers(checkpoint, leaves, rows)
        _note_codes(checkpoint, leaves, rows)
        unmatched = tuple(map(str, selection.unmatched))
        name = without_query(checkpoint.path)
        return Stats(name, checkpoint.format, tuple(rows), _sum_up(rows), unmatched)


def _index_tensors(checkpoint: Checkpoint, key: Any, limits: Limits) -> NameIndex:
    """Return an index of the tensors at `key` and below, or of all if `key` is None."""
    base_path: Path = () if key is None else resolve(checkpoint, key)[0]
    tensors = (
        (path, leaf)
        for path, leaf in walk(checkpoint.root, limits)
        if isinstance(leaf, TensorRef) and is_within(path, base_path)
    )
    index = NameIndex(tensors, checkpoint.path)
    if key is not None and not index.nodes:
        raise NotFound(
            f"no tensor to measure under {printable(name_of(base_path))!r}",
            file=checkpoint.path or None,
            hint=f"ckptool list {shell(checkpoint.path)}" if checkpoint.path else None,
        )
    return index


def _refuse_selected_placeholders(
    checkpoint: Checkpoint, leaves: Sequence[tuple[Path, TensorRef]]
) -> None:
    """Raise NotRepresentable if a tensor to measure is a placeholder of ZeRO-3."""
    placeholders = find_placeholders(checkpoint)
    # "part" is the kind of ZeRO-3. Lazy tensors and meta tensors get a row with the reason.
    if placeholders is not None and placeholders.kind == "part":
        names = set(placeholders.where)
        if any(name_of(path) in names for path, _ in leaves):
            refuse_placeholders(checkpoint)


def _flag_outliers(
    checkpoint: Checkpoint, leaves: Sequence[tuple[Path, TensorRef]], rows: list[TensorStats]
) -> None:
    """Add flags and remarks to the rows of tensors that differ from similar ones.

    The state of optimizers is not compared.
    """
    optimizers = [section.path for section in checkpoint.sections if section.kind == "optimizer"]
    positions = [
        position
        for position, (path, _) in enumerate(leaves)
        if not any(is_within(path, optimizer) for optimizer in optimizers)
    ]
    model_rows = [rows[position] for position in positions]
    for model_position, flags, remark in _find_outliers(model_rows):
        position = positions[model_position]
        row = rows[position]
        rows[position] = replace(row, flags=(*row.flags, *flags), remarks=(*row.remarks, remark))


def _note_codes(
    checkpoint: Checkpoint, leaves: Sequence[tuple[Path, TensorRef]], rows: list[TensorStats]
) -> None:
    """Add a remark to the first quantized weight of each scheme: its statistics are of codes.

    Codes are the integers of a weight that needs other tensors (scales) to be interpreted. Weights
    that are not in `leaves` get none.
    """
    position_by_id: dict[int, int] = {}
    for position, (_, tensor) in enumerate(leaves):
        position_by_id.setdefault(id(tensor), position)
    for section in checkpoint.sections:
        quantized_by_key = find_quantized(section.node) if section.kind in MODEL_KINDS else {}
        counts = Counter(quantized.scheme for quantized in quantized_by_key.values())
        first_by_scheme: dict[str, tuple[int, Quantized]] = {}
        for key, quantized in quantized_by_key.items():
            measured_position = position_by_id.get(id(section.node[key]))
            if measured_position is not None and quantized.companions:
                first_by_scheme.setdefault(quantized.scheme, (measured_position, quantized))
        for position, quantized in first_by_scheme.values():
            count = counts[quantized.scheme]
            others = f", like {count - 1:,} more here" if count > 1 else ""
            # str(quantized) is a predicate, such as "is quantized (gptq)".
            description = f"{str(quantized).removeprefix('is ')}{others}"
            remark = f"{description}: statistics of codes, without {listed(quantized.companions)}"
            rows[position] = replace(rows[position], remarks=(*rows[position].remarks, remark))


def _measure_tensors(
    leaves: Sequence[tuple[Path, TensorRef]],
    measurer: Measurer,
    limits: Limits,
    progress: Progress | None,
) -> Iterator[TensorStats]:
    """Yield a row for each tensor, in order. Tied tensors are measured once."""
    total = sum(leaf.nbytes for _, leaf in drop_ties(leaves) if find_obstacle(leaf) is None)
    meter, repeated = Meter(progress, total), RepeatedBytes(limits)
    measured: dict[Any, TensorStats] = {}
    for (path, tensor), row in zip(leaves, make_tensor_rows(leaves), strict=True):
        identity = tensor.place  # None: it has no storage, so it cannot be tied
        if identity in measured:
            yield replace(measured[identity], row=row, tie=measured[identity].name)
            continue
        reason, measures = find_obstacle(tensor), None
        if reason is None:
            repeated.add(path, tensor.unrepeated)
            try:
                measures = measurer.measure(tensor, meter.advance)
            except UnsupportedFormat as error:  # a dtype that this torch lacks
                reason = error.message
        stats_row = TensorStats(
            row, measures, reason, flags=find_flags(measures) if measures else ()
        )
        if identity is not None:
            measured[identity] = stats_row
        yield stats_row


def _sum_up(rows: Iterable[TensorStats]) -> Totals:
    """Return the totals of the measured rows, tied tensors counted once."""
    all_measures: list[Measures] = []
    measures_by_dtype: dict[str, list[Measures]] = {}
    for row in rows:
        if row.measures and row.tie is None:
            all_measures.append(row.measures)
            measures_by_dtype.setdefault(row.row.dtype, []).append(row.measures)
    dtypes = []
    for dtype, measures in measures_by_dtype.items():
        merged = _merge_measures(measures)
        dtypes.append(
            DtypeRange(dtype, len(measures), merged.elements, merged.minimum, merged.maximum)
        )
    total = _merge_measures(all_measures)
    return Totals(
        tensors=len(all_measures),
        elements=total.elements,
        zeros=total.zeros,
        nan=total.nan,
        infinite=total.infinite,
        norm=total.norm,
        dtypes=tuple(dtypes),
    )


_MAX_NAMED_TENSORS = 8
_REMARK_BY_FLAG: dict[str, Callable[[Measures], str]] = {
    "nan": lambda found: (
        f"{found.nan:,} of {counted(found.elements, 'element')} {are(found.nan)} NaN"
    ),
    "inf": lambda found: (
        f"{found.infinite:,} of {counted(found.elements, 'element')} {are(found.infinite)} infinite"
    ),
    "all-zero": lambda found: "all zero",
    "constant": lambda found: f"constant, {found.minimum:.6g}",
}
"""The remark on one tensor of a folded row, by its flag."""


def _fold_rows(rows: Sequence[TensorStats]) -> Iterator[TensorStats]:
    """Yield a row for each family of tensors of equal dtype, shape, device and kind, in order."""
    by_name: dict[str, list[TensorStats]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    signature_by_name = {
        row.name: (row.row.dtype, row.row.shape, row.row.device, row.row.kind, row.reason)
        for row in rows
    }
    for family in group_families(signature_by_name.items()):
        members = [row for name in family.names for row in by_name[name]]
        yield members[0] if len(members) == 1 else _merge_rows(family.label, members)


def _merge_rows(label: str, members: Sequence[TensorStats]) -> TensorStats:
    """Return one row for tensors of a family, with merged statistics, flags and remarks."""
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
        measures=_merge_measures(measures) if measures else None,
        tie=None,
        flags=tuple(flags),
        flagged=tuple(flags.values()),  # the number of tensors with each of `flags`
        remarks=(
            *_describe_odd_members(label, members),
            *(f"{member.name}: {remark}" for member in members for remark in member.remarks),
        ),
        count=len(members),
    )


def _describe_odd_members(label: str, members: Sequence[TensorStats]) -> Iterator[str]:
    """Yield remarks on the tensors with a flag of `_REMARK_BY_FLAG`, if not all have it."""
    for flag, describe in _REMARK_BY_FLAG.items():
        odd = [(row.name, row.measures) for row in members if row.measures and flag in row.flags]
        if len(odd) == len(members):
            continue
        for name, measures in odd[:_MAX_NAMED_TENSORS]:
            yield f"{name}: {describe(measures)}"
        if len(odd) > _MAX_NAMED_TENSORS:
            yield f"{label}: {len(odd) - _MAX_NAMED_TENSORS:,} more have the flag {flag}"


def _merge_measures(parts: Sequence[Measures]) -> Measures:
    """Return the statistics of all elements of several tensors.

    Mean and std are exact. The histograms are merged by the middle of each bin.
    """
    moments = Moments()
    for part in parts:
        if part.mean is not None and part.std is not None:
            moments.add(Moments(part.finite, part.mean, part.std * part.std * part.finite))
    lows = [part.minimum for part in parts if part.minimum is not None]
    highs = [part.maximum for part in parts if part.maximum is not None]
    low, high = min(lows, default=None), max(highs, default=None)
    histograms = [part.histogram for part in parts if part.histogram is not None]
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
        histogram=None if low is None or high is None else _merge_histograms(histograms, low, high),
    )


def _merge_histograms(parts: Sequence[Histogram], low: float, high: float) -> Histogram:
    """Return one histogram between `low` and `high`, by the middle of each bin.

    All distances are halved, because a range may be twice the largest float64.
    """
    bins = max(len(part.counts) for part in parts)
    counts = [0] * bins
    half_range = high / 2 - low / 2
    for part in parts:
        half_bin = (part.high / 2 - part.low / 2) / len(part.counts)
        half_offset = part.low / 2 - low / 2
        for position, count in enumerate(part.counts):
            half_middle = half_offset + half_bin * (position + 0.5)
            share = half_middle / half_range if half_range else 0.5
            counts[min(int(share * bins), bins - 1)] += count
    return Histogram(low, high, tuple(counts))


MIN_ROLE_TENSORS = 3
"""The fewest tensors of a role for which outliers are reported."""
MAJORITY = 2 / 3
"""The share of equal tensors above which the others are outliers."""
OUTLIER_FACTOR = 10
"""The factor from the median at which a norm or standard deviation is an outlier."""

Oddity = tuple[int, tuple[str, ...], str]
"""The position of a tensor, its flags, and a remark on the difference from others of its role."""


def find_flags(measures: Measures) -> tuple[str, ...]:
    """Return the flags of a tensor by itself: `nan`, `inf`, `all-zero`, `constant`.

    A single element is never one of the last two.
    """
    flags = [name for name, count in (("nan", measures.nan), ("inf", measures.infinite)) if count]
    if measures.elements > 1 and measures.finite == measures.elements:
        if measures.zeros == measures.elements:
            flags.append("all-zero")
        elif measures.minimum == measures.maximum:
            flags.append("constant")
    return tuple(flags)


def _find_outliers(rows: Sequence[TensorStats]) -> Iterator[Oddity]:
    """Yield differences of tensors from the others of one role.

    The tensors of a role have keys that differ only in numbers, and as many dimensions, for example
    `layers.{0..31}.mlp.weight`. Statistics are compared among those of one shape.
    """
    positions_by_name: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        positions_by_name.setdefault(row.name, []).append(position)
    # Without a signature (None), only the keys decide: dtypes and shapes are compared below.
    for family in group_families((name, None) for name in positions_by_name):
        members = [
            (position, rows[position])
            for name in family.names
            for position in positions_by_name[name]
        ]
        for role in _group_members(members, lambda row: len(row.row.shape)):
            yield from _find_header_outliers(role, family.label)
        for role in _group_members(members, lambda row: row.row.shape):
            yield from _find_number_outliers(role, family.label)


Role = list[tuple[int, TensorStats]]
"""Tensors with their positions."""


def _group_members(members: Role, key_of: Callable[[TensorStats], Hashable]) -> list[Role]:
    """Return groups of members with the same `key_of`, those large enough to compare."""
    groups: dict[Hashable, Role] = {}
    for position, tensor in members:
        groups.setdefault(key_of(tensor), []).append((position, tensor))
    return [group for group in groups.values() if len(group) >= MIN_ROLE_TENSORS]


_COMPARED_PROPERTIES: tuple[tuple[str, Callable[[TensorRow], Any], Callable[[Any], str]], ...] = (
    ("dtype", lambda row: row.dtype, str),
    ("shape", lambda row: row.shape, format_shape),
    ("device", lambda row: row.device, lambda device: f"on {device}"),
)
"""Properties that tensors of a role have in common, and their text."""


def _find_header_outliers(role: Role, label: str) -> Iterator[Oddity]:
    """Yield an oddity for each tensor with another dtype, shape or device than most of a role.

    Without a majority of two thirds, nothing is an outlier.
    """
    for property_name, read_property, describe in _COMPARED_PROPERTIES:
        values = [(position, read_property(row.row)) for position, row in role]
        [(usual, count)] = Counter(value for _, value in values).most_common(1)
        if count < MAJORITY * len(role):
            continue
        for position, value in values:
            if value != usual:
                remark = f"{describe(value)}, but {count:,} of {label} are {describe(usual)}"
                yield position, (f"{property_name}-outlier",), remark


def _find_number_outliers(role: Role, label: str) -> Iterator[Oddity]:
    """Yield tensors with a norm or std that is far from the median of a role."""
    measured = [
        (position, {"norm": measures.norm, "std": measures.std})
        for position, row in role
        if (measures := row.measures) is not None and measures.std is not None
    ]
    if len(measured) < MIN_ROLE_TENSORS:
        return
    medians = {name: median(figures[name] for _, figures in measured) for name in ("norm", "std")}
    for position, figures in measured:
        outliers = [name for name in figures if _is_far(figures[name], medians[name])]
        if outliers:
            texts = " and ".join(
                f"{name} {figures[name]:.4g}, median {medians[name]:.4g}" for name in outliers
            )
            remark = f"{texts} ({counted(len(measured), 'tensor')} of {label})"
            yield position, tuple(f"{name}-outlier" for name in outliers), remark


def _is_far(value: float, median_value: float) -> bool:
    """Return True if a value is far from the median. Zeros have their own flags."""
    return value > 0 and not median_value / OUTLIER_FACTOR <= value <= median_value * OUTLIER_FACTOR
