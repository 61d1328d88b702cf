"""The shape of the tree: nested containers made one flat dict, a tree put under a key."""

from __future__ import annotations

from typing import Any

from ckptool.core.checkpoint import Change, Checkpoint
from ckptool.core.model import Opaque, OrderedMap, Path, TensorRef
from ckptool.core.tree import walk, where
from ckptool.errors import NameCollision, NotRepresentable
from ckptool.words import counted, listed, printable


def flattened(checkpoint: Checkpoint, separator: str = ".") -> Checkpoint:
    """Return a checkpoint whose root is one dict: tensors and values under their whole names.

    Keys on the way to a tensor, and places in a list, are joined by `separator`.

    Raises:
        NameCollision: two would get one name.
        NotRepresentable: tensors are in an object, whose class would be lost.
    """
    root, lost = OrderedMap(), list[str]()

    def enter(path: Path, node: Any) -> bool:
        here = where(path)
        if isinstance(node, Opaque):
            raise NotRepresentable(
                f"{here} is an object of class {printable(node.class_name)}, which has tensors",
                file=checkpoint.path or None,
                hint="--plain makes plain data of objects where it can; --key takes one part",
            )
        if isinstance(node, OrderedMap) and node.attributes:
            lost.append(f"the attributes of {here}: {listed(map(str, node.attributes))}")
        if not node and path:
            lost.append(f"{here}, which is empty")
        return True

    for path, leaf in walk(checkpoint.root, enter=enter):
        name = separator.join(map(str, path))
        if name in root:
            raise NameCollision(
                f"two entries would be called {printable(name)!r}",
                file=checkpoint.path or None,
                hint="choose another separator: --flatten /",
            )
        root[name] = leaf
    count = sum(isinstance(leaf, TensorRef) for leaf in root.values())
    text = f"{counted(count, 'tensor')} in one flat dict, keys joined by {separator!r}"
    left_out = [Change("left-out", one, 1) for one in lost]
    return checkpoint.with_root(root, Change("flatten", text, count), *left_out)


def nested(checkpoint: Checkpoint, key: str) -> Checkpoint:
    """Return a checkpoint whose root is a dict with the tree under `key` alone."""
    root: dict[str, Any] = {key: checkpoint.root}
    return checkpoint.with_root(root, Change("nest", f"all of it put under {printable(key)!r}"))
