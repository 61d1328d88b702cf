"""Heads of names that are replaced by others: what a rule that is inferred does."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ckptool.matching.slots import Slot

__all__ = [
    "MOST_PARTS",
    "Head",
    "Names",
    "Swap",
    "is_number",
    "swap_between",
]

MOST_PARTS = 64
"""Components of a name that are looked at; hostile ones have a million."""

Head = tuple[str | None, ...]
"""Leading components of names; None is any number."""


@dataclass(frozen=True)
class Swap:
    """Names that begin with `old` begin with `new` instead, their numbers in the same order.

    `old` empty: `new` is put before; `new` empty: `old` is taken off. Both have as many None.
    """

    old: Head
    new: Head

    @property
    def is_prefix(self) -> bool:
        """Whether it only takes off or puts on."""
        return not (self.old and self.new)

    @property
    def renumbers(self) -> bool:
        """Whether it gives a number in the place of another: `layers.0.` that of `blocks.1.`."""
        old, new = (tuple(filter(is_number, head)) for head in self.parts[1:])
        return bool(old and new) and old != new

    @cached_property
    def parts(self) -> tuple[Head, Head, Head]:
        """The components at the front that both heads have, then what is left of either."""
        same = 0
        for old, new in zip(self.old, self.new, strict=False):
            if old != new:
                break
            same += 1
        return self.old[:same], self.old[same:], self.new[same:]

    def image(self, name: str) -> str:
        """The new name of one that begins with `old`."""
        return _replaced(name, self._old, self._new)

    def source(self, name: str) -> str:
        """The old name of one that begins with `new`."""
        return _replaced(name, self._new, self._old)

    @cached_property
    def _old(self) -> _Spelled:
        return _Spelled.of(self.old)

    @cached_property
    def _new(self) -> _Spelled:
        return _Spelled.of(self.new)


@dataclass(frozen=True, slots=True)
class _Spelled:
    """A head as text with its dot; with numbers, the texts around them and an expression."""

    texts: tuple[str, ...]
    pattern: re.Pattern[str] | None

    @classmethod
    def of(cls, head: Head) -> _Spelled:
        texts = [""]
        for part in head:
            if part is None:
                texts.append(".")
            else:
                texts[-1] += f"{part}."
        if len(texts) == 1:
            return cls(tuple(texts), None)
        return cls(tuple(texts), re.compile("([0-9]+)".join(map(re.escape, texts))))


def _replaced(name: str, old: _Spelled, new: _Spelled) -> str:
    if old.pattern is None:
        return new.texts[0] + name[len(old.texts[0]) :]
    found = old.pattern.match(name)
    if found is None:
        raise ValueError(name)
    head = new.texts[0]
    for number, text in zip(found.groups(), new.texts[1:], strict=True):
        head += number + text
    return head + name[found.end() :]


class Names:
    """The names of one side: of a file, or of a model."""

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        """Nothing is looked at yet."""
        self.slots = slots

    @cached_property
    def _sorted(self) -> list[str]:
        """So that those under a head are found at once."""
        return sorted(self.slots)

    def has_below(self, start: str) -> bool:
        """Whether some name begins with a text."""
        at = bisect_left(self._sorted, start)
        return at < len(self._sorted) and self._sorted[at].startswith(start)

    def under(self, head: Head) -> list[str]:
        """The names that begin with a head, and do not end there."""
        spelled = _Spelled.of(head)
        start = spelled.texts[0]
        names = self._sorted
        if start:
            first = bisect_left(names, start)
            names = names[first : bisect_left(names, start[:-1] + "/", first)]  # after the dot
        return names if spelled.pattern is None else list(filter(spelled.pattern.match, names))


def is_number(part: str | None) -> bool:
    """Whether a component is a number."""
    return part is not None and part.isascii() and part.isdigit()


def swap_between(old: str, new: str, *, is_open: bool = True) -> Swap:
    """What turns one name into the other.

    `is_open`: numbers that both have in the same order count as any number.
    """
    olds, news = old.split("."), new.split(".")
    alike = 0
    for a, b in zip(reversed(olds), reversed(news), strict=False):
        if a != b:
            break
        alike += 1
    olds, news = olds[: len(olds) - alike], news[: len(news) - alike]
    equal = 0
    for a, b in zip(filter(is_number, olds), filter(is_number, news), strict=False):
        if a != b or not is_open:
            break
        equal += 1
    return Swap(_with_any(olds, equal), _with_any(news, equal))


def _with_any(parts: list[str], numbers: int) -> Head:
    """The head with its first so many numbers open."""
    head: list[str | None] = []
    for part in parts:
        if numbers and is_number(part):
            numbers -= 1
            head.append(None)
        else:
            head.append(part)
    return tuple(head)
