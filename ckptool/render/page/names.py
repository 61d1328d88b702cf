"""Names as a tree of their parts, so that what many begin with is stored once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        self._known: dict[tuple[int, str], int] = {}

    def place(self, path: Sequence[str | int]) -> tuple[int, str]:
        """The module that a tensor with this path belongs to, and the label of its own."""
        module = 0
        *outer, own = _labels(path)
        for label in outer:
            key = (module, label)
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = len(self._labels)
                self._labels.append(clean(label))
                self._parents.append(module)
            module = found
        return module, clean(own)

    def columns(self, paths: Sequence[Sequence[str | int]]) -> dict[str, Any]:
        """`label` and `module` of each path, as columns."""
        placed = [self.place(path) for path in paths]
        return {
            "label": [label for _, label in placed],
            "module": [module for module, _ in placed],
        }

    def to_dict(self) -> dict[str, Any]:
        """The modules so far, as columns."""
        return {"label": self._labels, "parent": self._parents}


def _labels(path: Sequence[str | int]) -> Iterator[str]:
    *outer, own = (str(key) for key in path) if path else ("",)
    first, *rest = own.split(".", MAX_PARTS)
    for depth, key in enumerate((*outer, first)):
        yield f"/{key}" if depth else key
    yield from (f".{part}" for part in rest)
