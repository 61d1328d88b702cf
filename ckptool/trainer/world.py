"""The processes of a run, which decide together: what rank 0 knows, and what all of them add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["World"]


class World:
    """A process that is alone; those of `torch.distributed` inherit from it (`processes.py`).

    All processes make the same calls in the same order.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and tells."""
        return self.rank == 0

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the processes, as float64, the same in all of them."""
        return [float(value) for value in values]

    def gather(self, value: Any) -> list[Any]:
        """The plain values of all processes, by rank."""
        return [value]

    def told(self, value: Any) -> Any:
        """What rank 0 calls this with, in all of them."""
        return value
