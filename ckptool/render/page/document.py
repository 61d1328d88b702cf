"""The page: one document, with its style, its script and its data inside it.

Nothing is fetched: the policy in its head allows the style and the script whose hashes it names,
and no address at all.
"""

from __future__ import annotations

import os
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING

from ckptool._version import __version__
from ckptool.render.page.columns import columns
from ckptool.render.page.markup import element, script_json, words
from ckptool.render.page.summary import (
    changes_at_a_glance,
    facts,
    first_changes,
    first_tensors,
    notes,
    sections,
)
from ckptool.render.text import shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ckptool.inspection.reporting import Report

__all__ = ["SCRIPTS", "page"]

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
"""In this order they are one script."""


def page(report: Report) -> bytes:
    """The whole page, as UTF-8 (ASCII but for what names hold)."""
    return "".join(_document(report)).encode()


def _document(report: Report) -> Iterator[str]:
    style, script = _asset("page.css"), _script()
    title = _title(report)
    yield f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{_policy()}\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield '<meta name="referrer" content="no-referrer">\n'
    yield f"<title>{title}</title>\n<style>{style}</style>\n</head>\n<body>\n"
    yield element("header", element("h1", title) + element("p", _origin(report), class_="by"))
    yield f"\n<main>\n{_summary(report)}\n"
    if report.diff is not None:
        glance = element("p", changes_at_a_glance(report.diff))
        rows = first_changes(report)
        yield _part("changes", "What differs", glance + element("noscript", rows))
    yield _part("map", "Where the bytes are", "", hidden=True)
    yield _part("tensors", "Tensors", element("noscript", first_tensors(report)))
    yield "</main>\n"
    yield f'<script type="application/json" id="data">{script_json(columns(report))}</script>\n'
    yield f"<script>{script}</script>\n</body>\n</html>\n"


def _part(name: str, title: str, content: str, *, hidden: bool = False) -> str:
    """A section with a place that the script fills."""
    inner = element("h2", title) + content + element("div", "", id=f"{name}-here")
    return f'<section id="{name}"{" hidden" if hidden else ""}>{inner}</section>\n'


def _title(report: Report) -> str:
    names = [report.info.file] if report.other is None else [report.info.file, report.other.file]
    own = [shorten(os.path.basename(name.rstrip(os.sep)) or name, 120) for name in names]
    return " and ".join(map(words, own))


def _origin(report: Report) -> str:
    part = f"; only {words(shorten(report.key, 120))}" if report.key else ""
    return f"{words(report.info.file)}{part} &middot; ckptool {__version__}"


def _summary(report: Report) -> str:
    infos = [report.info] if report.other is None else [report.info, report.other]
    parts = [sections(one, "" if report.other is None else one.file) for one in infos]
    beside = element("div", "".join(parts), class_="sides")
    return element("section", facts(infos) + beside + notes(report), id="summary")


def _policy() -> str:
    """Nothing but the style and the script of this page, by their hashes."""
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
    """All scripts as one; the block keeps their names out of the window."""
    return '"use strict";\n{\n' + "".join(map(_asset, SCRIPTS)) + "}\n"


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")
