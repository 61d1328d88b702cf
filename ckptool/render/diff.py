"""`ckptool diff` as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptool.inspection.diff_result import Changed, Diff, Renamed
from ckptool.inspection.diffing import TAGS
from ckptool.render.diff_rows import (
    FIGURES,
    Row,
    changed_rows,
    figures,
    only_rows,
    renamed_rows,
)
from ckptool.render.quoting import quoted
from ckptool.render.table import apart, table
from ckptool.render.terminal import Look
from ckptool.render.text import clean, count, plural, shorten, wrapped

__all__ = ["diff_lines", "note_lines", "status_lines", "summary_lines"]

_MOST_MOVES = 5
_SPARE = ("rmse", "mean abs", "cosine", "what", "NaN, Inf", "max abs")
"""Columns that a narrow terminal does without, the first first."""


@dataclass(frozen=True, slots=True)
class Column:
    """Cells under a heading."""

    heading: str
    cells: Sequence[str]
    right: bool = False
    flexible: bool = False


def diff_lines(diff: Diff, look: Look, *, fold: bool = True) -> Iterator[str]:
    """The files, what differs with the largest change first, and a summary.

    With `fold` repeated layers are one row with the worst of each figure. Where tables are all that
    is asked for (`look.fmt`), one table of every difference, a row each.
    """
    if look.fmt:
        yield from _one_table(diff, look)
        return
    if diff.identical:
        yield from (*note_lines(diff, look), *summary_lines(diff, look))
        return
    yield from apart(
        [
            _headlines(diff, look),
            *_changed_tables(diff, look, fold),
            _value_table(diff, look, fold),
            *_only_tables(diff, look, fold),
            _renamed_table(diff, look, fold),
            _tag_lines(diff, look),
            note_lines(diff, look),
            summary_lines(diff, look),
        ]
    )


def status_lines(diff: Diff) -> Iterator[str]:
    r"""A line for each entry that differs, as git has it: `M\tname`, `R\told\tnew`.

    Names with quotes, backslashes or what does not print stand in quotes as in C, bytes of UTF-8 in
    octal (git's `core.quotePath=false`).
    """
    for change in (*diff.changed, *diff.values):
        if change.counts:
            yield f"{change.status}\t{quoted(change.name)}"
    yield from (f"D\t{quoted(side.name)}" for side in diff.only_in_a)
    yield from (f"A\t{quoted(side.name)}" for side in diff.only_in_b)
    yield from (f"R\t{quoted(row.a.name)}\t{quoted(row.b.name)}" for row in diff.renamed)


def note_lines(diff: Diff, look: Look) -> Iterator[str]:
    """What is worth knowing beside the differences."""
    for note in diff.notes:
        yield from wrapped(f"note: {clean(note)}", look.width)
    hidden = diff.changed_in_all - len(diff.changed)
    if hidden:
        yield from wrapped(f"and {plural(hidden, 'more tensor')} (--max-diffs)", look.width)


def summary_lines(diff: Diff, look: Look) -> Iterator[str]:
    """`12 of 161 entries differ, 3 only in A; 149 equal (20 by CRC-32 alone)`."""
    text = _identical(diff) if diff.identical else _different(diff)
    yield from (look.bold(line) for line in wrapped(text, look.width))


def _identical(diff: Diff) -> str:
    found = "equal" if diff.close else "identical"
    if diff.structure:
        found = "the same structure"
    aside = [*_on_trust(diff)]
    if diff.structure:
        aside.append("values not compared")
    aside.extend(f"ignored {tag}" for tag in _tags(diff))
    return f"{found}: {plural(diff.common, 'entry')}{_bracketed(aside)}"


def _different(diff: Diff) -> str:
    counts = diff.counts
    changed = counts["M"] + counts["T"]
    verb = "differs" if changed == 1 else "differ"
    parts = [f"{count(changed)} of {_entries(diff.common)} {verb}"] if diff.common else []
    for status, words in (("D", "only in A"), ("A", "only in B"), ("R", "renamed")):
        if counts[status]:
            parts.append(f"{count(counts[status])} {words}")
    if not diff.common:
        return f"no name in common: {', '.join(parts)}{_bracketed(_on_trust(diff))}"
    equal = f"{count(diff.equal)} equal{' in structure' if diff.structure else ''}"
    return f"{', '.join(parts)}; {equal}{_bracketed(_on_trust(diff))}"


def _on_trust(diff: Diff) -> Iterator[str]:
    """What makes equal less than equal byte for byte."""
    if diff.close:
        yield f"{count(diff.close)} within the tolerance"
    if diff.by_checksum:
        yield f"{plural(diff.by_checksum, 'tensor')} compared by CRC-32 alone"


def _bracketed(parts: Iterable[str]) -> str:
    text = ", ".join(parts)
    return f" ({text})" if text else ""


def _entries(number: int) -> str:
    return f"{count(number)} common {'entry' if number == 1 else 'entries'}"


def _headlines(diff: Diff, look: Look) -> Iterator[str]:
    counts = diff.counts
    sides = (("A", diff.a, diff.format_a, "D"), ("B", diff.b, diff.format_b, "A"))
    for letter, path, form, status in sides:
        entries = plural(diff.common + counts[status] + counts["R"], "entry")
        facts = f"  {clean(form)}, {entries}"
        room = (look.width or 1 << 30) - len(facts) - 3
        yield f"{look.bold(letter)}  {shorten(clean(path), room)}{facts}"


def _changed_tables(diff: Diff, look: Look, fold: bool) -> Iterator[Iterable[str]]:
    """Tensors that cannot be held against each other, then those that can with the figures."""
    rows = changed_rows([row for row in diff.changed if _is_content(row)], whole=False, fold=fold)
    bare = [row for row in rows if row.figures is None]
    measured = [row for row in rows if row.figures is not None]
    yield _drawn([_names(bare), *_counted(bare), _what(bare), *_sides(bare)], look)
    what = Column("what", [_in_brief(row) for row in measured])
    yield _drawn(
        [_names(measured), *_counted(measured), what, *_figures(measured, whole=False)],
        look,
        _SPARE,
    )


def _is_content(row: Changed) -> bool:
    return not TAGS.issuperset(row.what)


def _in_brief(row: Row) -> str:
    """`value`, or `float32 -> bfloat16`."""
    return f"{row.a} -> {row.b}" if row.a else row.what


def _value_table(diff: Diff, look: Look, fold: bool) -> Iterable[str]:
    rows = changed_rows([row for row in diff.values if _is_content(row)], whole=False, fold=fold)
    names = Column("value", [row.label for row in rows], flexible=True)
    places = [row.what.partition(" at ")[2] for row in rows]
    change = [
        f"{row.a} -> {row.b}{f' (at {place})' if place else ''}"
        for row, place in zip(rows, places, strict=True)
    ]
    return _drawn([names, *_counted(rows), Column("", change, flexible=True)], look)


def _only_tables(diff: Diff, look: Look, fold: bool) -> Iterator[Iterable[str]]:
    for status, sides, heading in (
        ("D", diff.only_in_a, "only in A"),
        ("A", diff.only_in_b, "only in B"),
    ):
        rows = only_rows(status, sides, whole=False, fold=fold)
        what = Column("", [row.a or row.b for row in rows], flexible=True)
        yield _drawn([_names(rows, heading), *_counted(rows), what], look)


def _renamed_table(diff: Diff, look: Look, fold: bool) -> Iterable[str]:
    rows = renamed_rows(diff.renamed, fold=fold)
    new = Column("in B", [row.b for row in rows], flexible=True)
    what = Column("", [row.what for row in rows])
    return _drawn([_names(rows, "renamed from"), *_counted(rows), new, what], look)


def _one_table(diff: Diff, look: Look) -> Iterator[str]:
    """Every difference a row, all under the same headings."""
    counting = [row for row in (*diff.changed, *diff.values) if row.counts]
    rows = [
        *changed_rows(counting, whole=True, fold=False, tags=True),
        *only_rows("D", diff.only_in_a, whole=True, fold=False),
        *only_rows("A", diff.only_in_b, whole=True, fold=False),
        *renamed_rows(diff.renamed, fold=False),
    ]
    columns = [
        Column("status", [row.status for row in rows]),
        _names(rows),
        _what(rows),
        *_sides(rows),
        *_figures(rows, whole=True),
    ]
    return table(
        [column.heading for column in columns],
        [list(row) for row in zip(*(column.cells for column in columns), strict=True)],
        look,
        right={n for n, column in enumerate(columns) if column.right},
    )


def _names(rows: Sequence[Row], heading: str = "name") -> Column:
    return Column(heading, [row.label for row in rows], flexible=True)


def _counted(rows: Sequence[Row]) -> list[Column]:
    """`x32` beside what stands for 32 entries."""
    return [Column("", [f"x{row.count}" if row.count > 1 else "" for row in rows])]


def _what(rows: Sequence[Row]) -> Column:
    return Column("what", [row.what for row in rows])


def _sides(rows: Sequence[Row]) -> list[Column]:
    return [
        Column("in A", [row.a for row in rows], flexible=True),
        Column("in B", [row.b for row in rows], flexible=True),
    ]


def _figures(rows: Sequence[Row], *, whole: bool) -> list[Column]:
    cells = [figures(row.figures, whole=whole) for row in rows]
    return [
        Column(heading, [row[n] for row in cells], right=heading != FIGURES[-1])
        for n, heading in enumerate(FIGURES)
    ]


def _drawn(columns: Sequence[Column], look: Look, spare: Sequence[str] = ()) -> Iterable[str]:
    """A table of the columns in which anything stands; nothing without rows."""
    filled = [column for column in columns if any(column.cells)]
    if not columns[0].cells:
        return ()
    headings = [column.heading for column in filled]
    return table(
        headings,
        [list(row) for row in zip(*(column.cells for column in filled), strict=True)],
        look,
        right={n for n, column in enumerate(filled) if column.right},
        flexible=[n for n, column in enumerate(filled) if column.flexible],
        spare=[headings.index(heading) for heading in spare if heading in headings],
    )


def _tag_lines(diff: Diff, look: Look) -> Iterator[str]:
    """Devices and requires_grad that are not the same in both, a line each."""
    ending = ", ignored without --strict" if diff.tagged else ""
    for text in _tags(diff):
        yield from wrapped(f"{text}{ending}", look.width)


def _tags(diff: Diff) -> Iterator[str]:
    """`device: cuda:3 -> cpu (14)`."""
    rows: list[Changed | Renamed] = [*diff.changed, *diff.values, *diff.renamed]
    for tag in sorted(TAGS):
        moves = Counter(
            (str(getattr(row.a, tag)), str(getattr(row.b, tag))) for row in rows if tag in row.what
        )
        parts = [
            f"{clean(before)} -> {clean(after)} ({count(number)})"
            for (before, after), number in moves.most_common(_MOST_MOVES)
        ]
        if len(moves) > _MOST_MOVES:
            parts.append(f"and {count(len(moves) - _MOST_MOVES)} more")
        if parts:
            yield f"{tag}: {', '.join(parts)}"
