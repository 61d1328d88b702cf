"""Rows as a table for people, or in one of tabulate's formats (`Look.fmt`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from ckptool.errors import UsageError
from ckptool.render.text import Look, shorten, wrapped

_NARROWEST = 12
_READABLE = 24  # characters of a flexible column before spare columns are left out for it
_WIDEST = 160  # characters that rows are padded to, so that one long name widens no other row


def table(
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
    last line names what is left out. `ruled` draws bars between the columns.

    Raises:
        UsageError: `look.fmt` would pad the rows to a file of gigabytes.
    """
    kept = [n for n in range(len(headers)) if n not in optional or any(row[n] for row in rows)]
    if look.fmt:
        cells = [[row[n] for n in kept] for row in (headers, *rows)]
        yield from _formatted(cells, look.fmt, {at for at, n in enumerate(kept) if n in right})
        return
    gap = " | " if ruled else "  "
    full = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    bending = (flexible,) if isinstance(flexible, int) else flexible
    spare = [n for n in spare if n in kept]
    widths = _fitted(kept, full, look.width or 1 << 30, len(gap), bending, spare)
    pattern = gap.join(
        f"%{'' if n in right else '-'}{min(width, _WIDEST)}s"
        for n, width in zip(kept, widths, strict=True)
    )
    yield look.bold((pattern % tuple(headers[n] for n in kept)).rstrip())
    if ruled:
        yield "-+-".join("-" * min(width, _WIDEST) for width in widths)
    is_narrowed = widths != [full[n] for n in kept]
    for row in rows:
        drawn = tuple(row[n] for n in kept)
        yield (pattern % (tuple(map(shorten, drawn, widths)) if is_narrowed else drawn)).rstrip()
    missing = ["names in full"] if widths[0] < full[kept[0]] else []
    missing += [headers[n] for n in spare if n not in kept and headers[n]]
    if missing:
        note = f"(a wider terminal shows {', '.join(missing)})"
        yield from map(look.faint, wrapped(note, look.width))


def _fitted(
    kept: list[int],
    full: Sequence[int],
    available: int,
    gap: int,
    flexible: Collection[int],
    spare: Sequence[int],
) -> list[int]:
    """Remove from `kept` as many spare columns as must go, and return the widths of the rest."""
    least = [min(width, _READABLE) if n in flexible else width for n, width in enumerate(full)]
    for column in spare:
        if sum(least[n] + gap for n in kept) <= available + gap:
            break
        kept.remove(column)
    widths = [full[n] for n in kept]
    excess = sum(widths) + gap * (len(kept) - 1) - available
    bending = sorted((n for n, at in enumerate(kept) if at in flexible), key=widths.__getitem__)
    room = sum(widths[n] for n in bending) - excess
    for done, n in enumerate(bending):  # the widest columns lose most
        widths[n] = min(widths[n], max(room // (len(bending) - done), _NARROWEST))
        room -= widths[n]
    return widths


def apart(blocks: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of blocks, with an empty line between blocks that are not empty."""
    begun = False
    for block in blocks:
        for number, line in enumerate(block):
            if begun and number == 0:
                yield ""
            begun = True
            yield line


_OTHER_NAMES = {"markdown": "github"}
_SEPARATED = ("csv", "tsv")
"""Formats without padding, so that a program reads the cells as they are."""
_ESCAPING_TWINS = {"unsafehtml": "html", "latex_raw": "latex"}
"""Formats that do not escape cells, and the same formats with escapes."""

_MOST_PADDING = 32 << 20  # characters; one name of a megabyte would widen every row
_MOST_PADDING_RATIO = 8


def known_format(word: str) -> str:
    """Return the format of this name.

    Raises:
        UsageError: there is no such format; the message lists all formats.
    """
    known = known_formats()
    if word not in known:
        raise UsageError(f"there is no table format {word!r}; there are {', '.join(known)}")
    return _OTHER_NAMES.get(word, word)


def known_formats() -> list[str]:
    """Return the names of all formats, sorted."""
    import tabulate  # 50 ms: only where a format is asked for

    return sorted({*tabulate.tabulate_formats, *_OTHER_NAMES, *_SEPARATED})


def _formatted(cells: Sequence[Sequence[str]], fmt: str, right: Collection[int]) -> Iterator[str]:
    """Return the lines of a table in a format that `known_format` returned.

    The first row has the headings. Characters that are syntax in the format are escaped.

    Raises:
        UsageError: one long cell would pad all rows to a file of gigabytes.
    """
    if fmt == "tsv":  # has no quotes; no clean cell holds a tab
        return map("\t".join, cells)
    if fmt == "csv":
        import csv
        from io import StringIO

        drawn = StringIO()
        csv.writer(drawn, lineterminator="\n").writerows(cells)
        return iter(drawn.getvalue().splitlines())
    import tabulate

    escape = _ESCAPES.get(fmt, str)
    headers, *rows = ([escape(cell) for cell in row] for row in cells)
    content = sum(len(cell) for row in rows for cell in row)
    widest = sum(max((len(row[n]) for row in rows), default=0) for n in range(len(headers)))
    if widest * len(rows) > _MOST_PADDING + _MOST_PADDING_RATIO * content:
        raise UsageError(
            f"the longest cell would make each of {len(rows):,} rows {widest:,} characters wide "
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


def _backslashed(characters: str) -> Callable[[str], str]:
    pattern = re.compile(characters)
    return lambda text: pattern.sub(r"\\\g<0>", text)


def _entities(characters: str) -> Callable[[str], str]:
    table = str.maketrans({character: f"&#{ord(character)};" for character in characters})
    return lambda text: text.translate(table)


_markdown = _backslashed(r"[\\|`*<&~]|(?<=\])\(|(?<![^\W_])_")
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
"""The function that escapes the syntax of a format. tabulate escapes html and latex."""
