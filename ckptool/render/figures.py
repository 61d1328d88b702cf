"""`ckptool stats` and `ckptool show` as text: tensor statistics, and one value or object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil

from ckptool.core.values import format_shape
from ckptool.inspection.show import Shown, ShownContainer, ShownObject, ShownTensor, ShownValue
from ckptool.inspection.stats import Stats, TensorStats, Totals
from ckptool.render.listing import tensor_line
from ckptool.render.table import separate_blocks, table_lines
from ckptool.render.text import (
    PLAIN,
    Look,
    format_label,
    format_number,
    format_share,
    format_size,
    limit_lines,
    wrap_text,
)
from ckptool.words import clean, clean_lines, counted, listed

BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII = " .:-=+*#%@"
"""The marks of a histogram: the first for an empty bin, the last for the fullest."""

_MAX_REMARKS = 20
_COLUMNS = (
    *("name", "dtype", "elements", "min", "max", "mean", "std", "zeros", "nan", "inf", "norm"),
    *("histogram", "flags"),
)
_COLUMNS_BY_IMPORTANCE = (
    *("histogram", "elements", "dtype", "norm", "mean", "zeros", "inf", "nan", "std", "max", "min"),
)
"""Columns that are left out on a narrow terminal, the first one first."""


def draw_histogram(counts: Sequence[int], ramp: str = BLOCKS) -> str:
    """Return a histogram with a character for each bin, whose height is relative to the fullest.

    A bin that is not empty has at least the lowest mark.
    """
    largest, steps = max(counts, default=0), len(ramp) - 1
    return "".join(ramp[ceil(count * steps / largest) if count else 0] for count in counts)


def choose_ramp(encoding: str | None) -> str:
    """Return the marks that an encoding has: blocks, or ASCII."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def stats_lines(stats: Stats, look: Look = PLAIN, ramp: str = BLOCKS) -> Iterator[str]:
    """Yield a row for each tensor, remarks and totals; with `look.fmt` only the table."""
    rows = _stats_table(stats.tensors, look, ramp) if stats.tensors or look.fmt else ()
    closing = [_remark_lines(stats.tensors, look.width), _totals_lines(stats.totals, look)]
    yield from separate_blocks([rows] if look.fmt else [rows, *closing])


def stats_line(stats: Stats) -> str:
    """Return the file and the totals in one line."""
    return f"{clean(stats.file)}: {next(_totals_lines(stats.totals, PLAIN))}"


def _stats_table(rows: Sequence[TensorStats], look: Look, ramp: str) -> Iterator[str]:
    """Return the lines of the table of statistics."""
    column = _COLUMNS.index
    return table_lines(
        _COLUMNS,
        [_make_cells(row, look, ramp) for row in rows],
        look,
        right=range(column("elements"), column("histogram")),
        flexible=(column("name"), column("flags")),
        spare=list(map(column, _COLUMNS_BY_IMPORTANCE)),
        optional=list(map(column, ("nan", "inf", "histogram", "flags"))),
    )


def _make_cells(row: TensorStats, look: Look, ramp: str) -> list[str]:
    """Return the cells of one row below `_COLUMNS`; no figures if it was not measured."""
    measures = row.measures
    figures = [""] * (len(_COLUMNS) - 4)  # all columns except name, dtype, elements and flags
    if measures is not None:
        figures = [
            *map(_format_figure, (measures.minimum, measures.maximum, measures.mean, measures.std)),
            format_share(measures.zeros, measures.elements, none="0"),
            f"{measures.nan:,}" if measures.nan else "",
            f"{measures.infinite:,}" if measures.infinite else "",
            _format_figure(measures.norm),
            draw_histogram(measures.histogram.counts, ramp) if measures.histogram else "",
        ]
    flags = [
        flag if times == row.count else f"{flag}({times:,})"
        for flag, times in row.flag_counts.items()
    ]
    flags += ["tied"] if row.tie is not None else []
    text = " ".join(flags if row.reason is None else [*flags, "no statistics"])
    if look.width is not None:  # on a terminal: max! for max-outlier
        text = text.replace("-outlier", "!")
    return [_format_name(row), row.row.dtype, f"{row.row.numel:,}", *figures, text]


def _format_figure(value: float | None) -> str:
    """Return four digits of a float, all digits of an integer; "" for None."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _format_name(row: TensorStats) -> str:
    """Return the name of a row, or words for the root."""
    return format_label(row.name, row.row.path)


def _remark_lines(rows: Sequence[TensorStats], width: int | None) -> Iterator[str]:
    """Yield remarks about tensors, and the reasons why tensors have no statistics."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.reason is not None:
            reasons.setdefault(row.reason, []).append(_format_name(row))
    lines = [  # the remarks of a folded row name their tensors already
        f"{_format_name(row)}: {clean(remark)}" if row.count == 1 else clean(remark)
        for row in rows
        for remark in row.remarks
    ]
    lines += [f"no statistics for {listed(names)}: {why}" for why, names in reasons.items()]
    for line in limit_lines(lines, _MAX_REMARKS):
        yield from wrap_text(line, width)


def _totals_lines(totals: Totals, look: Look) -> Iterator[str]:
    """Yield `14 tensors, 330 elements, 12.5% zeros, 3 NaN, norm 4.21`, and a line for each type."""
    facts = [counted(totals.tensors, "tensor"), counted(totals.elements, "element")]
    if totals.elements:
        facts.append(f"{format_share(totals.zeros, totals.elements, none='0')} zeros")
    facts += [
        f"{count:,} {word}"
        for count, word in ((totals.nan, "NaN"), (totals.infinite, "infinite"))
        if count
    ]
    facts.append(f"norm {_format_figure(totals.norm)}")
    yield from map(look.bold, wrap_text(", ".join(facts), look.width))
    for row in totals.dtypes:
        tensors, elements = counted(row.tensors, "tensor"), counted(row.elements, "element")
        line = f"{row.dtype}: {tensors}, {elements}"
        if row.minimum is not None:
            line += f", from {_format_figure(row.minimum)} to {_format_figure(row.maximum)}"
        yield from wrap_text(line, look.width)


def shown_lines(shown: Shown, look: Look) -> Iterator[str]:
    """Yield the lines of one value, tensor, object or container."""
    if look.fmt:
        yield from _shown_table(shown, look)
        return
    if isinstance(shown, ShownValue):
        # The value itself and nothing else, for $(ckptool show FILE epoch).
        yield clean_lines(shown.value) if isinstance(shown.value, str) else str(shown.value)
        return
    yield look.bold(clean(shown.name) or "(the whole file)")
    if isinstance(shown, ShownTensor):
        yield from _tensor_lines(shown)
    elif isinstance(shown, ShownObject):
        yield from _object_lines(shown, look)
    elif isinstance(shown, ShownContainer):
        yield f"{shown.type} of {counted(len(shown.entries), 'entry')}"
        yield from _entry_lines(shown.entries, look)


def _shown_table(shown: Shown, look: Look) -> Iterator[str]:
    """Return a table of the entries of a container or object, or of the facts of a tensor."""
    if isinstance(shown, ShownContainer):
        return _entry_lines(shown.entries, look)
    if isinstance(shown, ShownObject):
        return _entry_lines((*shown.attributes, *shown.items), look, "attribute or item")
    skipped = ("schema", "file", "path")
    facts = {key: fact for key, fact in shown.to_dict().items() if key not in skipped}
    rows = [[key, clean(str(fact))] for key, fact in facts.items()]
    return table_lines(["fact", "value"], rows, look)


def _tensor_lines(shown: ShownTensor) -> Iterator[str]:
    """Yield the header of a tensor, its parts, and if they can be read, elements and statistics."""
    row, stats = shown.row, shown.statistics
    yield tensor_line(row)
    stride = "" if row.storage is None else f", stride {format_shape(row.stride)}"
    yield f"{counted(row.numel, 'element')}, {format_size(row.nbytes)}{stride}"
    for name, text in shown.parts:
        yield f"  {clean(name)}: {clean(text)}"
    if stats is None:
        return
    if shown.head:
        more = " ..." if len(shown.head) < row.numel else ""
        yield f"head  {' '.join(map(format_number, shown.head))}{more}"
    if stats.minimum is not None:
        facts = (("min", stats.minimum), ("max", stats.maximum), ("mean", stats.mean))
        yield "  ".join(f"{name} {format_number(value)}" for name, value in facts)
    for name, count in (("NaN", stats.nan), ("infinite", stats.infinite)):
        if count:
            yield f"{count:,} {name}"


def _object_lines(shown: ShownObject, look: Look) -> Iterator[str]:
    """Yield the class, arguments, attributes and items of an object."""
    yield clean(shown.class_name)
    if shown.arguments:
        yield f"arguments: {', '.join(map(clean, shown.arguments))}"
    yield from _entry_lines(shown.attributes, look, "attribute")
    yield from _entry_lines(shown.items, look, "item")


def _entry_lines(
    entries: Iterable[tuple[str, str]], look: Look, heading: str = "key"
) -> Iterator[str]:
    """Yield a table of keys and texts; nothing without entries, unless `look.fmt`."""
    rows = [[clean(key), clean(text)] for key, text in entries]
    if rows or look.fmt:
        yield from table_lines([heading, "value" if look.fmt else ""], rows, look, flexible=(0, 1))
