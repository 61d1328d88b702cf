"""`ckptool list --tree` as text."""

from __future__ import annotations

from collections.abc import Iterator

from ckptool.inspection.folding import TreeNode
from ckptool.inspection.values import shape_text
from ckptool.render.terminal import Look
from ckptool.render.text import clean, count, plural, shorten, size

__all__ = ["tree_lines"]

_WIDEST = 100


def tree_lines(root: TreeNode, look: Look) -> Iterator[str]:
    """A line for each module and tensor, drawn as a tree, its totals behind it."""
    rows = list(_rows(root, "", ""))
    width = min(_WIDEST, max(len(label) for label, _ in rows))
    if look.width is not None:
        width = min(width, max(20, look.width - max(len(facts) for _, facts in rows) - 2))
    for label, facts in rows:
        shown = label if look.width is None else shorten(label, width)
        yield f"{shown:<{width}}  {look.faint(facts)}"


def _rows(node: TreeNode, lead: str, below: str) -> Iterator[tuple[str, str]]:
    yield lead + (clean(node.label) or "''"), _facts(node)
    last = len(node.children) - 1
    for index, child in enumerate(node.children):
        branch, deeper = ("`- ", "   ") if index == last else ("|- ", "|  ")
        yield from _rows(child, below + branch, below + deeper)


def _facts(node: TreeNode) -> str:
    own = node.tensor
    if own is None or node.children:
        totals = (plural(node.tensors, "tensor"), plural(node.elements, "element"))
        return ", ".join((*totals, size(node.nbytes)))
    times = f"{count(node.count)} x " if node.count > 1 else ""
    return f"{times}{own.dtype} {shape_text(own.shape)}  {size(node.nbytes)}"
