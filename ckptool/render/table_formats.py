"""Tables in tabulate's formats, for other programs and pages: `--fmt`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from ckptool.errors import UsageError

__all__ = ["formatted", "known_format", "known_formats"]

_OTHER_NAMES = {"markdown": "github"}
_SEPARATED = {"csv": ",", "tsv": "\t"}
"""Not padded, so that a program reads the cells as they are."""
_ESCAPING_TWINS = {"unsafehtml": "html", "latex_raw": "latex"}
"""Formats that take a cell for markup, and the same table with the cell escaped."""

_MOST_PADDING = 32 << 20  # characters; one name of a megabyte would widen every row
_MOST_PADDING_RATIO = 8


class _Returned:
    """A stream for `csv.writer`, whose `writerow` returns what `write` does."""

    def write(self, text: str) -> str:
        return text


def known_format(word: str) -> str:
    """The format of that name.

    Raises:
        UsageError: there is none; the message lists them all.
    """
    known = known_formats()
    if word not in known:
        raise UsageError(f"there is no table format {word!r}; there are {', '.join(known)}")
    return _OTHER_NAMES.get(word, word)


def known_formats() -> list[str]:
    """Return the names of all formats, from A to Z."""
    import tabulate  # 50 ms: only where a format is asked for

    return sorted({*tabulate.tabulate_formats, *_OTHER_NAMES, *_SEPARATED})


def formatted(
    headers: Sequence[str], rows: Sequence[Sequence[str]], fmt: str, right: frozenset[int]
) -> Iterator[str]:
    """The lines of a table in a format that `known_format` returned.

    Cells are clean already; what the format would take for its own syntax is escaped.

    Raises:
        UsageError: one long cell would pad all rows to a file of gigabytes.
    """
    if fmt in _SEPARATED:
        return _separated(headers, rows, _SEPARATED[fmt])
    escape = _ESCAPES.get(fmt)
    if escape is not None:
        headers, *rows = ([escape(cell) for cell in row] for row in (headers, *rows))
    _check_padding(headers, rows, fmt)
    return _tabulated(headers, rows, _ESCAPING_TWINS.get(fmt, fmt), right)


def _separated(
    headers: Sequence[str], rows: Sequence[Sequence[str]], separator: str
) -> Iterator[str]:
    if separator == "\t":  # has no quotes; no clean cell holds a tab
        return ("\t".join(row) for row in (headers, *rows))
    import csv

    writer = csv.writer(_Returned(), delimiter=separator, lineterminator="")
    return (str(writer.writerow(row)) for row in (headers, *rows))


def _check_padding(headers: Sequence[str], rows: Sequence[Sequence[str]], fmt: str) -> None:
    content = sum(len(cell) for row in rows for cell in row)
    widest = sum(max((len(row[n]) for row in rows), default=0) for n in range(len(headers)))
    if widest * len(rows) > _MOST_PADDING + _MOST_PADDING_RATIO * content:
        raise UsageError(
            f"the longest cell would make each of {len(rows):,} rows {widest:,} characters wide "
            f"in the format {fmt}",
            hint="--fmt csv pads nothing, and neither does --json",
        )


def _tabulated(
    headers: Sequence[str], rows: Sequence[Sequence[str]], fmt: str, right: frozenset[int]
) -> Iterator[str]:
    import tabulate

    text = tabulate.tabulate(
        rows,
        headers=headers,
        tablefmt=fmt,
        disable_numparse=True,
        colalign=["right" if column in right else "left" for column in range(len(headers))],
    )
    return (line.rstrip() for line in str(text).split("\n"))


def _backslashed(characters: str) -> Callable[[str], str]:
    pattern = re.compile(characters)
    return lambda text: pattern.sub(r"\\\g<0>", text)


def _entities(characters: str) -> Callable[[str], str]:
    table = str.maketrans({character: f"&#{ord(character)};" for character in characters})
    return lambda text: text.translate(table)


_MARKDOWN = _backslashed(r"[\\|`*<&~]|(?<=\])\(")
_MARKDOWN_EMPHASIS = _backslashed(r"[\\|`*<&~]|(?<=\])\(|(?<![^\W_])_")
_EMPHASIS_ENDS = re.compile(r"_(?![^\W_])")


def _markdown(text: str) -> str:
    """Escaped for a cell of a Markdown table; `_` only where it may begin and end an emphasis."""
    return (_MARKDOWN_EMPHASIS if _EMPHASIS_ENDS.search(text) else _MARKDOWN)(text)


_ESCAPES: dict[str, Callable[[str], str]] = {
    "github": _markdown,
    "pipe": _markdown,
    "rst": _backslashed(r"[\\|`*]|_(?![^\W_])"),
    "orgtbl": lambda text: text.replace("|", "\\vert{}"),
    "asciidoc": lambda text: text.replace("|", "\\|"),
    "jira": _backslashed(r"[\\|\[{]"),
    "youtrack": _backslashed(r"[\\|\[{]"),
    "mediawiki": _entities("&<|[{'"),
    "moinmoin": _entities("&<|[{'"),
    "textile": _entities("&<|"),
}
"""How a cell is kept from being syntax; html and latex are escaped by tabulate itself, and the
formats that are drawings need nothing."""
