"""Globs that allow some names and no others."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import translate

__all__ = ["escaped_glob", "fronts", "globs_of"]

_MOST_GLOBS = 8
"""More nobody reads."""
_MOST_NAMED = 3
"""Names that are listed one by one, though a glob might do."""
_LONGEST = 160
_DEEPEST = 24
"""Components of a name that are looked at."""
_NUMBER = re.compile(r"[0-9]+(?![^.])")
"""At the end of a component, or all of it."""
_SPECIAL = re.compile(r"[*?[]")


def escaped_glob(name: str) -> str:
    """A glob that matches this name alone."""
    return _SPECIAL.sub(r"[\g<0>]", name)


def globs_of(names: Sequence[str], known: Iterable[str] = ()) -> tuple[str, ...]:
    """Globs that match all of these names, and no other that is known.

    Whole modules are one glob, and so are the same modules of repeated layers. Empty where it would
    take more than a reader could check.
    """
    inside = set(names)
    others = [name for name in known if name not in inside]
    if len(inside) <= _MOST_NAMED and all(len(name) <= _LONGEST for name in inside):
        return tuple(map(escaped_glob, dict.fromkeys(names)))
    families: dict[str, dict[str, None]] = {}
    for head in _heads(inside, names, others):
        families.setdefault(_NUMBER.sub("\0", head), {})[head] = None
        if len(families) > _MOST_GLOBS:
            return ()
    found = [glob for heads in families.values() for glob in _folded(list(heads), others)]
    readable = len(found) <= _MOST_GLOBS and all(len(glob) <= _LONGEST for glob in found)
    return tuple(found) if readable else ()


def _heads(inside: set[str], names: Iterable[str], others: Iterable[str]) -> Iterable[str]:
    """The modules of which all that is known is to be matched, as globs; names that are in none."""
    held = {front for name in others for front in fronts(name)}
    below: dict[str, list[str]] = {}
    for name in names:
        front = next((front for front in fronts(name) if front not in held), "")
        below.setdefault(f"{escaped_glob(front)}*" if front else escaped_glob(name), []).append(
            name
        )
    return (
        escaped_glob(some[0]) if len(some) == 1 and len(some[0]) <= _LONGEST else head
        for head, some in below.items()
    )


def fronts(name: str) -> Iterable[str]:
    """The modules that a name lies in, outermost first, each with its dot."""
    at = -1
    for _ in range(_DEEPEST):
        at = name.find(".", at + 1)
        if at < 0:
            return
        yield name[: at + 1]


def _folded(heads: list[str], others: Collection[str]) -> list[str]:
    """As few globs as there can be for some that differ in numbers alone."""
    if len(heads) == 1:
        return heads
    rows = [_NUMBER.findall(head) for head in heads]
    vary = [len(set(column)) > 1 for column in zip(*rows, strict=True)]
    texts = _NUMBER.split(heads[0])
    loose = _joined(texts, ["*" if varies else n for n, varies in zip(rows[0], vary, strict=True)])
    if not any(map(re.compile(translate(loose)).match, others)):
        return [loose]
    if sum(vary) > 1:
        return heads
    at = vary.index(True)
    classes = _classes(row[at] for row in rows)
    return [_joined(texts, [*rows[0][:at], one, *rows[0][at + 1 :]]) for one in classes]


def _joined(texts: Sequence[str], between: Sequence[str]) -> str:
    return "".join(part for pair in zip(texts, [*between, ""], strict=True) for part in pair)


def _classes(numbers: Iterable[str]) -> list[str]:
    """`2[4-9]` and `3[01]` for 24 to 31: what no other number matches."""
    tens: dict[str, set[str]] = {}
    for number in numbers:
        tens.setdefault(number[:-1], set()).add(number[-1])
    return [front + _class(sorted(digits)) for front, digits in tens.items()]


def _class(digits: list[str]) -> str:
    if len(digits) == 1:
        return digits[0]
    is_run = int(digits[-1]) - int(digits[0]) == len(digits) - 1
    return f"[{digits[0]}-{digits[-1]}]" if is_run else f"[{''.join(digits)}]"
