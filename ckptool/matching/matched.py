"""Which name of a file is which of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptool.matching.report import MatchReport
from ckptool.matching.slots import Slot
from ckptool.transforms.name_rules import Rule

__all__ = ["Match", "matched"]


@dataclass(frozen=True, slots=True)
class Match:
    """Which name of the file goes where, and the report of it."""

    pairs: dict[str, str]
    """Name in the model to name in the file, of what is to be loaded, in the model's order.

    Tied names that only one of is in the file all have that one. What is mismatched is not here.
    """
    renamed: dict[str, str]
    """Every name of the file to what the rules make of it, matched or not: for files written."""
    report: MatchReport


def matched(
    have: Mapping[str, Slot],
    want: Mapping[str, Slot],
    *,
    rules: Iterable[Rule] = (),
    metadata: Mapping[str, Any] | None = None,
    file: str = "",
    model: str = "",
) -> Match:
    """Match the names `have` of a file with those that a model wants.

    `rules` are the user's, applied to the file's names before anything else. `metadata` is the
    `_metadata` of the file's state dict: the versions say which counters old files lack.

    Raises:
        NameCollision: the user's rules make two names one.
    """
    raise NotImplementedError
