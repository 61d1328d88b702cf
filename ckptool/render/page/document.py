"""The page: one document, with its style, its script and its data inside it.

Nothing is fetched: the policy in its head allows the style and the script whose hashes it names,
and no address at all.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ckptool._version import __version__
from ckptool.core.values import format_shape
from ckptool.diagnosis.info import Info
from ckptool.render.diff import diff_rows, summary_lines
from ckptool.render.info import SECTION_HEADINGS, counts_text, format_text, section_rows, size_text
from ckptool.render.page.data import columns, in_words
from ckptool.render.text import PLAIN, shorten, size
from ckptool.render.verdicts import complaint_text, verdict_text
from ckptool.words import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptool.comparison.diff import Diff
    from ckptool.comparison.report import FileSummary, Report
    from ckptool.diagnosis import Diagnosis

_IN_SCRIPT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def words(text: str) -> str:
    """Return text of a file as HTML: cleaned for a screen, with markup escaped."""
    return escape(clean(text))


def element(tag: str, content: str, **attributes: str) -> str:
    """Return an element around `content`, which is HTML; `class_` is the attribute `class`."""
    given = "".join(
        f' {name.rstrip("_")}="{escape(value)}"' for name, value in attributes.items() if value
    )
    return f"<{tag}{given}>{content}</{tag}>"


def table(
    headers: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    right: set[int],
    class_: str,
    caption: str = "",
) -> str:
    """Return a table; cells and caption are HTML, columns `right` are numbers."""

    def drawn_row(tag: str, cells: Iterable[str], scope: str = "") -> str:
        drawn = (
            element(tag, cell, scope=scope, class_="right" if column in right else "")
            for column, cell in enumerate(cells)
        )
        return element("tr", "".join(drawn))

    head, body = drawn_row("th", headers, "col"), (drawn_row("td", row) for row in rows)
    drawn = element("thead", head) + element("tbody", "".join(body))
    if caption:
        drawn = element("caption", caption) + drawn
    return element("div", element("table", drawn, class_=class_), class_="scroll")


def script_json(document: Any) -> str:
    """Return JSON for a `script` element: ASCII, without characters that could end the element.

    Raises:
        ValueError: JSON cannot have a NaN or infinity.
    """
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_IN_SCRIPT)


FIRST = 100
"""The most rows of a table that is shown without the script."""
_MOST_LISTED = 12
_LONGEST = 200


def facts(files: Sequence[FileSummary]) -> str:
    """Return a table of the facts about each file."""
    infos = [one.info for one in files]
    rows = [
        ("file", [words(one.file) for one in infos if len(infos) > 1]),
        ("format", [escape(format_text(one)) for one in infos]),
        ("size", [escape(size_text(one)) for one in infos]),
        ("tensors", [f"{sum(one.dtypes.values()):,}" for one in infos]),
        ("types", [escape(counts_text(one.dtypes)) for one in infos]),
        ("devices", [escape(counts_text(one.devices)) for one in infos]),
        ("ties", [_listed(" = ".join(names) for names in one.ties) for one in infos]),
        (
            "weights_only",
            [
                "yes" if one.weights_only else f"no, because of {_listed(one.blockers)}"
                for one in infos
            ],
        ),
        ("doctor", [_verdict(one.diagnosis) for one in files]),
    ]
    body = "".join(
        element(
            "tr",
            element("th", name, scope="row") + "".join(element("td", cell) for cell in cells),
        )
        for name, cells in rows
        if any(cells)
    )
    beside = " two" if len(files) > 1 else ""
    return element("div", element("table", body, class_=f"facts{beside}"), class_="scroll")


def _verdict(diagnosis: Diagnosis) -> str:
    """Return the verdict of `doctor`, what it follows from, and the command to run first."""
    complaints = enumerate(diagnosis.complaints, start=1)
    lines = [verdict_text(diagnosis), *(complaint_text(*one) for one in complaints)]
    command = diagnosis.first_command
    return _listed(lines) + (f"<br>{element('code', words(command))}" if command else "")


def values(files: Sequence[FileSummary]) -> str:
    """Return a table of the values of all files, a column each; nothing if they have none."""
    every = list(dict.fromkeys(name for one in files for name in one.values))
    rows = [
        [
            words(shorten(text, _LONGEST))
            for text in (name, *(one.values.get(name, "") for one in files))
        ]
        for name in every[:FIRST]
    ]
    if not rows:
        return ""
    headers = ["name", *(_title(one.info) if len(files) > 1 else "value" for one in files)]
    rest = f"The first {FIRST} of {len(every):,}." if len(every) > FIRST else ""
    drawn = table(headers, rows, right=set(), class_="sections values")
    return element("div", drawn, class_="frame") + (element("p", rest) if rest else "")


def _total(files: Sequence[FileSummary]) -> str:
    """Return the parameters of the models in each file, once if all have as many."""
    totals = (sum(section.parameters for section in one.info.sections) for one in files)
    texts = [f"{total:,}" for total in dict.fromkeys(totals)]
    return f"{' and '.join(texts)} parameters" if texts != ["0"] else ""


def _listed(texts: Iterable[str]) -> str:
    """Return lines of the file's text: the first ones, then the number of the rest."""
    every = list(texts)
    shown = [words(shorten(text, _LONGEST)) for text in every[:_MOST_LISTED]]
    if len(every) > _MOST_LISTED:
        shown.append(f"and {len(every) - _MOST_LISTED:,} more")
    return "<br>".join(shown)


def sections(info: Info, caption: str = "") -> str:
    """Return a table of the sections of a file; `caption` is text."""
    rows = [[words(shorten(cell, _LONGEST)) for cell in row] for row in section_rows(info.sections)]
    if not rows:
        return ""
    shown = len(SECTION_HEADINGS) - (not any(row[-1] for row in rows))  # wrappers, if there are any
    drawn, headings = [row[:shown] for row in rows], SECTION_HEADINGS[:shown]
    return table(headings, drawn, right={2, 3, 4}, class_="sections", caption=words(caption))


def notes(report: Report, infos: Sequence[Info]) -> str:
    """Return the notes of the report, of each file, and of the diff."""
    named = [
        note if note.startswith(one.file) or len(infos) == 1 else f"{one.file}: {note}"
        for one in infos
        for note in one.notes
    ]
    every = [*report.notes, *named, *(() if report.diff is None else report.diff.notes)]
    items = "".join(element("li", words(shorten(note, 2 * _LONGEST))) for note in every)
    return element("ul", items, class_="notes") if items else ""


def first_tensors(report: Report) -> str:
    """Return the first rows of the table of tensors."""
    rows = [
        [
            words(shorten(one.row.name, _LONGEST)),
            one.row.dtype,
            format_shape(one.row.shape),
            words(one.row.device),
            size(one.row.nbytes),
        ]
        for one in report.tensors[:FIRST]
    ]
    headings = ["name", "dtype", "shape", "device", "size"]
    return _first(headings, rows, {4}, len(report.tensors))


def first_changes(diff: Diff) -> str:
    """Return the first rows of the table of changes."""
    every = list(diff_rows(diff))
    rows = [
        [row.status, words(shorten(row.name, _LONGEST)), words(in_words(row))]
        for row in every[:FIRST]
    ]
    return _first(["", "name", "what"], rows, set(), len(every)) if rows else ""


def _first(headers: list[str], rows: list[list[str]], right: set[int], total: int) -> str:
    drawn = table(headers, rows, right=right, class_="first")
    if total > FIRST:
        drawn += element("p", f"The first {FIRST} of {total:,}; the others need the script.")
    return drawn


SCRIPTS = (
    "dom.js",
    "format.js",
    "state.js",
    "names.js",
    "histogram.js",
    "table.js",
    "treemap.js",
    "tensors.js",
    "diff.js",
    "page.js",
)
"""The files of the script, in their order."""


def page(report: Report) -> bytes:
    """Return the whole page as UTF-8."""
    return "".join(_document(report)).encode()


def _document(report: Report) -> Iterator[str]:
    style, script = _asset("page.css"), _script()
    files = [report.file] if report.other is None else [report.file, report.other]
    infos = [one.info for one in files]
    title = " and ".join(map(_title, infos))
    part = f"; only {words(shorten(report.key, 120))}" if report.key else ""
    origin = f"{words(report.file.info.file)}{part} &middot; ckptool {__version__}"
    tables = "".join(sections(one, one.file if len(infos) > 1 else "") for one in infos)
    beside = element("div", tables, class_="sides")
    summary = facts(files) + beside + notes(report, infos)
    total = _total(files)
    headline = title + (f" {element('span', total, class_='total')}" if total else "")
    yield f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{_policy()}\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield '<meta name="referrer" content="no-referrer">\n'
    yield f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
    yield element("header", element("h1", headline) + element("p", origin, class_="by"))
    yield f"\n<main>\n{element('section', summary, id='summary')}\n"
    if kept := values(files):
        yield f"{element('section', element('h2', 'Values') + kept, id='values')}\n"
    if report.diff is not None:
        glance = element("p", words(" ".join(summary_lines(report.diff, PLAIN))))
        rows = first_changes(report.diff)
        yield _part("changes", "What differs", glance + element("noscript", rows))
    yield _part("map", "Where the bytes are", "", hidden=True)
    yield _part("tensors", "Tensors", element("noscript", first_tensors(report)))
    yield "</main>\n"
    yield f'<script type="application/json" id="data">{script_json(columns(report))}</script>\n'
    yield f"<script>{script}</script>\n</body>\n</html>\n"


def _part(name: str, title: str, content: str, *, hidden: bool = False) -> str:
    """Return a section with an element that the script fills."""
    inner = element("h2", title) + content + element("div", "", id=f"{name}-here")
    return f'<section id="{name}"{" hidden" if hidden else ""}>{inner}</section>\n'


def _title(info: Info) -> str:
    return words(shorten(os.path.basename(info.file.rstrip(os.sep)) or info.file, 120))


def _policy() -> str:
    """Return the policy that allows this page's style and script alone, by their hashes."""
    allowed = {
        "default-src": "'none'",
        "style-src": _hash(_asset("page.css")),
        "script-src": _hash(_script()),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    content = "; ".join(f"{name} {value}" for name, value in allowed.items())
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


@cache
def _script() -> str:
    """Return all scripts as one, in a block, so that they define no global names."""
    return '"use strict";\n{\n' + "".join(map(_asset, SCRIPTS)) + "}\n"


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")
