"""Names of modules taken apart: what stands between their numbers, and the numbers."""

from __future__ import annotations

import re

__all__ = ["Families", "Family", "Numbers"]

_NUMBER = re.compile(r"\.([0-9]+)(?=\.)")
"""A component that is a number, with the dot before it, where there are dots around the name."""

Family = tuple[str | None, ...]
"""The components of a module's name; None is a number."""
Numbers = tuple[str, ...]


class Families:
    """Each family made once: of a hundred thousand names few differ in more than numbers."""

    def __init__(self) -> None:
        """None is known yet."""
        self._known: dict[str, Family] = {}

    def of(self, name: str) -> tuple[Family, Numbers]:
        """That of the module of a tensor, and the numbers in its name."""
        end = name.rfind(".")
        if end < 0:
            return (), ()
        module = f".{name[:end]}."
        numbers = tuple(_NUMBER.findall(module))
        text = _NUMBER.sub(".0", module) if numbers else module  # no other component is a 0 then
        family = self._known.get(text)
        if family is None:
            parts = text[1:-1].split(".")
            family = self._known[text] = tuple(None if part == "0" else part for part in parts)
        return family, numbers
