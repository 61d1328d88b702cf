"""A listing as a tree of modules, repeated layers folded into one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ckptool.inspection.listing import Listing, TensorRow
from ckptool.names import families

__all__ = ["TreeNode", "tree"]

MAX_PARTS = 100  # dots of a name that make levels; a hostile name has millions


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A module, or a tensor, of `count` equal ones; the totals are over all of them.

    `label` is the last part of the name, `{0..31}` where layers are folded. `elements` and
    `nbytes` count every name, ties again.
    """

    label: str
    tensors: int
    elements: int
    nbytes: int
    count: int = 1
    tensor: TensorRow | None = None
    """The tensor of that name, one of `count` with the same type and shape."""
    children: tuple[TreeNode, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the node as `ckptool.tree/1` nests it."""
        own = self.tensor
        return {
            "label": self.label,
            "count": self.count,
            "tensors": self.tensors,
            "elements": self.elements,
            "nbytes": self.nbytes,
            "dtype": own.dtype if own else None,
            "shape": own.shape if own else None,
            "device": own.device if own else None,
            "children": [child.to_dict() for child in self.children],
        }


def tree(listing: Listing) -> TreeNode:
    """Return the tensors of a listing by module; the label of the root is the file's name.

    Siblings whose names are numbers are folded where their subtrees agree in names, dtypes,
    devices and shapes.
    """
    rows = [(_parts(row), row) for row in listing.tensors]
    return _fold(listing.file, 0, rows, {})[0]


def _parts(row: TensorRow) -> tuple[str, ...]:
    *outer, own = (str(key) for key in row.path) if row.path else ("",)
    return (*outer, *own.split(".", MAX_PARTS))


def _fold(
    label: str, depth: int, rows: list[tuple[tuple[str, ...], TensorRow]], known: dict[Any, int]
) -> tuple[TreeNode, int]:
    """Return the node of the rows of a module, and a number that equal subtrees share."""
    own = None
    below: dict[str, list[tuple[tuple[str, ...], TensorRow]]] = {}
    for parts, row in rows:
        if len(parts) == depth:
            own = row
        else:
            below.setdefault(parts[depth], []).append((parts, row))
    folded = [(name, *_fold(name, depth + 1, part, known)) for name, part in below.items()]
    shape = (own.dtype, own.shape, own.device) if own else None
    signature = (shape, tuple((name, number) for name, _, number in folded))
    number = known.setdefault(signature, len(known))
    children = tuple(_grouped(folded))
    node = TreeNode(
        label,
        tensors=(own is not None) + sum(child.tensors for child in children),
        elements=(own.numel if own else 0) + sum(child.elements for child in children),
        nbytes=(own.nbytes if own else 0) + sum(child.nbytes for child in children),
        tensor=own,
        children=children,
    )
    return node, number


def _grouped(folded: list[tuple[str, TreeNode, int]]) -> Iterator[TreeNode]:
    """Yield siblings, each numbered one with equal subtrees merged into the first of them."""
    nodes = {name: node for name, node, _ in folded}
    for family in families((name, no if name.isdecimal() else name) for name, _, no in folded):
        members = [nodes[name] for name in family.names]
        yield (
            members[0]
            if len(members) == 1
            else replace(
                members[0],
                label=family.label,
                tensors=sum(node.tensors for node in members),
                elements=sum(node.elements for node in members),
                nbytes=sum(node.nbytes for node in members),
                count=len(members),
            )
        )
