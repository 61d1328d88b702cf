"""Measure the difference of two tensors over all elements, in chunks as they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptool.core.model import TensorRef
from ckptool.dtypes import BY_NAME
from ckptool.errors import UnsupportedFormat, UsageError
from ckptool.files.source import BytesDone
from ckptool.files.threads import run_in_order
from ckptool.tensors.averaging import ElementBuffer, Elements, run_of_tensor
from ckptool.tensors.bytewise import align_runs
from ckptool.tensors.casting import FLOATS
from ckptool.tensors.storages import get_torch_dtype, require_torch, use_one_thread

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 18
"""Elements handled at a time: with fewer, threads wait for each other longer than they work."""
BLOCK = 4 * CHUNK
"""Elements that a thread is given at a time."""

_COMPLEX = frozenset(("complex32", "complex64", "complex128"))
_INTEGERS = frozenset(
    ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
)
_LONG_INTEGERS = frozenset(("uint64", "int64"))
_SMALL = frozenset(name for name in FLOATS if BY_NAME[name].itemsize == 1)
_STAND_INS = {
    **dict.fromkeys(_SMALL, "float32"),
    **dict.fromkeys(_INTEGERS, "float64"),
    "complex32": "complex64",
}
"""By dtype that torch cannot calculate in, the dtype to calculate in."""
COMPARED = frozenset(("float64", "float32", "float16", "bfloat16", *_COMPLEX, *_INTEGERS, *_SMALL))
"""The dtypes with one number per element."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between the elements of b and of a, in the wider of their dtypes.

    `rel_norm` to `cosine` are of the elements that are finite in both; None where there are none.
    Complex numbers count by their magnitude. Squares are added up in float64, those of a chunk of
    numbers of at most 32 bits in float32: the relative error is below 1e-6.
    """

    elements: int
    mismatched: int
    """Elements that are not equal: NaN to nothing, unless `equal_nan`; -0.0 to 0.0."""
    close: bool | None
    """As `torch.allclose`; None: no tolerance was given."""
    rel_norm: float | None
    """|a - b| / |a|, with |.| the Frobenius norm: the root of the sum of squares of all elements.

    Infinite where |a| is 0 and |a - b| is not, 0.0 where both are. NaN where an element of one is
    NaN or infinite and the same element of the other is not, and where both sums overflow."""
    max_abs: float | None
    mean_abs: float | None
    max_rel: float | None
    """The largest |a - b| / |b|: infinite where b is 0 and a is not, 0.0 where both are."""
    rmse: float | None
    cosine: float | None
    """None if the norm of either is 0, or too small next to the other for float64."""
    nan_a: int
    nan_b: int
    inf_a: int
    inf_b: int

    @property
    def share(self) -> float:
        """The share of mismatched elements, from 0 to 1; 0.0 if there are no elements."""
        return self.mismatched / self.elements if self.elements else 0.0


class Comparer:
    """Compares tensors pair by pair, with one set of buffers for each pair of dtypes."""

    def __init__(
        self, *, atol: float | None = None, rtol: float | None = None, equal_nan: bool = False
    ) -> None:
        """Set the tolerance for `Difference.close`, which is None if both are left out.

        If only one is given, the other is 0. `equal_nan` makes NaN equal to NaN. Torch is imported
        when the first tensors are compared.

        Raises:
            UsageError: a tolerance is negative, or no number.
        """
        for name, value in (("atol", atol), ("rtol", rtol)):
            if value is not None and not value >= 0:
                raise UsageError(f"{name} is {value}, expected a number of at least 0")
        has_tolerance = atol is not None or rtol is not None
        self._tolerance = _Tolerance(atol or 0.0, rtol or 0.0, equal_nan, has_tolerance)
        self._idle_kernels: dict[tuple[str, str], list[_Kernel]] = {}
        """By the two dtypes, the kernels that no thread uses now."""

    def compare(
        self, a: TensorRef, b: TensorRef, on_progress: BytesDone | None = None
    ) -> Difference:
        """Compare two tensors of one shape with `has_content`; b is the reference.

        Their dtypes may differ and are in `COMPARED`. Both are read chunk by chunk.
        `on_progress` is called with the bytes of `a` that were compared.

        Raises:
            TorchMissing: torch is not installed.
            UnsupportedFormat: the elements are not numbers, or torch lacks the dtype.
            CheckpointError: the bytes of a tensor cannot be read.
        """
        for tensor in (a, b):
            if tensor.dtype not in COMPARED:
                raise UnsupportedFormat(f"{tensor.dtype} elements cannot be compared as numbers")
        count = a.numel
        if not count:
            return _Sums().to_difference(0, has_tolerance=self._tolerance.was_given)
        run_a, run_b = _run_side_by_side(a, b)
        total, idle_kernels = _Sums(), self._idle_kernels.setdefault((a.dtype, b.dtype), [])

        def compare_block(first: int) -> list[_Sums]:
            """Return the sums of each chunk in the block from element `first`."""
            # Threads must not share the buffers of a kernel: take an idle one, or make one.
            kernel = (
                idle_kernels.pop() if idle_kernels else _Kernel(a.dtype, b.dtype, self._tolerance)
            )
            # The results so far spare the kernel calculations that cannot change them.
            kernel.ratio, kernel.close = total.ratio, total.close
            chunks = range(first, min(first + BLOCK, count), CHUNK)
            sums_of_chunks = [
                kernel.compare(run_a, run_b, start, min(start + CHUNK, count)) for start in chunks
            ]
            idle_kernels.append(kernel)
            return sums_of_chunks

        blocks = range(0, count, BLOCK)
        is_parallel = (
            len(blocks) > 1 and run_a.data.source.is_shared and run_b.data.source.is_shared
        )
        sums_of_blocks = (run_in_order if is_parallel else map)(compare_block, blocks)
        with use_one_thread():
            for first, sums_of_chunks in zip(blocks, sums_of_blocks, strict=True):
                for sums in sums_of_chunks:
                    total.add(sums)
                if on_progress is not None:
                    on_progress(min(BLOCK, count - first) * a.itemsize)
        return total.to_difference(count, has_tolerance=self._tolerance.was_given)


def _run_side_by_side(a: TensorRef, b: TensorRef) -> tuple[Elements, Elements]:
    """Return the elements of both in one order: their common order in memory, or row-major.

    Memory order saves gathering the elements of tensors that are transposed alike.
    """
    both_contiguous = a.is_contiguous and b.is_contiguous
    if both_contiguous or a.flags or b.flags:
        return run_of_tensor(a), run_of_tensor(b)
    runs = align_runs(a, b)
    # Runs have an expanded element only once, so that they may be shorter.
    if runs is None or runs[0].length != a.nbytes or a.storage is None:
        return run_of_tensor(a), run_of_tensor(b)
    (data_a, data_b), order = runs, a.storage.byteorder  # the same for both, as of all runs
    return Elements(a.dtype, data_a, order), Elements(b.dtype, data_b, order)


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """The arguments of `torch.allclose`."""

    atol: float
    rtol: float
    equal_nan: bool
    was_given: bool
    """True if a tolerance was given."""


@dataclass(slots=True)
class _Sums:
    """Sums over the elements so far; all but the counts are of elements finite in both."""

    mismatched: int = 0
    finite: int = 0
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0
    nonfinite_mismatches: int = 0
    """Elements that are NaN or infinite in one tensor, and not the same in the other."""
    total: float = 0.0
    """Of |a - b|."""
    squares: float = 0.0
    """Of a - b."""
    squares_a: float = 0.0
    squares_b: float = 0.0
    product: float = 0.0
    """Of a times b."""
    largest: float = 0.0
    """Of |a - b|."""
    ratio: float = 0.0
    """The largest |a - b| / |b|."""
    close: bool = True

    def add(self, other: _Sums) -> None:
        """Add the sums of other elements."""
        self.mismatched += other.mismatched
        self.finite += other.finite
        self.nan_a += other.nan_a
        self.nan_b += other.nan_b
        self.inf_a += other.inf_a
        self.inf_b += other.inf_b
        self.nonfinite_mismatches += other.nonfinite_mismatches
        self.total += other.total
        self.squares += other.squares
        self.squares_a += other.squares_a
        self.squares_b += other.squares_b
        self.product += other.product
        self.largest = max(self.largest, other.largest)
        self.ratio = max(self.ratio, other.ratio)
        self.close = self.close and other.close

    def to_difference(self, elements: int, *, has_tolerance: bool) -> Difference:
        """Return the difference of tensors with `elements` elements.

        Its measures are None if no element is finite in both.
        """
        finite = self.finite
        return Difference(
            elements=elements,
            mismatched=self.mismatched,
            close=self.close if has_tolerance else None,
            rel_norm=self._relative_norm(),
            max_abs=self.largest if finite else None,
            mean_abs=self.total / finite if finite else None,
            max_rel=self.ratio if finite else None,
            rmse=math.sqrt(self.squares) / math.sqrt(finite) if finite else None,
            cosine=self._cosine(),
            nan_a=self.nan_a,
            nan_b=self.nan_b,
            inf_a=self.inf_a,
            inf_b=self.inf_b,
        )

    def _relative_norm(self) -> float | None:
        """Return |a - b| / |a|, with norms over the elements that are finite in both.

        NaN if another element differs, None if no element is finite in both.
        """
        if self.nonfinite_mismatches:
            return math.nan
        if not self.finite:
            return None
        norm_of_gap, norm_of_a = math.sqrt(self.squares), math.sqrt(self.squares_a)
        if norm_of_a == 0:
            return math.inf if norm_of_gap else 0.0
        return norm_of_gap / norm_of_a

    def _cosine(self) -> float | None:
        """Return the cosine of the angle between a and b; None if a norm is 0 or infinite."""
        norm_of_a, norm_of_b = math.sqrt(self.squares_a), math.sqrt(self.squares_b)
        if not (0 < norm_of_a < math.inf and 0 < norm_of_b < math.inf):
            return None
        cosine = self.product / norm_of_a / norm_of_b
        # Rounding may take it beyond 1.
        return max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else None


class _Kernel:
    """The arithmetic on one chunk of a pair of tensors, with reused buffers."""

    def __init__(self, a: str, b: str, tolerance: _Tolerance) -> None:
        """Allocate memory for chunks of the dtypes `a` and `b`, which are in `COMPARED`."""
        require_torch()
        import torch

        type_a, type_b = (get_torch_dtype(_STAND_INS.get(dtype, dtype)) for dtype in (a, b))
        self._common_dtype = torch.promote_types(type_a, type_b)
        is_complex = self._common_dtype.is_complex
        # Both are integers, and float64 does not have all values of one of them.
        self._has_long_integers = {a, b} <= _INTEGERS and not _LONG_INTEGERS.isdisjoint((a, b))
        self._can_compare_fast = not (is_complex or self._has_long_integers)
        is_wide = is_complex or self._common_dtype == torch.float64
        chunk_dtype = torch.float64 if is_wide else torch.float32
        self._wide_dtype = torch.complex128 if is_complex else torch.float64
        self._smallest_sum = 1e-300 if is_wide else 1e-33
        """Sums of squares up to this are inexact: small squares in them became 0."""
        self._buffers = ElementBuffer(a, CHUNK), ElementBuffer(b, CHUNK)
        self._a, self._b, self._gap = (
            torch.empty(CHUNK, dtype=chunk_dtype, device="cpu") for _ in range(3)
        )
        self._tolerance = tolerance
        self.ratio = 0.0
        """The largest |a - b| / |b| of the tensor so far: smaller ones need not be calculated."""
        self.close = True
        """True if all elements so far are within the tolerance; if not, it is not checked again."""

    def compare(self, a: Elements, b: Elements, start: int, stop: int) -> _Sums:
        """Return the sums over the elements from `start` up to `stop`, at most a chunk."""
        count = stop - start
        buffer_a, buffer_b = self._buffers
        x, y = buffer_a.read(a, start, count), buffer_b.read(b, start, count)
        sums = self._compare_fast(x, y) if self._can_compare_fast else None
        if sums is None:
            sums = self._compare_exactly(x, y)
        # With these, the next chunks need fewer calculations.
        self.ratio, self.close = max(self.ratio, sums.ratio), self.close and sums.close
        return sums

    def _compare_fast(self, x: torch.Tensor, y: torch.Tensor) -> _Sums | None:
        """Return the sums over a chunk; None if `_compare_exactly` must compute them.

        This is so if a number or a sum is infinite, NaN or too small for the dtype of the buffers.
        Each of the three buffers is reused for squares after its numbers were used, and filled
        again if they are needed once more.
        """
        import torch

        count, smallest = x.numel(), self._smallest_sum
        a, b = self._a[:count].copy_(x), self._b[:count].copy_(y)
        gap = torch.sub(a, b, out=self._gap[:count]).abs_()
        total, largest = gap.sum().item(), gap.amax().item()
        if not math.isfinite(total):
            return None
        close = self._is_close(x, y, gap, b)
        mismatched = int(gap.sign().sum())  # counts the elements with a gap
        squares = gap.square_().sum().item()
        squares_a, squares_b = a.square_().sum().item(), b.square_().sum().item()
        if not (smallest < squares_a < math.inf and smallest < squares_b < math.inf):
            return None
        if largest and not smallest < squares < math.inf:
            return None
        ratio = self._find_largest_ratio(x, y, gap, b)
        # |a - b|^2 = |a|^2 + |b|^2 - 2ab gives ab, but loses digits if the norms differ much.
        product = (squares_a + squares_b - squares) / 2
        if squares_a > 4 * squares_b or squares_b > 4 * squares_a:
            product = a.copy_(x).mul_(b.copy_(y)).sum().item()
        return _Sums(
            mismatched=mismatched,
            finite=count,
            total=total,
            squares=squares,
            squares_a=squares_a,
            squares_b=squares_b,
            product=product,
            largest=largest,
            ratio=ratio,
            close=close,
        )

    def _find_largest_ratio(
        self, x: torch.Tensor, y: torch.Tensor, gap: torch.Tensor, b: torch.Tensor
    ) -> float:
        """Return the largest |x - y| / |y| of a chunk, or `self.ratio` if that is larger.

        `gap` and `b` contain the squares of x - y and of y; they are overwritten.
        """
        import torch

        if self.ratio == math.inf:
            return self.ratio
        # The squares show if an element can exceed the ratio so far: gap^2 > ratio^2 b^2. Small
        # squares are inexact, so the ratios are calculated unless the excess is clearly negative
        # (the smallest float32 is 1e-45). The factor is capped, because infinity times 0 is NaN; a
        # smaller one only makes more chunks be calculated.
        excess = gap.sub_(b, alpha=min(self.ratio * self.ratio, 1e30)).amax().item()
        if excess < -1e-44:
            return self.ratio
        gaps = torch.sub(x.to(b.dtype), b.copy_(y), out=gap).abs_()
        ratios = gaps.div_(b.abs_()).nan_to_num_(0.0, math.inf)
        return max(self.ratio, ratios.amax().item())

    def _compare_exactly(self, x: torch.Tensor, y: torch.Tensor) -> _Sums:
        """Return the sums over a chunk of any numbers, in float64 or complex128."""
        if self._has_long_integers:  # float64 does not have them all, but it has their differences
            (x_high, x_low), (y_high, y_low) = _split_halves(x), _split_halves(y)
            a, b = _join_halves(x_high, x_low), _join_halves(y_high, y_low)
            gap = _join_halves(x_high - y_high, x_low - y_low)
        else:
            a, b = x.to(self._wide_dtype), y.to(self._wide_dtype)
            gap = a - b
        nan_a, nan_b = a.isnan(), b.isnan()
        is_different = gap.ne(0) if self._has_long_integers else a.ne(b)
        if self._tolerance.equal_nan:
            is_different &= ~(nan_a & nan_b)
        # Only the gap of integers is exact; torch decides for all other numbers.
        close = self._is_close(x, y, gap.abs() if self._has_long_integers else None, b)
        finite = a.isfinite() & b.isfinite()
        is_equal = a.eq(b) | (nan_a & nan_b)
        sums = _Sums(
            mismatched=int(is_different.sum()),
            finite=int(finite.sum()),
            nan_a=int(nan_a.sum()),
            nan_b=int(nan_b.sum()),
            inf_a=int((a.isinf() & ~nan_a).sum()),
            inf_b=int((b.isinf() & ~nan_b).sum()),
            nonfinite_mismatches=int((~finite & ~is_equal).sum()),
            close=close,
        )
        if sums.finite:
            a, b, gap = a[finite], b[finite], gap[finite].abs()
            sums.total, sums.squares = float(gap.sum()), float(gap.square().sum())
            sums.squares_a = float(a.abs().square().sum())
            sums.squares_b = float(b.abs().square().sum())
            sums.product = float((a * b.conj()).sum().real)
            sums.largest = float(gap.amax())
            sums.ratio = float((gap / b.abs()).nan_to_num_(0.0, math.inf).amax())
        return sums

    def _is_close(
        self, x: torch.Tensor, y: torch.Tensor, gap: torch.Tensor | None, b: torch.Tensor
    ) -> bool:
        """Return `torch.allclose` of x and y.

        True without a calculation if nobody asked for it, or if an earlier chunk was not close.
        `gap` is |x - y| and `b` is y, both as calculated with; without `gap` torch decides.
        """
        import torch

        tolerance = self._tolerance
        is_undecided = self.close  # False once a chunk of the tensor was not close
        if not (tolerance.was_given and is_undecided):
            return True
        if gap is not None and (self._has_long_integers or gap.dtype == self._common_dtype):
            excess = gap.sub(b.abs().mul_(tolerance.rtol).add_(tolerance.atol)).amax().item()
            # Torch would get long integers in float64, where different ones may be equal. For other
            # dtypes it decides the doubtful cases.
            if excess <= 0 or self._has_long_integers:
                return excess <= 0
        x, y = x.to(self._common_dtype), y.to(self._common_dtype)
        return torch.allclose(x, y, tolerance.rtol, tolerance.atol, tolerance.equal_nan)


def _split_halves(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and the lower 32 bits of integers of at most 64 bits."""
    import torch

    if numbers.dtype == vars(torch).get("uint64"):  # torch cannot shift its bits
        bits = numbers.view(torch.int64)
        return (bits >> 32) & 0xFFFFFFFF, bits & 0xFFFFFFFF
    bits = numbers.to(torch.int64)
    return bits >> 32, bits & 0xFFFFFFFF


def _join_halves(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return float64 numbers made of upper and lower 32 bits, rounded once."""
    return high.double().mul_(1 << 32).add_(low)
