"""Names as a tree of their parts, so that what many begin with is stored once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ckptool.inspection.folding import MAX_PARTS
from ckptool.render.text import clean

__all__ = ["Names"]


class Names:
    """The modules that names go through, numbered; 0 is the root, parents come first.

    A label begins with what joins it to its parent, `/` between the keys of a path and `.` within
    the last of them; below the root with nothing.
    """

    def __init__(self) -> None:
        """Only the root is there."""
        self._labels = [""]
        self._parents = [0]
        self._children: dict[tuple[int, str], int] = {}
        self._modules: dict[tuple[str, ...], int] = {}

    def place(self, path: Sequence[str | int]) -> tuple[int, str]:
        """The module that a tensor with this path belongs to, and the label of its own.

        A name of more dots than modules nest is one label.
        """
        *outer, own = map(str, path) if path else ("",)
        if "." in own and own.count(".") <= MAX_PARTS:
            inner, _, own = own.rpartition(".")
            return self._module((*outer, inner), dotted=True), clean(f".{own}")
        return self._module(tuple(outer), dotted=False), clean(f"/{own}" if outer else own)

    def columns(self, paths: Iterable[Sequence[str | int]]) -> dict[str, Any]:
        """`label` and `module` of each path, as columns."""
        placed = [self.place(path) for path in paths]
        return {
            "label": [label for _, label in placed],
            "module": [module for module, _ in placed],
        }

    def to_dict(self) -> dict[str, Any]:
        """The modules so far, as columns."""
        return {"label": self._labels, "parent": self._parents}

    def _module(self, keys: tuple[str, ...], *, dotted: bool) -> int:
        """The module at these keys, of which the last, where `dotted`, has parts of its own."""
        known = (*keys, "." if dotted else "/")
        if known not in self._modules:
            module = 0
            for depth, key in enumerate(keys):
                first, *rest = key.split(".") if dotted and depth == len(keys) - 1 else (key,)
                for label in (f"/{first}" if depth else first, *(f".{part}" for part in rest)):
                    module = self._child(module, label)
            self._modules[known] = module
        return self._modules[known]

    def _child(self, module: int, label: str) -> int:
        found = self._children.setdefault((module, label), len(self._labels))
        if found == len(self._labels):
            self._labels.append(clean(label))
            self._parents.append(module)
        return found
