"""Names taken apart in one way: words and numbers, with a dot between them or without."""

from __future__ import annotations

import re

__all__ = ["Families", "Family", "Numbers", "numbers_of"]

_NUMBER = re.compile("[0-9]+")
_NUMBERS = re.compile("([0-9]+)")
_TOKEN = re.compile("[0-9]+|[^0-9]+")

Family = tuple[str | None, ...]
"""The words of a module's name; None is a number."""
Numbers = tuple[str, ...]


class Families:
    """Each family made once: of a hundred thousand names few differ in more than numbers."""

    def __init__(self) -> None:
        """None is known yet."""
        self._known: dict[str, Family] = {}
        self._modules: dict[str, tuple[Family, Numbers]] = {}

    def of(self, name: str) -> tuple[Family, Numbers]:
        """That of the module of a tensor, and the numbers in its name."""
        end = name.rfind(".")
        if end < 0:
            return (), ()
        module = name[:end]
        found = self._modules.get(module)
        if found is None:
            parts = _NUMBERS.split(module)
            text = "0".join(parts[::2])
            family = self._known.get(text)
            if family is None:
                family = self._known[text] = tuple(_tokens(text))
            found = self._modules[module] = family, tuple(parts[1::2])
        return found


def numbers_of(name: str) -> Numbers:
    """The numbers in a name: `layers.0.fc1` has `0` and `1`."""
    return tuple(_NUMBER.findall(name))


def _tokens(path: str) -> list[str | None]:
    """`layer2` and `layer_2` are `layer` and a number, as `layer.2` is."""
    found: list[str | None] = []
    for part in path.split("."):
        if not _NUMBER.search(part):
            found.append(part)
            continue
        for token in _TOKEN.findall(part):
            if _NUMBER.match(token):
                found.append(None)
            elif word := token.strip("_-"):
                found.append(word)
    return found
