"""`ckptool list` as text."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.core.model import Opaque, Storage, TensorRef
from ckptool.core.quantizers import LOOKS_QUANTIZED
from ckptool.core.values import format_shape, summarize
from ckptool.inspection.listing import Listing, ObjectRow, TensorRow, TreeNode
from ckptool.render.table import separate_blocks, table_lines
from ckptool.render.text import PLAIN, Look, format_label, format_size, shorten
from ckptool.words import clean, counted

_MAX_VALUE_LENGTH = 60


def listing_lines(listing: Listing, look: Look = PLAIN) -> Iterator[str]:
    """Yield the tables of tensors, values and objects, then the totals unless `look.fmt`."""
    tables = [
        _tensor_table(listing, look) if listing.tensors else (),
        _value_table(listing, look) if listing.values else (),
        _object_table(listing, look) if listing.objects else (),
    ]
    yield from separate_blocks(
        tables if look.fmt else [*tables, [look.bold(format_totals(listing))]]
    )


def name_lines(listing: Listing) -> Iterator[str]:
    """Yield the key of every tensor, value and object, one a line."""
    for rows in (listing.tensors, listing.values, listing.objects):
        yield from (format_label(row.name, row.path) for row in rows)


def listing_line(listing: Listing) -> str:
    """Return the file and the totals in one line."""
    return f"{clean(listing.file)}: {format_totals(listing)}"


def format_totals(listing: Listing) -> str:
    """Return `14 tensors, 1,234 elements, 4.8 KiB; 3 values; 1 object`."""
    elements = sum(row.numel for row in listing.tensors)
    nbytes = sum(row.nbytes for row in listing.tensors)
    tensors = counted(len(listing.tensors), "tensor")
    parts = [f"{tensors}, {counted(elements, 'element')}, {format_size(nbytes)}"]
    if listing.values:
        parts.append(counted(len(listing.values), "value"))
    if listing.objects:
        parts.append(counted(len(listing.objects), "object"))
    if listing.quantizers:
        known = [scheme for scheme in listing.quantizers if scheme != LOOKS_QUANTIZED]
        parts += [f"quantized: {', '.join(known)}"] if known else []
        parts += [LOOKS_QUANTIZED] if len(known) < len(listing.quantizers) else []
    return "; ".join(parts)


def _tensor_table(listing: Listing, look: Look) -> Iterator[str]:
    """Return the lines of the table of tensors."""
    headers = ["name", "dtype", "shape", "device", "size", "sha256", "marks"]
    rows = [
        [
            format_label(row.name, row.path),
            row.dtype,
            format_shape(row.shape),
            clean(row.device),
            format_size(row.nbytes),
            (_format_digests(row) or "-") if listing.hashed else "",
            _format_marks(row),
        ]
        for row in listing.tensors
    ]
    return table_lines(
        headers,
        rows,
        look,
        right={4},
        flexible=(0, 2, 3, 5, 6),  # all but dtype and size
        spare=(4, 3),  # the size, then the device
        optional=(5,) if look.fmt else (5, 6),  # --fmt always has the marks
    )


def _format_digests(row: TensorRow | ObjectRow) -> str:
    """Return the hash of the elements, and a digest of other parts of the tensor."""
    digests = [row.sha256] if isinstance(row, TensorRow) else []
    digests.append(f"parts:{row.digest}" if row.digest else None)
    return " ".join(filter(None, digests))


def _format_marks(row: TensorRow) -> str:
    """Return the kind of a tensor if it is special, `grad`, and `tied(STORAGE)`."""
    marks = [] if row.kind == "strided" else [row.kind]
    if row.requires_grad:
        marks.append("grad")
    if row.tied:
        marks.append(f"tied({clean(row.storage or '')})")
    return " ".join(marks)


def _value_table(listing: Listing, look: Look) -> Iterator[str]:
    """Return the lines of the table of values."""
    rows = []
    for row in listing.values:
        text = repr(row.value) if isinstance(row.value, str) else str(row.value)
        short = text if look.fmt else shorten(text, _MAX_VALUE_LENGTH)
        rows.append([format_label(row.name, row.path), row.type, clean(short)])
    headers = ["name", "type", "value"] if look.fmt else ["value", "type", ""]
    return table_lines(headers, rows, look, flexible=(0, 2))


def _object_table(listing: Listing, look: Look) -> Iterator[str]:
    """Return the lines of the table of objects."""
    headers = ["name" if look.fmt else "object", "class", "value" if look.fmt else "", "content"]
    rows = [
        [
            format_label(row.name, row.path),
            clean(row.class_name),
            clean(row.summary),
            _format_digests(row),
        ]
        for row in listing.objects
    ]
    content = headers.index("content")  # has digests, which may be empty
    return table_lines(
        headers,
        rows,
        look,
        flexible=range(len(headers)),
        optional=() if listing.hashed else (content,),
    )


_MAX_TREE_WIDTH = 100
_MIN_NAME_LENGTH = 12
"""Characters that every name keeps."""


def tree_lines(root: TreeNode, look: Look) -> Iterator[str]:
    """Yield a line for each module and tensor, drawn as a tree, with its totals.

    On a narrow terminal the totals lose their elements, then names lose their middle.
    """
    # `lead` is the drawing in front of a name.
    rows = list(_walk_tree(root, "", ""))
    all_totals = [_format_node_totals(node) for _, _, node in rows]
    # The width of the drawing and the names, which are two spaces before the totals.
    width = min(_MAX_TREE_WIDTH, max(len(lead) + len(name) for lead, name, _ in rows))
    if look.width is not None:
        if width + 2 + max(map(len, all_totals)) > look.width:
            all_totals = [_format_node_totals(node, brief=True) for _, _, node in rows]
        smallest = max(len(lead) + min(len(name), _MIN_NAME_LENGTH) for lead, name, _ in rows)
        width = min(width, max(smallest, look.width - max(map(len, all_totals)) - 2))
    for (lead, name, _), totals in zip(rows, all_totals, strict=True):
        if look.width is not None:
            name = shorten(name, max(width - len(lead), _MIN_NAME_LENGTH))
        yield f"{lead + name:<{width}}  {look.faint(totals)}"


def _walk_tree(node: TreeNode, lead: str, below: str) -> Iterator[tuple[str, str, TreeNode]]:
    """Yield a node and all below it: the tree drawing before its name, the name, and the node.

    `lead` is the drawing before this node, `below` the start of the drawing before its children.
    """
    yield lead, clean(node.label) or "''", node
    for child in node.children:
        branch, deeper = ("`- ", "   ") if child is node.children[-1] else ("|- ", "|  ")
        yield from _walk_tree(child, below + branch, below + deeper)


def _format_node_totals(node: TreeNode, *, brief: bool = False) -> str:
    """Return the number of tensors, elements and bytes of a module, or the header of a tensor.

    If `brief`, a module has no elements. A row of repeated tensors has their number.
    """
    tensor = node.tensor
    if tensor is None or node.children:
        elements = [] if brief else [counted(node.elements, "element")]
        return ", ".join((counted(node.tensors, "tensor"), *elements, format_size(node.nbytes)))
    times = f"{node.count:,} x " if node.count > 1 else ""
    return f"{times}{tensor.dtype} {format_shape(tensor.shape)}  {format_size(node.nbytes)}"


def tensor_line(tensor: TensorRow | TensorRef) -> str:
    """Return `float32 [8, 3] on cuda:3, requires_grad`."""
    kind = "" if tensor.kind == "strided" else f", {tensor.kind}"
    grad = ", requires_grad" if tensor.requires_grad else ""
    return f"{tensor.dtype} {format_shape(tensor.shape)} on {clean(tensor.device)}{kind}{grad}"


def object_line(node: Opaque) -> str:
    """Return `pathlib.PosixPath('runs')`, or only the class."""
    return clean(summarize(node))


def storage_line(storage: Storage) -> str:
    """Return `3: 864 B on cuda:3`."""
    return f"{clean(storage.key)}: {format_size(storage.nbytes)} on {clean(storage.device)}"
