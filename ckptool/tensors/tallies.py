"""Elements of 8 and 16 bits counted by their bit patterns: few additions say all about millions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptool.dtypes import BY_NAME
from ckptool.tensors.averaging import Elements
from ckptool.tensors.element_buffer import ElementBuffer
from ckptool.tensors.moments import CHUNK, Axis, Extent, Moments, axis_of
from ckptool.tensors.runtime import require_torch, torch_dtype

if TYPE_CHECKING:
    import torch

__all__ = ["Tally", "add_counts", "by_pattern", "no_counts"]

PIECE = 8 * CHUNK
"""Elements that are counted by one call: it uses no other threads however many there are."""
_SIGNED = {1: "int8", 2: "int16"}


class Tally:
    """Counts the patterns of elements of one type, over buffers that are used again."""

    def __init__(self, dtype: str) -> None:
        """Take memory for a piece.

        Raises:
            TorchMissing: torch is not installed.
        """
        require_torch()
        import torch

        size = BY_NAME[dtype].itemsize
        self._last = (1 << 8 * size) - 1
        self._buffer = ElementBuffer(dtype, PIECE, seen_as=torch_dtype(_SIGNED[size]))
        self._patterns = torch.empty(PIECE, dtype=torch.int64)
        self._ones = torch.ones(PIECE, dtype=torch.int32)

    def counts(self, run: Elements, start: int, stop: int) -> torch.Tensor:
        """How often each pattern is among the elements from `start` up to `stop`, as int32."""
        import torch

        made = torch.frombuffer(bytearray(4 * (self._last + 1)), dtype=torch.int32)
        for first in range(start, stop, PIECE):
            count = min(PIECE, stop - first)
            bits, patterns = self._buffer.read(run, first, count), self._patterns[:count]
            for at in range(0, count, CHUNK):
                patterns[at : at + CHUNK].copy_(bits[at : at + CHUNK]).bitwise_and_(self._last)
            made.scatter_add_(0, patterns, self._ones[:count])
        return made


def no_counts(dtype: str) -> torch.Tensor:
    """Of all patterns of a type, none (int64)."""
    import torch

    return torch.frombuffer(bytearray(8 << 8 * BY_NAME[dtype].itemsize), dtype=torch.int64)


def add_counts(total: torch.Tensor, counts: torch.Tensor) -> None:
    """Count those too, a chunk at a time as `CHUNK` wants it."""
    for start in range(0, total.numel(), CHUNK):
        total[start : start + CHUNK] += counts[start : start + CHUNK]


def by_pattern(dtype: str, counts: torch.Tensor, bins: int) -> tuple[Extent, Moments, Axis | None]:
    """What counted elements reach, and their moments on the axis, where there is one.

    Raises:
        UnsupportedFormat: this torch does not have the type.
    """
    extent, moments = Extent(), Moments()
    for values, times in _met(dtype, counts):
        extent.add(_extent(values, times))
    if extent.low >= extent.high:
        return extent, moments, None
    axis = axis_of(dtype, extent, bins)
    for values, times in _met(dtype, counts):
        moments.add(_moments(values, times, axis))
    return extent, moments, axis


def _met(dtype: str, counts: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The values that were met (float64), and how often each, a chunk at a time."""
    for start in range(0, counts.numel(), CHUNK):
        part = counts[start : start + CHUNK]
        yield _values(dtype, part.nonzero().flatten() + start), part.masked_select(part != 0)


def _values(dtype: str, patterns: torch.Tensor) -> torch.Tensor:
    """The values of bit patterns, as float64."""
    if dtype == "bool":
        return (patterns != 0).double()
    if dtype == "uint16":
        return patterns.double()
    signed = torch_dtype(_SIGNED[BY_NAME[dtype].itemsize])
    return patterns.to(signed).view(torch_dtype(dtype)).double()


def _extent(values: torch.Tensor, times: torch.Tensor) -> Extent:
    """How far values reach that were met so often."""
    odd = (values.isnan(), values.isinf(), values == 0)
    nan, infinite, zeros = (int((times * chosen).sum()) for chosen in odd)
    finite = values.masked_select(values.isfinite())
    if not finite.numel():
        return Extent(nan=nan, infinite=infinite)
    low, high = (end.item() for end in finite.aminmax())
    return Extent(low, high, int(times.sum()) - nan - infinite, zeros, nan, infinite)


def _moments(values: torch.Tensor, times: torch.Tensor, axis: Axis) -> Moments:
    """The moments, on that axis, of the finite ones among values that were met so often."""
    import torch

    finite = values.isfinite()
    values, times = values.masked_select(finite), times.masked_select(finite)
    bins = torch.zeros(axis.bins, dtype=torch.int64)
    count = int(times.sum())
    if not count:
        return Moments(bins=bins.tolist())
    bins.scatter_add_(0, axis.places(values).long().clamp_(max=axis.bins - 1), times)
    mean = float((values * times).sum()) / count
    squares = float(((values - mean).square_() * times).sum())
    return Moments(count, mean, squares, bins.tolist())
