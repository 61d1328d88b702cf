"""Names like one that is not there, for messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher
from heapq import nlargest
from itertools import chain, islice

__all__ = ["similar"]

_MOST, _LONGEST = 2000, 120
"""Names looked at, characters of each: comparing takes its time, and a file may be hostile."""
_CANDIDATES = 20
"""Names compared letter by letter, after counting letters has chosen them."""
_WORDS = 4


def similar(wanted: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The names most like `wanted`, else those that have a component like a word of it."""
    known = list(islice((name for name in names if len(name) <= _LONGEST), _MOST))
    wanted = wanted[:_LONGEST]
    found = _closest(wanted, known, most, 0.6)
    if found:
        return found
    words = [word for word in re.findall(r"\w+", wanted) if len(word) > 1 and not word.isdecimal()]
    parts_of = {name: re.split(r"[./]", name) for name in known}
    parts = list(islice(dict.fromkeys(chain.from_iterable(parts_of.values())), _MOST))
    near = [part for word in words[:_WORDS] for part in _closest(word, parts, most, 0.75)]
    found = [name for part in near for name in known if part in parts_of[name]]
    return list(dict.fromkeys(found))[:most]


def _closest(wanted: str, names: Iterable[str], most: int, cutoff: float) -> list[str]:
    """The names whose likeness to `wanted`, as difflib counts it, reaches `cutoff`; best first."""
    matcher = SequenceMatcher(b=wanted)
    bounds: list[tuple[float, str]] = []
    for name in names:
        matcher.set_seq1(name)
        if matcher.real_quick_ratio() >= cutoff and (bound := matcher.quick_ratio()) >= cutoff:
            bounds.append((bound, name))
    likeness: list[tuple[float, str]] = []
    for _, name in nlargest(_CANDIDATES, bounds, key=lambda pair: pair[0]):
        matcher.set_seq1(name)
        likeness.append((matcher.ratio(), name))
    best = nlargest(most, likeness, key=lambda pair: pair[0])
    return [name for ratio, name in best if ratio >= cutoff]
