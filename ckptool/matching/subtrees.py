"""Whether a part of one side is the other side, though some names are equal as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptool.matching.slots import Slot

__all__ = ["Fits", "Moved", "has_twin", "moved", "whole_part"]

_DEEPEST = 16
"""Components of a name that may be a front."""
_MOST_TRIED = 8
"""Fronts that are looked at in full, and names by which they are found."""

Fits = Callable[[Slot, Slot], bool]


class Moved(NamedTuple):
    """A front of one side, below which names are those of the other side."""

    front: str
    score: int
    """How many names meet when the front is off, those beside it included."""
    contested: frozenset[str]
    """Names that are on both sides, and below the front too."""
    rivals: tuple[str, ...] = ()
    """Other fronts below which everything is on the other side as well."""


def moved(longer: Mapping[str, Slot], shorter: Mapping[str, Slot], fits: Fits) -> Moved | None:
    """The front of `longer` that explains more than equal names do, and moves all they explain.

    Where an equal name is not below the front it stays what it is, and the front is none.
    """
    if not _doubled(longer):
        return None
    equal = {name for name, slot in shorter.items() if name in longer and fits(longer[name], slot)}
    left = {name: slot for name, slot in shorter.items() if name not in equal}
    hits = Counter(
        front for front, rest, slot in _ends(longer) if rest in left and fits(slot, left[rest])
    )
    found = []
    for front, _ in hits.most_common(_MOST_TRIED):
        below = {n[len(front) :]: slot for n, slot in longer.items() if n.startswith(front)}
        met = {n for n, slot in below.items() if n in shorter and fits(slot, shorter[n])}
        beside = {name for name in equal - met if not name.startswith(front)}
        found.append((len(met) + len(beside), front, met, len(met) == len(below)))
    found.sort(key=lambda one: -one[0])
    for score, front, met, _ in found:
        contested = met & equal
        if not contested or not all(name.startswith(front) for name in contested):
            continue
        rivals = [
            other
            for _, other, others, whole in found
            if (whole or len(others) >= len(met))
            and others & met
            and not other.startswith(front)
            and not front.startswith(other)
        ]
        outermost = tuple(
            one for one in rivals if not any(one != at and one.startswith(at) for at in rivals)
        )
        return Moved(front, score, frozenset(contested), outermost)
    return None


def whole_part(longer: Mapping[str, Slot], shorter: Mapping[str, Slot], fits: Fits) -> Moved | None:
    """The front of `longer` below which all names are that are on both sides, and more.

    `visual.` of a file that has two towers, for a model that is one of them: what has equal names
    is of the other tower. `rivals` are those below which as much is.
    """
    equal = {name for name, slot in shorter.items() if name in longer and fits(longer[name], slot)}
    left = [name for name in shorter if name not in equal]
    if not equal or not left:
        return None
    tails = tuple(f".{name}" for name in left[:: -(-len(left) // _MOST_TRIED)])
    fronts = Counter(
        name[: 1 - len(tail)]
        for name in longer
        if name.endswith(tails)
        for tail in tails
        if name.endswith(tail)
    )
    found: list[tuple[int, str]] = []
    for front, _ in fronts.most_common(_MOST_TRIED):
        if all(front + name in longer for name in equal):
            met = sum(
                fits(longer[at], slot)
                for name, slot in shorter.items()
                if (at := front + name) in longer
            )
            found.append((met, front))
    best = max((met for met, _ in found), default=0)
    fronts_of_best = [front for met, front in found if met == best]
    if best <= len(equal):
        return None
    first, *rivals = fronts_of_best
    return Moved(first, best, frozenset(equal), tuple(rivals))


def has_twin(
    met: Sequence[str], bare: Mapping[str, Slot], other: Mapping[str, Slot], fits: Fits
) -> bool:
    """Whether all of some names of a side are also below some path of the other side.

    `met` are on both sides; what is below the path is on the other one alone.
    """
    if not met:
        return False
    end = f".{max(met, key=len)}"
    for name in other:
        if name.endswith(end):
            path = name[: 1 - len(end)]
            if all(
                (at := f"{path}{one}") in other and at not in bare and fits(bare[one], other[at])
                for one in met
            ):
                return True
    return False


def _doubled(names: Iterable[str]) -> bool:
    """Whether some name begins with a front twice, as one does that a front moves and is left."""
    for name in {name.rpartition(".")[0] + "." for name in names}:
        parts = name.split(".", 2 * _DEEPEST)
        if len(set(parts)) == len(parts):
            continue
        at = name.find(".") + 1
        for _ in range(_DEEPEST):
            if not at:
                break
            if name.startswith(name[:at], at):
                return True
            at = name.find(".", at) + 1
    return False


def _ends(slots: Mapping[str, Slot]) -> Iterator[tuple[str, str, Slot]]:
    """Every name taken apart behind each of its first components."""
    for name, slot in slots.items():
        at = -1
        for _ in range(_DEEPEST):
            at = name.find(".", at + 1)
            if at < 0:
                break
            yield name[: at + 1], name[at + 1 :], slot
