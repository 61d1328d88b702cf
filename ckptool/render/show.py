"""`ckptool show` as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptool.inspection.show import Shown, ShownContainer, ShownObject, ShownTensor, ShownValue
from ckptool.inspection.values import shape_text
from ckptool.render.listing import tensor_line
from ckptool.render.table import table
from ckptool.render.text import Look, number, size
from ckptool.words import clean, clean_lines, counted

__all__ = ["shown_lines"]


def shown_lines(shown: Shown, look: Look) -> Iterator[str]:
    """Yield the lines of one value, tensor, object or container."""
    if look.fmt:
        yield from _as_table(shown, look)
        return
    if isinstance(shown, ShownValue):
        # The value itself and nothing else, for $(ckptool show FILE epoch).
        yield clean_lines(shown.value) if isinstance(shown.value, str) else str(shown.value)
        return
    yield look.bold(clean(shown.name) or "(the whole file)")
    if isinstance(shown, ShownTensor):
        yield from _one_tensor(shown)
    elif isinstance(shown, ShownObject):
        yield from _object(shown, look)
    elif isinstance(shown, ShownContainer):
        yield f"{shown.type} of {counted(len(shown.entries), 'entry')}"
        yield from _entries(shown.entries, look)


def _as_table(shown: Shown, look: Look) -> Iterator[str]:
    """Return a table of the entries of a container or object, or of the facts of a tensor."""
    if isinstance(shown, ShownContainer):
        return _entries(shown.entries, look)
    if isinstance(shown, ShownObject):
        return _entries((*shown.attributes, *shown.items), look, "attribute or item")
    skipped = ("schema", "file", "path")
    facts = {key: fact for key, fact in shown.to_dict().items() if key not in skipped}
    rows = [[key, clean(str(fact))] for key, fact in facts.items()]
    return table(["fact", "value"], rows, look)


def _one_tensor(shown: ShownTensor) -> Iterator[str]:
    row, stats = shown.row, shown.statistics
    yield tensor_line(row)
    stride = "" if row.storage is None else f", stride {shape_text(row.stride)}"
    yield f"{counted(row.numel, 'element')}, {size(row.nbytes)}{stride}"
    for name, text in shown.parts:
        yield f"  {clean(name)}: {clean(text)}"
    if stats is None:
        return
    if shown.head:
        more = " ..." if len(shown.head) < row.numel else ""
        yield f"head  {' '.join(map(number, shown.head))}{more}"
    if stats.minimum is not None:
        facts = (("min", stats.minimum), ("max", stats.maximum), ("mean", stats.mean))
        yield "  ".join(f"{name} {number(value)}" for name, value in facts)
    for name, found in (("NaN", stats.nan), ("infinite", stats.infinite)):
        if found:
            yield f"{found:,} {name}"


def _object(shown: ShownObject, look: Look) -> Iterator[str]:
    yield clean(shown.class_name)
    if shown.arguments:
        yield f"arguments: {', '.join(map(clean, shown.arguments))}"
    yield from _entries(shown.attributes, look, "attribute")
    yield from _entries(shown.items, look, "item")


def _entries(entries: Iterable[tuple[str, str]], look: Look, heading: str = "key") -> Iterator[str]:
    rows = [[clean(key), clean(text)] for key, text in entries]
    if rows or look.fmt:
        yield from table([heading, "value" if look.fmt else ""], rows, look, flexible=(0, 1))
