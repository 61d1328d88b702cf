"""Rows as a table for people, or in one of tabulate's formats (`Look.fmt`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from ckptool.errors import UsageError
from ckptool.render.text import Look, shorten, wrap_text

_MIN_COLUMN_WIDTH = 12
"""Characters that a cell of a narrow table keeps."""
_READABLE_WIDTH = 24
"""Characters of a flexible column below which spare columns are left out."""
_MAX_PADDED_WIDTH = 160
"""The most characters to which cells are padded, so that one long name does not widen all rows."""
_UNLIMITED = 1 << 30
"""The width without a terminal."""


def table_lines(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    look: Look,
    *,
    right: Collection[int] = (),
    flexible: int | Collection[int] = 0,
    spare: Sequence[int] = (),
    optional: Collection[int] = (),
    ruled: bool = False,
) -> Iterator[str]:
    """Yield the lines of a table of clean cells.

    Columns `right` are aligned to the right; `optional` columns are left out if they are empty. If
    the rows are wider than the terminal, `spare` columns are left out, one after the other, until
    each `flexible` column has some room; then the cells of flexible columns lose their middle. A
    last line names the left out columns. `ruled` draws bars between the columns.

    Raises:
        UsageError: `look.fmt` would pad the rows to a file of gigabytes.
    """
    columns = [n for n in range(len(headers)) if n not in optional or any(row[n] for row in rows)]
    if look.fmt:
        cells = [[row[n] for n in columns] for row in (headers, *rows)]
        yield from _format_cells(
            cells, look.fmt, {index for index, n in enumerate(columns) if n in right}
        )
        return
    gap = " | " if ruled else "  "
    full_widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    flexible_columns = (flexible,) if isinstance(flexible, int) else flexible
    spare = [n for n in spare if n in columns]
    available = look.width or _UNLIMITED
    columns = _drop_spare_columns(
        columns, full_widths, available, len(gap), flexible_columns, spare
    )
    widths = _shrink_columns(columns, full_widths, available, len(gap), flexible_columns)
    pattern = gap.join(
        f"%{'' if n in right else '-'}{min(width, _MAX_PADDED_WIDTH)}s"
        for n, width in zip(columns, widths, strict=True)
    )
    yield look.bold((pattern % tuple(headers[n] for n in columns)).rstrip())
    if ruled:
        yield "-+-".join("-" * min(width, _MAX_PADDED_WIDTH) for width in widths)
    is_narrowed = widths != [full_widths[n] for n in columns]
    for row in rows:
        cells_shown = tuple(row[n] for n in columns)
        if is_narrowed:
            cells_shown = tuple(map(shorten, cells_shown, widths))
        yield (pattern % cells_shown).rstrip()
    missing = ["names in full"] if widths[0] < full_widths[columns[0]] else []
    missing += [headers[n] for n in spare if n not in columns and headers[n]]
    if missing:
        note = f"(a wider terminal shows {', '.join(missing)})"
        yield from map(look.faint, wrap_text(note, look.width))


def _drop_spare_columns(
    columns: Sequence[int],
    full_widths: Sequence[int],
    available: int,
    gap: int,
    flexible: Collection[int],
    spare: Sequence[int],
) -> list[int]:
    """Return the columns without as many of the spare ones, in order, as needed to fit.

    `full_widths` has every column, `gap` is the space between two. A flexible column fits if it has
    a readable width.
    """
    smallest = [
        min(width, _READABLE_WIDTH) if column in flexible else width
        for column, width in enumerate(full_widths)
    ]
    kept = list(columns)
    for column in spare:
        if sum(smallest[n] for n in kept) + gap * (len(kept) - 1) <= available:
            break
        kept.remove(column)
    return kept


def _shrink_columns(
    columns: Sequence[int],
    full_widths: Sequence[int],
    available: int,
    gap: int,
    flexible: Collection[int],
) -> list[int]:
    """Return the widths of the columns; flexible ones shrink, the widest first, until all fit.

    None becomes narrower than `_MIN_COLUMN_WIDTH`, even if the rows are then too wide.
    """
    widths = [full_widths[column] for column in columns]
    excess = sum(widths) + gap * (len(columns) - 1) - available
    shrinkable = sorted(
        (index for index, column in enumerate(columns) if column in flexible),
        key=widths.__getitem__,
    )
    room = sum(widths[index] for index in shrinkable) - excess
    # From the narrowest: each gets an equal share of the room that is left, if it needs that much.
    for shrunk_count, index in enumerate(shrinkable):
        share = room // (len(shrinkable) - shrunk_count)
        widths[index] = min(widths[index], max(share, _MIN_COLUMN_WIDTH))
        room -= widths[index]
    return widths


def separate_blocks(blocks: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of blocks, with an empty line between blocks that are not empty."""
    has_output = False
    for block in blocks:
        for number, line in enumerate(block):
            if has_output and number == 0:
                yield ""
            has_output = True
            yield line


_OTHER_NAMES = {"markdown": "github"}
_SEPARATED_FORMATS = ("csv", "tsv")
"""Formats without padding, so that a program reads the cells as they are."""
_ESCAPING_TWINS = {"unsafehtml": "html", "latex_raw": "latex"}
"""Formats that do not escape cells, and the same formats with escapes."""

_MAX_PADDING = 32 << 20
"""Characters by which cells may be padded: one name of a megabyte would widen every row."""
_MAX_PADDING_RATIO = 8
"""Padded characters that are allowed for each character of the cells, in addition."""


def resolve_format(word: str) -> str:
    """Return the format of this name.

    Raises:
        UsageError: if no format has this name; the message lists all formats.
    """
    known = list_formats()
    if word not in known:
        raise UsageError(f"unknown table format {word!r}; choose one of {', '.join(known)}")
    return _OTHER_NAMES.get(word, word)


def list_formats() -> list[str]:
    """Return the names of all formats, sorted."""
    import tabulate  # 50 ms: only where a format is asked for

    return sorted({*tabulate.tabulate_formats, *_OTHER_NAMES, *_SEPARATED_FORMATS})


def _format_cells(
    cells: Sequence[Sequence[str]], fmt: str, right: Collection[int]
) -> Iterator[str]:
    """Return the lines of a table in a format that `resolve_format` returned.

    The first row has the headings. Characters that are syntax in the format are escaped.

    Raises:
        UsageError: one long cell would pad all rows to a file of gigabytes.
    """
    if fmt == "tsv":  # which has no quotes; a clean cell has no tab
        return map("\t".join, cells)
    if fmt == "csv":
        import csv
        from io import StringIO

        drawn = StringIO()
        csv.writer(drawn, lineterminator="\n").writerows(cells)
        return iter(drawn.getvalue().splitlines())
    import tabulate

    escape = _ESCAPE_BY_FORMAT.get(fmt, str)
    headers, *rows = ([escape(cell) for cell in row] for row in cells)
    content_length = sum(len(cell) for row in rows for cell in row)
    row_width = sum(max((len(row[n]) for row in rows), default=0) for n in range(len(headers)))
    if row_width * len(rows) > _MAX_PADDING + _MAX_PADDING_RATIO * content_length:
        raise UsageError(
            f"the longest cell would make each of {len(rows):,} rows {row_width:,} characters wide "
            f"in the format {fmt}",
            hint="--fmt csv pads nothing, and neither does --json",
        )
    text = tabulate.tabulate(
        rows,
        headers=headers,
        tablefmt=_ESCAPING_TWINS.get(fmt, fmt),
        disable_numparse=True,
        colalign=["right" if column in right else "left" for column in range(len(headers))],
    )
    return (line.rstrip() for line in str(text).split("\n"))


def _make_backslash_escape(characters: str) -> Callable[[str], str]:
    """Return a function that puts a backslash before these characters."""
    pattern = re.compile(characters)
    return lambda text: pattern.sub(r"\\\g<0>", text)


def _make_entity_escape(characters: str) -> Callable[[str], str]:
    """Return a function that replaces these characters by HTML entities."""
    table = str.maketrans({character: f"&#{ord(character)};" for character in characters})
    return lambda text: text.translate(table)


_escape_markdown = _make_backslash_escape(r"[\\|`*<&~]|(?<=\])\(|(?<![^\W_])_")
_ESCAPE_BY_FORMAT: dict[str, Callable[[str], str]] = {
    "github": _escape_markdown,
    "pipe": _escape_markdown,
    "rst": _make_backslash_escape(r"[\\|`*]|_(?![^\W_])"),
    "orgtbl": lambda text: text.replace("|", "\\vert{}"),
    "asciidoc": lambda text: text.replace("|", "\\|"),
    "jira": _make_backslash_escape(r"[\\|\[{]"),
    "youtrack": _make_backslash_escape(r"[\\|\[{]"),
    "mediawiki": _make_entity_escape("&<|[{'"),
    "moinmoin": _make_entity_escape("&<|[{'"),
    "textile": _make_entity_escape("&<|"),
}
"""The function that escapes the syntax of a format. tabulate escapes html and latex."""
