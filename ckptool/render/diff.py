"""`ckptool diff` as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptool.inspection.diff import TAGS
from ckptool.inspection.diff_result import Changed, Diff, Renamed, Side, magnitude
from ckptool.inspection.values import shape_text
from ckptool.names import Family, families, numbered
from ckptool.render.table import apart, table
from ckptool.render.text import PLAIN, Look, count, number, quoted, share, shorten, wrapped
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

_ODD = ("nan_a", "nan_b", "inf_a", "inf_b")
_FIGURES = ("max abs", "mean abs", "max rel", "rmse", "cosine", "differing", "NaN, Inf")


@dataclass(frozen=True, slots=True)
class Row:
    """`count` entries that differ alike; each figure is the worst of theirs."""

    status: str
    name: str
    what: str = ""
    a: str = ""
    b: str = ""
    figures: Difference | None = None
    count: int = 1


def _changed(found: Iterable[Changed], *, whole: bool = False, tags: bool = False) -> list[Row]:
    """Return a row for each entry of both files, those without figures first.

    `whole` texts are not shortened. With `tags` a row has device and requires_grad, too.
    """
    rows = [Row(row.status, row.name, *_said_of(row, whole, tags), row.difference) for row in found]
    return _by_change(rows)


def _only(diff: Diff, *, whole: bool = False) -> tuple[list[Row], list[Row]]:
    """Return the rows of the entries that only A has, and those that only B has."""
    return (
        [Row("D", side.name, a=_words(side, whole)) for side in diff.only_in_a],
        [Row("A", side.name, b=_words(side, whole)) for side in diff.only_in_b],
    )


def _renamed(diff: Diff) -> list[Row]:
    """Return a row for each renamed tensor: `a` and `b` are its names, `what` is what it is."""
    return [
        Row("R", row.a.name, _words(row.a, True), _label(row.a.name), _label(row.b.name))
        for row in diff.renamed
    ]


def _folded(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with repeated layers as one."""
    found = []
    for family in families((row.name, _alike(row, n)) for n, row in enumerate(rows)):
        members = [rows[n] for n in family.numbers]
        first, b = members[0], members[0].b
        if first.status == "R":
            b = families((row.b, None) for row in members)[0].label
        worst = _worst([row.figures for row in members if row.figures is not None])
        found.append(Row(first.status, family.label, first.what, first.a, b, worst, len(members)))
    return found


def _alike(row: Row, number: int) -> Hashable:
    """Return what is equal of rows that may be folded: renamed ones change both names in step."""
    if row.status == "R":
        (_, before), (texts, after) = numbered(row.name), numbered(row.b)
        return row.what, texts if before == after else number
    one = row.figures
    odd = one and tuple(map(bool, (one.nan_a, one.nan_b, one.inf_a, one.inf_b)))
    return row.status, row.what, row.a, row.b, odd


def _by_change(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: magnitude(row.figures), reverse=True)


def _worst(found: Sequence[Difference]) -> Difference | None:
    """Return the worst of each figure: NaN and infinities of all, the largest share of elements."""
    if not found:
        return None

    def most(name: str, worst: Callable[..., Any] = max) -> Any:
        known = [figure for one in found if (figure := getattr(one, name)) is not None]
        nan = next((figure for figure in known if figure != figure), None)
        return worst(known, default=None) if nan is None else nan

    return replace(
        max(found, key=lambda one: one.share),
        **{name: most(name) for name in ("max_abs", "mean_abs", "max_rel", "rmse")},
        cosine=most("cosine", min),
        **{name: sum(getattr(one, name) for one in found) for name in _ODD},
    )


def folded(names: Iterable[tuple[str, Hashable]], *, fold: bool) -> list[Family]:
    """Return `families`, or without `fold` each name by itself."""
    if fold:
        return families(names)
    return [Family(name, (name,), (number,)) for number, (name, _) in enumerate(names)]


def figures(found: Difference | None, *, whole: bool) -> list[str]:
    """Return the cells below `_FIGURES`; `whole` numbers have six digits, others three."""
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


def _said_of(row: Changed, whole: bool, tags: bool) -> tuple[str, str, str]:
    """Return in what an entry differs, and what it is on either side."""
    kept = [aspect for aspect in row.what if tags or aspect not in TAGS]
    place = (row.place or "").removeprefix("quantizer/")
    what = ", ".join(kept) + (f" at {clean(place)}" if place else "")
    a, b = (" ".join(_said(side, kept, row, whole)) for side in (row.a, row.b))
    if row.change is not None and (row.place or "tensor" in (row.a.sort, row.b.sort)):
        a, b = (f"{a} {clean(text)}".strip() for a, text in zip((a, b), row.change, strict=True))
    return what, a, b


def _said(side: Side, aspects: Sequence[str], row: Changed, whole: bool) -> Iterator[str]:
    """Yield the aspects of one side in which the two differ."""
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
    """Return what an entry of one file alone is."""
    if side.sort == "tensor":
        return f"{side.dtype} {shape_text(side.shape or ())}"
    return "None" if side.value is None else _typed(side, whole)


def _typed(side: Side, whole: bool, *, alone: bool = True) -> str:
    """Return the type of an entry, with its value where that is told nowhere else."""
    kind = clean(side.type)
    if side.sort == "tensor":
        return f"{kind} {side.dtype} {shape_text(side.shape or ())}" if alone else kind
    literal = _literal(side, whole)
    if side.sort != "value" and literal.startswith(kind):  # `dict of 3`
        return literal
    return f"{kind} {literal}" if alone else kind


def _literal(side: Side, whole: bool) -> str:
    """Return a value as Python writes it; the words for anything else."""
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
    """Yield the files, what differs with the largest change first, and a summary.

    With `fold` repeated layers are one row, with the worst of each figure. With `look.fmt` the
    result is one table that has a row for every difference.
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
            *_tables(diff, look, _folded if fold else list),
            _tag_lines(diff, look),
            note_lines(diff, look),
            summary_lines(diff, look),
        ]
    )


def status_lines(diff: Diff) -> Iterator[str]:
    r"""Return a line for each entry that differs, as git has it: `M\tname`, `R\told\tnew`.

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
    """Yield what is worth knowing beside the differences."""
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
    """Yield what makes equal less than equal byte for byte."""
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


def _tables(
    diff: Diff, look: Look, fold: Callable[[Sequence[Row]], list[Row]]
) -> Iterator[Iterable[str]]:
    """Yield a table for each kind of difference."""
    rows = _by_change(fold(_changed(filter(_is_content, diff.changed))))
    bare = [row for row in rows if row.figures is None]
    yield _drawn([_names(bare), _counted(bare), _what(bare), *_sides(bare)], look)
    rows = [row for row in rows if row.figures is not None]
    what = Column("what", [_in_brief(row) for row in rows])
    measured = _figures(rows, whole=False)
    yield _drawn([_names(rows), _counted(rows), what, *measured], look, _SPARE)
    rows = fold(_changed(filter(_is_content, diff.values)))
    change = Column("", [_in_brief(row, place=True) for row in rows], flexible=True)
    yield _drawn([_names(rows, "value"), _counted(rows), change], look)
    for heading, rows in zip(("only in A", "only in B"), map(fold, _only(diff)), strict=True):
        what = Column("", [row.a or row.b for row in rows], flexible=True)
        yield _drawn([_names(rows, heading), _counted(rows), what], look)
    rows = fold(_renamed(diff))
    new = Column("in B", [row.b for row in rows], flexible=True)
    what = Column("", [row.what for row in rows])
    yield _drawn([_names(rows, "renamed from"), _counted(rows), new, what], look)


def _is_content(row: Changed) -> bool:
    return not TAGS.issuperset(row.what)


def _in_brief(row: Row, *, place: bool = False) -> str:
    """Return `value`, or `float32 -> bfloat16`; with `place` the change of a value."""
    at = row.what.partition(" at ")[2] if place else ""
    return f"{row.a} -> {row.b}{f' (at {at})' if at else ''}" if row.a or place else row.what


def _one_table(diff: Diff, look: Look) -> Iterable[str]:
    """Return a table of all differences under the same headings."""
    counting = [row for row in (*diff.changed, *diff.values) if row.counts]
    only_a, only_b = _only(diff, whole=True)
    rows = [*_changed(counting, whole=True, tags=True), *only_a, *only_b, *_renamed(diff)]
    columns = [
        Column("status", [row.status for row in rows]),
        _names(rows),
        _what(rows),
        *_sides(rows),
        *_figures(rows, whole=True),
    ]
    return _table(columns, look)


def _names(rows: Sequence[Row], heading: str = "name") -> Column:
    return Column(heading, [_label(row.name) for row in rows], flexible=True)


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
    """Yield a line for each module that differs, and the totals; `fold` repeated ones."""
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
    """Return how many entries of each mark, by the name without its last part."""
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
