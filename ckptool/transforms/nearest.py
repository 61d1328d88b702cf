"""Names like one that is not there, for messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

__all__ = ["similar"]

_MOST, _LONGEST = 2000, 200
"""Names looked at, characters of each: comparing takes its time, and a file may be hostile."""


def similar(wanted: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The names most like `wanted`, else those that have a component like a word of it."""
    known = list(islice((name for name in names if len(name) <= _LONGEST), _MOST))
    wanted = wanted[:_LONGEST]
    found = get_close_matches(wanted, known, n=most)
    if found:
        return found
    words = {word for word in re.findall(r"\w+", wanted) if len(word) > 1 and not word.isdecimal()}
    parts = {part for name in known for part in re.split(r"[./]", name)}
    near = {part for word in words for part in get_close_matches(word, parts, n=most, cutoff=0.75)}
    return [name for name in known if not near.isdisjoint(re.split(r"[./]", name))][:most]
