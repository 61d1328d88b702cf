"""`ckptool diff` as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isnan
from typing import TYPE_CHECKING, Any

from ckptool.comparison.diff import TAGS, Changed, Diff, Renamed, Side, magnitude_key
from ckptool.core.names import Family, group_families, split_numbers
from ckptool.core.values import format_shape
from ckptool.render.table import separate_blocks, table_lines
from ckptool.render.text import (
    PLAIN,
    Look,
    format_number,
    format_share,
    quote_as_git,
    shorten,
    wrap_text,
)
from ckptool.words import clean, counted

if TYPE_CHECKING:
    from ckptool.tensors.comparing import Difference

_MAX_VALUE_LENGTH = 40
"""The most characters of each of two values on a line."""
_MAX_MOVES = 5
"""The most pairs of devices, or of requires_grad, on a line."""
_FIGURES = ("rel norm", "max abs", "mean abs", "max rel", "rmse", "cosine", "differing", "NaN, Inf")
_NUMERIC_COLUMNS = range(5, 12)
"""Numeric columns of a table: all of `_FIGURES` except the last."""
_COLUMNS_BY_IMPORTANCE = ("rmse", "mean abs", "cosine", "max rel", "what", "NaN, Inf", "max abs")
"""Columns that are left out on a narrow terminal, the first one first."""
_MARK_BY_STATUS = {"M": "~", "T": "~", "D": "-", "A": "+", "R": ">"}
"""The mark of each status in the bars of `--stat`."""
_MAX_BAR_WIDTH = 32


@dataclass(frozen=True, slots=True)
class Row:
    """An entry that differs, or `count` entries of repeated layers that differ alike."""

    status: str
    name: str
    """The name in A, or in B if only B has the entry."""
    what: str = ""
    """The differences; for a renamed tensor its dtype and shape."""
    a: str = ""
    """The differing aspects of the entry in A, or the whole entry if only A has it."""
    b: str = ""
    """The same in B; for a renamed tensor the new name."""
    figures: Difference | None = None
    """The largest differences of the entries."""
    count: int = 1
    is_weight: bool = False
    is_integer: bool = False


def diff_rows(diff: Diff, *, full: bool = False) -> Iterator[Row]:
    """Yield a row for each difference, including device and requires_grad.

    The status is `=` if these two differ but do not count. Values are shortened unless `full`.
    """
    yield from _changed_rows((*diff.changed, *diff.values), tags=True, full=full)
    yield from _unpaired_rows(diff, full)


def _changed_rows(
    changes: Iterable[Changed], *, tags: bool = False, full: bool = False
) -> Iterator[Row]:
    """Yield a row for each changed entry; with `tags`, also for device and requires_grad.

    Its sides are the aspects that differ. A difference inside an entry, or of a tensor that became
    a value, adds the changed texts.
    """
    for changed in changes:
        aspects = [aspect for aspect in changed.what if tags or aspect not in TAGS]
        if not aspects:
            continue
        # An aspect `quantizer` already says where the place is.
        place = (changed.place or "").removeprefix("quantizer/")
        description = ", ".join(aspects) + (f" at {clean(place)}" if place else "")
        a, b = (" ".join(_describe_side(side, aspects, full)) for side in (changed.a, changed.b))
        has_tensor = "tensor" in (changed.a.sort, changed.b.sort)
        if changed.change is not None and (changed.place or has_tensor):
            text_a, text_b = changed.change
            a, b = f"{a} {clean(text_a)}".strip(), f"{b} {clean(text_b)}".strip()
        yield Row(
            changed.status if changed.counts else "=",  # only device or requires_grad differ
            changed.name,
            description,
            a,
            b,
            changed.difference,
            is_weight=changed.is_weight,
            is_integer=changed.is_integer,
        )


def _unpaired_rows(
    diff: Diff, full: bool, hidden: Collection[tuple[str, str | None]] = ()
) -> Iterator[Row]:
    """Yield a row for each entry of only one file (status D or A), and each renamed one (R).

    Entries in `hidden` containers, pairs of A or B and a name, are left out.
    """
    for side in diff.only_in_a:
        if ("A", side.container) not in hidden:
            yield Row("D", side.name, a=_describe_entry(side, full))
    for side in diff.only_in_b:
        if ("B", side.container) not in hidden:
            yield Row("A", side.name, b=_describe_entry(side, full))
    for renamed in diff.renamed:
        tags = "".join(f", different {tag}" for tag in renamed.what)
        yield Row("R", renamed.a.name, _describe_entry(renamed.a, full) + tags, b=renamed.b.name)


def _describe_side(side: Side, aspects: Sequence[str], full: bool) -> Iterator[str]:
    """Yield these aspects of one side as texts, except the values of a tensor, which have figures.

    If the types differ, the whole entry is described instead.
    """
    if "type" in aspects:
        prefix = f"{clean(side.type)} " if side.sort == "tensor" else ""
        yield prefix + _describe_entry(side, full)
        return
    for aspect in aspects:
        if aspect == "shape" and side.shape is not None:
            yield format_shape(side.shape)
        elif aspect in ("value", "quantizer"):
            if side.sort != "tensor":
                yield _format_value(side, full)
        elif side.sort == "tensor" or side.device is not None:  # not a tensor: a storage or device
            yield clean(str(getattr(side, aspect)))


def _describe_entry(side: Side, full: bool) -> str:
    """Return the type of an entry with its shape or value: `float32 [2, 3]`, `int 3`, `None`."""
    if side.sort == "tensor":
        return f"{side.dtype} {format_shape(side.shape or ())}"
    kind, text = clean(side.type), _format_value(side, full)
    starts_with_type = side.sort != "value" and text.startswith(kind)  # `dict of 3`
    return text if side.value is None or starts_with_type else f"{kind} {text}"


def _format_value(side: Side, full: bool) -> str:
    """Return the value of an entry, shortened unless `full`."""
    text = repr(side.value) if side.type == "str" else str(side.value)
    return clean(text if full else shorten(text, _MAX_VALUE_LENGTH))


def _fold_rows(rows: Sequence[Row]) -> list[Row]:
    """Return one row for rows of repeated layers that differ alike, with the largest figures.

    Its name is a pattern such as `layers.{0..11}.weight`; a renamed row has one for both names.
    """
    folded = []
    for family in group_families((row.name, _fold_key(row, n)) for n, row in enumerate(rows)):
        members = [rows[n] for n in family.numbers]
        first, b = members[0], members[0].b
        if first.status == "R":  # renamed: `_fold_key` has checked that both names differ alike
            b = group_families((row.b, None) for row in members)[0].label
        largest = _find_largest_differences(
            [row.figures for row in members if row.figures is not None]
        )
        folded.append(replace(first, name=family.label, b=b, figures=largest, count=len(members)))
    return folded


def _fold_key(row: Row, number: int) -> Hashable:
    """Return a key that is equal for rows that can be folded; `number` is the index of the row.

    A renamed row is only folded with others if both of its names have the same numbers.
    """
    if row.status == "R":
        (_, old_numbers), (new_texts, new_numbers) = split_numbers(row.name), split_numbers(row.b)
        return row.what, new_texts if old_numbers == new_numbers else number
    difference, nonfinite = row.figures, None
    if difference is not None:  # rows that gain NaN or infinity stand out
        counts = (difference.nan_a, difference.nan_b, difference.inf_a, difference.inf_b)
        nonfinite = tuple(map(bool, counts))
    return row.status, row.what, row.a, row.b, nonfinite, row.is_weight, row.is_integer


def _find_largest_differences(differences: Sequence[Difference]) -> Difference | None:
    """Return the largest of each figure, the smallest cosine, and the sums of NaN and infinities.

    The counts of elements are those of the difference with the largest share. None without any.
    """
    if not differences:
        return None

    def find_largest(name: str, sign: int = 1) -> Any:
        """Return the largest figure of this name, or the smallest if `sign` is -1; NaN first."""
        known = [
            figure
            for difference in differences
            if (figure := getattr(difference, name)) is not None
        ]
        return max(known, key=lambda figure: (isnan(figure), sign * figure), default=None)

    return replace(
        max(differences, key=lambda difference: difference.share),
        **{
            name: find_largest(name)
            for name in ("rel_norm", "max_abs", "mean_abs", "max_rel", "rmse")
        },
        cosine=find_largest("cosine", -1),
        **{
            name: sum(getattr(difference, name) for difference in differences)
            for name in ("nan_a", "nan_b", "inf_a", "inf_b")
        },
    )


def fold_names(names: Iterable[tuple[str, Hashable]], *, fold: bool) -> list[Family]:
    """Return the families of `group_families`, or without `fold` each name by itself."""
    if fold:
        return group_families(names)
    return [Family(name, (name,), (number,)) for number, (name, _) in enumerate(names)]


def _format_figures(difference: Difference | None, full: bool) -> list[str]:
    """Return the cells below `_FIGURES`, with six digits if `full`, else three."""
    if difference is None:
        return [""] * len(_FIGURES)

    def format_figure(figure: float | None, digits: str = ".3g") -> str:
        """Return a figure in the format `digits`, or in six digits if `full`; none is empty."""
        return "" if figure is None else format_number(figure) if full else format(figure, digits)

    nonfinite = (
        ("NaN", difference.nan_a, difference.nan_b),
        ("Inf", difference.inf_a, difference.inf_b),
    )
    return [
        format_figure(difference.rel_norm),
        format_figure(difference.max_abs),
        format_figure(difference.mean_abs),
        format_figure(difference.max_rel),
        format_figure(difference.rmse),
        format_figure(difference.cosine, ".6f"),
        format_share(difference.mismatched, difference.elements),
        ", ".join(f"{name} {a:,} -> {b:,}" for name, a, b in nonfinite if a or b),
    ]


def _make_cells(row: Row, *, full: bool = False) -> list[str]:
    """Return the cells of a row from `what` to the figures.

    The sides of a renamed row are its names. Unless `full`, the old one has its own column.
    """
    a, b = row.a, row.b
    if row.status == "R":
        a, b = _format_name(row.name) if full else "", _format_name(row.b)
    return [row.what, a, b, *_format_figures(row.figures, full)]


def _format_name(name: str) -> str:
    """Return the name of a row, or words for the root."""
    return clean(name) or "(the whole file)"


def diff_lines(diff: Diff, look: Look = PLAIN, *, fold: bool = True) -> Iterator[str]:
    """Yield the files, a summary, and the differences: the weights first, the largest change first.

    With `fold` repeated layers are one row, with the worst of each figure, and a container that
    only one file has is one line. Tags (device, `requires_grad` and others) have one line each.
    With `look.fmt` the result is one table that has a row for every difference.
    """
    if look.fmt:
        headings = ("status", "name", "what", "in A", "in B", *_FIGURES)
        rows = [
            [row.status, _format_name(row.name), *_make_cells(row, full=True)]
            for row in diff_rows(diff, full=True)
            if row.status != "="
        ]
        yield from table_lines(headings, rows, look, right=_NUMERIC_COLUMNS)
    elif diff.identical:
        yield from chain(summary_lines(diff, look), note_lines(diff, look))
    else:
        ignored = ", ignored without --strict" if diff.tagged else ""
        tags = (
            line
            for tag in _describe_tags(diff)
            for line in wrap_text(f"{tag}{ignored}", look.width)
        )
        heading = chain(_heading_lines(diff, look), summary_lines(diff, look))
        yield from separate_blocks(
            [heading, *_difference_tables(diff, look, fold), tags, note_lines(diff, look)]
        )


def _heading_lines(diff: Diff, look: Look) -> Iterator[str]:
    """Yield a line about each file: its path, format and number of entries."""
    # With the status of the entries that only this side has.
    sides = (("A", diff.a, diff.format_a, "D"), ("B", diff.b, diff.format_b, "A"))
    for letter, path, format, status in sides:
        entries = counted(diff.common + diff.counts[status] + diff.counts["R"], "entry")
        facts = f"  {clean(format)}, {entries}"
        width = look.width or 1 << 30  # None does not shorten any path
        room = width - len(facts) - len(f"{letter}  ")
        yield f"{look.bold(letter)}  {shorten(clean(path), room)}{facts}"


def _difference_tables(diff: Diff, look: Look, fold: bool) -> Iterator[Iterable[str]]:
    """Yield the tables of weights, other tensors, values, entries of one side, and renamed entries.

    Weights and tensors have two tables each: without figures (another dtype or shape), then with.
    With `fold` a container that only one side has is one line.
    """
    one_sided = _describe_one_sided_containers(diff) if fold else {}
    unpaired = _unpaired_rows(diff, full=False, hidden=one_sided)
    rows = map(list, (_changed_rows(diff.changed), _changed_rows(diff.values), unpaired))
    tensors, values, others = map(_fold_rows, rows) if fold else rows
    for heading in ("weight", "tensor"):
        group = [row for row in tensors if row.is_weight == (heading == "weight")]
        yield _rows_table(heading, [row for row in group if row.figures is None], look)
        # With figures, A and B share a column.
        measured = [_merge_sides(row) for row in group if row.figures is not None]
        measured.sort(
            key=lambda row: (not row.is_integer, magnitude_key(row.figures, diff.sort)),
            reverse=True,
        )
        yield _rows_table(heading, measured, look, _COLUMNS_BY_IMPORTANCE)
    yield _rows_table("value", values, look)
    yield (
        line
        for (side, name), text in one_sided.items()
        for line in wrap_text(f"only in {side}: {_format_name(name or '')}, {text}", look.width)
    )
    # D: deleted in B, A: added in B, R: renamed.
    yield _rows_table("only in A", [_merge_sides(row) for row in others if row.status == "D"], look)
    yield _rows_table("only in B", [_merge_sides(row) for row in others if row.status == "A"], look)
    yield _rows_table("renamed from", [row for row in others if row.status == "R"], look)


def _describe_one_sided_containers(diff: Diff) -> dict[tuple[str, str | None], str]:
    """Map the side (A or B) and name of each container that only one file has to its size in words.

    It counts tensors, or entries if there are none. A container of one entry is left out.
    """
    sides_by_container: dict[tuple[str, str | None], list[Side]] = {}
    for letter, sides in (("A", diff.only_in_a), ("B", diff.only_in_b)):
        for side in sides:
            if side.container is not None:
                sides_by_container.setdefault((letter, side.container), []).append(side)

    def count_entries(sides: list[Side]) -> str:
        """Return `3 tensors`, or `3 entries` if no entry is a tensor."""
        tensors = sum(side.sort == "tensor" for side in sides)
        return counted(tensors, "tensor") if tensors else counted(len(sides), "entry")

    return {
        container: count_entries(sides)
        for container, sides in sides_by_container.items()
        if len(sides) > 1
    }


def _merge_sides(row: Row) -> Row:
    """Return the row with both sides as `what`: `float32 -> bfloat16`."""
    sides = " -> ".join(filter(None, (row.a, row.b)))
    return replace(row, what=sides or row.what, a="", b="")


def _rows_table(
    heading: str, rows: Sequence[Row], look: Look, spare: Sequence[str] = ()
) -> Iterator[str]:
    """Yield a table of the columns with content; nothing without rows.

    On a narrow terminal the columns in `spare` are left out, the first one first.
    """
    headings = (heading, "", "what", "in A", "in B", *_FIGURES)
    cells = [
        [_format_name(row.name), f"x{row.count}" if row.count > 1 else "", *_make_cells(row)]
        for row in rows
    ]
    if cells:
        yield from table_lines(
            headings,
            cells,
            look,
            right=_NUMERIC_COLUMNS,
            flexible=(0, 2, 3, 4),
            spare=[headings.index(name) for name in spare],
            optional=range(1, len(headings)),
        )


def _describe_tags(diff: Diff) -> Iterator[str]:
    """Yield a line about each tag that differs: `device: cuda:3 -> cpu (14)`."""
    rows: list[Changed | Renamed] = [*diff.changed, *diff.values, *diff.renamed]
    for tag in sorted(TAGS):
        moves = Counter(
            (str(getattr(row.a, tag)), str(getattr(row.b, tag))) for row in rows if tag in row.what
        )
        parts = [
            f"{clean(before)} -> {clean(after)} ({count:,})"
            for (before, after), count in moves.most_common(_MAX_MOVES)
        ]
        if len(moves) > _MAX_MOVES:
            parts.append(f"and {len(moves) - _MAX_MOVES:,} more")
        if parts:
            yield f"{tag}: {', '.join(parts)}"


def note_lines(diff: Diff, look: Look) -> Iterator[str]:
    """Yield the notes of a diff, and how many tensors `--max-diffs` left out."""
    for note in diff.notes:
        yield from wrap_text(f"note: {clean(note)}", look.width)
    hidden = diff.changed_in_all - len(diff.changed)
    if hidden:
        yield from wrap_text(f"and {counted(hidden, 'more tensor')} (--max-diffs)", look.width)


def summary_lines(diff: Diff, look: Look) -> Iterator[str]:
    """Yield `12 of 161 common entries differ, 3 only in A; 149 equal`, wrapped.

    For files without differences `identical: 161 entries`, or `equal` within the tolerance.
    """
    remarks = [f"{diff.close:,} within the tolerance"] if diff.close else []
    if diff.by_checksum:
        remarks.append(f"{counted(diff.by_checksum, 'tensor')} compared only by CRC-32")
    if diff.identical:
        verdict = "equal" if diff.close else "identical"
        if diff.structure:
            verdict = "the same structure"
            remarks.append("values not compared")
        remarks += [f"ignored {tag}" for tag in _describe_tags(diff)]
        text = f"{verdict}: {counted(diff.common, 'entry')}"
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
    text += f" ({', '.join(remarks)})" if remarks else ""
    yield from map(look.bold, wrap_text(text, look.width))


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
            yield "\t".join((row.status, *map(quote_as_git, names)))


def stat_lines(diff: Diff, look: Look, *, fold: bool = True) -> Iterator[str]:
    """Return a line for each module that differs, and the totals; `fold` repeated modules."""
    if look.fmt:
        return _module_lines(diff, look, fold=False)
    return separate_blocks(
        [summary_lines(diff, look), _module_lines(diff, look, fold), note_lines(diff, look)]
    )


def _module_lines(diff: Diff, look: Look, fold: bool) -> Iterator[str]:
    """Yield the table of modules, with the number of their differences and a bar of marks.

    A bar has `~` for changed, `-` and `+` for one-sided, and `>` for renamed entries. All have one
    scale, and at least one mark for each kind.
    """
    marks_by_module: dict[str, Counter[str]] = {}
    for row in diff_rows(diff):
        name = row.b if row.status == "R" else row.name
        module = name[: max(name.rfind("."), name.rfind("/"), 0)]
        if row.status in _MARK_BY_STATUS:
            marks_by_module.setdefault(module, Counter())[_MARK_BY_STATUS[row.status]] += 1
    # Repeated modules are folded if they have equal counts.
    keyed = ((module, tuple(sorted(marks.items()))) for module, marks in marks_by_module.items())
    folded = [  # the label, the number of modules, and the marks of each
        (family.label, len(family.names), marks_by_module[family.names[0]])
        for family in fold_names(keyed, fold=fold)
    ]
    longest = max((times * marks.total() for _, times, marks in folded), default=1)
    scale = min(1.0, _MAX_BAR_WIDTH / longest)
    rows = [
        [
            clean(label) or "(top level)",
            f"x{times}" if times > 1 else "",
            f"{times * marks.total():,}",
            "".join(
                mark * max(round(times * marks[mark] * scale), marks[mark] > 0) for mark in "~-+>"
            ),
        ]
        for label, times, marks in folded
    ]
    headers = ["module", "repeated" if look.fmt else "", "differing", "bar" if look.fmt else ""]
    if rows or look.fmt:
        yield from table_lines(headers, rows, look, right={2})
