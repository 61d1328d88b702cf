"""Names made shorter so that they stay apart: `m.l.12.self_attn.q_proj.weight`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ckptool.render.text import shorten

__all__ = ["fit_names"]

_TOKEN = re.compile(r"\{[0-9.,]+\}|[^./]+|[./]")
_NUMBERS = re.compile(r"\{[0-9.,]+\}|[0-9]+")
_LONG = 24  # a component of more characters is cut where the room ends
_ELLIPSIS = "..."


@dataclass(slots=True)
class _Node:
    """What the names that begin alike go on with, and how much of each piece tells it apart."""

    after: dict[str, _Node] = field(default_factory=dict)
    enough: dict[str, int] = field(default_factory=dict)

    def measure(self) -> None:
        """Find the shortest beginning of each piece that no other has; numbers are kept whole."""
        pieces = ["", *sorted(self.after), ""]
        shared = [_common(one, other) for one, other in pairwise(pieces)]
        for piece, before, behind in zip(pieces[1:], shared, shared[1:], strict=False):
            whole = _NUMBERS.fullmatch(piece) is not None
            self.enough[piece] = len(piece) if whole else min(len(piece), max(before, behind) + 1)


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def fit_names(names: Sequence[str], width: int) -> list[str]:
    """The names in at most `width` characters (8 or more), different ones different if possible.

    Of components that end at a `.` or a `/` as much is kept as tells them apart from others at the
    same place, from the left, until the name fits; numbers are kept.
    """
    if all(len(name) <= width for name in names):
        return list(names)
    root = _tree(set(names))
    return [name if len(name) <= width else _fitted(root, name, width) for name in names]


def _tree(names: Iterable[str]) -> _Node:
    root = _Node()
    nodes = [root]
    for name in names:
        node = root
        for piece in _TOKEN.findall(name):
            if piece not in node.after:
                node.after[piece] = _Node()
                nodes.append(node.after[piece])
            node = node.after[piece]
    for node in nodes:
        node.measure()
    return root


def _fitted(root: _Node, name: str, width: int) -> str:
    excess, node, made = len(name) - width, root, []
    for piece in _TOKEN.findall(name):
        short = piece if excess <= 0 else _cut(piece, node.enough[piece], len(piece) - excess)
        excess -= len(piece) - len(short)
        made.append(short)
        node = node.after[piece]
    return shorten("".join(made), width)


def _cut(piece: str, enough: int, room: int) -> str:
    """A beginning that is enough; of a long piece as much as there is room for."""
    if len(piece) > _LONG and enough <= room - len(_ELLIPSIS) < len(piece):
        return piece[: room - len(_ELLIPSIS)] + _ELLIPSIS
    return piece[:enough]
