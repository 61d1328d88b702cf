"""Parts of layers that stand in other layers of the same list: `layers.{0..2}.downsample`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING

from ckptool.matching.numbering import numbered_otherwise
from ckptool.paths import printable

if TYPE_CHECKING:
    from ckptool.matching.slots import Slot

__all__ = ["moved_parts"]

_NUMBER = re.compile(r"[0-9]+(?=\.)")
_DEEPEST = 4
_MOST_PARTS = 8
_DIGITS = 9
"""Of a number that are looked at."""

_Part = tuple[str, str]
"""What stands before a number of a name, and what behind it."""


def moved_parts(
    have: Iterable[str],
    want: Iterable[str],
    unused: Mapping[str, Slot],
    missing: Mapping[str, Slot],
) -> tuple[str, ...]:
    """Parts that some layers of a list have, in the file others than in the model, in words.

    `unused` of the file's names and `missing` of the model's are those that nothing meets.
    """
    moved = numbered_otherwise(have, want, unused, missing, places=_parts)
    told: dict[str, None] = {}
    for part in sorted(moved):
        start, below = printable(part[0]), printable(".".join(part[1].split(".")[:2]))
        one, other = (f"{start}{_shown(numbers)}{below}" for numbers in moved[part])
        told[f"{one} of the file may be {other} of the model, by other numbers"] = None
    return tuple(islice(told, _MOST_PARTS))


def _parts(name: str) -> Iterator[tuple[_Part, str]]:
    for found in islice(_NUMBER.finditer(name), _DEEPEST):
        yield (name[: found.start()], name[found.end() :]), found[0]


def _shown(numbers: Iterable[str]) -> str:
    from ckptool.patterns import ranges  # seldom needed

    shown = ranges({int(number[:_DIGITS]) for number in numbers})
    return shown.strip("{}") if len({*numbers}) == 1 else shown
