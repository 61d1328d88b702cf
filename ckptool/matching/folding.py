"""Names of tensors for one line of a message: repeated layers as one, long lists cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from ckptool.patterns import families
from ckptool.words import listed

__all__ = ["folded", "folded_within", "labels"]

_MOST_FOLDED = 2000
"""Names that are folded for a message; it shows a few."""


def folded(names: Sequence[str], most: int = 4) -> str:
    """`layers.{0..31}.weight, head.bias, and 4 more`."""
    shown = [label for label, _ in labels((name, None) for name in names)]
    if len(names) <= _MOST_FOLDED:
        return listed(shown, most)
    known = f"the first {_MOST_FOLDED:,} of {len(names):,} are "
    return known + listed(shown[:most], most) + ", ..." * (len(shown) > most)


def folded_within(names: Sequence[str], most: int = 3) -> str:
    """The same for the middle of a sentence: of very many, how many they are and some of them."""
    if len(names) <= _MOST_FOLDED:
        return folded(names, most)
    shown = [label for label, _ in labels((name, None) for name in names)]
    return f"{len(names):,} tensors, such as {listed(shown[:most])}"


def labels(rows: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Names of repeated layers as one, with what they have in common; many are not looked at."""
    some = list(islice(rows, _MOST_FOLDED))
    return [(one.label, some[one.numbers[0]][1]) for one in families(some)]
