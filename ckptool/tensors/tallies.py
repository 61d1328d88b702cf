"""Elements of 8 and 16 bits counted by their bit patterns: few additions say all about millions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool.dtypes import BY_NAME
from ckptool.tensors.averaging import Elements
from ckptool.tensors.cast_kernel import CHUNK
from ckptool.tensors.element_buffer import ElementBuffer
from ckptool.tensors.moments import Axis, Extent, Moments, axis_of
from ckptool.tensors.runtime import require_torch, torch_dtype

if TYPE_CHECKING:
    import torch

__all__ = ["COUNTED_AT_ONCE", "Tally", "by_pattern"]

COUNTED_AT_ONCE = 1 << 18
"""Elements; each time the counts of all patterns are added up anew."""


class Tally:
    """Counts the patterns of elements of one type, over buffers that are used again."""

    def __init__(self, dtype: str) -> None:
        """Take memory for some elements.

        Raises:
            TorchMissing: torch is not installed.
        """
        require_torch()
        import torch

        self._small = BY_NAME[dtype].itemsize == 1
        self._patterns = 1 << 8 * BY_NAME[dtype].itemsize
        seen_as = torch.uint8 if self._small else torch.int16
        self._buffer = ElementBuffer(dtype, COUNTED_AT_ONCE, seen_as=seen_as)
        room = 0 if self._small else COUNTED_AT_ONCE
        self._unsigned = torch.empty(room, dtype=torch.int32)

    def counts(self, run: Elements, start: int, stop: int) -> torch.Tensor:
        """How often each pattern is among the elements from `start` up to `stop` (int64)."""
        import torch

        total = torch.zeros(self._patterns, dtype=torch.int64)
        for first in range(start, stop, COUNTED_AT_ONCE):
            count = min(COUNTED_AT_ONCE, stop - first)
            bits = self._buffer.read(run, first, count)
            if not self._small:
                bits = self._without_sign(bits)
            total += torch.bincount(bits, minlength=self._patterns)
        return total

    def _without_sign(self, bits: torch.Tensor) -> torch.Tensor:
        """16 bits as numbers that are not negative, chunk by chunk as `CHUNK` wants it."""
        count = bits.numel()
        for start in range(0, count, CHUNK):
            part = slice(start, min(start + CHUNK, count))
            self._unsigned[part].copy_(bits[part]).bitwise_and_(0xFFFF)
        return self._unsigned[:count]


def by_pattern(dtype: str, counts: torch.Tensor, bins: int) -> tuple[Extent, Moments, Axis | None]:
    """What counted elements reach, and their moments on the axis, where there is one."""
    import torch

    values = _values(dtype)
    there = counts.nonzero().flatten()
    values, counts = values[there], counts[there]
    nan, infinite = int(counts[values.isnan()].sum()), int(counts[values.isinf()].sum())
    zeros = int(counts[values == 0].sum())
    finite = values.isfinite()
    values, counts = values[finite], counts[finite]
    count = int(counts.sum())
    if not count:
        return Extent(nan=nan, infinite=infinite), Moments(), None
    low, high = (end.item() for end in values.aminmax())
    if not BY_NAME[dtype].floating:
        low, high = int(low), int(high)
    extent = Extent(low, high, count, zeros, nan, infinite)
    if low == high:
        return extent, Moments(), None
    axis = axis_of(dtype, extent, bins)
    mean = float((values * counts).sum()) / count
    squares = float(((values - mean).square() * counts).sum())
    places = axis.places(values).long().clamp_(max=bins - 1)
    binned = torch.zeros(bins, dtype=torch.int64).scatter_add_(0, places, counts)
    return extent, Moments(count, mean, squares, binned.tolist()), axis


def _values(dtype: str) -> torch.Tensor:
    """The value of each pattern (float64).

    Raises:
        UnsupportedFormat: this torch does not have the type.
    """
    import torch

    if BY_NAME[dtype].itemsize == 1:
        patterns = torch.arange(256, dtype=torch.uint8)
        return (patterns != 0).double() if dtype == "bool" else _seen_as(patterns, dtype)
    numbers = torch.arange(1 << 16, dtype=torch.int32)
    return numbers.double() if dtype == "uint16" else _seen_as(numbers.to(torch.int16), dtype)


def _seen_as(patterns: torch.Tensor, dtype: str) -> torch.Tensor:
    return patterns.view(torch_dtype(dtype)).double()
