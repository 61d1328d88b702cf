"""Remedies for errors, as data: arguments of the library, from which every hint is made.

Hints are never parsed, because they contain names from the file, which can look like anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

Given = bool | float | str | tuple[str, ...]
"""The value of an argument: True, a number, one text or several."""
Argument = tuple[str, Given]


class Remedy(NamedTuple):
    """Arguments to give to a function of the library, with words around them; str() gives Python.

    With words around them, the arguments are in backticks, so that they can be copied.
    """

    arguments: tuple[Argument, ...] = ()
    """Arguments to give together."""
    note: str = ""
    """Text after them, with its leading space."""
    lead: str = ""
    """Text before them."""
    instead: tuple[Remedy, ...] = ()
    """Alternatives, each instead of `arguments`."""
    to_fill_in: bool = False
    """True if `arguments` contain placeholders that the user must fill in."""

    def __bool__(self) -> bool:
        """Return True if the remedy has any text."""
        return bool(self.arguments or self.note or self.lead or self.instead)

    def __str__(self) -> str:
        """Return `rename=['a=>b'], allow_missing=True`; alternatives are in backticks each."""
        return self.spell(lambda name, given: f"{name}={_value(given)}", ", ")

    def spell(
        self, spelled: Callable[[str, Given], str], between: str, tick: str | None = None
    ) -> str:
        """Return the text, with `spelled` arguments joined by `between` and quoted with `tick`."""
        if tick is None:
            tick = "`" if self != Remedy(self.arguments) else ""
        given = between.join(spelled(name, value) for name, value in self.arguments)
        tick_here = "" if self.to_fill_in else tick
        fence = 2 * tick_here if "`" in given else tick_here
        own = f"{fence}{given}{fence}{self.note}" if given else self.note
        others = (other.spell(spelled, between, tick) for other in self.instead)
        # Alternatives with words of their own need more than a comma between them.
        mark = "; or " if any(one.note for one in (self, *self.instead)) else " or "
        return self.lead + mark.join(filter(None, (own, *others)))

    def with_names(self, names: Mapping[str, str]) -> Remedy:
        """Return the remedy for a function that has other names for some arguments."""
        return self._replace(
            arguments=tuple((names.get(name, name), given) for name, given in self.arguments),
            instead=tuple(other.with_names(names) for other in self.instead),
        )


def together(remedies: Iterable[Remedy]) -> Remedy:
    """Merge remedies; several values of one argument become a list."""
    given: dict[str, Given] = {}
    note, lead = "", ""
    instead: list[Remedy] = []
    for remedy in remedies:
        for name, value in remedy.arguments:
            given[name] = _merge_values(given[name], value) if name in given else value
        apart = ", " if not remedy.arguments and remedy.note and (given or note) else ""
        note += apart + remedy.note
        lead += remedy.lead
        instead += remedy.instead
    return Remedy(tuple(given.items()), note, lead, tuple(instead))


def _merge_values(one: Given, other: Given) -> Given:
    one, other = ((given,) if isinstance(given, str) else given for given in (one, other))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(dict.fromkeys((*one, *other)))
    return one if isinstance(one, bool) else other


def _value(given: Given) -> str:
    if isinstance(given, tuple):
        return f"[{', '.join(map(literal, given))}]"
    return literal(given) if isinstance(given, str) else repr(given)


def literal(text: str) -> str:
    """Return the Python literal of a text, as a raw string if that keeps backslashes single."""
    plain = "\\" in text and "'" not in text and text.isprintable() and not text.endswith("\\")
    return f"r'{text}'" if plain else repr(text)
