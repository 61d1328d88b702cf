"""`ckptool diff` as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ckptool.comparison.diff import TAGS, Changed, Diff, Renamed, Side, magnitude
from ckptool.core.names import Family, group_families, split_numbers
from ckptool.core.values import format_shape
from ckptool.render.table import apart, table
from ckptool.render.text import PLAIN, Look, number, quoted, share, shorten, wrapped
from ckptool.words import clean, counted

if TYPE_CHECKING:
    from ckptool.tensors.comparing import Difference

_SHORT = 40  # characters of each of two values on a line
_MOST_MOVES = 5
_FIGURES = ("rel norm", "max abs", "mean abs", "max rel", "rmse", "cosine", "differing", "NaN, Inf")
_NUMBERS = range(5, 12)
"""Numeric columns of a table: all of `_FIGURES` except the last."""
_SPARE = ("rmse", "mean abs", "cosine", "max rel", "what", "NaN, Inf", "max abs")
"""Columns that are left out on a narrow terminal, the first one first."""
_MARKS = {"M": "~", "T": "~", "D": "-", "A": "+", "R": ">"}
"""The mark of each status in the bars of `--stat`."""
_WIDEST_BAR = 32


@dataclass(frozen=True, slots=True)
class Row:
    """An entry that differs, or `count` entries of repeated layers that differ alike."""

    status: str
    name: str
    """The name in A, or in B if only B has the entry."""
    what: str = ""
    """The differences; for a renamed tensor its dtype and shape."""
    a: str = ""
    b: str = ""
    """The entry in B; for a renamed tensor the new name."""
    figures: Difference | None = None
    """The largest differences of the entries."""
    count: int = 1
    is_weight: bool = False
    is_integer: bool = False


def diff_rows(diff: Diff, *, whole: bool = False) -> Iterator[Row]:
    """Yield a row for each difference, including device and requires_grad.

    The status is `=` if these two differ but do not count. Values are shortened unless `whole`.
    """
    yield from _changed((*diff.changed, *diff.values), tags=True, whole=whole)
    yield from _unpaired(diff, whole)


def _changed(found: Iterable[Changed], *, tags: bool = False, whole: bool = False) -> Iterator[Row]:
    """Yield a row for each entry of both files; `tags`: device and requires_grad count as well."""
    for row in found:
        aspects = [aspect for aspect in row.what if tags or aspect not in TAGS]
        place = (row.place or "").removeprefix("quantizer/")
        what = ", ".join(aspects) + (f" at {clean(place)}" if place else "")
        a, b = (" ".join(_describe_side(side, aspects, whole)) for side in (row.a, row.b))
        if row.change is not None and (row.place or "tensor" in (row.a.sort, row.b.sort)):
            a, b = (
                f"{a} {clean(text)}".strip() for a, text in zip((a, b), row.change, strict=True)
            )
        if aspects:
            yield Row(
                row.status if row.counts else "=", row.name, what, a, b, row.difference,
                is_weight=row.is_weight, is_integer=row.is_integer,
            )  # fmt: skip


def _unpaired(
    diff: Diff, whole: bool, hidden: Collection[tuple[str, str | None]] = ()
) -> Iterator[Row]:
    """Yield a row for each entry of only one file, except in `hidden` containers."""
    only_a, only_b = (
        [side for side in sides if (letter, side.container) not in hidden]
        for letter, sides in (("A", diff.only_in_a), ("B", diff.only_in_b))
    )
    yield from (Row("D", side.name, a=_about(side, whole)) for side in only_a)
    yield from (Row("A", side.name, b=_about(side, whole)) for side in only_b)
    for moved in diff.renamed:
        tags = "".join(f", different {tag}" for tag in moved.what)
        yield Row("R", moved.a.name, _about(moved.a, whole) + tags, b=moved.b.name)


def _describe_side(side: Side, aspects: Sequence[str], whole: bool) -> Iterator[str]:
    """Yield these aspects of one side, except the values of a tensor, which have figures."""
    if "type" in aspects:
        yield (f"{clean(side.type)} " if side.sort == "tensor" else "") + _about(side, whole)
        return
    for aspect in aspects:
        if aspect == "shape" and side.shape is not None:
            yield format_shape(side.shape)
        elif aspect in ("value", "quantizer"):
            if side.sort != "tensor":
                yield _literal(side, whole)
        elif side.sort == "tensor" or side.device is not None:
            yield clean(str(getattr(side, aspect)))


def _about(side: Side, whole: bool) -> str:
    """Return the type of an entry with its shape or value: `float32 [2, 3]`, `int 3`."""
    if side.sort == "tensor":
        return f"{side.dtype} {format_shape(side.shape or ())}"
    kind, literal = clean(side.type), _literal(side, whole)
    names_its_type = side.sort != "value" and literal.startswith(kind)  # `dict of 3`
    return literal if side.value is None or names_its_type else f"{kind} {literal}"


def _literal(side: Side, whole: bool) -> str:
    text = repr(side.value) if side.type == "str" else str(side.value)
    return clean(text if whole else shorten(text, _SHORT))


def _folded(rows: Sequence[Row]) -> list[Row]:
    found = []
    for family in group_families((row.name, _fold_key(row, n)) for n, row in enumerate(rows)):
        members = [rows[n] for n in family.numbers]
        first, b = members[0], members[0].b
        if first.status == "R":
            b = group_families((row.b, None) for row in members)[0].label
        worst = _worst([row.figures for row in members if row.figures is not None])
        merged = replace(first, name=family.label, b=b, figures=worst, count=len(members))
        found.append(merged)
    return found


def _fold_key(row: Row, number: int) -> Hashable:
    """Return a key that is equal for rows that can be folded.

    The numbers of a renamed row change in step in both names.
    """
    if row.status == "R":
        (_, before), (texts, after) = split_numbers(row.name), split_numbers(row.b)
        return row.what, texts if before == after else number
    one = row.figures
    odd = one and tuple(map(bool, (one.nan_a, one.nan_b, one.inf_a, one.inf_b)))
    return row.status, row.what, row.a, row.b, odd, row.is_weight, row.is_integer


def _worst(found: Sequence[Difference]) -> Difference | None:
    """Return the largest of each difference. NaN and infinities are summed."""
    if not found:
        return None

    def most(name: str, sign: int = 1) -> Any:
        known = [figure for one in found if (figure := getattr(one, name)) is not None]
        return max(known, key=lambda figure: (figure != figure, sign * figure), default=None)

    return replace(
        max(found, key=lambda one: one.share),
        **{name: most(name) for name in ("rel_norm", "max_abs", "mean_abs", "max_rel", "rmse")},
        cosine=most("cosine", -1),
        **{
            name: sum(getattr(one, name) for one in found)
            for name in ("nan_a", "nan_b", "inf_a", "inf_b")
        },
    )


def folded(names: Iterable[tuple[str, Hashable]], *, fold: bool) -> list[Family]:
    """Return `families`, or without `fold` each name by itself."""
    if fold:
        return group_families(names)
    return [Family(name, (name,), (number,)) for number, (name, _) in enumerate(names)]


def _figures(found: Difference | None, whole: bool) -> list[str]:
    """Return the cells below `_FIGURES`, with six digits if `whole`, else three."""
    if found is None:
        return [""] * len(_FIGURES)

    def said(figure: float | None, digits: str = ".3g") -> str:
        return "" if figure is None else number(figure) if whole else format(figure, digits)

    odd = (("NaN", found.nan_a, found.nan_b), ("Inf", found.inf_a, found.inf_b))
    return [
        said(found.rel_norm),
        said(found.max_abs),
        said(found.mean_abs),
        said(found.max_rel),
        said(found.rmse),
        said(found.cosine, ".6f"),
        share(found.mismatched, found.elements),
        ", ".join(f"{name} {a:,} -> {b:,}" for name, a, b in odd if a or b),
    ]


def _cells(row: Row, *, whole: bool = False) -> list[str]:
    a, b = row.a, row.b
    if row.status == "R":
        a, b = _label(row.name) if whole else "", _label(row.b)
    return [row.what, a, b, *_figures(row.figures, whole)]


def _label(name: str) -> str:
    return clean(name) or "(the whole file)"


def diff_lines(diff: Diff, look: Look = PLAIN, *, fold: bool = True) -> Iterator[str]:
    """Yield the files, a summary, and the differences: the weights first, the largest change first.

    With `fold` repeated layers are one row, with the worst of each figure, and a container that
    only one file has is one line. With `look.fmt` the result is one table that has a row for every
    difference.
    """
    if look.fmt:
        headings = ("status", "name", "what", "in A", "in B", *_FIGURES)
        rows = [
            [row.status, _label(row.name), *_cells(row, whole=True)]
            for row in diff_rows(diff, whole=True)
            if row.status != "="
        ]
        yield from table(headings, rows, look, right=_NUMBERS)
    elif diff.identical:
        yield from chain(summary_lines(diff, look), note_lines(diff, look))
    else:
        ignored = ", ignored without --strict" if diff.tagged else ""
        tags = (line for tag in _tags(diff) for line in wrapped(f"{tag}{ignored}", look.width))
        top = chain(_headlines(diff, look), summary_lines(diff, look))
        yield from apart([top, *_tables(diff, look, fold), tags, note_lines(diff, look)])


def _headlines(diff: Diff, look: Look) -> Iterator[str]:
    sides = (("A", diff.a, diff.format_a, "D"), ("B", diff.b, diff.format_b, "A"))
    for letter, path, form, status in sides:
        entries = counted(diff.common + diff.counts[status] + diff.counts["R"], "entry")
        facts = f"  {clean(form)}, {entries}"
        room = (look.width or 1 << 30) - len(facts) - 3
        yield f"{look.bold(letter)}  {shorten(clean(path), room)}{facts}"


def _tables(diff: Diff, look: Look, fold: bool) -> Iterator[Iterable[str]]:
    one_sided = _containers(diff) if fold else {}
    unpaired = _unpaired(diff, whole=False, hidden=one_sided)
    rows = map(list, (_changed(diff.changed), _changed(diff.values), unpaired))
    tensors, values, others = map(_folded, rows) if fold else rows
    for heading in ("weight", "tensor"):
        part = [row for row in tensors if row.is_weight == (heading == "weight")]
        yield _table(heading, [row for row in part if row.figures is None], look)
        measured = [_brief(row) for row in part if row.figures is not None]
        measured.sort(
            key=lambda row: (not row.is_integer, magnitude(row.figures, diff.sort)), reverse=True
        )
        yield _table(heading, measured, look, _SPARE)
    yield _table("value", values, look)
    yield (
        line
        for (side, name), text in one_sided.items()
        for line in wrapped(f"only in {side}: {_label(name or '')}, {text}", look.width)
    )
    yield _table("only in A", [_brief(row) for row in others if row.status == "D"], look)
    yield _table("only in B", [_brief(row) for row in others if row.status == "A"], look)
    yield _table("renamed from", [row for row in others if row.status == "R"], look)


def _containers(diff: Diff) -> dict[tuple[str, str | None], str]:
    """Return the content of containers that only A or B has, by side and name."""
    found: dict[tuple[str, str | None], list[Side]] = {}
    for letter, sides in (("A", diff.only_in_a), ("B", diff.only_in_b)):
        for side in sides:
            if side.container is not None:
                found.setdefault((letter, side.container), []).append(side)
    tensors = {at: sum(side.sort == "tensor" for side in found[at]) for at in found}
    return {
        at: counted(tensors[at], "tensor") if tensors[at] else counted(len(sides), "entry")
        for at, sides in found.items()
        if len(sides) > 1
    }


def _brief(row: Row) -> Row:
    """Return the row with both sides as `what`: `float32 -> bfloat16`."""
    sides = " -> ".join(filter(None, (row.a, row.b)))
    return replace(row, what=sides or row.what, a="", b="")


def _table(
    heading: str, rows: Sequence[Row], look: Look, spare: Sequence[str] = ()
) -> Iterator[str]:
    """Yield a table of the columns with content; nothing without rows."""
    headings = (heading, "", "what", "in A", "in B", *_FIGURES)
    cells = [
        [_label(row.name), f"x{row.count}" if row.count > 1 else "", *_cells(row)] for row in rows
    ]
    if cells:
        yield from table(
            headings,
            cells,
            look,
            right=_NUMBERS,
            flexible=(0, 2, 3, 4),
            spare=[headings.index(name) for name in spare],
            optional=range(1, len(headings)),
        )


def _tags(diff: Diff) -> Iterator[str]:
    """Yield `device: cuda:3 -> cpu (14)`."""
    rows: list[Changed | Renamed] = [*diff.changed, *diff.values, *diff.renamed]
    for tag in sorted(TAGS):
        moves = Counter(
            (str(getattr(row.a, tag)), str(getattr(row.b, tag))) for row in rows if tag in row.what
        )
        parts = [
            f"{clean(before)} -> {clean(after)} ({number:,})"
            for (before, after), number in moves.most_common(_MOST_MOVES)
        ]
        if len(moves) > _MOST_MOVES:
            parts.append(f"and {len(moves) - _MOST_MOVES:,} more")
        if parts:
            yield f"{tag}: {', '.join(parts)}"


def note_lines(diff: Diff, look: Look) -> Iterator[str]:
    """Yield the notes of a diff, and how many tensors `--max-diffs` left out."""
    for note in diff.notes:
        yield from wrapped(f"note: {clean(note)}", look.width)
    hidden = diff.changed_in_all - len(diff.changed)
    if hidden:
        yield from wrapped(f"and {counted(hidden, 'more tensor')} (--max-diffs)", look.width)


def summary_lines(diff: Diff, look: Look) -> Iterator[str]:
    """Yield `12 of 161 common entries differ, 3 only in A; 149 equal`, wrapped."""
    aside = [f"{diff.close:,} within the tolerance"] if diff.close else []
    if diff.by_checksum:
        aside.append(f"{counted(diff.by_checksum, 'tensor')} compared only by CRC-32")
    if diff.identical:
        found = "equal" if diff.close else "identical"
        if diff.structure:
            found = "the same structure"
            aside.append("values not compared")
        aside += [f"ignored {tag}" for tag in _tags(diff)]
        text = f"{found}: {counted(diff.common, 'entry')}"
    else:
        changed = diff.counts["M"] + diff.counts["T"]
        verb = "differs" if changed == 1 else "differ"
        entries = "entry" if diff.common == 1 else "entries"
        parts = [f"{changed:,} of {diff.common:,} common {entries} {verb}"] if diff.common else []
        for status, words in (("D", "only in A"), ("A", "only in B"), ("R", "renamed")):
            parts += [f"{diff.counts[status]:,} {words}"] if diff.counts[status] else []
        text = ", ".join(parts)
        if diff.common:
            text += f"; {diff.equal:,} equal{' in structure' if diff.structure else ''}"
        else:
            text = f"no keys in common: {text}"
    text += f" ({', '.join(aside)})" if aside else ""
    yield from map(look.bold, wrapped(text, look.width))


def diff_line(diff: Diff) -> str:
    """Return the two files and the summary in one line."""
    return " ".join([clean(diff.a), f"{clean(diff.b)}:", *summary_lines(diff, PLAIN)])


def status_lines(diff: Diff) -> Iterator[str]:
    r"""Yield a line for each difference, in the format of git: `M\tname`, `R\told\tnew`.

    Names with quotes, backslashes or unprintable characters are quoted as in git.
    """
    for row in diff_rows(diff):
        if row.status != "=":
            names = (row.name, row.b) if row.status == "R" else (row.name,)
            yield "\t".join((row.status, *map(quoted, names)))


def stat_lines(diff: Diff, look: Look, *, fold: bool = True) -> Iterator[str]:
    """Return a line for each module that differs, and the totals; `fold` repeated modules."""
    if look.fmt:
        return _modules(diff, look, fold=False)
    return apart([summary_lines(diff, look), _modules(diff, look, fold), note_lines(diff, look)])


def _modules(diff: Diff, look: Look, fold: bool) -> Iterator[str]:
    modules: dict[str, Counter[str]] = {}
    for row in diff_rows(diff):
        name = row.b if row.status == "R" else row.name
        module = name[: max(name.rfind("."), name.rfind("/"), 0)]
        if row.status in _MARKS:
            modules.setdefault(module, Counter())[_MARKS[row.status]] += 1
    alike = ((name, tuple(sorted(marks.items()))) for name, marks in modules.items())
    found = [(one.label, len(one.names), modules[one.names[0]]) for one in folded(alike, fold=fold)]
    most = max((times * marks.total() for _, times, marks in found), default=1)
    scale = min(1.0, _WIDEST_BAR / most)
    rows = [
        [
            clean(label) or "(top level)",
            f"x{times}" if times > 1 else "",
            f"{times * marks.total():,}",
            "".join(
                mark * max(round(times * marks[mark] * scale), marks[mark] > 0) for mark in "~-+>"
            ),
        ]
        for label, times, marks in found
    ]
    headers = ["module", "repeated" if look.fmt else "", "differing", "bar" if look.fmt else ""]
    if rows or look.fmt:
        yield from table(headers, rows, look, right={2})
