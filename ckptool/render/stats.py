"""`ckptool stats` as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptool.inspection.stats import Stats, TensorStats, Totals
from ckptool.render.table import apart, table
from ckptool.render.text import PLAIN, Look, first_lines, label, share, wrapped
from ckptool.words import clean, counted, listed

__all__ = ["ASCII", "BLOCKS", "bars", "ramp_for", "stats_lines"]

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII = " .:-=+*#%@"
"""The marks of a histogram: the first for an empty bin, the last for the fullest."""

_MOST_REMARKS = 20
_COLUMNS = (
    *("name", "dtype", "elements", "min", "max", "mean", "std", "zeros", "nan", "inf", "norm"),
    *("histogram", "flags"),
)
_SPARE = (
    *("histogram", "elements", "dtype", "norm", "mean", "zeros", "inf", "nan", "std", "max", "min"),
)
"""Columns that are left out on a narrow terminal, the first one first."""


def bars(counts: Sequence[int], ramp: str = BLOCKS) -> str:
    """Return a histogram with a character for each bin, whose height is relative to the fullest.

    A bin that is not empty has at least the lowest mark.
    """
    most, steps = max(counts, default=0), len(ramp) - 1
    return "".join(ramp[-(-number * steps // most) if number else 0] for number in counts)


def ramp_for(encoding: str | None) -> str:
    """Return the marks that an encoding has: blocks, or ASCII."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def stats_lines(stats: Stats, look: Look = PLAIN, ramp: str = BLOCKS) -> Iterator[str]:
    """Yield a row for each tensor, remarks and totals; with `look.fmt` only the table."""
    rows = _table(stats.tensors, look, ramp) if stats.tensors or look.fmt else ()
    closing = [_remarks(stats.tensors, look.width), _totals(stats.totals, look)]
    yield from apart([rows] if look.fmt else [rows, *closing])


def stats_line(stats: Stats) -> str:
    """Return the file and the totals in one line."""
    return f"{clean(stats.file)}: {next(_totals(stats.totals, PLAIN))}"


def _table(rows: Sequence[TensorStats], look: Look, ramp: str) -> Iterator[str]:
    at = _COLUMNS.index
    return table(
        _COLUMNS,
        [_cells(row, look, ramp) for row in rows],
        look,
        right=range(at("elements"), at("histogram")),
        flexible=(at("name"), at("flags")),
        spare=list(map(at, _SPARE)),
        optional=list(map(at, ("nan", "inf", "histogram", "flags"))),
    )


def _cells(row: TensorStats, look: Look, ramp: str) -> list[str]:
    one = row.measures
    figures = [""] * 9
    if one is not None:
        figures = [
            *map(_number, (one.minimum, one.maximum, one.mean, one.std)),
            share(one.zeros, one.elements, none="0"),
            f"{one.nan:,}" if one.nan else "",
            f"{one.infinite:,}" if one.infinite else "",
            _number(one.norm),
            bars(one.histogram.counts, ramp) if one.histogram else "",
        ]
    flags = [
        flag if times == row.count else f"{flag}({times:,})"
        for flag, times in row.flag_counts.items()
    ]
    flags += ["tied"] if row.tie is not None else []
    text = " ".join(flags if row.reason is None else [*flags, "no figures"])
    if look.width is not None:
        text = text.replace("-outlier", "!")
    return [_name(row), row.row.dtype, f"{row.row.numel:,}", *figures, text]


def _number(value: float | None) -> str:
    """Return four digits of a float, all digits of an integer."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _name(row: TensorStats) -> str:
    return label(row.name, row.row.path)


def _remarks(rows: Sequence[TensorStats], width: int | None) -> Iterator[str]:
    """Yield remarks about tensors, and the reasons why tensors have no figures."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.reason is not None:
            reasons.setdefault(row.reason, []).append(_name(row))
    said = [
        f"{_name(row)}: {clean(remark)}" if row.count == 1 else clean(remark)
        for row in rows
        for remark in row.remarks
    ]
    said += [f"no figures of {listed(names)}: {why}" for why, names in reasons.items()]
    for line in first_lines(said, _MOST_REMARKS):
        yield from wrapped(line, width)


def _totals(totals: Totals, look: Look) -> Iterator[str]:
    """Yield `14 tensors, 330 elements, 12.5% zeros, 3 NaN, norm 4.21`, and a line for each type."""
    facts = [counted(totals.tensors, "tensor"), counted(totals.elements, "element")]
    if totals.elements:
        facts.append(f"{share(totals.zeros, totals.elements, none='0')} zeros")
    facts += [
        f"{n:,} {what}" for n, what in ((totals.nan, "NaN"), (totals.infinite, "infinite")) if n
    ]
    facts.append(f"norm {_number(totals.norm)}")
    yield from map(look.bold, wrapped(", ".join(facts), look.width))
    for one in totals.dtypes:
        reach = f", from {_number(one.minimum)} to {_number(one.maximum)}"
        tensors, elements = counted(one.tensors, "tensor"), counted(one.elements, "element")
        said = f"{one.dtype}: {tensors}, {elements}{'' if one.minimum is None else reach}"
        yield from wrapped(said, look.width)
