"""How much two tensors differ: figures over all elements, computed in chunks as they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptool.core.model import TensorRef
from ckptool.dtypes import BY_NAME
from ckptool.errors import UnsupportedFormat, UsageError
from ckptool.files.source import BytesDone
from ckptool.files.threads import in_order
from ckptool.tensors.averaging import ElementBuffer, Elements, elements_of
from ckptool.tensors.bytewise import side_by_side
from ckptool.tensors.casting import FLOATS
from ckptool.tensors.materialize import one_thread, require_torch, torch_dtype

if TYPE_CHECKING:
    import torch

CHUNK = 1 << 18
"""Elements handled at a time: with fewer, threads wait for each other longer than they work."""
BLOCK = 4 * CHUNK
"""Elements that a thread is given at a time."""

_COMPLEX = frozenset(("complex32", "complex64", "complex128"))
_WHOLE = frozenset(
    ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
)
_LONG = frozenset(("uint64", "int64"))
_SMALL = frozenset(name for name in FLOATS if BY_NAME[name].itemsize == 1)
_STAND_INS = {
    **dict.fromkeys(_SMALL, "float32"),
    **dict.fromkeys(_WHOLE, "float64"),
    "complex32": "complex64",
}
"""Types to calculate in, where torch cannot in those of the elements."""
COMPARED = frozenset(("float64", "float32", "float16", "bfloat16", *_COMPLEX, *_WHOLE, *_SMALL))
"""The types whose elements are numbers, a number an element."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How the elements of b are not those of a, in the wider of their types.

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
        """The mismatched elements of all."""
        return self.mismatched / self.elements if self.elements else 0.0


class Comparer:
    """Compares tensors, one pair after the other, with one set of buffers for each two types."""

    def __init__(
        self, *, atol: float | None = None, rtol: float | None = None, equal_nan: bool = False
    ) -> None:
        """Ask for `Difference.close` by giving a tolerance; of two, one that is left out is 0.

        `equal_nan` makes NaN equal to NaN. Torch is imported when the first tensors are compared.

        Raises:
            UsageError: a tolerance is negative, or no number.
        """
        for name, value in (("atol", atol), ("rtol", rtol)):
            if value is not None and not value >= 0:
                raise UsageError(f"{name} is {value}, expected a number of at least 0")
        asked = atol is not None or rtol is not None
        self._tolerance = _Tolerance(atol or 0.0, rtol or 0.0, equal_nan, asked)
        self._kernels: dict[tuple[str, str], list[_Kernel]] = {}
        """By the two types, those that no thread uses now."""

    def compare(self, a: TensorRef, b: TensorRef, told: BytesDone | None = None) -> Difference:
        """Compare two tensors of one shape with `has_content`; b is the reference.

        Their types may differ, and are among `COMPARED`. Neither is ever in memory as a whole.
        `told` is told the bytes of `a` as they are compared.

        Raises:
            TorchMissing: torch is not installed.
            UnsupportedFormat: elements that are no numbers, or that this torch does not have.
            CheckpointError: the bytes of either cannot be read.
        """
        for tensor in (a, b):
            if tensor.dtype not in COMPARED:
                raise UnsupportedFormat(f"{tensor.dtype} elements cannot be compared as numbers")
        count = a.numel
        if not count:
            return _Sums().difference(0, asked=self._tolerance.asked)
        one, other = _beside(a, b)
        total, spare = _Sums(), self._kernels.setdefault((a.dtype, b.dtype), [])

        def block(first: int) -> list[_Sums]:
            kernel = spare.pop() if spare else _Kernel(a.dtype, b.dtype, self._tolerance)
            kernel.ratio, kernel.close = total.ratio, total.close
            chunks = range(first, min(first + BLOCK, count), CHUNK)
            made = [kernel.compare(one, other, at, min(at + CHUNK, count)) for at in chunks]
            spare.append(kernel)
            return made

        blocks = range(0, count, BLOCK)
        divided = len(blocks) > 1 and one.data.source.is_shared and other.data.source.is_shared
        with one_thread():
            for first, made in zip(
                blocks, (in_order if divided else map)(block, blocks), strict=True
            ):
                for sums in made:
                    total.add(sums)
                if told is not None:
                    told(min(BLOCK, count - first) * a.itemsize)
        return total.difference(count, asked=self._tolerance.asked)


def _beside(a: TensorRef, b: TensorRef) -> tuple[Elements, Elements]:
    """Return the elements of both in one order: their common order in memory, or row-major."""
    if not ((a.is_contiguous and b.is_contiguous) or a.flags or b.flags):
        runs = side_by_side(a, b)
        if runs is not None and runs[0].length == a.nbytes and a.storage is not None:
            order = a.storage.byteorder
            return Elements(a.dtype, runs[0], order), Elements(b.dtype, runs[1], order)
    return elements_of(a), elements_of(b)


@dataclass(frozen=True, slots=True)
class _Tolerance:
    atol: float
    rtol: float
    equal_nan: bool
    asked: bool
    """Whether anybody wants to know what is close."""


@dataclass(slots=True)
class _Sums:
    """What is known of the elements so far: but for the counts, of those finite in both."""

    mismatched: int = 0
    finite: int = 0
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0
    odd: int = 0
    """NaN or infinite in one, and not the same in the other."""
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
        """Add the figures of other elements."""
        self.mismatched += other.mismatched
        self.finite += other.finite
        self.nan_a += other.nan_a
        self.nan_b += other.nan_b
        self.inf_a += other.inf_a
        self.inf_b += other.inf_b
        self.odd += other.odd
        self.total += other.total
        self.squares += other.squares
        self.squares_a += other.squares_a
        self.squares_b += other.squares_b
        self.product += other.product
        self.largest = max(self.largest, other.largest)
        self.ratio = max(self.ratio, other.ratio)
        self.close = self.close and other.close

    def difference(self, elements: int, *, asked: bool) -> Difference:
        """Return the figures of `elements` elements."""
        finite = self.finite
        return Difference(
            elements=elements,
            mismatched=self.mismatched,
            close=self.close if asked else None,
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
        if self.odd:
            return math.nan
        if not self.finite:
            return None
        gap, a = math.sqrt(self.squares), math.sqrt(self.squares_a)
        if a == 0:
            return math.inf if gap else 0.0
        return gap / a

    def _cosine(self) -> float | None:
        a, b = math.sqrt(self.squares_a), math.sqrt(self.squares_b)
        if not (0 < a < math.inf and 0 < b < math.inf):
            return None
        cosine = self.product / a / b
        return max(-1.0, min(1.0, cosine)) if math.isfinite(cosine) else None


class _Kernel:
    def __init__(self, a: str, b: str, tolerance: _Tolerance) -> None:
        """Take memory for chunks of these types, which are among `COMPARED`."""
        require_torch()
        import torch

        one, other = (torch_dtype(_STAND_INS.get(dtype, dtype)) for dtype in (a, b))
        self._type = torch.promote_types(one, other)
        self._long = {a, b} <= _WHOLE and not _LONG.isdisjoint((a, b))
        self._plain = not (self._type.is_complex or self._long)
        wide = self._type.is_complex or self._type == torch.float64
        lane = torch.float64 if wide else torch.float32
        self._wide = torch.complex128 if self._type.is_complex else torch.float64
        self._least = 1e-300 if wide else 1e-33
        """Sums of squares up to this may have lost some of them."""
        self._buffers = ElementBuffer(a, CHUNK), ElementBuffer(b, CHUNK)
        self._a, self._b, self._gap = (
            torch.empty(CHUNK, dtype=lane, device="cpu") for _ in range(3)
        )
        self._tolerance = tolerance
        self.ratio = 0.0
        """The largest of the tensor so far: smaller ones need not be calculated."""
        self.close = True
        """Whether all of the tensor is close so far; if not, no more need be asked."""

    def compare(self, a: Elements, b: Elements, start: int, stop: int) -> _Sums:
        """Return the figures of the elements from `start` up to `stop`, at most a chunk."""
        count = stop - start
        x, y = self._buffers[0].read(a, start, count), self._buffers[1].read(b, start, count)
        made = (self._quick(x, y) if self._plain else None) or self._careful(x, y)
        self.ratio, self.close = max(self.ratio, made.ratio), self.close and made.close
        return made

    def _quick(self, x: torch.Tensor, y: torch.Tensor) -> _Sums | None:
        """Return the figures if all numbers and their squares are finite and not too small."""
        import torch

        count, least = x.numel(), self._least
        a, b = self._a[:count].copy_(x), self._b[:count].copy_(y)
        gap = torch.sub(a, b, out=self._gap[:count]).abs_()
        total, largest = gap.sum().item(), gap.amax().item()
        if not math.isfinite(total):
            return None
        close = self._is_close(x, y, gap, b)
        differ = int(gap.sign().sum())
        squares = gap.square_().sum().item()
        squares_a, squares_b = a.square_().sum().item(), b.square_().sum().item()
        if not (least < squares_a < math.inf and least < squares_b < math.inf):
            return None
        if largest and not least < squares < math.inf:
            return None
        ratio, sums = self.ratio, _Sums()
        if ratio < math.inf:
            # Squares of small numbers are a guess: what is nearly as far is calculated.
            over = gap.sub_(b, alpha=min(ratio * ratio, 1e30)).amax().item()
            if not over < -1e-44:
                gaps = torch.sub(x.to(a.dtype), b.copy_(y), out=gap).abs_()
                ratios = gaps.div_(b.abs_()).nan_to_num_(0.0, math.inf)
                ratio = max(ratio, ratios.amax().item())
        product = (squares_a + squares_b - squares) / 2
        if squares_a > 4 * squares_b or squares_b > 4 * squares_a:
            product = a.copy_(x).mul_(b.copy_(y)).sum().item()
        sums.mismatched, sums.finite, sums.total, sums.largest = differ, count, total, largest
        sums.squares, sums.squares_a, sums.squares_b = squares, squares_a, squares_b
        sums.product, sums.ratio, sums.close = product, ratio, close
        return sums

    def _careful(self, x: torch.Tensor, y: torch.Tensor) -> _Sums:
        """Return the figures of any numbers, in float64 or complex128."""
        if self._long:  # float64 does not have them all, but it has their differences
            (x_high, x_low), (y_high, y_low) = _split(x), _split(y)
            a, b = _joined(x_high, x_low), _joined(y_high, y_low)
            gap = _joined(x_high - y_high, x_low - y_low)
        else:
            a, b = x.to(self._wide), y.to(self._wide)
            gap = a - b
        nan_a, nan_b = a.isnan(), b.isnan()
        differ = gap.ne(0) if self._long else a.ne(b)
        if self._tolerance.equal_nan:
            differ &= ~(nan_a & nan_b)
        close = self._is_close(x, y, gap.abs() if self._long else None, b)
        finite = a.isfinite() & b.isfinite()
        same = a.eq(b) | (nan_a & nan_b)
        sums = _Sums(
            mismatched=int(differ.sum()),
            finite=int(finite.sum()),
            nan_a=int(nan_a.sum()),
            nan_b=int(nan_b.sum()),
            inf_a=int((a.isinf() & ~nan_a).sum()),
            inf_b=int((b.isinf() & ~nan_b).sum()),
            odd=int((~finite & ~same).sum()),
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
        """Return `torch.allclose` of x and y; `gap` is |a - b| if it is in their type."""
        import torch

        known = self._tolerance
        if not (known.asked and self.close):
            return True
        if gap is not None and (self._long or gap.dtype == self._type):
            over = gap.sub(b.abs().mul_(known.rtol).add_(known.atol)).amax().item()
            if over <= 0 or self._long:
                return over <= 0
        x, y = x.to(self._type), y.to(self._type)
        return torch.allclose(x, y, known.rtol, known.atol, known.equal_nan)


def _split(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    if numbers.dtype == vars(torch).get("uint64"):
        bits = numbers.view(torch.int64)
        return (bits >> 32) & 0xFFFFFFFF, bits & 0xFFFFFFFF
    bits = numbers.to(torch.int64)
    return bits >> 32, bits & 0xFFFFFFFF


def _joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the numbers of two halves in float64, rounded once."""
    return high.double().mul_(1 << 32).add_(low)
