"""Which wrapper names are to come off a state dict, or go on, for the model that it is meant for.

Without a reference that is a bare model. With one, names are to be the reference's own, wrappers
included: of the ways to get there, the one after which most of them are in the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ckptool.errors import NameCollision
from ckptool.matching.align import wrapped_submodules
from ckptool.wrappers import WRAPPERS, counts, strip_names, wrappers_of

__all__ = ["Wrapping", "front", "wrapping"]

_LONGEST = 1000
"""Characters of a name of which every part is looked at."""

_MOST_PARTS = 50
"""Submodules from which wrappers are taken off: each takes a command."""
_DEEPEST = 16
"""Wrappers around a model that are looked for."""


@dataclass(frozen=True, slots=True)
class Wrapping:
    """What is to change about the wrappers, and what becomes of the names."""

    names: dict[str, str]
    """Every name in the file, with what it is afterwards."""
    strip: bool = False
    """Whether the wrappers that there are come off."""
    at: tuple[str, ...] = ()
    """Submodules from which `module` comes off after that."""
    add: tuple[str, ...] = ()
    """Wrappers that go before all names then, outermost first."""


def wrapping(names: Collection[str], wanted: Collection[str] | None = None) -> Wrapping:
    """What to change, so that a bare model, or one with the names `wanted`, takes the names.

    Wrappers that cannot come off (`NameCollision`) stay.
    """
    if wanted is None:
        bare = _way(names, strip=bool(wrappers_of(names)))
        return bare or Wrapping({name: name for name in names}, strip=True)
    ways = list(_ways(names, wanted))
    aim = set(wanted)
    scores = [sum(new in aim for new in way.names.values()) for way in ways]
    if not any(scores) and wrappers_of(names) != wrappers_of(wanted):
        return next((way for way in ways if way.strip), ways[0])
    return ways[scores.index(max(scores))]


def _ways(names: Collection[str], wanted: Collection[str]) -> Iterator[Wrapping]:
    """All there are, those that change less first."""
    outer = front(wanted)
    kinds = (False, True) if wrappers_of(names) else (False,)
    for add in ((), outer) if outer else ((),):
        before = "".join(f"{word}." for word in add)
        inner = [name.removeprefix(before) for name in wanted]
        for strip in kinds:
            way = _way(names, strip=strip, inner=inner, add=add)
            if way is not None:
                yield way


def _way(
    names: Collection[str],
    *,
    strip: bool,
    inner: Collection[str] | None = None,
    add: tuple[str, ...] = (),
) -> Wrapping | None:
    """One way; None where two names would be one."""
    try:
        renamed = strip_names(names).renamed if strip else {}
        new = [renamed.get(name, name) for name in names]
        at = wrapped_submodules(filter(counts, new))
        if inner is not None:
            known = set(_modules(inner))
            at = [path for path in at if path in known and f"{path}.module" not in known]
        at = at[:_MOST_PARTS]
        for path in at:
            renamed = strip_names(new, at=path).renamed
            new = [renamed.get(name, name) for name in new]
    except NameCollision:
        return None
    before = "".join(f"{word}." for word in add)
    new = [before + name if counts(name) else name for name in new]
    return Wrapping(dict(zip(names, new, strict=True)), strip, tuple(at), add)


def _modules(names: Iterable[str]) -> Iterator[str]:
    """The paths of all modules that these names lie in."""
    for name in names:
        parts = name.split(".") if len(name) <= _LONGEST else ()
        for depth in range(1, len(parts)):
            yield ".".join(parts[:depth])


def front(names: Iterable[str]) -> tuple[str, ...]:
    """The wrapper components with which every name begins, outermost first."""
    left = list(filter(counts, names))
    found: list[str] = []
    while left and len(found) < _DEEPEST:
        word = left[0].partition(".")[0]
        if word not in WRAPPERS or not all(name.startswith(f"{word}.") for name in left):
            break
        found.append(word)
        left = [name[len(word) + 1 :] for name in left]
    return tuple(found)
