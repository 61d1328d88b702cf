"""Names made shorter so that they stay apart: `m.l.12.self_attn.q_proj.weight`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ckptool.render.text import shorten

__all__ = ["fit_names"]

_TOKEN = re.compile(r"\{[0-9.,]+\}|[^./]+|[./]")
_NUMBERS = re.compile(r"\{[0-9.,]+\}|[0-9]+")
_LONG = 24  # a component of more characters is cut where the room ends
_ELLIPSIS = "..."
_MOST_COMPARED = 1 << 20
"""Characters of all names: those of hostile ones may each be a component."""


class _Tree(dict[str, "_Tree"]):
    """What the names that begin alike go on with."""

    __slots__ = ("_enough",)

    def enough(self, piece: str) -> int:
        """How much of a piece no other begins with; numbers are kept whole."""
        if len(self) == 1:  # most are
            return len(piece) if _NUMBERS.fullmatch(piece) else 1
        if not hasattr(self, "_enough"):
            pieces = ["", *sorted(self), ""]
            shared = [_common(one, other) for one, other in pairwise(pieces)]
            counts = zip(pieces[1:], shared, shared[1:], strict=False)
            self._enough = {
                piece: len(piece) if _NUMBERS.fullmatch(piece) else max(before, behind) + 1
                for piece, before, behind in counts
            }
        return self._enough[piece]


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def fit_names(names: Sequence[str], width: int) -> list[str]:
    """The names in at most `width` characters (8 or more), different ones different if possible.

    Of components that end at a `.` or a `/` as much is kept as tells them apart from others at the
    same place, from the left, until the name fits; numbers are kept. Beyond a million
    characters names just lose their middle.
    """
    if all(len(name) <= width for name in names):
        return list(names)
    if sum(map(len, names)) > _MOST_COMPARED:
        return [shorten(name, width) for name in names]
    root = _tree(set(names))
    return [name if len(name) <= width else _fitted(root, name, width) for name in names]


def _tree(names: Iterable[str]) -> _Tree:
    root = _Tree()
    for name in names:
        node = root
        for piece in _TOKEN.findall(name):
            found = node.get(piece)
            if found is None:
                found = node[piece] = _Tree()
            node = found
    return root


def _fitted(root: _Tree, name: str, width: int) -> str:
    excess, node, made = len(name) - width, root, []
    for piece in _TOKEN.findall(name):
        short = piece if excess <= 0 else _cut(piece, node.enough(piece), len(piece) - excess)
        excess -= len(piece) - len(short)
        made.append(short)
        node = node[piece]
    return shorten("".join(made), width)


def _cut(piece: str, enough: int, room: int) -> str:
    """A beginning that is enough; of a long piece as much as there is room for."""
    if len(piece) > _LONG and enough <= room - len(_ELLIPSIS) < len(piece):
        return piece[: room - len(_ELLIPSIS)] + _ELLIPSIS
    return piece[:enough]
