"""`ckptool list` as text."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.inspection.listing import Listing, ObjectRow, TensorRow
from ckptool.inspection.values import shape_text
from ckptool.render.table import apart, table
from ckptool.render.terminal import Look
from ckptool.render.text import clean, label, plural, shorten, size

__all__ = ["listing_lines"]

_VALUE_WIDTH = 60


def listing_lines(listing: Listing, look: Look) -> Iterator[str]:
    """Tensors, then values, then objects, then a line of totals unless tables are all."""
    tables = [
        _tensors(listing, look) if listing.tensors else (),
        _values(listing, look) if listing.values else (),
        _objects(listing, look) if listing.objects else (),
    ]
    return apart(tables if look.fmt else [*tables, [look.bold(totals(listing))]])


def totals(listing: Listing) -> str:
    """`14 tensors, 1,234 elements, 4.8 KiB; 3 values; 1 object`."""
    elements = sum(row.numel for row in listing.tensors)
    nbytes = sum(row.nbytes for row in listing.tensors)
    parts = [
        f"{plural(len(listing.tensors), 'tensor')}, {plural(elements, 'element')}, {size(nbytes)}"
    ]
    if listing.values:
        parts.append(plural(len(listing.values), "value"))
    if listing.objects:
        parts.append(plural(len(listing.objects), "object"))
    if listing.quantisers:
        parts.append(f"quantised: {', '.join(listing.quantisers)}")
    return "; ".join(parts)


def _tensors(listing: Listing, look: Look) -> Iterator[str]:
    headers = ["name", "dtype", "shape", "device", "size", "marks" if look.fmt else ""]
    rows = [
        [
            label(row.name, row.path),
            row.dtype,
            shape_text(row.shape),
            clean(row.device),
            size(row.nbytes),
            _marks(row),
        ]
        for row in listing.tensors
    ]
    if listing.hashed:
        headers.insert(5, "sha256")
        for cells, row in zip(rows, listing.tensors, strict=True):
            cells.insert(5, _content(row) or "-")
    if not look.fmt and not any(cells[-1] for cells in rows):
        headers, rows = headers[:-1], [cells[:-1] for cells in rows]
    return table(
        headers, rows, look, right={4}, flexible=(0, 2, 3, *range(5, len(headers))), spare=(4, 3)
    )


def _content(row: TensorRow | ObjectRow) -> str:
    """The hash of the elements, and a digest of what is more than elements."""
    digests = [row.sha256] if isinstance(row, TensorRow) else []
    digests.append(f"parts:{row.digest}" if row.digest else None)
    return " ".join(filter(None, digests))


def _marks(row: TensorRow) -> str:
    marks = [] if row.kind == "strided" else [row.kind]
    if row.requires_grad:
        marks.append("grad")
    if row.tied:
        marks.append(f"tied({clean(row.storage or '')})")
    return " ".join(marks)


def _values(listing: Listing, look: Look) -> Iterator[str]:
    if look.fmt:
        rows = [
            [label(row.name, row.path), row.type, clean(_whole(row.value))]
            for row in listing.values
        ]
        return table(["name", "type", "value"], rows, look)
    rows = [
        [label(row.name, row.path), row.type, clean(_short(row.value))] for row in listing.values
    ]
    return table(["value", "type", ""], rows, look, flexible=(0, 2))


def _whole(value: object) -> str:
    return repr(value) if isinstance(value, str) else str(value)


def _short(value: object) -> str:
    """The repr of a value, not more of a long one than is shown."""
    short = shorten(value, _VALUE_WIDTH) if isinstance(value, str) else value
    return shorten(_whole(short), _VALUE_WIDTH)


def _objects(listing: Listing, look: Look) -> Iterator[str]:
    headers = ["name" if look.fmt else "object", "class", "value" if look.fmt else ""]
    rows = [
        [label(row.name, row.path), clean(row.class_name), clean(row.summary)]
        for row in listing.objects
    ]
    if listing.hashed:
        headers.append("content")
        rows = [[*cells, _content(row)] for cells, row in zip(rows, listing.objects, strict=True)]
    return table(headers, rows, look, flexible=tuple(range(len(headers))))
