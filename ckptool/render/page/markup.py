"""HTML from text: whatever a file calls itself stays text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

from ckptool.render.text import clean

__all__ = ["element", "script_json", "table", "words"]

_IN_SCRIPT = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def words(text: str) -> str:
    """Text of the file as HTML: what a screen might obey or hide spelled out, markup escaped."""
    return escape(clean(text))


def element(tag: str, content: str, **attributes: str) -> str:
    """An element around `content`, which is HTML already; `class_` is the attribute `class`."""
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
    """A table of cells that are HTML already, as the caption is; `right`: columns of numbers."""
    head = "".join(
        element("th", header, scope="col", class_="right" if column in right else "")
        for column, header in enumerate(headers)
    )
    body = "".join(
        element(
            "tr",
            "".join(
                element("td", cell, class_="right" if column in right else "")
                for column, cell in enumerate(row)
            ),
        )
        for row in rows
    )
    drawn = element("thead", element("tr", head)) + element("tbody", body)
    if caption:
        drawn = element("caption", caption) + drawn
    return element("div", element("table", drawn, class_=class_), class_="scroll")


def script_json(document: Any) -> str:
    """JSON for a `script` element: ASCII, and no character that could end the element.

    Raises:
        ValueError: a float that JSON has no word for.
    """
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_IN_SCRIPT)
