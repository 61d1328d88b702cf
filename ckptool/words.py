"""Format names and numbers for sentences, safely for a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

_LONGEST = 160
"""The most characters of a name in a message."""


def clean(text: str) -> str:
    r"""Return the text with everything that a terminal may interpret or hide escaped (`\x1b`).

    These are control characters, escapes, bidirectional and other invisible format characters, line
    separators, lone surrogates, unassigned and private code points, and spaces at either end.
    """
    inner = text.strip(" ")
    if text.isprintable() and inner == text:
        return text
    before = len(text) - len(text.lstrip(" "))
    after = len(text) - len(inner) - before
    return "\\x20" * before + "".join(map(_escape_character, inner)) + "\\x20" * after


def clean_lines(text: str) -> str:
    """Return a text of several lines, escaped as by `clean`, with its line breaks and indents."""
    return "\n".join("".join(map(_escape_character, line)) for line in text.split("\n"))


def _escape_character(character: str) -> str:
    """Return a character, or its Python escape if a terminal would not print it."""
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def printable(text: str) -> str:
    """Return a name for a message: escaped as by `clean`, and shortened in the middle."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 2 :]}"
    return clean(text)


def listed(names: Iterable[str], most: int = 8) -> str:
    """Return names for a sentence: `a, b, and 3 more`, or `nothing`."""
    all_names = list(names)
    shown = ", ".join(map(printable, all_names[:most]))
    if len(all_names) > most:
        return f"{shown}, and {len(all_names) - most:,} more"
    return shown or "nothing"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 name`, `1,200 names`, `3 entries`."""
    if count == 1:
        return f"1 {noun}"
    ends_in_y = noun.endswith("y") and noun[-2:-1] not in "aeiou"
    return f"{count:,} {noun[:-1]}ies" if ends_in_y else f"{count:,} {noun}s"


def are(count: int) -> str:
    """Return `is` or `are` for `count`."""
    return "is" if count == 1 else "are"


def a_class(node: Any) -> str:
    """Return `an int`, `a Net`, `None`."""
    if node is None:
        return "None"
    name = type(node).__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


def quoted(name: str, most: int = 80) -> str:
    """Return a name from a file in quotes, with control characters escaped, and shortened."""
    return repr(name if len(name) <= most else name[: most - 3] + "...")


def few(names: Sequence[str], most: int = 4) -> str:
    """Return the first names in quotes, and the number of others."""
    if not names:
        return "nothing"
    shown = ", ".join(quoted(name) for name in names[:most])
    return shown + (f" and {len(names) - most:,} more" if len(names) > most else "")


def as_argument(path: str) -> str:
    """Return a path that cannot be mistaken for an option: `./-x` for `-x`."""
    return os.path.join(".", path) if path.startswith("-") else path


def shell(path: str) -> str:
    """Return a path, quoted for a shell."""
    import shlex  # Imported here: only error paths need it.

    return shlex.quote(as_argument(path))
