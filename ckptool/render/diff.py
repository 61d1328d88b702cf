"""`ckptool diff` as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool.inspection.diff_result import Changed, Diff, Renamed, Side, magnitude
from ckptool.inspection.diffing import TAGS
from ckptool.inspection.values import shape_text
from ckptool.names import Family, families, numbered
from ckptool.render.table import apart, table
from ckptool.render.terminal import PLAIN, Look
from ckptool.render.text import count, number, quoted, share, shorten, wrapped
from ckptool.words import clean, counted

if TYPE_CHECKING:
    from ckptool.tensors.comparing import Difference

__all__ = [
    "diff_line",
    "diff_lines",
    "folded",
    "note_lines",
    "stat_lines",
    "status_lines",
]

_SHORT = 40  # characters of a value where it is one of two on a line

_FIGURES = ("max abs", "mean abs", "max rel", "rmse", "cosine", "differing", "NaN, Inf")


@dataclass(frozen=True, slots=True)
class Row:
    """`count` entries that differ alike, with the figures of the one that changed most."""

    status: str
    label: str
    count: int
    what: str = ""
    a: str = ""
    b: str = ""
    figures: Difference | None = None


def changed_rows(
    found: Sequence[Changed], *, whole: bool, fold: bool, tags: bool = False
) -> list[Row]:
    """Entries of both files, those without figures first, then by the largest relative change.

    `whole` texts are not shortened; with `fold` repeated layers are one row. With `tags` a row says
    in which device and requires_grad it differs, too.
    """
    rows = []
    for family in folded(((row.name, _alike(row, whole, tags)) for row in found), fold=fold):
        members = [found[n] for n in family.numbers]
        what, a, b, _ = _alike(members[0], whole, tags)
        most = max((row.difference for row in members), key=magnitude)
        status, label = members[0].status, _label(family.label)
        rows.append(Row(status, label, len(members), what, a, b, most))
    return sorted(rows, key=lambda row: magnitude(row.figures), reverse=True)


def folded(names: Iterable[tuple[str, Hashable]], *, fold: bool) -> list[Family]:
    """As `families`, or without `fold` each name by itself."""
    if fold:
        return families(names)
    return [Family(name, (name,), (number,)) for number, (name, _) in enumerate(names)]


def only_rows(status: str, sides: Sequence[Side], *, whole: bool, fold: bool) -> list[Row]:
    """Entries of one file alone: what they are stands in `a` (status D) or in `b` (status A)."""
    rows = []
    for family in folded(((side.name, _words(side, whole)) for side in sides), fold=fold):
        words = _words(sides[family.numbers[0]], whole)
        a, b = (words, "") if status == "D" else ("", words)
        rows.append(Row(status, _label(family.label), len(family.names), "", a, b))
    return rows


def renamed_rows(found: Sequence[Renamed], *, fold: bool) -> list[Row]:
    """Tensors under another name: `label` is A's, `b` that of B, `what` says what it is."""
    rows = []
    names = [(row.a.name, (_renaming(n, row), _words(row.a, True))) for n, row in enumerate(found)]
    for name in folded(names, fold=fold):
        (other, *_) = families((found[n].b.name, None) for n in name.numbers)
        what = _words(found[name.numbers[0]].a, True)
        label = _label(name.label)
        rows.append(Row("R", label, len(name.names), what, label, _label(other.label)))
    return rows


def figures(found: Difference | None, *, whole: bool) -> list[str]:
    """The cells below `_FIGURES`; `whole` numbers have six digits, others three."""
    if found is None:
        return [""] * len(_FIGURES)

    def said(figure: float | None, digits: str = ".3g") -> str:
        return "" if figure is None else number(figure) if whole else format(figure, digits)

    odd = [
        f"{name} {before:,} -> {after:,}"
        for name, before, after in (
            ("NaN", found.nan_a, found.nan_b),
            ("Inf", found.inf_a, found.inf_b),
        )
        if before or after
    ]
    return [
        said(found.max_abs),
        said(found.mean_abs),
        said(found.max_rel),
        said(found.rmse),
        said(found.cosine, ".6f"),
        share(found.mismatched, found.elements),
        ", ".join(odd),
    ]


def _label(name: str) -> str:
    return clean(name) or "(the whole file)"


def _renaming(number: int, row: Renamed) -> Hashable:
    """Equal for entries whose two names change in step; each of the others is its own."""
    (_, before), (texts, after) = numbered(row.a.name), numbered(row.b.name)
    return texts if before == after else number


def _alike(row: Changed, whole: bool, tags: bool) -> tuple[str, str, str, Hashable]:
    """What a row says beside its name and numbers: only entries alike in it are folded."""
    kept = [aspect for aspect in row.what if tags or aspect not in TAGS]
    place = (row.place or "").removeprefix("quantizer/")
    what = ", ".join(kept) + (f" at {clean(place)}" if place else "")
    a, b = (" ".join(_said(side, kept, row, whole)) for side in (row.a, row.b))
    if row.change is not None and (row.place or "tensor" in (row.a.sort, row.b.sort)):
        a, b = (f"{a} {clean(text)}".strip() for a, text in zip((a, b), row.change, strict=True))
    found = row.difference
    odd = found and tuple(map(bool, (found.nan_a, found.nan_b, found.inf_a, found.inf_b)))
    return what, a, b, odd


def _said(side: Side, aspects: Sequence[str], row: Changed, whole: bool) -> Iterator[str]:
    """The aspects of one side in which the two differ."""
    for aspect in aspects:
        if aspect == "shape" and side.shape is not None:
            yield shape_text(side.shape)
        elif aspect in ("value", "quantizer"):
            if side.sort != "tensor":
                yield _literal(side, whole)
        elif aspect == "type":
            yield _typed(side, whole, alone=aspects == ["type"])
        elif side.sort == "tensor" or side.device is not None:
            yield clean(str(getattr(side, aspect)))


def _words(side: Side, whole: bool) -> str:
    """What an entry of one file alone is."""
    if side.sort == "tensor":
        return f"{side.dtype} {shape_text(side.shape or ())}"
    return "None" if side.value is None else _typed(side, whole)


def _typed(side: Side, whole: bool, *, alone: bool = True) -> str:
    """The type of an entry, with its value where that is told nowhere else."""
    kind = clean(side.type)
    if side.sort == "tensor":
        return f"{kind} {side.dtype} {shape_text(side.shape or ())}" if alone else kind
    literal = _literal(side, whole)
    if side.sort != "value" and literal.startswith(kind):  # `dict of 3`
        return literal
    return f"{kind} {literal}" if alone else kind


def _literal(side: Side, whole: bool) -> str:
    """A value as Python writes it; the words for anything else."""
    value: Any = side.value
    if not isinstance(value, str):
        return str(value)
    short = value if whole else shorten(value, _SHORT)
    text = repr(short) if side.type == "str" else short
    return clean(text if whole else shorten(text, _SHORT))


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


def diff_lines(diff: Diff, look: Look = PLAIN, *, fold: bool = True) -> Iterator[str]:
    """The files, what differs with the largest change first, and a summary.

    With `fold` repeated layers are one row, with the figures of the tensor that changed most. With
    `look.fmt` the result is one table that has a row for every difference.
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
    return ("\t".join((status, *map(quoted, names))) for status, *names in _differing(diff))


def _differing(diff: Diff) -> Iterator[tuple[str, ...]]:
    """Yield the status and the name of each entry that differs; of a rename both names."""
    rows = (*diff.changed, *diff.values)
    yield from ((row.status, row.name) for row in rows if row.counts)
    yield from (("D", side.name) for side in diff.only_in_a)
    yield from (("A", side.name) for side in diff.only_in_b)
    yield from (("R", row.a.name, row.b.name) for row in diff.renamed)


def note_lines(diff: Diff, look: Look) -> Iterator[str]:
    """What is worth knowing beside the differences."""
    for note in diff.notes:
        yield from wrapped(f"note: {clean(note)}", look.width)
    hidden = diff.changed_in_all - len(diff.changed)
    if hidden:
        yield from wrapped(f"and {counted(hidden, 'more tensor')} (--max-diffs)", look.width)


def summary_lines(diff: Diff, look: Look) -> Iterator[str]:
    """`12 of 161 entries differ, 3 only in A; 149 equal (20 by CRC-32 alone)`."""
    text = _identical(diff) if diff.identical else _different(diff)
    yield from (look.bold(line) for line in wrapped(text, look.width))


def diff_line(diff: Diff) -> str:
    """Return the summary, the two files in front."""
    return " ".join([clean(diff.a), f"{clean(diff.b)}:", *summary_lines(diff, PLAIN)])


def _identical(diff: Diff) -> str:
    found = "equal" if diff.close else "identical"
    if diff.structure:
        found = "the same structure"
    aside = [*_on_trust(diff)]
    if diff.structure:
        aside.append("values not compared")
    aside.extend(f"ignored {tag}" for tag in _tags(diff))
    return f"{found}: {counted(diff.common, 'entry')}{_bracketed(aside)}"


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
        yield f"{counted(diff.by_checksum, 'tensor')} compared by CRC-32 alone"


def _bracketed(parts: Iterable[str]) -> str:
    text = ", ".join(parts)
    return f" ({text})" if text else ""


def _entries(number: int) -> str:
    return f"{count(number)} common {'entry' if number == 1 else 'entries'}"


def _headlines(diff: Diff, look: Look) -> Iterator[str]:
    counts = diff.counts
    sides = (("A", diff.a, diff.format_a, "D"), ("B", diff.b, diff.format_b, "A"))
    for letter, path, form, status in sides:
        entries = counted(diff.common + counts[status] + counts["R"], "entry")
        facts = f"  {clean(form)}, {entries}"
        room = (look.width or 1 << 30) - len(facts) - 3
        yield f"{look.bold(letter)}  {shorten(clean(path), room)}{facts}"


def _changed_tables(diff: Diff, look: Look, fold: bool) -> Iterator[Iterable[str]]:
    """Tensors that cannot be held against each other, then those that can with the figures."""
    rows = changed_rows([row for row in diff.changed if _is_content(row)], whole=False, fold=fold)
    bare = [row for row in rows if row.figures is None]
    measured = [row for row in rows if row.figures is not None]
    yield _drawn([_names(bare), _counted(bare), _what(bare), *_sides(bare)], look)
    what = Column("what", [_in_brief(row) for row in measured])
    yield _drawn(
        [_names(measured), _counted(measured), what, *_figures(measured, whole=False)],
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
    return _drawn([names, _counted(rows), Column("", change, flexible=True)], look)


def _only_tables(diff: Diff, look: Look, fold: bool) -> Iterator[Iterable[str]]:
    for status, sides, heading in (
        ("D", diff.only_in_a, "only in A"),
        ("A", diff.only_in_b, "only in B"),
    ):
        rows = only_rows(status, sides, whole=False, fold=fold)
        what = Column("", [row.a or row.b for row in rows], flexible=True)
        yield _drawn([_names(rows, heading), _counted(rows), what], look)


def _renamed_table(diff: Diff, look: Look, fold: bool) -> Iterable[str]:
    rows = renamed_rows(diff.renamed, fold=fold)
    new = Column("in B", [row.b for row in rows], flexible=True)
    what = Column("", [row.what for row in rows])
    return _drawn([_names(rows, "renamed from"), _counted(rows), new, what], look)


def _one_table(diff: Diff, look: Look) -> Iterable[str]:
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
    return _table(columns, look)


def _names(rows: Sequence[Row], heading: str = "name") -> Column:
    return Column(heading, [row.label for row in rows], flexible=True)


def _counted(rows: Sequence[Row]) -> Column:
    """Return the column that says `x32` of a row for 32 entries."""
    return Column("", [f"x{row.count}" if row.count > 1 else "" for row in rows])


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
        Column(heading, [row[n] for row in cells], right=heading != _FIGURES[-1])
        for n, heading in enumerate(_FIGURES)
    ]


def _drawn(columns: Sequence[Column], look: Look, spare: Sequence[str] = ()) -> Iterable[str]:
    """Return a table of the columns that have a filled cell; nothing without rows."""
    if not columns[0].cells:
        return ()
    return _table([column for column in columns if any(column.cells)], look, spare)


def _table(columns: Sequence[Column], look: Look, spare: Sequence[str] = ()) -> Iterable[str]:
    headings = [column.heading for column in columns]
    return table(
        headings,
        [list(row) for row in zip(*(column.cells for column in columns), strict=True)],
        look,
        right={n for n, column in enumerate(columns) if column.right},
        flexible=[n for n, column in enumerate(columns) if column.flexible],
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


_MARKS = {"~": "MT", "-": "D", "+": "A", ">": "R"}
"""What stands in a bar for entries of which status."""
_WIDEST_BAR = 32


def stat_lines(diff: Diff, look: Look, *, fold: bool = True) -> Iterator[str]:
    """A line for each module in which something differs and the totals; `fold` repeated ones."""
    tables = [_modules(diff, look, fold and not look.fmt)] if look.fmt or not diff.identical else []
    return apart(
        tables if look.fmt else [*tables, note_lines(diff, look), summary_lines(diff, look)]
    )


def _modules(diff: Diff, look: Look, fold: bool) -> Iterator[str]:
    modules = _by_module(diff)
    totals = []
    names = list(modules)
    alike = ((name, tuple(sorted(modules[name].items()))) for name in names)
    for family in folded(alike, fold=fold):
        times = len(family.names)
        one = modules[family.names[0]]
        totals.append((family.label, times, {mark: one[mark] * times for mark in _MARKS}))
    most = max((sum(found.values()) for _, _, found in totals), default=0)
    rows = [
        [
            clean(label) or "(top level)",
            f"x{times}" if times > 1 else "",
            count(sum(found.values())),
            _bar(found, most),
        ]
        for label, times, found in totals
    ]
    headers = ["module", "repeated" if look.fmt else "", "differing", "bar" if look.fmt else ""]
    return table(headers, rows, look, right={2})


def _by_module(diff: Diff) -> dict[str, Counter[str]]:
    """How many entries of each mark, by the name without its last part."""
    marks = {status: mark for mark, statuses in _MARKS.items() for status in statuses}
    modules: dict[str, Counter[str]] = {}
    for status, *names in _differing(diff):
        name = names[-1]
        module = name[: max(name.rfind("."), name.rfind("/"), 0)]
        modules.setdefault(module, Counter())[marks[status]] += 1
    return modules


def _bar(found: Mapping[str, int], most: int) -> str:
    """`~~~-+`: as long as the numbers, or to scale where they are large; none of them vanishes."""
    scale = min(1.0, _WIDEST_BAR / most)
    return "".join(mark * max(round(found[mark] * scale), found[mark] > 0) for mark in _MARKS)
