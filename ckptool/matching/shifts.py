"""Parts of layers that stand in other layers of the same list: `layers.{0..2}.downsample`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from ckptool.matching.numbering import Move, numbered_otherwise

if TYPE_CHECKING:
    from ckptool.matching.slots import Slot

__all__ = ["moved_parts"]

_NUMBER = re.compile(r"[0-9]+(?=\.)")
_DEEPEST = 4
_MOST_PARTS = 8

_Part = tuple[str, str]
"""What stands before a number of a name, and what behind it."""


def moved_parts(
    have: Iterable[str],
    want: Iterable[str],
    unused: Mapping[str, Slot],
    missing: Mapping[str, Slot],
) -> tuple[Move, ...]:
    """Parts that some layers of a list have, in the file others than in the model.

    `unused` of the file's names and `missing` of the model's are those that nothing meets.
    """
    moved = numbered_otherwise(have, want, unused, missing, places=_parts)
    told: dict[_Part, Move] = {}
    for (start, rest), numbers in sorted(moved.items()):
        below = ".".join(rest.split(".")[:2])
        told.setdefault((start, below), Move(start, start, *numbers, below))
    return tuple(islice(told.values(), _MOST_PARTS))


def _parts(name: str) -> Iterator[tuple[_Part, str]]:
    for found in islice(_NUMBER.finditer(name), _DEEPEST):
        yield (name[: found.start()], name[found.end() :]), found[0]
