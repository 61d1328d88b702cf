"""Which samples make which batch: follows from seed and epoch, whatever computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Batches", "share"]


@dataclass(frozen=True)
class Batches:
    """The steps of an epoch, each of one or more global batches of row numbers.

    The order follows from `seed` and the epoch alone, so that a run that goes on in the middle of
    an epoch, on other devices, sees the same batches. The last batch, and the last step, may be
    smaller; nothing is left out, nothing comes twice.
    """

    samples: int
    batch_size: int
    accumulate: int
    seed: int

    @property
    def steps(self) -> int:
        """Steps of the optimizer in one epoch."""
        return -(-self.samples // (self.batch_size * self.accumulate))

    def of_epoch(self, epoch: int, first: int = 0) -> Iterator[list[list[int]]]:
        """The steps of `epoch` (from 0), from the `first` on: lists of batches of row numbers."""
        generator = torch.Generator().manual_seed((self.seed << 20) + epoch & (1 << 63) - 1)
        order = torch.randperm(self.samples, generator=generator).tolist()
        batches = list(in_batches(order, self.batch_size))
        for step in range(first, self.steps):
            yield batches[step * self.accumulate : (step + 1) * self.accumulate]


def in_batches(rows: Sequence[int], size: int) -> Iterator[list[int]]:
    """The rows in their order, `size` at a time."""
    for start in range(0, len(rows), size):
        yield list(rows[start : start + size])


def share(rows: Sequence[int], rank: int, size: int) -> list[int]:
    """The rows of a batch that process `rank` of `size` computes; for the last ones maybe none.

    As `torch.chunk` splits it, which `DataParallel` does too: equal parts rounded up, the last one
    smaller (30 over 4: 8, 8, 8, 6; 10 over 8: five times 2, and nothing for three).
    """
    each = -(-len(rows) // size)
    return list(rows[rank * each : (rank + 1) * each])
