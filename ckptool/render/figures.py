"""`ckptool stats` and `ckptool show` as text: tensor statistics, and one value or object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptool.core.values import format_shape
from ckptool.inspection.show import Shown, ShownContainer, ShownObject, ShownTensor, ShownValue
from ckptool.inspection.stats import Stats, TensorStats, Totals
from ckptool.render.listing import tensor_line
from ckptool.render.table import apart, table
from ckptool.render.text import PLAIN, Look, first_lines, label, number, share, size, wrapped
from ckptool.words import clean, clean_lines, counted, listed

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
    text = " ".join(flags if row.reason is None else [*flags, "no statistics"])
    if look.width is not None:
        text = text.replace("-outlier", "!")
    return [_name(row), row.row.dtype, f"{row.row.numel:,}", *figures, text]


def _number(value: float | None) -> str:
    """Return four digits of a float, all digits of an integer."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _name(row: TensorStats) -> str:
    return label(row.name, row.row.path)


def _remarks(rows: Sequence[TensorStats], width: int | None) -> Iterator[str]:
    """Yield remarks about tensors, and the reasons why tensors have no statistics."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.reason is not None:
            reasons.setdefault(row.reason, []).append(_name(row))
    lines = [
        f"{_name(row)}: {clean(remark)}" if row.count == 1 else clean(remark)
        for row in rows
        for remark in row.remarks
    ]
    lines += [f"no statistics for {listed(names)}: {why}" for why, names in reasons.items()]
    for line in first_lines(lines, _MOST_REMARKS):
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
        span = f", from {_number(one.minimum)} to {_number(one.maximum)}"
        tensors, elements = counted(one.tensors, "tensor"), counted(one.elements, "element")
        line = f"{one.dtype}: {tensors}, {elements}{'' if one.minimum is None else span}"
        yield from wrapped(line, look.width)


def shown_lines(shown: Shown, look: Look) -> Iterator[str]:
    """Yield the lines of one value, tensor, object or container."""
    if look.fmt:
        yield from _as_table(shown, look)
        return
    if isinstance(shown, ShownValue):
        # The value itself and nothing else, for $(ckptool show FILE epoch).
        yield clean_lines(shown.value) if isinstance(shown.value, str) else str(shown.value)
        return
    yield look.bold(clean(shown.name) or "(the whole file)")
    if isinstance(shown, ShownTensor):
        yield from _one_tensor(shown)
    elif isinstance(shown, ShownObject):
        yield from _object(shown, look)
    elif isinstance(shown, ShownContainer):
        yield f"{shown.type} of {counted(len(shown.entries), 'entry')}"
        yield from _entries(shown.entries, look)


def _as_table(shown: Shown, look: Look) -> Iterator[str]:
    """Return a table of the entries of a container or object, or of the facts of a tensor."""
    if isinstance(shown, ShownContainer):
        return _entries(shown.entries, look)
    if isinstance(shown, ShownObject):
        return _entries((*shown.attributes, *shown.items), look, "attribute or item")
    skipped = ("schema", "file", "path")
    facts = {key: fact for key, fact in shown.to_dict().items() if key not in skipped}
    rows = [[key, clean(str(fact))] for key, fact in facts.items()]
    return table(["fact", "value"], rows, look)


def _one_tensor(shown: ShownTensor) -> Iterator[str]:
    row, stats = shown.row, shown.statistics
    yield tensor_line(row)
    stride = "" if row.storage is None else f", stride {format_shape(row.stride)}"
    yield f"{counted(row.numel, 'element')}, {size(row.nbytes)}{stride}"
    for name, text in shown.parts:
        yield f"  {clean(name)}: {clean(text)}"
    if stats is None:
        return
    if shown.head:
        more = " ..." if len(shown.head) < row.numel else ""
        yield f"head  {' '.join(map(number, shown.head))}{more}"
    if stats.minimum is not None:
        facts = (("min", stats.minimum), ("max", stats.maximum), ("mean", stats.mean))
        yield "  ".join(f"{name} {number(value)}" for name, value in facts)
    for name, found in (("NaN", stats.nan), ("infinite", stats.infinite)):
        if found:
            yield f"{found:,} {name}"


def _object(shown: ShownObject, look: Look) -> Iterator[str]:
    yield clean(shown.class_name)
    if shown.arguments:
        yield f"arguments: {', '.join(map(clean, shown.arguments))}"
    yield from _entries(shown.attributes, look, "attribute")
    yield from _entries(shown.items, look, "item")


def _entries(entries: Iterable[tuple[str, str]], look: Look, heading: str = "key") -> Iterator[str]:
    rows = [[clean(key), clean(text)] for key, text in entries]
    if rows or look.fmt:
        yield from table([heading, "value" if look.fmt else ""], rows, look, flexible=(0, 1))
