"""Rows as a table for people, which streams; or in one of tabulate's formats (`Look.fmt`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from ckptool.errors import UsageError
from ckptool.render.text import Look, fit_names, shorten, wrapped

__all__ = ["apart", "formatted", "known_format", "known_formats", "table"]

_GAP = "  "
_BAR = " | "
_NARROWEST = 12
_READABLE = 24  # what a flexible column should have before others are left out for it
_WIDEST = 160  # what rows are padded to: one long name must not cost every row its length


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    look: Look,
    *,
    right: frozenset[int] | set[int] = frozenset(),
    flexible: int | Sequence[int] = 0,
    spare: Sequence[int] = (),
    ruled: bool = False,
) -> Iterator[str]:
    """Return the lines of a table; cells are clean already.

    `right` are the columns aligned to the right. Where the rows would be wider than the terminal,
    the `spare` columns are left out one by one until the `flexible` ones need little shortening,
    and a last line names them; then the cells of the flexible ones are shortened. The first column
    holds names: their gap is where most of them stay apart. With `ruled` there are bars between the
    columns and a line below the headings.

    Raises:
        UsageError: `look.fmt` would pad the rows to a file of gigabytes.
    """
    if look.fmt:
        return formatted(headers, rows, look.fmt, frozenset(right))
    widths = [
        max(len(header), max((len(row[column]) for row in rows), default=0))
        for column, header in enumerate(headers)
    ]
    gap = _BAR if ruled else _GAP
    bending = (flexible,) if isinstance(flexible, int) else tuple(flexible)
    left_out = _left_out(widths, look.width, bending, spare, gap)
    kept = [column for column in range(len(headers)) if column not in left_out]
    missing = [headers[column] for column in left_out]
    if missing:
        rows = [[row[column] for column in kept] for row in rows]
    widths = [widths[column] for column in kept]
    flexing = [n for n, column in enumerate(kept) if column in bending]
    fitted = _fit(widths, look.width, flexing, gap)
    if fitted != widths:
        rows = _shortened(rows, fitted)
        missing = ["names in full", *missing] if fitted[0] < widths[0] else missing
    lines = _lines(
        [[headers[column] for column in kept], *rows],
        [min(width, _WIDEST) for width in fitted],
        [column in right for column in kept],
        look,
        gap,
    )
    return chain(lines, _not_shown(missing, look)) if missing else lines


def _left_out(
    widths: Sequence[int],
    available: int | None,
    flexible: Sequence[int],
    spare: Sequence[int],
    gap: str,
) -> Sequence[int]:
    """Return the first of the spare columns, as many as must go."""
    least = [
        min(width, _READABLE) if column in flexible else width
        for column, width in enumerate(widths)
    ]
    excess = sum(least) + len(gap) * (len(widths) - 1) - (available or 1 << 30)
    for number, column in enumerate(spare):
        if excess <= 0:
            return spare[:number]
        excess -= least[column] + len(gap)
    return spare


def _not_shown(headers: Sequence[str], look: Look) -> Iterator[str]:
    named = f"(a wider terminal shows {', '.join(filter(None, headers))})"
    yield from map(look.faint, wrapped(named, look.width))


def _shortened(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[list[str]]:
    """Return the cells in at most those widths, names in the first column."""
    names = fit_names([row[0] for row in rows], widths[0])
    return [
        [name, *(shorten(cell, width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for name, row in zip(names, rows, strict=True)
    ]


def apart(blocks: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of tables or paragraphs, an empty line between them; empty ones go."""
    begun = False
    for block in blocks:
        for number, line in enumerate(block):
            if begun and number == 0:
                yield ""
            begun = True
            yield line


def _fit(
    widths: Sequence[int], available: int | None, flexible: Sequence[int], gap: str
) -> list[int]:
    """Return the widths with the flexible columns narrowed, the widest of them first."""
    fitted = list(widths)
    excess = sum(widths) + len(gap) * (len(widths) - 1) - (available or 1 << 30)
    if excess <= 0:
        return fitted
    room = sum(widths[column] for column in flexible) - excess
    for number, column in enumerate(sorted(flexible, key=lambda column: widths[column])):
        share = room // (len(flexible) - number)
        fitted[column] = min(widths[column], max(share, _NARROWEST))
        room -= fitted[column]
    return fitted


def _lines(
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
    right: Sequence[bool],
    look: Look,
    gap: str,
) -> Iterator[str]:
    """Yield the rows, the first of them in bold."""
    columns = zip(widths, right, strict=True)
    pattern = gap.join(f"%{width}s" if at_right else f"%-{width}s" for width, at_right in columns)
    lines = ((pattern % tuple(row)).rstrip() for row in rows)
    yield look.bold(next(lines))
    if gap == _BAR:
        yield "-+-".join("-" * width for width in widths)
    yield from lines


_OTHER_NAMES = {"markdown": "github"}
_SEPARATED = ("csv", "tsv")
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
    """Return the format of that name.

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
    """Return the lines of a table in a format that `known_format` returned.

    Cells are clean already; what the format would take for its own syntax is escaped.

    Raises:
        UsageError: one long cell would pad all rows to a file of gigabytes.
    """
    if fmt == "tsv":  # has no quotes; no clean cell holds a tab
        return ("\t".join(row) for row in (headers, *rows))
    if fmt == "csv":
        import csv

        writer = csv.writer(_Returned(), lineterminator="")
        return (str(writer.writerow(row)) for row in (headers, *rows))
    import tabulate

    escape = _ESCAPES.get(fmt)
    if escape is not None:
        headers, *rows = ([escape(cell) for cell in row] for row in (headers, *rows))
    _check_padding(headers, rows, fmt)
    text = tabulate.tabulate(
        rows,
        headers=headers,
        tablefmt=_ESCAPING_TWINS.get(fmt, fmt),
        disable_numparse=True,
        colalign=["right" if column in right else "left" for column in range(len(headers))],
    )
    return (line.rstrip() for line in str(text).split("\n"))


def _check_padding(headers: Sequence[str], rows: Sequence[Sequence[str]], fmt: str) -> None:
    content = sum(len(cell) for row in rows for cell in row)
    widest = sum(max((len(row[n]) for row in rows), default=0) for n in range(len(headers)))
    if widest * len(rows) > _MOST_PADDING + _MOST_PADDING_RATIO * content:
        raise UsageError(
            f"the longest cell would make each of {len(rows):,} rows {widest:,} characters wide "
            f"in the format {fmt}",
            hint="--fmt csv pads nothing, and neither does --json",
        )


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
