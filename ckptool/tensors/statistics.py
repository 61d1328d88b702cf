"""What the elements of a tensor span, in two passes over blocks, or in one where they are small."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from threading import local
from typing import TYPE_CHECKING, TypeVar

from ckptool.dtypes import BY_NAME, PACKED
from ckptool.errors import UsageError
from ckptool.files.computed import may_be_shared
from ckptool.model import TensorRef
from ckptool.tensors.averaging import Elements, elements_of
from ckptool.tensors.moments import CHUNK, Axis, Extent, Moments, Number, Numbers, axis_of
from ckptool.tensors.runtime import require_torch
from ckptool.tensors.tallies import Tally, add_counts, by_pattern, no_counts

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    import torch

__all__ = ["Histogram", "Measurer", "Measures", "measurable"]

BLOCK = 1 << 20
"""Elements that a thread is given at a time."""
THREADS = min(2, os.cpu_count() or 1)
WORTH_COUNTING = 1 << 19
"""Elements of 16 bits from which it is cheaper to count patterns, of which there are 65,536."""

Told = Callable[[int], None]
Found = tuple[Extent, Moments, Axis | None]
"""No axis: no element is finite, or all that are finite are equal."""
_T = TypeVar("_T")

_NO_NUMBERS = ("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "qint8", "quint8", "qint32")


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many finite elements lie in each of some equally wide bins from `low` to `high`.

    A bin begins at its lower edge and ends before the next; the last has `high` too. Where all
    elements are equal they are in the middle bin, as `torch.histc` has it.
    """

    low: Number
    high: Number
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measures:
    """What the elements of a tensor span; of complex numbers, their magnitudes.

    NaN and infinite elements are counted and left out of all else. Where no element is finite,
    `minimum`, `maximum`, `mean`, `std` and `histogram` are None. Integers are exact, as are
    `minimum` and `maximum` of any type.
    """

    elements: int
    minimum: Number | None
    maximum: Number | None
    mean: float | None
    std: float | None
    """The standard deviation of the population: divided by the number of elements, not one less."""
    zeros: int
    nan: int
    infinite: int
    norm: float
    """The Euclidean (L2) norm, of all elements as one vector."""
    histogram: Histogram | None

    @property
    def finite(self) -> int:
        """Elements that are neither NaN nor infinite."""
        return self.elements - self.nan - self.infinite

    def repeated(self, times: int) -> Measures:
        """Of as many elements times `times`, each as often."""
        drawn = self.histogram
        return replace(
            self,
            elements=self.elements * times,
            zeros=self.zeros * times,
            nan=self.nan * times,
            infinite=self.infinite * times,
            norm=self.norm * math.sqrt(times),
            histogram=drawn and replace(drawn, counts=tuple(n * times for n in drawn.counts)),
        )


def measurable(ref: TensorRef) -> str | None:
    """Why a tensor has no figures, in a few words; None where it has some."""
    if ref.kind == "meta" or ref.device == "meta":
        return "on the meta device, which has no elements"
    if not ref.has_content:
        if ref.kind == "subclass":
            return "spread over ranks, of which this file holds one part"
        return f"{ref.kind}: its elements are no plain array"
    if ref.dtype in PACKED or ref.dtype == "float4_e2m1fn_x2":
        return f"{ref.dtype}: several numbers share a byte"
    if ref.dtype in _NO_NUMBERS:
        return f"{ref.dtype}: its elements stand for no numbers"
    return None


class Measurer:
    """Measures tensors one after the other, with one set of buffers a thread."""

    def __init__(self, bins: int = 16) -> None:
        """Histograms have `bins` bins. Torch is imported when the first element is wanted.

        Raises:
            UsageError: there is not even one bin.
        """
        if bins < 1:
            raise UsageError(f"a histogram of {bins} bins cannot be drawn")
        self._bins = bins
        self._kernels = local()
        self._pool: ThreadPoolExecutor | None = None

    def measure(self, ref: TensorRef, told: Told | None = None) -> Measures:
        """The figures of a tensor that has some (`measurable`); `told` of the bytes that are done.

        Elements that a stride of zero repeats are read once.

        Raises:
            TorchMissing: torch is not installed.
            UnsupportedFormat: this torch does not have the type.
            UsageError: a tensor that has no figures.
            TruncatedFile, CorruptFile: its bytes cannot be read.
        """
        reason = measurable(ref)
        if reason is not None:
            raise UsageError(f"a tensor without figures cannot be measured ({reason})")
        once = ref.unrepeated
        count = once.numel
        if not count:
            return _measures(ref.dtype, Extent(), Moments(), None, self._bins)
        reading = _Reading(self, elements_of(once), count, ref.nbytes, told)
        size = BY_NAME[ref.dtype].itemsize
        # Of 256 patterns always, of 65,536 where that is few.
        counted = size == 1 or (size == 2 and count >= WORTH_COUNTING)
        found = reading.counted() if counted else reading.spanned()
        reading.tell()
        made = _measures(ref.dtype, *found, self._bins)
        return made if once is ref else made.repeated(ref.numel // count)

    @property
    def bins(self) -> int:
        """Bins of a histogram."""
        return self._bins

    def kernel(self, make: Callable[[str], _T], dtype: str) -> _T:
        """The buffers and the arithmetic for a type, made once for each thread."""
        known: dict[str, _T] = self._kernels.__dict__
        key = f"{make.__name__} {dtype}"
        if key not in known:
            known[key] = make(dtype)
        return known[key]

    def threads(self) -> ThreadPoolExecutor:
        """The threads that read and count; they end with this object."""
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor  # brings logging: milliseconds

            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ckptool-measure")
        return self._pool


class _Reading:
    """One tensor on its way through the kernels."""

    def __init__(
        self, measurer: Measurer, run: Elements, count: int, nbytes: int, told: Told | None
    ) -> None:
        self._measurer = measurer
        self._run = run
        self._dtype = run.dtype
        self._count = count
        self._told = told
        self._left = nbytes
        """Bytes that nobody was told of."""

    def tell(self, most: int | None = None) -> None:
        """Tell of all bytes that are left, or `most` of them."""
        count = self._left if most is None else min(most, self._left)
        self._left -= count
        if self._told is not None and count:
            self._told(count)

    def counted(self) -> Found:
        """What the elements span, by their bit patterns."""
        require_torch()
        total = no_counts(self._dtype)
        for counts in self._blocks(self._counts, passes=1):
            add_counts(total, counts)
        return by_pattern(self._dtype, total, self._measurer.bins)

    def spanned(self) -> Found:
        """What the elements span, in a pass for the ends and one for what lies between them."""
        extent, moments = Extent(), Moments()
        for reach in self._blocks(self._extent, passes=2):
            extent.add(reach)
        if extent.low >= extent.high:
            return extent, moments, None
        axis = axis_of(self._dtype, extent, self._measurer.bins)
        all_finite = extent.finite == self._count

        def measured(start: int, stop: int) -> Moments:
            return self._moments(start, stop, axis, all_finite=all_finite)

        for part in self._blocks(measured, passes=2):
            moments.add(part)
        return extent, moments, axis

    def _counts(self, start: int, stop: int) -> torch.Tensor:
        return self._measurer.kernel(Tally, self._dtype).counts(self._run, start, stop)

    def _extent(self, start: int, stop: int) -> Extent:
        kernel, extent = self._measurer.kernel(Numbers, self._dtype), Extent()
        for first in range(start, stop, CHUNK):
            extent.add(kernel.extent(self._run, first, min(first + CHUNK, stop)))
        return extent

    def _moments(self, start: int, stop: int, axis: Axis, *, all_finite: bool) -> Moments:
        kernel, moments = self._measurer.kernel(Numbers, self._dtype), Moments()
        for first in range(start, stop, CHUNK):
            last = min(first + CHUNK, stop)
            moments.add(kernel.moments(self._run, first, last, axis, all_finite=all_finite))
        return moments

    def _blocks(self, work: Callable[[int, int], _T], *, passes: int) -> Iterator[_T]:
        """What `work` gives of each block, in order, in one of so many passes."""
        shared = THREADS > 1 and self._count > BLOCK and may_be_shared(self._run.data)
        starts = range(0, self._count, BLOCK)

        def done(start: int) -> _T:
            return work(start, min(start + BLOCK, self._count))

        for result in self._shared(done, starts) if shared else map(done, starts):
            self.tell(BLOCK * BY_NAME[self._dtype].itemsize // passes)
            yield result

    def _shared(self, done: Callable[[int], _T], starts: range) -> Iterator[_T]:
        """The results by several threads, in order, few of them waiting to be taken."""
        pending: deque[Future[_T]] = deque()
        try:
            for start in starts:
                pending.append(self._measurer.threads().submit(done, start))
                if len(pending) > 2 * THREADS:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for left in pending:  # nobody wants them, and the file is about to be closed
                left.cancel()
            for left in pending:
                left.cancelled() or left.exception()


def _measures(
    dtype: str, extent: Extent, moments: Moments, axis: Axis | None, bins: int
) -> Measures:
    """The figures, in the numbers of the elements themselves."""
    elements = extent.finite + extent.nan + extent.infinite
    odd = {"zeros": extent.zeros, "nan": extent.nan, "infinite": extent.infinite}
    if not extent.finite:
        return Measures(elements, None, None, None, None, **odd, norm=0.0, histogram=None)
    low, high, count = extent.low, extent.high, extent.finite
    if not BY_NAME[dtype].floating and not dtype.startswith("complex"):
        low, high = int(low), int(high)
    if axis is None:
        mean, std, norm = float(low), 0.0, abs(float(low)) * math.sqrt(count)
        counts = [count if place == bins // 2 else 0 for place in range(bins)]
    else:
        centre = axis.base + moments.mean / axis.scale
        mean, std = float(centre), math.sqrt(moments.squares / count) / axis.scale
        middle = moments.mean + float(axis.base) * axis.scale
        norm = math.sqrt(moments.squares + count * middle * middle) / axis.scale
        counts = moments.bins
    histogram = Histogram(low, high, tuple(counts))
    return Measures(elements, low, high, mean, std, **odd, norm=norm, histogram=histogram)
