"""Statistics of tensors, read once in chunks that stay in the cache."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from threading import local
from typing import TYPE_CHECKING, TypeVar

from ckptool.dtypes import BY_NAME, PACKED
from ckptool.errors import UsageError
from ckptool.files.computed import may_be_shared
from ckptool.model import TensorRef
from ckptool.tensors.averaging import ElementBuffer, Elements, elements_of
from ckptool.tensors.runtime import require_torch, torch_dtype

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    import torch

__all__ = [
    "CHUNK",
    "Axis",
    "Extent",
    "Histogram",
    "Measurer",
    "Measures",
    "Moments",
    "Number",
    "Numbers",
    "Tally",
    "add_counts",
    "axis_of",
    "by_pattern",
    "measurable",
    "no_counts",
]

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
