"""A listing as a tree of modules, repeated layers folded into one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ckptool.inspection.listing import Listing, TensorRow
from ckptool.names import ranges

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


@dataclass(slots=True)
class _Module:
    """A node while the tree grows."""

    tensor: TensorRow | None = None
    children: dict[str, _Module] = field(default_factory=dict)


def tree(listing: Listing) -> TreeNode:
    """Return the tensors of a listing by module; the label of the root is the file's name.

    Siblings whose names are numbers are folded where their subtrees agree in names, dtypes,
    devices and shapes.
    """
    root = _Module()
    for row in listing.tensors:
        node = root
        for part in _parts(row):
            child = node.children.get(part)
            if child is None:
                child = node.children[part] = _Module()
            node = child
        node.tensor = row
    return _fold(listing.file, root, {})[0]


def _parts(row: TensorRow) -> Iterable[str]:
    *outer, own = (str(key) for key in row.path) if row.path else ("",)
    return (*outer, *own.split(".", MAX_PARTS))


def _fold(label: str, module: _Module, known: dict[Any, int]) -> tuple[TreeNode, int]:
    """Return the node of a module, and a number that equal subtrees share."""
    folded = [(name, *_fold(name, child, known)) for name, child in module.children.items()]
    own = module.tensor
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


def _grouped(folded: list[tuple[str, TreeNode, int]]) -> Iterable[TreeNode]:
    """Merge numbered siblings with equal subtrees into the first of them."""
    groups: dict[Any, list[TreeNode]] = {}
    for name, node, number in folded:
        groups.setdefault(number if _is_index(name) else name, []).append(node)
    return [_merged(nodes) for nodes in groups.values()]


def _is_index(name: str) -> bool:
    return len(name) < 10 and name.isdecimal() and str(int(name)) == name


def _merged(nodes: list[TreeNode]) -> TreeNode:
    first, times = nodes[0], len(nodes)
    if times == 1:
        return first
    return TreeNode(
        ranges(int(node.label) for node in nodes),
        tensors=sum(node.tensors for node in nodes),
        elements=sum(node.elements for node in nodes),
        nbytes=sum(node.nbytes for node in nodes),
        count=times,
        tensor=first.tensor,
        children=first.children,
    )
