"""What several processes gather together, each its part: the same things in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from ckptool.errors import WriteError

__all__ = ["Job", "Label", "check_alike"]


class Label(NamedTuple):
    """What is gathered, as the processes tell each other of it."""

    text: str
    ranks: tuple[int, ...] | None
    """Between which; None: all."""

    def is_for(self, rank: int) -> bool:
        """Whether that one takes part."""
        return self.ranks is None or rank in self.ranks


class Job(NamedTuple):
    """One thing that is gathered, and how."""

    label: Label
    do: Callable[[], Any]


def check_alike(told: Sequence[Sequence[Label]], own: int) -> None:
    """Refuse what would have this process wait for another that does something else.

    `told` is what each rank is about to gather, `own` which this one is.

    Raises:
        WriteError: naming the first difference.
    """
    for rank, theirs in enumerate(told):
        ours = [one.text for one in told[own] if one.is_for(rank)]
        others = [one.text for one in theirs if one.is_for(own)]
        for here, there in zip_longest(ours, others, fillvalue="nothing"):
            if here != there:
                raise WriteError(
                    f"nothing is written, as rank {own} gathers {here} where rank {rank} gathers "
                    f"{there}",
                    hint="every rank calls ckptool.save with the same sharded modules, optimizers "
                    "and tensors",
                )
