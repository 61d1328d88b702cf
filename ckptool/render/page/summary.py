"""The part of the page that needs no script: what the file is, and the first rows of the tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice
from typing import TYPE_CHECKING

from ckptool.inspection.summary import Info, SectionInfo
from ckptool.inspection.values import shape_text
from ckptool.render.info import NAMELESS, counts_text, format_text, size_text
from ckptool.render.page.changes import change_rows
from ckptool.render.page.markup import element, table, words
from ckptool.render.text import count, plural, shorten, size

if TYPE_CHECKING:
    from ckptool.inspection.diff_result import Diff
    from ckptool.inspection.reporting import Report

__all__ = ["changes_at_a_glance", "facts", "first_changes", "first_tensors", "notes", "sections"]

FIRST = 100
"""Rows of a table that is there without the script."""
_MOST_LISTED = 12
_LONGEST = 200
_STATUSES = {
    "M": "changed",
    "T": "of another type or shape",
    "A": "only in the second",
    "D": "only in the first",
    "R": "renamed",
}


def facts(infos: Sequence[Info]) -> str:
    """What each file is, side by side."""
    rows = [
        ("file", [words(one.file) for one in infos]) if len(infos) > 1 else None,
        ("format", [escape(format_text(one)) for one in infos]),
        ("size", [escape(size_text(one)) for one in infos]),
        ("tensors", [count(sum(one.dtypes.values())) for one in infos]),
        ("types", [escape(counts_text(one.dtypes)) for one in infos]),
        ("devices", [escape(counts_text(one.devices)) for one in infos]),
        ("ties", [_listed(" = ".join(names) for names in one.ties) for one in infos]),
        ("weights_only", [_weights_only(one) for one in infos]),
    ]
    body = "".join(
        element("tr", element("th", name, scope="row") + "".join(map(_cell, cells)))
        for name, cells in filter(None, rows)
        if any(cells)
    )
    return element("div", element("table", body, class_="facts"), class_="scroll")


def _cell(content: str) -> str:
    return element("td", content)


def _listed(texts: Iterable[str]) -> str:
    """Lines of text of the file; of many the first ones, and how many more there are."""
    every = list(texts)
    shown = [words(shorten(text, _LONGEST)) for text in every[:_MOST_LISTED]]
    if len(every) > _MOST_LISTED:
        shown.append(f"and {count(len(every) - _MOST_LISTED)} more")
    return "<br>".join(shown)


def _weights_only(info: Info) -> str:
    return "accepts it" if info.weights_only else f"refuses it: {_listed(info.blockers)}"


def sections(info: Info, caption: str = "") -> str:
    """The named parts of a file; `caption` is text."""
    headers = ["section", "kind", "tensors", "parameters", "bytes", "wrappers"]
    rows = [_section(one) for one in info.sections]
    if not rows:
        return ""
    return table(headers, rows, right={2, 3, 4}, class_="sections", caption=words(caption))


def _section(section: SectionInfo) -> list[str]:
    return [
        words(shorten(section.name, _LONGEST)) or NAMELESS.get(section.kind, "(the whole file)"),
        section.kind,
        count(section.tensors) if section.tensors else "",
        count(section.parameters) if section.parameters else "",
        size(section.nbytes) if section.tensors else "",
        words(" ".join(section.wrappers)),
    ]


def notes(report: Report) -> str:
    """What is worth knowing of the files, of what was looked at, and of what was not."""
    infos = [report.info] if report.other is None else [report.info, report.other]
    named = [
        note if note.startswith(one.file) or len(infos) == 1 else f"{one.file}: {note}"
        for one in infos
        for note in one.notes
    ]
    every = [*report.notes, *named, *(report.diff.notes if report.diff else ())]
    items = "".join(element("li", words(shorten(note, 2 * _LONGEST))) for note in every)
    return element("ul", items, class_="notes") if items else ""


def changes_at_a_glance(diff: Diff) -> str:
    """How many tensors and values differ, and in what way."""
    values = "; values were not compared" if diff.structure else ""
    if diff.identical:
        where = "the headers of " if diff.structure else ""
        return f"No difference in {where}{plural(diff.common, 'entry')}{values}."
    parts = [
        f"{count(diff.counts[status])} {text}"
        for status, text in _STATUSES.items()
        if diff.counts.get(status)
    ]
    alike = "have the same header" if diff.structure else "are equal"
    equal = f"{count(diff.equal)} of {count(diff.common)} in common {alike}"
    return f"{', '.join(parts)}; {equal}{values}."


def first_tensors(report: Report) -> str:
    """The first rows of the table of tensors."""
    rows = [
        [
            words(shorten(one.row.name, _LONGEST)),
            one.row.dtype,
            shape_text(one.row.shape),
            words(one.row.device),
            size(one.row.nbytes),
        ]
        for one in report.tensors[:FIRST]
    ]
    drawn = table(["name", "dtype", "shape", "device", "size"], rows, right={4}, class_="first")
    return drawn + _rest(len(report.tensors))


def first_changes(report: Report) -> str:
    """The first rows of the table of changes."""
    every = change_rows(report)
    rows = [
        [row.status, words(shorten(row.name, _LONGEST)), words(row.what)]
        for row in islice(every, FIRST)
    ]
    if not rows:
        return ""
    drawn = table(["", "name", "what"], rows, right=set(), class_="first")
    return drawn + _rest(len(rows) + sum(1 for _ in every))


def _rest(all_of_them: int) -> str:
    if all_of_them <= FIRST:
        return ""
    return element("p", f"The first {FIRST} of {count(all_of_them)}; the others need the script.")
