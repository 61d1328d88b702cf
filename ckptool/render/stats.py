"""`ckptool stats` as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckptool.inspection.stats import Stats, TensorStats, Totals
from ckptool.render.table import apart, table
from ckptool.render.text import PLAIN, Look, count, label, share, wrapped
from ckptool.words import clean, counted, listed

if TYPE_CHECKING:
    from ckptool.tensors.statistics import Measures

__all__ = ["ASCII", "BLOCKS", "bars", "ramp_for", "stats_lines"]

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII = " .:-=+*#%@"
"""Marks of a histogram, the first for nothing at all, the last for the fullest bin."""

_MOST_REMARKS = 20
_SPARE = (
    "histogram",
    "elements",
    "dtype",
    "norm",
    "mean",
    "zeros",
    "inf",
    "nan",
    "std",
    "max",
    "min",
)
"""Columns that a narrow terminal does without, the first first."""
_ODD = ("nan", "inf", "histogram", "flags")
"""Columns that are left out where they say nothing."""
_LEFT = ("name", "dtype", "histogram", "flags")


def bars(counts: Sequence[int], ramp: str = BLOCKS) -> str:
    """Return a histogram as a character a bin: its height is the share of the fullest bin.

    Whatever is not empty has at least the lowest mark.
    """
    most, steps = max(counts, default=0), len(ramp) - 1
    return "".join(ramp[-(-number * steps // most) if number else 0] for number in counts)


def ramp_for(encoding: str | None) -> str:
    """Return the marks that a stream of that encoding can show: blocks, or ASCII."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def stats_lines(stats: Stats, look: Look = PLAIN, ramp: str = BLOCKS) -> Iterator[str]:
    """Yield a row for each tensor, what is odd, and totals; with `look.fmt` the table alone."""
    rows = _table(stats.tensors, look, ramp) if stats.tensors or look.fmt else ()
    closing = [_remarks(stats.tensors, look.width), _totals(stats.totals, look)]
    yield from apart([rows] if look.fmt else [rows, *closing])


def stats_line(stats: Stats) -> str:
    """Return the totals, the file in front."""
    return f"{clean(stats.file)}: {next(_totals(stats.totals, PLAIN))}"


def _table(rows: Sequence[TensorStats], look: Look, ramp: str) -> Iterator[str]:
    columns = _columns(rows, ramp)
    headings = list(columns)
    if look.width is not None and _width(columns) > look.width and "flags" in columns:
        columns["flags"] = [cell.replace("-outlier", "!") for cell in columns["flags"]]
    return table(
        headings,
        [list(row) for row in zip(*columns.values(), strict=True)],
        look,
        right={at for at, name in enumerate(headings) if name not in _LEFT},
        flexible=[headings.index(name) for name in ("name", "flags") if name in columns],
        spare=[headings.index(name) for name in _SPARE if name in columns],
    )


def _width(columns: dict[str, list[str]]) -> int:
    """Return the width of the rows if nothing is left out."""
    return sum(max(map(len, (name, *cells))) + 2 for name, cells in columns.items()) - 2


def _columns(rows: Sequence[TensorStats], ramp: str) -> dict[str, list[str]]:
    """Return the cells of each column by its heading."""
    found = [row.measures for row in rows]
    columns = {
        "name": [_name(row) for row in rows],
        "dtype": [row.row.dtype for row in rows],
        "elements": [count(row.row.numel) for row in rows],
        "min": _figures(found, "minimum"),
        "max": _figures(found, "maximum"),
        "mean": _figures(found, "mean"),
        "std": _figures(found, "std"),
        "zeros": [share(one.zeros, one.elements, none="0") if one else "" for one in found],
        "nan": [count(one.nan) if one and one.nan else "" for one in found],
        "inf": [count(one.infinite) if one and one.infinite else "" for one in found],
        "norm": _figures(found, "norm"),
        "histogram": [
            bars(one.histogram.counts, ramp) if one and one.histogram else "" for one in found
        ],
        "flags": [_flags(row) for row in rows],
    }
    return {name: cells for name, cells in columns.items() if any(cells) or name not in _ODD}


def _figures(found: Sequence[Measures | None], field: str) -> list[str]:
    return ["" if one is None else _number(getattr(one, field)) for one in found]


def _number(value: float | None) -> str:
    """Four digits of a float, all of an integer."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _name(row: TensorStats) -> str:
    return label(row.name, row.row.path)


def _flags(row: TensorStats) -> str:
    words = [
        flag if times == row.count else f"{flag}({times:,})"
        for flag, times in row.flag_counts.items()
    ]
    words += ["tied"] if row.tie is not None else []
    return " ".join(words if row.reason is None else [*words, "no figures"])


def _remarks(rows: Sequence[TensorStats], width: int | None) -> Iterator[str]:
    """Yield what is odd about some tensors, and why others have no figures."""
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
    for sentence in said[:_MOST_REMARKS]:
        yield from wrapped(sentence, width)
    if len(said) > _MOST_REMARKS:
        yield f"and {count(len(said) - _MOST_REMARKS)} more (--json has them all)"


def _totals(totals: Totals, look: Look) -> Iterator[str]:
    """`14 tensors, 330 elements, 12.5% zeros, 3 NaN, 1 infinite, norm 4.21`, and a line a type."""
    facts = [counted(totals.tensors, "tensor"), counted(totals.elements, "element")]
    if totals.elements:
        facts.append(f"{share(totals.zeros, totals.elements, none='0')} zeros")
    facts += [
        f"{count(n)} {what}"
        for n, what in ((totals.nan, "NaN"), (totals.infinite, "infinite"))
        if n
    ]
    facts.append(f"norm {_number(totals.norm)}")
    yield from map(look.bold, wrapped(", ".join(facts), look.width))
    for one in totals.dtypes:
        reach = f", from {_number(one.minimum)} to {_number(one.maximum)}"
        tensors, elements = counted(one.tensors, "tensor"), counted(one.elements, "element")
        said = f"{one.dtype}: {tensors}, {elements}{'' if one.minimum is None else reach}"
        yield from wrapped(said, look.width)
