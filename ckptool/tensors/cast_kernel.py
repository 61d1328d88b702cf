"""The arithmetic of a cast on one chunk of elements, and what it does to them."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptool.dtypes import BY_NAME
from ckptool.files import ByteRange
from ckptool.tensors.coverage import Grid, Piece
from ckptool.tensors.floats import FLOATS, SATURATES, is_exact
from ckptool.tensors.runtime import require_torch, torch_dtype

if TYPE_CHECKING:
    import torch

__all__ = ["CHUNK", "Kernel", "Losses", "chunks", "own_elements"]

CHUNK = 1 << 15
"""Elements handled at a time: they stay in the processor's cache, and below what torch divides
among threads, whose waiting for each other costs more than it gains where the machine is busy."""


def chunks(
    offset: int, buffer: memoryview, size: int
) -> Iterator[tuple[int, int, memoryview, int]]:
    """The elements, of `size` bytes, that a buffer for the bytes from `offset` has a part of.

    Of each chunk the first element and the one after its last, the part of the buffer that its
    bytes go to, and how many of its first bytes lie before that.
    """
    first, last = offset // size, -(-(offset + len(buffer)) // size)
    for start in range(first, last, CHUNK):
        stop = min(start + CHUNK, last)
        at = start * size - offset
        yield start, stop, buffer[max(at, 0) : at + (stop - start) * size], max(-at, 0)


@dataclass(slots=True)
class Losses:
    """How many elements were cast, and of those how many are not what they were."""

    elements: int = 0
    overflow: int = 0
    """Finite and beyond the largest finite value, or infinite or negative where there is no such.

    After rounding: 65519 is 65504 in float16.
    """
    underflow: int = 0
    """Not zero, and zero now."""
    precision: int = 0
    """Another value now, neither of the above."""
    largest: float = 0.0
    """The largest magnitude of those that overflow."""
    zeros: int = 0
    """Zero, and the smallest value now, as the type has no zero."""

    def add(self, other: Losses) -> None:
        """Count those too."""
        self.elements += other.elements
        self.overflow += other.overflow
        self.underflow += other.underflow
        self.precision += other.precision
        self.zeros += other.zeros
        self.largest = max(self.largest, other.largest)


class Kernel:
    """The arithmetic on one chunk, over buffers that are used again and again."""

    def __init__(self, source: str, target: str) -> None:
        """Take memory for chunks of these types.

        Raises:
            TorchMissing: torch is not installed.
            UnsupportedFormat: this torch has not one of the types.
        """
        require_torch()
        import torch

        self._exact = is_exact(source, target)
        self._kind = FLOATS[target]
        self._limit = SATURATES.get(target, float("inf"))
        self._itemsize = BY_NAME[source].itemsize
        wide = torch.float64 if source == "float64" else torch.float32
        self._bits = torch.int64 if source == "float64" else torch.int32
        self._raw = bytearray(CHUNK * self._itemsize)
        self._made = bytearray(CHUNK * BY_NAME[target].itemsize)
        self._source = torch.frombuffer(self._raw, dtype=torch_dtype(source))
        self._own = self._target = torch.frombuffer(self._made, dtype=torch_dtype(target))
        # Both types in one that has all their values, where they can be compared.
        self._back = torch.empty(CHUNK, dtype=wide)
        self._size = torch.empty(CHUNK, dtype=wide)
        self._low_bits: torch.Tensor | None = None
        if (source, target) == ("float32", "bfloat16"):  # the lower half of the bits goes
            halves = self._source.view(torch.int16)
            self._low_bits = halves[sys.byteorder == "big" :: 2]
        self._old = self._source
        if self._source.dtype != wide and not self._exact:
            self._old = torch.empty(CHUNK, dtype=wide)
        self._count = 0
        self._widened = False

    def read(self, data: ByteRange, start: int, stop: int, crc: int | None = None) -> int:
        """Take the elements from `start` up to `stop`; the CRC-32 that goes on from `crc`."""
        self._count, self._widened = stop - start, False
        raw = memoryview(self._raw)[: self._count * self._itemsize]
        data.read_into(raw, start * self._itemsize)
        return 0 if crc is None else zlib.crc32(raw, crc)

    def cast(self, *, swap: bool, into: memoryview | None = None) -> memoryview:
        """The elements that were read in the target's type: `into` there, or until the next are."""
        import torch

        source, size = self._source[: self._count], self._itemsize
        own = self._own.dtype
        self._target = self._own if into is None else torch.frombuffer(into, dtype=own)
        if swap and size > 1:
            rows = source.view(torch.uint8).view(-1, size)
            rows.copy_(rows.flip(1))
        self._target[: self._count].copy_(source)
        return into or memoryview(self._made)[: self._count * own.itemsize]

    def losses(self, start: int, piece: Piece) -> Losses:
        """What became of a piece of the chunk that was just cast, which began at `start`.

        Few passes where nothing overflows and there is no NaN, which is nearly everywhere.
        """
        chosen = slice(piece.start - start, piece.stop - start)
        if self._exact:
            mask = None if piece.grid is None else own_elements(piece)
            count = chosen.stop - chosen.start if mask is None else int(mask.sum())
            return Losses(count)
        if self._low_bits is not None and piece.grid is None:
            return self._halved(chosen)
        if not self._widened:
            self._widen()
        old, back = self._old[chosen], self._back[chosen]
        if piece.grid is not None:
            mask = own_elements(piece)
            old, back = old[mask], back[mask]
        return self._compared(old, back) if old.numel() else Losses()

    def _widen(self) -> None:
        """Have the chunk before and after in a type where both can be compared."""
        cast = slice(self._count)
        self._back[cast].copy_(self._target[cast])
        if self._old is not self._source:
            self._old[cast].copy_(self._source[cast])
        self._widened = True

    def _reach(self, old: torch.Tensor) -> tuple[float, float]:
        """The least and the largest magnitude; NaN where there is one."""
        import torch

        size = torch.abs(old, out=self._size[: old.numel()])
        low, high = torch.aminmax(size)
        return low.item(), high.item()

    def _halved(self, chosen: slice) -> Losses:
        """The losses where the higher half of the bits is what remains, rounded."""
        old, low_bits = self._source[chosen], self._low_bits
        low, high = self._reach(old)
        if not high <= self._kind.largest or low_bits is None:
            return self._sorted_out(old, self._target[chosen].to(old.dtype))
        gone = 0
        if low < 2.0**self._kind.lowest:
            gone = _nonzero(old) - _nonzero(self._target[chosen])
        return Losses(old.numel(), 0, gone, _nonzero(low_bits[chosen]) - gone)

    def _compared(self, old: torch.Tensor, back: torch.Tensor) -> Losses:
        low, high = self._reach(old)
        kind = self._kind
        if not high <= kind.largest or not (kind.signed or float(old.min()) >= 0):
            return self._sorted_out(old, back)
        gone = 0
        if low < 2.0**kind.lowest and kind.signed:
            gone = _nonzero(old) - _nonzero(back)
        zeros = 0 if kind.signed else old.numel() - _nonzero(old)
        changed = _nonzero((back - old).view(self._bits))
        return Losses(old.numel(), 0, gone, changed - gone - zeros, zeros=zeros)

    def _sorted_out(self, old: torch.Tensor, back: torch.Tensor) -> Losses:
        """The same with NaN, infinities and what overflows told apart."""
        import torch

        size, finite = old.abs(), torch.isfinite(old)
        over = finite & (~torch.isfinite(back) | (size > self._limit))
        if not self._kind.infinite:
            over |= torch.isinf(old)
        if not self._kind.signed:
            over |= old < 0
        rest = finite & ~over
        gone = rest & (old != 0) & (back == 0)
        changed = rest & (old != back)
        overflow, underflow = int(over.sum()), int(gone.sum())
        largest = float(size[over].max()) if overflow else 0.0
        zeros = 0 if self._kind.signed else old.numel() - _nonzero(old)
        precision = int(changed.sum()) - underflow - zeros
        return Losses(old.numel(), overflow, underflow, precision, largest, zeros)


def _nonzero(elements: torch.Tensor) -> int:
    import torch

    return int(torch.count_nonzero(elements))


def own_elements(piece: Piece) -> torch.Tensor:
    """Which elements of a piece of a view with holes are its own."""
    import torch

    index = torch.arange(piece.start, piece.stop)
    own = torch.ones(index.numel(), dtype=torch.bool)
    for grid in piece.before:
        own &= ~_on_grid(index, grid)
    return own if piece.grid is None else own & _on_grid(index, piece.grid)


def _on_grid(index: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Which elements of the storage a view looks at."""
    rest = index - grid.first
    inside = rest >= 0
    for step, size in grid.axes:
        at = rest // step
        inside &= at < size
        rest = rest - at * step
    return inside & (rest == 0)
