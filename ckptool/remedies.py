"""What helps, as data: arguments of the library, of which every text about them is made.

A text for people is never read again: names of a file stand in it, and may look like anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

Given = bool | float | str | tuple[str, ...]
"""What an argument is given: True, a number, a text or several."""
Argument = tuple[str, Given]


class Remedy(NamedTuple):
    """What to give a function of the library, and what is said of that; as text it is Python.

    Arguments stand in backticks where anything else is said: what is inside can be given as it is.
    """

    arguments: tuple[Argument, ...] = ()
    """To be given together."""
    note: str = ""
    """What is said behind them, space and all."""
    lead: str = ""
    """What is said before them."""
    instead: tuple[Remedy, ...] = ()
    """Other ways, each in place of `arguments`."""
    to_fill_in: bool = False
    """Whether words of `arguments` stand for others: as they are they are of no use."""

    def __bool__(self) -> bool:
        """Return whether it says anything."""
        return bool(self.arguments or self.note or self.lead or self.instead)

    def __str__(self) -> str:
        """`rename=['a=>b'], allow_missing=True`, or of two ways each in backticks of its own."""
        return self.told(lambda name, given: f"{name}={_value(given)}", ", ")

    def told(
        self, spelled: Callable[[str, Given], str], between: str, tick: str | None = None
    ) -> str:
        """Return the text, its arguments as they are spelled, with something between any two."""
        if tick is None:
            tick = "`" if self != Remedy(self.arguments) else ""
        given = between.join(spelled(name, value) for name, value in self.arguments)
        tick_here = "" if self.to_fill_in else tick
        fence = 2 * tick_here if "`" in given else tick_here
        own = f"{fence}{given}{fence}{self.note}" if given else self.note
        others = (other.told(spelled, between, tick) for other in self.instead)
        # Sentences need a stronger mark between them than options.
        mark = "; or " if any(one.note for one in (self, *self.instead)) else " or "
        return self.lead + mark.join(filter(None, (own, *others)))

    def with_names(self, names: Mapping[str, str]) -> Remedy:
        """Return the same for a function that calls some arguments otherwise."""
        return self._replace(
            arguments=tuple((names.get(name, name), given) for name, given in self.arguments),
            instead=tuple(other.with_names(names) for other in self.instead),
        )


def together(remedies: Iterable[Remedy]) -> Remedy:
    """Merge remedies: what several give one argument becomes a list."""
    given: dict[str, Given] = {}
    note, lead = "", ""
    instead: list[Remedy] = []
    for remedy in remedies:
        for name, value in remedy.arguments:
            given[name] = _both(given[name], value) if name in given else value
        apart = ", " if not remedy.arguments and remedy.note and (given or note) else ""
        note += apart + remedy.note
        lead += remedy.lead
        instead += remedy.instead
    return Remedy(tuple(given.items()), note, lead, tuple(instead))


def _both(one: Given, other: Given) -> Given:
    one, other = ((given,) if isinstance(given, str) else given for given in (one, other))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return tuple(dict.fromkeys((*one, *other)))
    return one if isinstance(one, bool) else other


def _value(given: Given) -> str:
    if isinstance(given, tuple):
        return f"[{', '.join(map(literal, given))}]"
    return literal(given) if isinstance(given, str) else repr(given)


def literal(text: str) -> str:
    """Return a text as Python has it, backslashes as they are where that can be."""
    plain = "\\" in text and "'" not in text and text.isprintable() and not text.endswith("\\")
    return f"r'{text}'" if plain else repr(text)
