"""Compute statistics of tensors chunk by chunk: first the range, then the moments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ckptool.core.model import TensorRef
from ckptool.dtypes import BY_NAME, PACKED
from ckptool.errors import UsageError
from ckptool.files.source import BytesDone
from ckptool.files.threads import run_in_order
from ckptool.tensors.averaging import ElementBuffer, Elements, run_of_tensor
from ckptool.tensors.casting import FLOATS
from ckptool.tensors.storages import require_torch, use_one_thread

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 17
"""Elements handled at a time: they stay in the processor's cache."""
BLOCK = 8 * CHUNK
"""Elements that a thread is given at a time."""

Number = int | float
_T = TypeVar("_T")

_NO_NUMBERS = ("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "qint8", "quint8", "qint32")
_BIAS = {"uint64": 1 << 63}
"""By dtype, the offset of its numbers: torch gets them minus this, because it lacks unsigned ones.

Numbers of dtypes that are not listed have the offset 0."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of finite elements in bins of equal width from `low` to `high`.

    A bin begins at its lower edge and ends before the next; the last has `high` too. Where all
    elements are equal they are in the middle bin, as `torch.histc` has it.
    """

    low: Number
    high: Number
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Measures:
    """Statistics of the elements of a tensor; of complex numbers, of their magnitudes.

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

    def repeat(self, times: int) -> Measures:
        """Return the statistics if each element occurred `times` times."""
        histogram = self.histogram
        return replace(
            self,
            elements=self.elements * times,
            zeros=self.zeros * times,
            nan=self.nan * times,
            infinite=self.infinite * times,
            norm=self.norm * math.sqrt(times),
            histogram=histogram
            and replace(histogram, counts=tuple(n * times for n in histogram.counts)),
        )


def find_obstacle(ref: TensorRef) -> str | None:
    """Return the reason why a tensor has no statistics; None if it has statistics."""
    if ref.kind == "meta" or ref.device == "meta":
        return "on the meta device, without data"
    if not ref.has_content:
        if ref.is_spread and ref.whole is None:
            return "distributed over ranks; this file has only one part"
        kind = ref.class_name if ref.kind == "subclass" else ref.kind
        return f"{kind}: not a plain array of elements"
    if ref.dtype in PACKED or ref.dtype == "float4_e2m1fn_x2":
        return f"{ref.dtype}: several numbers share a byte"
    if ref.dtype in _NO_NUMBERS:
        return f"{ref.dtype}: its elements are not numbers"
    return None


@dataclass(slots=True)
class _Extent:
    """The least and the largest finite number, and counts of zeros, NaN and infinities."""

    low: Number = math.inf
    high: Number = -math.inf
    finite: int = 0
    zeros: int = 0
    nan: int = 0
    infinite: int = 0

    def add(self, other: _Extent) -> None:
        """Add the extent of other elements."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.finite += other.finite
        self.zeros += other.zeros
        self.nan += other.nan
        self.infinite += other.infinite


@dataclass(slots=True)
class Moments:
    """The number of elements, their mean, the sum of squared distances from it, and a histogram."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    bins: list[int] = field(default_factory=list)

    def add(self, other: Moments) -> None:
        """Add other elements (Chan, Golub and LeVeque 1979: exact even if the means differ)."""
        if not other.count:
            return
        count = self.count + other.count
        distance = other.mean - self.mean
        self.mean += distance * (other.count / count)
        self.squares += other.squares + distance * distance * (self.count / count * other.count)
        self.count = count
        pairs = zip(self.bins, other.bins, strict=True)  # unused if these are the first elements
        self.bins = [count_a + count_b for count_a, count_b in pairs] if self.bins else other.bins


class Measurer:
    """Measures tensors one after the other, with one set of buffers per dtype."""

    def __init__(self, bins: int = 16) -> None:
        """Make histograms with `bins` bins. Torch is imported when the first tensor is measured."""
        if bins < 1:
            raise UsageError(f"a histogram cannot have {bins} bins")
        self._bins = bins
        self._idle_kernels: dict[str, list[_Kernel]] = {}
        """By dtype, the kernels that no thread uses now."""

    def measure(self, ref: TensorRef, on_progress: BytesDone | None = None) -> Measures:
        """Return the statistics of a tensor; `on_progress` is called with the bytes done.

        Elements repeated by a stride of zero are read once.

        Raises:
            TorchMissing: torch is not installed.
            UnsupportedFormat: torch does not have the dtype.
            UsageError: the tensor has no statistics (`find_obstacle`).
            TruncatedFile, CorruptFile: its bytes cannot be read.
        """
        reason = find_obstacle(ref)
        if reason is not None:
            raise UsageError(f"this tensor has no statistics ({reason})")
        unrepeated, unreported_bytes = ref.unrepeated, ref.nbytes

        def report_elements(count: int) -> None:
            """Report elements that one of the two passes has finished: half of their bytes.

            Halves of odd sizes are rounded down; `measure` reports the rest at the end.
            """
            nonlocal unreported_bytes
            done = min(unreported_bytes, count * ref.itemsize // 2)
            unreported_bytes -= done
            if on_progress is not None and done:
                on_progress(done)

        require_torch()
        with use_one_thread():
            run = run_of_tensor(unrepeated)
            measures = self._measure_run(run, unrepeated.numel, report_elements)
        report_elements(2 * ref.numel)  # repeated elements, or a second pass that was not needed
        if unrepeated is ref:
            return measures
        return measures.repeat(ref.numel // max(unrepeated.numel, 1))

    def _measure_run(self, run: Elements, count: int, on_elements: BytesDone) -> Measures:
        """Return the statistics of a run of `count` elements, read twice.

        The first pass finds the range, the second the moments and the histogram within it. Equal
        elements need no second pass.
        """
        extent, moments = _Extent(), Moments()
        for chunk_extent in self._map_chunks(_Kernel.measure_extent, run, count, on_elements):
            extent.add(chunk_extent)
        low, high, finite = extent.low, extent.high, extent.finite
        counts = {"zeros": extent.zeros, "nan": extent.nan, "infinite": extent.infinite}
        if not finite:
            return Measures(count, None, None, None, None, **counts, norm=0.0, histogram=None)
        if low == high:
            mean, std, norm = float(low), 0.0, abs(float(low)) * math.sqrt(finite)
            bins = [0] * self._bins
            bins[self._bins // 2] = finite
        else:
            axis = _Axis(run.dtype, low, high, self._bins, all_finite=finite == count)
            measure_moments = partial(_Kernel.measure_moments, axis=axis)
            for chunk_moments in self._map_chunks(measure_moments, run, count, on_elements):
                moments.add(chunk_moments)
            # The moments are of `(element - base) * scale`; undo both.
            mean = float(axis.base + moments.mean / axis.scale)
            std, bins = math.sqrt(moments.squares / finite) / axis.scale, moments.bins
            # The sum of squares is that of the distances from the mean, plus n times mean squared.
            scaled_mean = moments.mean + float(axis.base) * axis.scale
            norm = math.sqrt(moments.squares + finite * scaled_mean * scaled_mean) / axis.scale
        histogram = Histogram(low, high, tuple(bins))
        return Measures(count, low, high, mean, std, **counts, norm=norm, histogram=histogram)

    def _map_chunks(
        self,
        work: Callable[[_Kernel, Elements, int, int], _T],
        run: Elements,
        count: int,
        on_elements: BytesDone,
    ) -> Iterator[_T]:
        """Yield the result of `work` for each chunk, in order; threads share a large run.

        `work` gets a kernel, the run, and the first and the end element of the chunk.
        `on_elements` is called with the number of elements of each block that is done.
        """
        idle_kernels = self._idle_kernels.setdefault(run.dtype, [])

        def work_on_block(first: int) -> list[_T]:
            """Return the results for the chunks of the block from element `first`."""
            # Threads must not share the buffers of a kernel: take an idle one, or make one.
            kernel = idle_kernels.pop() if idle_kernels else _Kernel(run.dtype)
            chunks = range(first, min(first + BLOCK, count), CHUNK)
            results = [work(kernel, run, start, min(start + CHUNK, count)) for start in chunks]
            idle_kernels.append(kernel)
            return results

        blocks = range(0, count, BLOCK)
        is_parallel = len(blocks) > 1 and run.data.source.is_shared
        results_of_blocks = (run_in_order if is_parallel else map)(work_on_block, blocks)
        for first, results in zip(blocks, results_of_blocks, strict=True):
            yield from results
            on_elements(min(BLOCK, count - first))


class _Axis:
    """The scale of a histogram in float64: `(element - base) * scale`.

    The base of 64-bit integers is the smallest one, because float64 has only 53 bits: so close
    integers stay different. The scale keeps the squares of huge numbers, as in a damaged file,
    within float64.
    """

    def __init__(
        self, dtype: str, low: Number, high: Number, bins: int, *, all_finite: bool
    ) -> None:
        """Divide the range from `low` to `high` into `bins` bins of equal width.

        `all_finite` is True if the tensor has neither NaN nor infinities.
        """
        self.base = 0
        if dtype in ("int64", "uint64"):
            # torch subtracts the base as int64, which must have all results. If it has not, the
            # base is the offset that torch's numbers of this dtype have anyway.
            base_fits = high - low < 1 << 63
            self.base = int(low) if base_fits else _BIAS.get(dtype, 0)
        self.scale = 2.0**-600 if max(abs(low), abs(high)) > 2.0**500 else 1.0
        self.low = float(low - self.base) * self.scale
        self.width = (float(high - self.base) * self.scale - self.low) / bins
        self.bins = bins
        self.all_finite = all_finite


class _Kernel:
    """The arithmetic on a chunk of elements of one dtype, with reused buffers."""

    def __init__(self, dtype: str) -> None:
        """Allocate memory for a chunk."""
        import torch

        self._bias = _BIAS.get(dtype, 0)
        """The number to add to each read number, because torch reads another dtype."""
        seen_as, to_numbers = _list_preparations().get(dtype, (None, None))
        self._to_numbers = to_numbers
        """Converts read elements to numbers that torch can calculate with; None if they are."""
        self._buffer = ElementBuffer(dtype, CHUNK, seen_as=seen_as)
        self._wide_buffer = torch.empty(CHUNK, dtype=torch.float64, device="cpu")
        # The position of an element on the axis, in bins, and the index of its bin.
        self._position_buffer = torch.empty(CHUNK, dtype=torch.float64, device="cpu")
        self._bin_buffer = torch.empty(CHUNK, dtype=torch.int32, device="cpu")
        self._last_chunk: tuple[Elements, int, torch.Tensor] | None = None
        """The run, the start and the numbers of the chunk that was read last."""

    def measure_extent(self, run: Elements, start: int, stop: int) -> _Extent:
        """Return the extent of the elements from `start` up to `stop`, at most a chunk."""
        numbers = self._read(run, start, stop)
        nan = infinite = 0
        low, high = _find_extremes(numbers)
        if not (math.isfinite(low) and math.isfinite(high)):
            total, nan = numbers.numel(), int(numbers.isnan().sum())
            numbers = numbers.masked_select(numbers.isfinite())
            infinite = total - nan - numbers.numel()
            if not numbers.numel():
                return _Extent(nan=nan, infinite=infinite)
            low, high = _find_extremes(numbers)
        low, high = low + self._bias, high + self._bias  # `numbers` are the elements minus the bias
        zeros = self._count_zeros(numbers) if low <= 0 <= high else 0
        return _Extent(low, high, numbers.numel(), zeros, nan, infinite)

    def _count_zeros(self, numbers: torch.Tensor) -> int:
        """Return the number of zero elements; `numbers` are the elements minus the bias."""
        import torch

        if numbers.is_floating_point():  # without a bias
            # Twice as fast as counting, and most chunks of floats have no zero.
            if float(numbers.abs().min()) > 0:
                return 0
        elif self._bias:
            numbers = numbers.ne(-self._bias)
        return numbers.numel() - int(torch.count_nonzero(numbers))

    def measure_moments(self, run: Elements, start: int, stop: int, axis: _Axis) -> Moments:
        """Return the moments, on an axis, of the finite elements from `start` up to `stop`."""
        import torch

        numbers = self._read(run, start, stop)  # the elements minus the bias
        if not axis.all_finite:
            numbers = numbers.masked_select(numbers.isfinite())
        if axis.base != self._bias:  # make them the elements minus the base
            numbers = numbers - (axis.base - self._bias)
        count = numbers.numel()
        if not count:
            return Moments(bins=[0] * axis.bins)
        wide = self._wide_buffer[:count].copy_(numbers)
        if axis.scale != 1.0:
            wide.mul_(axis.scale)
        # Divided, not multiplied: what lies on the edge of a bin is in that bin.
        positions = torch.sub(wide, axis.low, out=self._position_buffer[:count]).div_(axis.width)
        bins = self._bin_buffer[:count].copy_(positions)  # rounds down to the number of the bin
        *counts, overflow = torch.bincount(bins, minlength=axis.bins + 1).tolist()
        counts[-1] += overflow  # the largest element lies where a next bin would begin
        mean = float(wide.sum()) / count
        wide.sub_(mean)
        return Moments(count, mean, float(wide.square_().sum()), counts)

    def _read(self, run: Elements, start: int, stop: int) -> torch.Tensor:
        """Return a chunk as numbers; a tensor of one chunk is read once for both passes."""
        if self._last_chunk is not None:
            last_run, last_start, last_numbers = self._last_chunk
            if last_run is run and last_start == start:
                return last_numbers
        self._last_chunk = None
        numbers = self._buffer.read(run, start, stop - start)
        if self._to_numbers is not None:
            numbers = self._to_numbers(numbers)
        self._last_chunk = run, start, numbers
        return numbers


def _find_extremes(numbers: torch.Tensor) -> tuple[Number, Number]:
    """Return the smallest and the largest number."""
    import torch

    low, high = torch.aminmax(numbers)
    return low.item(), high.item()


def _to_magnitudes(parts: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes of complex numbers given as pairs of parts; NaN if a part is NaN."""
    import torch

    pairs = parts.double().view(-1, 2)
    magnitudes = torch.view_as_complex(pairs).abs()
    return magnitudes.masked_fill_(pairs.isnan().any(1), math.nan)  # torch: abs(inf + nan j) is inf


def _list_preparations() -> dict[
    str, tuple[torch.dtype | None, Callable[[torch.Tensor], torch.Tensor]]
]:
    """Return, by dtype that torch cannot calculate in, the dtype to read it as and a conversion.

    None as a dtype: read it as its own. The conversion makes numbers from the read elements.
    """
    import torch

    small_floats = [name for name in FLOATS if BY_NAME[name].itemsize == 1]
    return {
        **dict.fromkeys([*small_floats, "float16"], (None, torch.Tensor.float)),
        "bool": (torch.uint8, lambda bits: bits.clamp(max=1)),  # a damaged file may have others
        "uint16": (torch.int16, lambda bits: bits.int() & 0xFFFF),
        "uint32": (torch.int32, lambda bits: bits.long() & 0xFFFFFFFF),
        # To invert the highest bit is to subtract `_BIAS` and to read the result as signed.
        "uint64": (torch.int64, lambda bits: bits ^ -(1 << 63)),
        "complex32": (torch.float16, _to_magnitudes),
        "complex64": (torch.float32, _to_magnitudes),
        "complex128": (torch.float64, _to_magnitudes),
    }
