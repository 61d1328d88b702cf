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
        return self.spell(lambda name, value: f"{name}={_format_value(value)}", ", ")

    def spell(
        self, format_argument: Callable[[str, Given], str], separator: str, quote: str | None = None
    ) -> str:
        """Return the text of the remedy.

        `format_argument` formats each argument; they are joined by `separator`, within `quote`. By
        default that is a backtick if there are words around the arguments. Arguments to fill in
        have no quotes, because they cannot be copied.
        """
        if quote is None:
            has_words = self != Remedy(self.arguments)
            quote = "`" if has_words else ""
        formatted = separator.join(format_argument(name, value) for name, value in self.arguments)
        own_quote = "" if self.to_fill_in else quote
        if "`" in formatted:  # as in Markdown, two backticks quote a text with one
            own_quote *= 2
        text = f"{own_quote}{formatted}{own_quote}{self.note}" if formatted else self.note
        alternatives = (other.spell(format_argument, separator, quote) for other in self.instead)
        # Alternatives with words of their own need more than a comma between them.
        mark = "; or " if any(remedy.note for remedy in (self, *self.instead)) else " or "
        return self.lead + mark.join(filter(None, (text, *alternatives)))

    def with_names(self, names: Mapping[str, str]) -> Remedy:
        """Return the remedy for a function that has other names for some arguments."""
        return self._replace(
            arguments=tuple((names.get(name, name), value) for name, value in self.arguments),
            instead=tuple(other.with_names(names) for other in self.instead),
        )


def merge_remedies(remedies: Iterable[Remedy]) -> Remedy:
    """Merge remedies into one; several values of one argument become a list.

    Notes, leads and alternatives are joined. A comma separates the note of a remedy without
    arguments from the text before it.
    """
    arguments: dict[str, Given] = {}
    note, lead = "", ""
    instead: list[Remedy] = []
    for remedy in remedies:
        for name, value in remedy.arguments:
            arguments[name] = _merge_values(arguments[name], value) if name in arguments else value
        separator = ", " if not remedy.arguments and remedy.note and (arguments or note) else ""
        note += separator + remedy.note
        lead += remedy.lead
        instead += remedy.instead
    return Remedy(tuple(arguments.items()), note, lead, tuple(instead))


def _merge_values(first: Given, second: Given) -> Given:
    """Return the texts of both as one tuple without repeats.

    True, which means all, wins over texts if it is first; otherwise the second value wins.
    """
    first_texts = (first,) if isinstance(first, str) else first
    second_texts = (second,) if isinstance(second, str) else second
    if isinstance(first_texts, tuple) and isinstance(second_texts, tuple):
        return tuple(dict.fromkeys((*first_texts, *second_texts)))
    return first if isinstance(first, bool) else second_texts


def _format_value(value: Given) -> str:
    """Return the value of an argument as Python code."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(to_literal, value))}]"
    return to_literal(value) if isinstance(value, str) else repr(value)


def to_literal(text: str) -> str:
    """Return the Python literal of a text, as a raw string if that keeps backslashes single."""
    plain = "\\" in text and "'" not in text and text.isprintable() and not text.endswith("\\")
    return f"r'{text}'" if plain else repr(text)
