"""Names in quotes, as git writes paths that are not plain."""

from __future__ import annotations

__all__ = ["quoted"]

_NAMED = dict(zip('\a\b\t\n\v\f\r"\\', 'abtnvfr"\\', strict=True))


def quoted(text: str) -> str:
    r"""The text as git quotes a path: `"a\tb\342\200\256"` where it must, else as it is.

    It must where a character does not print, or is a double quote or a backslash. What else does
    not print stands as its bytes of UTF-8 in octal (quote.c in git, `core.quotePath=false`).
    """
    if text.isprintable() and '"' not in text and "\\" not in text:
        return text
    return f'"{"".join(map(_in_c, text))}"'


def _in_c(character: str) -> str:
    if character in _NAMED:
        return f"\\{_NAMED[character]}"
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogatepass"))
