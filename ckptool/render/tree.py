"""`ckptool list --tree` as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptool.inspection.folding import TreeNode
from ckptool.inspection.values import shape_text
from ckptool.render.names import fit_names
from ckptool.render.terminal import Look
from ckptool.render.text import clean, count, plural, shorten, size

__all__ = ["tree_lines"]

_WIDEST = 100
_LEAST = 12
"""Characters that a name keeps, however deep it stands."""


class _Row(NamedTuple):
    lead: str
    """The drawing before the name."""
    label: str
    node: TreeNode
    siblings: tuple[str, ...]
    """The labels below the same module, this one's too: short, they still differ."""


def tree_lines(root: TreeNode, look: Look) -> Iterator[str]:
    """Yield a line for each module and tensor, drawn as a tree, with its totals behind it.

    Where the terminal is too narrow, modules go without their elements, then names are shortened.
    """
    rows = list(_rows(root, "", "", (_label(root),)))
    own = max(len(row.lead) + len(row.label) for row in rows)
    width, facts = min(_WIDEST, own), [_facts(row.node) for row in rows]
    if look.width is not None:
        if width + 2 + max(map(len, facts)) > look.width:
            facts = [_facts(row.node, brief=True) for row in rows]
        deepest = max(len(row.lead) + min(len(row.label), _LEAST) for row in rows)
        width = min(width, max(deepest, look.width - max(map(len, facts)) - 2))
    short: dict[int, dict[str, str]] = {}
    for row, told in zip(rows, facts, strict=True):
        shown, room = row.label, max(width - len(row.lead), _LEAST)
        if look.width is not None and len(shown) > room:
            if id(row.siblings) not in short:
                fitted = [shorten(label, room) for label in row.siblings]
                if len(set(fitted)) < len(fitted):
                    fitted = fit_names(row.siblings, room)
                short[id(row.siblings)] = dict(zip(row.siblings, fitted, strict=True))
            shown = short[id(row.siblings)][shown]
        yield f"{row.lead + shown:<{width}}  {look.faint(told)}"


def _rows(node: TreeNode, lead: str, below: str, siblings: tuple[str, ...]) -> Iterator[_Row]:
    yield _Row(lead, _label(node), node, siblings)
    labels = tuple(map(_label, node.children))
    last = len(node.children) - 1
    for index, child in enumerate(node.children):
        branch, deeper = ("`- ", "   ") if index == last else ("|- ", "|  ")
        yield from _rows(child, below + branch, below + deeper, labels)


def _label(node: TreeNode) -> str:
    return clean(node.label) or "''"


def _facts(node: TreeNode, *, brief: bool = False) -> str:
    own = node.tensor
    if own is None or node.children:
        totals = [plural(node.tensors, "tensor"), plural(node.elements, "element")]
        return ", ".join((*totals[: 1 if brief else 2], size(node.nbytes)))
    times = f"{count(node.count)} x " if node.count > 1 else ""
    return f"{times}{own.dtype} {shape_text(own.shape)}  {size(node.nbytes)}"
