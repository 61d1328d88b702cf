"""Rows as a table: drawn by tabulate up to some thousands, then fixed columns that stream.

Where a format is asked for (`Look.fmt`) it is drawn in that one, whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptool.render.terminal import Look
from ckptool.render.text import shorten

__all__ = ["apart", "table"]

MOST_DRAWN = 2000
_GAP = 2
_NARROWEST = 12
_WIDEST = 160  # what rows are padded to: one long name must not cost every row its length


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    look: Look,
    *,
    right: frozenset[int] | set[int] = frozenset(),
    flexible: int = 0,
) -> Iterator[str]:
    """The lines of a table; cells are clean already.

    `right` are the columns aligned to the right; `flexible` is the one whose cells are shortened
    where the rows would be wider than the terminal.

    Raises:
        UsageError: `look.fmt` would pad the rows to a file of gigabytes.
    """
    if look.fmt:
        from ckptool.render.table_formats import formatted

        return formatted(headers, rows, look.fmt, frozenset(right))
    widths = [
        max(len(header), max((len(row[column]) for row in rows), default=0))
        for column, header in enumerate(headers)
    ]
    fitted = _fit(widths, look.width, flexible)
    if fitted[flexible] < widths[flexible]:
        rows = [
            [*row[:flexible], shorten(row[flexible], fitted[flexible]), *row[flexible + 1 :]]
            for row in rows
        ]
    if len(rows) > MOST_DRAWN or max(fitted) > _WIDEST:
        return _streamed(headers, rows, [min(w, _WIDEST) for w in fitted], right, look)
    return _drawn(headers, rows, right, look)


def apart(blocks: Iterable[Iterable[str]]) -> Iterator[str]:
    """The lines of several tables or paragraphs, an empty line between them; empty ones go."""
    begun = False
    for block in blocks:
        for number, line in enumerate(block):
            if begun and number == 0:
                yield ""
            begun = True
            yield line


def _fit(widths: list[int], available: int | None, flexible: int) -> list[int]:
    excess = sum(widths) + _GAP * (len(widths) - 1) - (available or 1 << 30)
    if excess <= 0:
        return widths
    fitted = list(widths)
    fitted[flexible] = max(min(_NARROWEST, widths[flexible]), widths[flexible] - excess)
    return fitted


def _drawn(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: frozenset[int] | set[int],
    look: Look,
) -> Iterator[str]:
    import tabulate  # 50 ms: only where a table is drawn

    # The header is a row like the others: tabulate would make its columns wider than they need.
    text = tabulate.tabulate(
        [headers, *rows],
        tablefmt="plain",
        disable_numparse=True,
        colalign=["right" if column in right else "left" for column in range(len(headers))],
    )
    first, *rest = text.split("\n")
    yield look.bold(first.rstrip())
    yield from (line.rstrip() for line in rest)


def _streamed(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: list[int],
    right: frozenset[int] | set[int],
    look: Look,
) -> Iterator[str]:
    columns = (f"%{width}s" if n in right else f"%-{width}s" for n, width in enumerate(widths))
    pattern = (" " * _GAP).join(columns)
    yield look.bold((pattern % tuple(headers)).rstrip())
    for row in rows:
        yield (pattern % tuple(row)).rstrip()
