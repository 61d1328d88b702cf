"""`ckptool list` as text."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.inspection.listing import Listing, TensorRow
from ckptool.inspection.values import shape_text
from ckptool.render.table import table
from ckptool.render.terminal import Look
from ckptool.render.text import clean, plural, shorten, size

__all__ = ["listing_lines"]

_VALUE_WIDTH = 60


def listing_lines(listing: Listing, look: Look) -> Iterator[str]:
    """Tensors, then values, then objects, then a line of totals."""
    blocks = [
        _tensors(listing, look) if listing.tensors else iter(()),
        _values(listing, look) if listing.values else iter(()),
        _objects(listing, look) if listing.objects else iter(()),
    ]
    for block in blocks:
        first = next(block, None)
        if first is not None:
            yield first
            yield from block
            yield ""
    yield look.bold(totals(listing))


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
    return "; ".join(parts)


def _tensors(listing: Listing, look: Look) -> Iterator[str]:
    headers = ["name", "dtype", "shape", "device", "size", ""]
    rows = [
        [
            clean(row.name),
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
            cells.insert(5, row.sha256 or "-")
    if not any(cells[-1] for cells in rows):
        headers, rows = headers[:-1], [cells[:-1] for cells in rows]
    return table(headers, rows, look, right={4})


def _marks(row: TensorRow) -> str:
    marks = [] if row.kind == "strided" else [row.kind]
    if row.requires_grad:
        marks.append("grad")
    if row.tied:
        marks.append(f"tied({clean(row.storage or '')})")
    return " ".join(marks)


def _values(listing: Listing, look: Look) -> Iterator[str]:
    rows = [
        [clean(row.name), row.type, clean(shorten(_literal(row.value), _VALUE_WIDTH))]
        for row in listing.values
    ]
    return table(["value", "type", ""], rows, look)


def _literal(value: object) -> str:
    """The repr of a value, not more of a long text than is shown."""
    if isinstance(value, str):
        return repr(shorten(value, _VALUE_WIDTH))
    return "None" if value is None else str(value)


def _objects(listing: Listing, look: Look) -> Iterator[str]:
    rows = [[clean(row.name), clean(row.class_name)] for row in listing.objects]
    return table(["object", "class"], rows, look)
