"""The arithmetic of statistics on one chunk of elements, in numbers that torch computes with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptool.tensors.averaging import Elements
from ckptool.tensors.element_buffer import ElementBuffer
from ckptool.tensors.runtime import require_torch

if TYPE_CHECKING:
    import torch

__all__ = ["CHUNK", "Axis", "Extent", "Moments", "Number", "Numbers", "axis_of"]

CHUNK = (1 << 15) - 64
"""Elements handled at a time: they stay in the processor's cache, and are fewer than torch, which
divides reductions of 32,768, gives to several threads, whose waiting for each other costs more
than it gains where the machine is busy. (Dot products, and indices that are tensors, it divides
even so.)"""

Number = int | float

_BIAS = {"uint64": 1 << 63}
"""What the numbers of a type lack, as torch computes with signed ones."""
_SMALLEST, _LARGEST = 1e-140, 1e140
"""Magnitudes whose squares float64 still holds."""


@dataclass(slots=True)
class Extent:
    """How far elements reach, and how many are no finite numbers; those count for nothing else."""

    low: Number = math.inf
    high: Number = -math.inf
    finite: int = 0
    zeros: int = 0
    nan: int = 0
    infinite: int = 0

    def add(self, other: Extent) -> None:
        """Have those elements too."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.finite += other.finite
        self.zeros += other.zeros
        self.nan += other.nan
        self.infinite += other.infinite


@dataclass(slots=True)
class Moments:
    """How many elements there are, their mean, the sum of their squared distances from it."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    bins: list[int] = field(default_factory=list)

    def add(self, other: Moments) -> None:
        """Have those elements too (Chan, Golub and LeVeque 1979: exact where means differ)."""
        if not other.count:
            return
        count = self.count + other.count
        distance = other.mean - self.mean
        self.mean += distance * (other.count / count)
        self.squares += other.squares + distance * distance * (self.count / count * other.count)
        self.count = count
        pairs = zip(self.bins, other.bins, strict=True)
        self.bins = [own + more for own, more in pairs] if self.bins else other.bins


@dataclass(frozen=True, slots=True)
class Axis:
    """Where elements lie for float64: `(element - base) * scale`, from `low` to `high` there.

    The base of 64-bit integers is their least, as float64 has 53 bits; the scale, a power of two,
    is other than 1 where squares would leave the range of float64.
    """

    base: int
    scale: float
    low: float
    high: float
    bins: int

    def places(self, elements: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """In which bin each lies, as a number to be cut off; the largest lies behind the last.

        Divided, not multiplied: what lies on the edge of a bin is in that bin.
        """
        import torch

        width = (self.high - self.low) / self.bins
        return torch.sub(elements, self.low, out=out).div_(width)


def axis_of(dtype: str, extent: Extent, bins: int) -> Axis:
    """The axis on which elements of `dtype`, some of them finite, are measured."""
    low, high, base, scale = extent.low, extent.high, 0, 1.0
    if dtype in ("int64", "uint64"):
        narrow = high - low < 1 << 63
        base = int(low) if narrow else _BIAS.get(dtype, 0)
    else:
        largest = max(abs(low), abs(high))
        if largest > _LARGEST or 0 < largest < _SMALLEST:
            scale = math.ldexp(1.0, min(-math.frexp(largest)[1], 1000))
    return Axis(base, scale, float(low - base) * scale, float(high - base) * scale, bins)


class Numbers:
    """Elements of one type as numbers, a chunk at a time, over buffers that are used again."""

    def __init__(self, dtype: str) -> None:
        """Take memory for a chunk.

        Raises:
            TorchMissing: torch is not installed.
            UnsupportedFormat: this torch does not have the type.
        """
        require_torch()
        import torch

        self._bias = _BIAS.get(dtype, 0)
        seen_as, self._prepare = _preparations().get(dtype, (None, _as_they_are))
        self._buffer = ElementBuffer(dtype, CHUNK, seen_as=seen_as)
        self._wide = torch.empty(CHUNK, dtype=torch.float64)
        self._places = torch.empty(CHUNK, dtype=torch.float64)
        self._bins = torch.empty(CHUNK, dtype=torch.int32)
        self._last: tuple[Elements, int, torch.Tensor] | None = None

    def extent(self, run: Elements, start: int, stop: int) -> Extent:
        """How far the elements from `start` up to `stop` (a chunk at most) reach."""
        numbers = self._read(run, start, stop)
        nan = infinite = 0
        low, high = _ends(numbers)
        if not (math.isfinite(low) and math.isfinite(high)):
            every, nan = numbers.numel(), int(numbers.isnan().sum())
            numbers = numbers.masked_select(numbers.isfinite())
            infinite = every - nan - numbers.numel()
            if not numbers.numel():
                return Extent(nan=nan, infinite=infinite)
            low, high = _ends(numbers)
        low, high = low + self._bias, high + self._bias
        zeros = self._zeros(numbers) if low <= 0 <= high else 0
        return Extent(low, high, numbers.numel(), zeros, nan, infinite)

    def _zeros(self, numbers: torch.Tensor) -> int:
        """How many finite numbers are zero."""
        import torch

        if numbers.is_floating_point():
            if float(numbers.abs().min()) > 0:  # twice as fast as counting, and usually so
                return 0
        elif self._bias:
            numbers = numbers.ne(-self._bias)
        return numbers.numel() - int(torch.count_nonzero(numbers))

    def moments(
        self, run: Elements, start: int, stop: int, axis: Axis, *, all_finite: bool
    ) -> Moments:
        """The moments, on that axis, of the finite elements from `start` up to `stop`."""
        import torch

        numbers = self._read(run, start, stop)
        if not all_finite:
            numbers = numbers.masked_select(numbers.isfinite())
        if axis.base != self._bias:
            numbers = numbers - (axis.base - self._bias)
        count = numbers.numel()
        if not count:
            return Moments(bins=[0] * axis.bins)
        wide = self._wide[:count].copy_(numbers)
        if axis.scale != 1.0:
            wide.mul_(axis.scale)
        bins = self._bins[:count].copy_(axis.places(wide, out=self._places[:count]))
        *counts, end = torch.bincount(bins, minlength=axis.bins + 1).tolist()
        counts[-1] += end  # the largest element lies where a next bin would begin
        mean = float(wide.sum()) / count
        wide.sub_(mean)
        return Moments(count, mean, float(wide.square_().sum()), counts)

    def _read(self, run: Elements, start: int, stop: int) -> torch.Tensor:
        """A chunk as numbers; of a tensor that is a single one they are read once for both."""
        last = self._last
        if last is not None and last[0] is run and last[1] == start:
            return last[2]
        self._last = None
        numbers = self._prepare(self._buffer.read(run, start, stop - start))
        self._last = run, start, numbers
        return numbers


def _ends(numbers: torch.Tensor) -> tuple[Number, Number]:
    """The least and the largest number, NaN where there is one."""
    import torch

    low, high = torch.aminmax(numbers)
    return low.item(), high.item()


def _as_they_are(elements: torch.Tensor) -> torch.Tensor:
    return elements


def _magnitudes(parts: torch.Tensor) -> torch.Tensor:
    """Of complex numbers, given as their parts; NaN where a part is."""
    import torch

    pairs = parts.double().view(-1, 2)
    made = torch.view_as_complex(pairs).abs()
    return made.masked_fill_(pairs.isnan().any(1), math.nan)  # torch: abs(inf + nan j) is inf


def _preparations() -> dict[str, tuple[torch.dtype | None, Callable[[torch.Tensor], torch.Tensor]]]:
    """What elements are read as, and how they become numbers, where they are none as they are."""
    import torch

    return {
        "float16": (None, torch.Tensor.float),
        "bfloat16": (None, torch.Tensor.float),
        "uint16": (torch.int16, lambda bits: bits.int() & 0xFFFF),
        "uint32": (torch.int32, lambda bits: bits.long() & 0xFFFFFFFF),
        "uint64": (torch.int64, lambda bits: bits ^ -(1 << 63)),
        "complex32": (torch.float16, _magnitudes),
        "complex64": (torch.float32, _magnitudes),
        "complex128": (torch.float64, _magnitudes),
    }
