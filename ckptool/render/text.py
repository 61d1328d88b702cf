"""Words and numbers made fit for a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["clean", "count", "label", "plural", "runnable", "shorten", "size", "wrapped"]

_NARROWEST = 20  # columns for a sentence; a word a line is harder to read than a broken line
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
"""What a shell has in quotes, as `shlex.quote` writes them."""
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def clean(text: str) -> str:
    r"""The text with everything that a terminal might obey or hide spelled out (`\x1b`).

    That is control characters, escapes, bidirectional and other invisible format characters, line
    separators, lone surrogates, unassigned and private code points, and a space at either end.
    """
    if text.isprintable() and text.strip(" ") == text:
        return text
    inner = text.strip(" ")
    before = len(text) - len(text.lstrip(" "))
    after = len(text) - len(inner) - before
    return "\\x20" * before + "".join(map(_visible, inner)) + "\\x20" * after


def label(name: str, path: Sequence[Any]) -> str:
    """What a row is called: its name, whatever the file gave it, and where it is the root."""
    return (clean(name) or "''") if path else "(the whole file)"


def clean_lines(text: str) -> str:
    """As `clean`, for a text of several lines: line breaks and indents are kept."""
    return "\n".join("".join(map(_visible, line)) for line in text.split("\n"))


def runnable(command: str) -> str:
    r"""A command as a shell takes it from the screen, where `clean` would change its words.

    What is quoted and not printable becomes `$'a\nb'`, which bash, zsh and ksh know: control
    characters, and bytes of a file's name that are no text.
    """
    if command.isprintable():
        return command
    return clean(_QUOTED.sub(_ansi_quoted, command))


def _ansi_quoted(found: re.Match[str]) -> str:
    word = found[0]
    if word.isprintable() or word[0] != "'":
        return word
    return f"$'{''.join(map(_ansi, word[1:-1]))}'"


def _ansi(character: str) -> str:
    if character.isprintable():
        return "\\\\" if character == "\\" else character
    raw = character.encode("utf-8", "surrogateescape" if _is_byte(character) else "replace")
    return _NAMED.get(character) or "".join(f"\\x{byte:02x}" for byte in raw)


def _is_byte(character: str) -> bool:
    """Whether it stands for a byte that is no UTF-8 (`os.fsdecode`)."""
    return "\udc80" <= character <= "\udcff"


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    code = ord(character)
    if character in _NAMED:
        return _NAMED[character]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def size(nbytes: int) -> str:
    """Bytes as people read them: `512 B`, `1.5 KiB`, `4.7 GiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    number = float(nbytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        number /= 1024
        if number < 999.95:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:,.1f} PiB"


def count(number: int) -> str:
    """An integer with its thousands apart."""
    return f"{number:,}"


def plural(number: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`, `3 entries`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("y") else f"{number:,} {noun}s"


def shorten(text: str, most: int) -> str:
    """At most `most` characters (8 or more), the middle left out."""
    if len(text) <= most:
        return text
    most = max(most, 8)
    tail = (most - 3) // 2
    return f"{text[: most - 3 - tail]}...{text[len(text) - tail :]}"


def wrapped(text: str, width: int | None) -> list[str]:
    """A sentence in lines of at most `width` (20 or more) characters; longer words are broken."""
    if width is None or len(text) <= width:
        return [text]
    import textwrap

    width = max(width, _NARROWEST)
    return textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)


def number(value: Any) -> str:
    """A number of a tensor, six digits where it is a float."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, complex):
        return f"{value.real:.6g}{value.imag:+.6g}j"
    return str(value)
