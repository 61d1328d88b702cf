"""The parts of the README that programs write: between two comments that name them."""

from __future__ import annotations

import re

__all__ = ["between"]


def between(text: str, name: str, content: str) -> str:
    """`text` with what stands between the comments of that name replaced.

    Raises:
        ValueError: there are no such comments.
    """
    place = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if not place.search(text):
        raise ValueError(f"there is no place for {name!r}")
    return place.sub(lambda found: f"{found[1]}{content}\n{found[2]}", text)
