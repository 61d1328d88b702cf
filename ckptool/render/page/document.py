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
from ckptool.render.page.data import collect_columns, describe_difference
from ckptool.render.text import PLAIN, format_size, shorten
from ckptool.render.verdicts import complaint_text, verdict_text
from ckptool.words import clean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptool.comparison.diff import Diff
    from ckptool.comparison.report import FileSummary, Report
    from ckptool.diagnosis import Diagnosis

_SCRIPT_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def to_html(text: str) -> str:
    """Return text of a file as HTML: cleaned for a screen, with markup escaped."""
    return escape(clean(text))


def render_element(tag: str, content: str, **attributes: str) -> str:
    """Return an element around `content`, which is HTML; `class_` is the attribute `class`."""
    attribute_text = "".join(
        f' {name.rstrip("_")}="{escape(value)}"' for name, value in attributes.items() if value
    )
    return f"<{tag}{attribute_text}>{content}</{tag}>"


def render_table(
    headers: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    right: set[int],
    class_: str,
    caption: str = "",
) -> str:
    """Return a table; cells and caption are HTML, columns `right` are numbers."""

    def render_row(tag: str, cells: Iterable[str], scope: str = "") -> str:
        """Return a row whose cells are `tag` elements."""
        drawn = (
            render_element(tag, cell, scope=scope, class_="right" if column in right else "")
            for column, cell in enumerate(cells)
        )
        return render_element("tr", "".join(drawn))

    head, body = render_row("th", headers, "col"), (render_row("td", row) for row in rows)
    drawn = render_element("thead", head) + render_element("tbody", "".join(body))
    if caption:
        drawn = render_element("caption", caption) + drawn
    return render_element("div", render_element("table", drawn, class_=class_), class_="scroll")


def script_json(document: Any) -> str:
    """Return JSON for a `script` element: ASCII, without characters that could end the element.

    Raises:
        ValueError: JSON cannot have a NaN or infinity.
    """
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_SCRIPT_ESCAPES)


MAX_FIRST_ROWS = 100
"""The most rows of a table that is shown without the script."""
_MAX_LISTED = 12
"""The most lines in a cell."""
_MAX_TEXT_LENGTH = 200
"""The most characters of a text of a file."""


def render_facts(files: Sequence[FileSummary]) -> str:
    """Return a table of the facts about each file: a row for each fact, a column for each file.

    A fact that no file has is left out.
    """
    infos = [file.info for file in files]
    rows = [  # each fact with its cell for each file; the name is in the title of a single file
        ("file", [to_html(info.file) for info in infos if len(infos) > 1]),
        ("format", [escape(format_text(info)) for info in infos]),
        ("size", [escape(size_text(info)) for info in infos]),
        ("tensors", [f"{sum(info.dtypes.values()):,}" for info in infos]),
        ("types", [escape(counts_text(info.dtypes)) for info in infos]),
        ("devices", [escape(counts_text(info.devices)) for info in infos]),
        ("ties", [_render_lines(" = ".join(names) for names in info.ties) for info in infos]),
        (
            "weights_only",
            [
                "yes" if info.weights_only else f"no, because of {_render_lines(info.blockers)}"
                for info in infos
            ],
        ),
        ("doctor", [_render_verdict(file.diagnosis) for file in files]),
    ]
    body = "".join(
        render_element(
            "tr",
            render_element("th", name, scope="row")
            + "".join(render_element("td", cell) for cell in cells),
        )
        for name, cells in rows
        if any(cells)
    )
    columns_class = " two" if len(files) > 1 else ""
    return render_element(
        "div", render_element("table", body, class_=f"facts{columns_class}"), class_="scroll"
    )


def _render_verdict(diagnosis: Diagnosis) -> str:
    """Return the verdict of `doctor`, the complaints, and the command to run first."""
    complaints = enumerate(diagnosis.complaints, start=1)
    lines = [verdict_text(diagnosis), *(complaint_text(*numbered) for numbered in complaints)]
    command = diagnosis.first_command
    return _render_lines(lines) + (
        f"<br>{render_element('code', to_html(command))}" if command else ""
    )


def render_values(files: Sequence[FileSummary]) -> str:
    """Return a table of the values of all files, a column each; "" if they have none."""
    names = list(dict.fromkeys(name for file in files for name in file.values))
    rows = [
        [
            to_html(shorten(text, _MAX_TEXT_LENGTH))
            for text in (name, *(file.values.get(name, "") for file in files))
        ]
        for name in names[:MAX_FIRST_ROWS]
    ]
    if not rows:
        return ""
    headers = ["name", *(_render_title(file.info) if len(files) > 1 else "value" for file in files)]
    remark = f"The first {MAX_FIRST_ROWS} of {len(names):,}." if len(names) > MAX_FIRST_ROWS else ""
    drawn = render_table(headers, rows, right=set(), class_="sections values")
    return render_element("div", drawn, class_="frame") + (
        render_element("p", remark) if remark else ""
    )


def _render_parameter_count(files: Sequence[FileSummary]) -> str:
    """Return the parameters of the models in each file, once if all have as many."""
    totals = (sum(section.parameters for section in file.info.sections) for file in files)
    texts = [f"{total:,}" for total in dict.fromkeys(totals)]
    return f"{' and '.join(texts)} parameters" if texts != ["0"] else ""


def _render_lines(texts: Iterable[str]) -> str:
    """Return lines of the file's text: the first ones, then the number of the rest."""
    lines = list(texts)
    shown = [to_html(shorten(text, _MAX_TEXT_LENGTH)) for text in lines[:_MAX_LISTED]]
    if len(lines) > _MAX_LISTED:
        shown.append(f"and {len(lines) - _MAX_LISTED:,} more")
    return "<br>".join(shown)


def render_sections(info: Info, caption: str = "") -> str:
    """Return a table of the sections of a file; `caption` is text."""
    rows = [
        [to_html(shorten(cell, _MAX_TEXT_LENGTH)) for cell in row]
        for row in section_rows(info.sections)
    ]
    if not rows:
        return ""
    headings: Sequence[str] = SECTION_HEADINGS
    if not any(row[-1] for row in rows):  # no wrappers
        headings, rows = headings[:-1], [row[:-1] for row in rows]
    numbers = {2, 3, 4}  # aligned to the right
    return render_table(headings, rows, right=numbers, class_="sections", caption=to_html(caption))


def render_notes(report: Report, infos: Sequence[Info]) -> str:
    """Return the notes of the report, of each file, and of the diff."""
    file_notes = [
        note if note.startswith(info.file) or len(infos) == 1 else f"{info.file}: {note}"
        for info in infos
        for note in info.notes
    ]
    all_notes = [*report.notes, *file_notes, *(() if report.diff is None else report.diff.notes)]
    items = "".join(
        render_element("li", to_html(shorten(note, 2 * _MAX_TEXT_LENGTH))) for note in all_notes
    )
    return render_element("ul", items, class_="notes") if items else ""


def render_first_tensors(report: Report) -> str:
    """Return the first rows of the table of tensors."""
    rows = [
        [
            to_html(shorten(tensor.row.name, _MAX_TEXT_LENGTH)),
            tensor.row.dtype,
            format_shape(tensor.row.shape),
            to_html(tensor.row.device),
            format_size(tensor.row.nbytes),
        ]
        for tensor in report.tensors[:MAX_FIRST_ROWS]
    ]
    headings = ["name", "dtype", "shape", "device", "size"]
    return _render_first_rows(headings, rows, right={4}, total=len(report.tensors))


def render_first_changes(diff: Diff) -> str:
    """Return the first rows of the table of changes."""
    all_rows = list(diff_rows(diff))
    rows = [
        [
            row.status,
            to_html(shorten(row.name, _MAX_TEXT_LENGTH)),
            to_html(describe_difference(row)),
        ]
        for row in all_rows[:MAX_FIRST_ROWS]
    ]
    if not rows:
        return ""
    return _render_first_rows(["", "name", "what"], rows, right=set(), total=len(all_rows))


def _render_first_rows(
    headers: list[str], rows: list[list[str]], *, right: set[int], total: int
) -> str:
    """Return a table of the first of `total` rows, for a browser without scripts.

    The columns `right` are aligned to the right.
    """
    drawn = render_table(headers, rows, right=right, class_="first")
    if total > MAX_FIRST_ROWS:
        drawn += render_element(
            "p",
            f"Only the first {MAX_FIRST_ROWS} of {total:,} rows are shown. "
            "Enable JavaScript to see all.",
        )
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


def render_page(report: Report) -> bytes:
    """Return the whole page as UTF-8."""
    return "".join(_page_parts(report)).encode()


def _page_parts(report: Report) -> Iterator[str]:
    """Yield the document in order: head, summary, values, sections that the script fills, data.

    `noscript` tables have the first rows for a browser without scripts.
    """
    style, script = _read_asset("page.css"), _join_scripts()
    files = [report.file] if report.other is None else [report.file, report.other]
    infos = [file.info for file in files]
    title = " and ".join(map(_render_title, infos))
    key_note = f"; only {to_html(shorten(report.key, 120))}" if report.key else ""
    origin = f"{to_html(report.file.info.file)}{key_note} &middot; ckptool {__version__}"
    tables = "".join(render_sections(info, info.file if len(infos) > 1 else "") for info in infos)
    section_tables = render_element("div", tables, class_="sides")
    summary = render_facts(files) + section_tables + render_notes(report, infos)
    total = _render_parameter_count(files)
    headline = title + (f" {render_element('span', total, class_='total')}" if total else "")
    yield f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{_render_policy()}\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield '<meta name="referrer" content="no-referrer">\n'
    yield f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
    yield render_element(
        "header", render_element("h1", headline) + render_element("p", origin, class_="by")
    )
    yield f"\n<main>\n{render_element('section', summary, id='summary')}\n"
    if table := render_values(files):
        yield f"{render_element('section', render_element('h2', 'Values') + table, id='values')}\n"
    if report.diff is not None:
        summary_line = render_element("p", to_html(" ".join(summary_lines(report.diff, PLAIN))))
        rows = render_first_changes(report.diff)
        yield _render_fillable_section(
            "changes", "What differs", summary_line + render_element("noscript", rows)
        )
    yield _render_fillable_section("map", "Where the bytes are", "", hidden=True)
    yield _render_fillable_section(
        "tensors", "Tensors", render_element("noscript", render_first_tensors(report))
    )
    yield "</main>\n"
    data = script_json(collect_columns(report))
    yield f'<script type="application/json" id="data">{data}</script>\n'
    yield f"<script>{script}</script>\n</body>\n</html>\n"


def _render_fillable_section(name: str, title: str, content: str, *, hidden: bool = False) -> str:
    """Return a section with an element that the script fills."""
    inner = render_element("h2", title) + content + render_element("div", "", id=f"{name}-here")
    return f'<section id="{name}"{" hidden" if hidden else ""}>{inner}</section>\n'


def _render_title(info: Info) -> str:
    """Return the name of a file as HTML, shortened."""
    return to_html(shorten(os.path.basename(info.file.rstrip(os.sep)) or info.file, 120))


def _render_policy() -> str:
    """Return the policy that allows only this page's style and script, by their hashes."""
    allowed = {
        "default-src": "'none'",
        "style-src": _hash_source(_read_asset("page.css")),
        "script-src": _hash_source(_join_scripts()),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    content = "; ".join(f"{name} {value}" for name, value in allowed.items())
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def _hash_source(text: str) -> str:
    """Return the hash of a style or script for the policy."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


@cache
def _join_scripts() -> str:
    """Return all scripts as one, in a block, so that they define no global names."""
    return '"use strict";\n{\n' + "".join(map(_read_asset, SCRIPTS)) + "}\n"


@cache
def _read_asset(name: str) -> str:
    """Return the text of a file of this package."""
    return files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")
