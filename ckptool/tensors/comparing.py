"""How much two tensors differ, block by block."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from ckptool.errors import UnsupportedFormat, UsageError
from ckptool.files.computed import may_be_shared
from ckptool.model import TensorRef
from ckptool.tensors.averaging import ElementBuffer, Elements, elements_of
from ckptool.tensors.runtime import require_torch, torch_dtype
from ckptool.tensors.sameness import Told, in_turns, side_by_side

if TYPE_CHECKING:
    import torch

__all__ = [
    "BLOCK",
    "CHUNK",
    "COMPARED",
    "Comparer",
    "Difference",
    "Functions",
    "Kernel",
    "Sums",
    "Tolerance",
    "block",
    "figures",
    "fill",
    "functions",
    "magnitudes",
]

CHUNK = (1 << 15) - 64
"""Elements handled at a time: they stay in the processor's cache, and below what torch divides
among threads of its own."""


def magnitudes(numbers: torch.Tensor, pairs: bool) -> torch.Tensor:
    """Of real numbers, or of complex ones as pairs of them."""
    if pairs:
        parts = numbers.view(-1, 2)
        return parts.select(1, 0).hypot(parts.select(1, 1))
    return numbers.abs()


def _any(flags: torch.Tensor, pairs: bool) -> torch.Tensor:
    """Of pairs, whether one of the two is 1.0."""
    return flags.view(-1, 2).amax(1) if pairs else flags


def _is_lost(total: float, numbers: torch.Tensor, least: float) -> bool:
    """Whether a sum of squares is one that the type cannot tell: too small, or not finite."""
    return not (least < total < float("inf")) and float(numbers.abs().amax()) != 0.0


def figures(
    a: torch.Tensor, b: torch.Tensor, gap: torch.Tensor, ratio: float, rtol: float, pairs: bool
) -> tuple[float, float, float, float, float, float, float, bool]:
    """Figures of a chunk: `gap` is a - b. All three are used up; they hold at least one element.

    How many differ; the sum of the gaps, of their squares, of the squares of a and of b; the
    largest gap, the largest excess of one over `rtol` (if not negative) times |b|; whether one may
    be more than `ratio` times |b|.
    """
    gap = magnitudes(gap, pairs) if pairs else gap.abs_()
    total, largest = float(gap.sum()), float(gap.amax())
    differ = float(gap.sign().sum())
    excess, beyond = -float("inf"), False
    if rtol >= 0.0:
        excess = float(gap.sub(magnitudes(b, pairs), alpha=rtol).amax())
    squares = float(gap.square_().sum())
    ones, others = float(a.square_().sum()), float(b.square_().sum())
    if ratio < float("inf"):
        size = b.view(-1, 2).sum(1) if pairs else b
        over = float(gap.sub_(size, alpha=min(ratio * ratio, 1e30)).amax())
        beyond = not over < -1e-44  # nearly 0: squares of small numbers are a guess
    return differ, total, squares, ones, others, largest, excess, beyond


def _largest_ratio(a: torch.Tensor, b: torch.Tensor, pairs: bool) -> float:
    """The largest |a - b| / |b|, 0.0 where both are 0."""
    ratios = magnitudes(a - b, pairs).div_(magnitudes(b, pairs))
    return float(ratios.nan_to_num_(0.0, float("inf")).amax())


def fill(
    a: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    pairs: bool,
    special: bool,
    equal_nan: bool,
) -> list[float]:
    """Put x into a and y into b; if `special`, 0 into both where either is not finite.

    Then 0: elements that differ, 1: finite pairs, 2, 3: NaN in a and in b, 4, 5: infinities
    (complex numbers with both are NaN).
    """
    a.copy_(x)
    b.copy_(y)
    if not special:
        return [0.0] * 0
    nan_a, nan_b = _any(a.clone().ne_(a), pairs), _any(b.clone().ne_(b), pairs)
    inf_a = _any(a.abs().eq_(float("inf")), pairs)
    inf_b = _any(b.abs().eq_(float("inf")), pairs)
    counts = [float(nan_a.sum()), float(nan_b.sum())]
    counts.extend([float((inf_a > nan_a).sum()), float((inf_b > nan_b).sum())])
    differ = float(_any(a.clone().ne_(b), pairs).sum())
    if equal_nan:
        differ -= float(nan_a.mul_(nan_b).sum())
    gone = a.mul(0.0).add_(b.mul(0.0))  # NaN where either is not finite
    if pairs:
        gone = gone.view(-1, 2).sum(1, keepdim=True).expand(-1, 2).contiguous().view(-1)
    a.add_(gone).nan_to_num_(0.0)
    b.add_(gone).nan_to_num_(0.0)
    finite = float(gone.eq_(gone).sum()) / (2 if pairs else 1)
    found = [differ, finite]
    found.extend(counts)
    return found


def block(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ratio: float,
    rtol: float,
    least: float,
    pairs: bool,
    special: bool,
    equal_nan: bool,
) -> list[float]:
    """Figures of all elements of x and y, chunk by chunk, in the type of the buffers a and b.

    `pairs`: two of them are the parts of a complex number. Sums of squares up to `least` cannot be
    told from 0. Where NaN and infinities are not looked for (`special`), they are lost.

    0 to 5: as `fill`; 6: the sum of the gaps, 7: of their squares, 8, 9: of the squares of a and of
    b, 10: of their products; 11: what is lost; 12: the largest gap, 13: the largest excess, 14: the
    largest ratio of a gap to |b|, at least `ratio`.
    """
    counts, lost = [0.0] * 6, 0.0
    total, squares, ones, others, product = 0.0, 0.0, 0.0, 0.0, 0.0
    largest, excess = 0.0, -float("inf")
    for start in range(0, x.numel(), a.numel()):
        left, right = x[start : start + a.numel()], y[start : start + a.numel()]
        one, other = a[: left.numel()], b[: left.numel()]
        known = fill(one, other, left, right, pairs, special, equal_nan)
        found = figures(one, other, one - other, ratio, rtol, pairs)
        differ, gaps, gap2, a2, b2, widest, over, beyond = found
        both = (a2 + b2 - gap2) / 2.0
        alike = a2 <= 4.0 * b2 and b2 <= 4.0 * a2
        if not (alike and least < a2 < float("inf") and least < b2 < float("inf")):
            fill(one, other, left, right, pairs, special, equal_nan)
            both = float((one * other).sum())
            lost += float(_is_lost(a2, one, least) or _is_lost(b2, other, least))
        if widest != 0.0 and not (least < gap2 < float("inf")):
            lost += 1.0
        if beyond:
            fill(one, other, left, right, pairs, special, equal_nan)
            ratio = max(ratio, _largest_ratio(one, other, pairs))
        for at, count in enumerate(known):
            counts[at] += count
        if not special:
            counts[0] += differ
            counts[1] += float(left.numel()) / (2 if pairs else 1)
        total, squares, ones, others = total + gaps, squares + gap2, ones + a2, others + b2
        product, largest, excess = product + both, max(largest, widest), max(excess, over)
    counts.extend([total, squares, ones, others, product, lost, largest, excess, ratio])
    return counts


class Functions(NamedTuple):
    """The functions of this module that others call, the fast way if there is one."""

    block: Callable[..., list[float]]
    figures: Callable[..., tuple[float, ...]]


@cache
def functions() -> Functions:
    """Compile them, which takes some hundredths of a second; once."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is to go one day
        try:
            return Functions(torch.jit.script(block), torch.jit.script(figures))
        except Exception:  # whatever a torch without it says; what it is for is speed
            return Functions(block, figures)


BLOCK = 8 * CHUNK
"""Elements read and handled at once."""
_HALVES = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_WHOLE = frozenset(
    ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
)
_LONG = frozenset(("uint64", "int64"))
_SMALL = frozenset(
    ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
)
_STAND_INS = {
    **dict.fromkeys(_SMALL, "float32"),
    **dict.fromkeys(_WHOLE, "float64"),
    "complex32": "complex64",
}
"""Types to calculate in, where torch cannot in those of the elements."""
COMPARED = frozenset(("float64", "float32", "float16", "bfloat16", *_HALVES, *_WHOLE, *_SMALL))
"""The types whose elements are numbers, a number an element."""
_NEAR_THE_LIMIT, _UNIT = 1e290, 2.0**128
"""Numbers beyond the first are added up in the second."""
_FAR = 1e30
"""Factors beyond this are too much for float32."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What `torch.allclose` takes."""

    atol: float = 0.0
    rtol: float = 0.0
    equal_nan: bool = False
    asked: bool = True
    """Whether anybody wants to know what is close."""


@dataclass(slots=True)
class Sums:
    """What is known of the elements met so far: but for the counts, of those finite in both."""

    mismatched: int = 0
    finite: int = 0
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0
    unit: float = 1.0
    """What `total` and the norms are counted in: more than 1 where float64 does not have them."""
    total: float = 0.0
    """Of |a - b|."""
    product: float = 0.0
    """Of a times b; not known where `unit` is not 1."""
    norm: float = 0.0
    """Of a - b."""
    norm_a: float = 0.0
    norm_b: float = 0.0
    largest: float = 0.0
    """Of |a - b|."""
    ratio: float = 0.0
    """The largest |a - b| / |b|."""
    close: bool = True

    def add(self, other: Sums) -> None:
        """Take those in too."""
        self.mismatched += other.mismatched
        self.finite += other.finite
        self.nan_a += other.nan_a
        self.nan_b += other.nan_b
        self.inf_a += other.inf_a
        self.inf_b += other.inf_b
        unit = max(self.unit, other.unit)
        mine, others = self.unit / unit, other.unit / unit
        self.unit = unit
        self.total = self.total * mine + other.total * others
        self.product += other.product
        self.norm = math.hypot(self.norm * mine, other.norm * others)
        self.norm_a = math.hypot(self.norm_a * mine, other.norm_a * others)
        self.norm_b = math.hypot(self.norm_b * mine, other.norm_b * others)
        self.largest = max(self.largest, other.largest)
        self.ratio = max(self.ratio, other.ratio)
        self.close = self.close and other.close


class Kernel:
    """The arithmetic for two types of elements, for one thread."""

    def __init__(self, a: str, b: str, tolerance: Tolerance) -> None:
        """Take memory for blocks of these types, which are among `COMPARED`.

        Raises:
            TorchMissing: torch is not installed.
            UnsupportedFormat: this torch has not one of the types.
        """
        require_torch()
        import torch

        one, other = (torch_dtype(_STAND_INS.get(dtype, dtype)) for dtype in (a, b))
        self._type = torch.promote_types(one, other)
        self._pairs = self._type.is_complex
        self._long = {a, b} <= _WHOLE and not _LONG.isdisjoint((a, b))
        self._sides = _Side(a, self._pairs), _Side(b, self._pairs)
        self._wide = _Lane(torch.float64, 1e-300)
        narrow = self._type in (torch.float32, torch.float16, torch.bfloat16)
        self._lane = _Lane(torch.float32, 1e-33) if narrow else self._wide
        self._functions = functions()
        self._tolerance = tolerance
        self._bounds = _Bounds(tolerance, self._type)
        self._special = False
        """Whether the last block had NaN or infinities."""
        self.sums = Sums()
        """Of what was met since the last `start`."""

    def start(self) -> None:
        """Begin with other tensors."""
        self.sums, self._special = Sums(), False

    def meet(self, a: Elements, b: Elements, start: int, stop: int) -> bool:
        """Take in the elements from `start` up to `stop`, at most `BLOCK`; there is more to do."""
        x, y = self._sides[0].read(a, start, stop), self._sides[1].read(b, start, stop)
        if self._long:
            for at in range(0, stop - start, CHUNK):
                self._add_integers(x[at : at + CHUNK], y[at : at + CHUNK])
        else:
            self._add(x, y)
        return True

    def _add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """In the type that is fast, as far as it serves; looking for NaN where there are some."""
        before, special = self.sums.ratio, self._special
        lane = self._wide if _FAR < before < math.inf else self._lane
        while True:
            found = self._found(lane, x, y, special=special)
            far = lane is not self._wide and found[14] > max(before, _FAR)
            if not found[11] and not far:
                self._special = special and found[1] < x.numel() / (1 + self._pairs)
                self._take(found, x, y)
                return
            if not special and not math.isfinite(sum(found[6:11])):
                special = True
            elif lane is self._wide:
                break
            else:
                lane = self._wide
        for at in range(0, x.numel(), CHUNK):
            self._add_scaled(x[at : at + CHUNK], y[at : at + CHUNK])

    def _found(
        self, lane: _Lane, x: torch.Tensor, y: torch.Tensor, *, special: bool
    ) -> list[float]:
        return self._functions.block(
            x,
            y,
            lane.a,
            lane.b,
            self.sums.ratio,
            self._bounds.rtol,
            lane.least,
            self._pairs,
            special,
            self._tolerance.equal_nan,
        )

    def _add_scaled(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """A chunk of numbers whose squares are beyond float64."""
        lane = self._wide
        found = self._found(lane, x, y, special=True)
        a, b = lane.a[: x.numel()], lane.b[: x.numel()]
        fill(a, b, x, y, self._pairs, True, False)
        far = max(float(a.abs().amax()), float(b.abs().amax())) > _NEAR_THE_LIMIT
        unit = _UNIT if far else 1.0
        for side in (a, b):
            side.div_(unit)
        gap = a - b
        found[6:10] = [0.0] * 4
        self._take(found, x, y)
        total = float(magnitudes(gap, self._pairs).sum())
        self.sums.add(
            Sums(unit=unit, total=total, norm=_norm(gap), norm_a=_norm(a), norm_b=_norm(b))
        )

    def _add_integers(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """A chunk of integers that float64 does not have: their differences are exact."""
        (x_high, x_low), (y_high, y_low) = _split(x), _split(y)
        a, b = _joined(x_high, x_low), _joined(y_high, y_low)
        gap = _joined(x_high - y_high, x_low - y_low)
        known, product = self._tolerance, float((a * b).sum())
        close = not known.asked or bool((gap.abs() <= known.atol + known.rtol * b.abs()).all())
        ratio = float(gap.abs().div_(b.abs()).nan_to_num_(0.0, math.inf).amax())
        differ, *sums, largest, _, _ = self._functions.figures(a, b, gap, math.inf, -1.0, False)
        counts = [differ, float(x.numel()), 0.0, 0.0, 0.0, 0.0]
        self.sums.add(_sums([*counts, *sums, product, 0.0, largest, 0.0, ratio], close))

    def _take(self, found: list[float], x: torch.Tensor, y: torch.Tensor) -> None:
        """Add figures of a block, and whether it is close."""
        close = True
        if self._tolerance.asked and self.sums.close:
            finite = found[1] == x.numel() / (1 + self._pairs)
            held = finite and self._bounds.hold(found[12], found[13])
            close = held or self._is_close(x, y)
        self.sums.add(_sums(found, close))

    def _is_close(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """What torch says."""
        import torch

        if self._pairs:
            real = self._wide.a.dtype if self._type == torch.complex128 else torch.float32
            x, y = (torch.view_as_complex(side.to(real).view(-1, 2)) for side in (x, y))
        known = self._tolerance
        return torch.allclose(
            x.to(self._type), y.to(self._type), known.rtol, known.atol, known.equal_nan
        )


class _Lane:
    """Buffers for a chunk in the type that is calculated in."""

    def __init__(self, dtype: torch.dtype, least: float) -> None:
        import torch

        self.a, self.b = torch.empty(CHUNK, dtype=dtype), torch.empty(CHUNK, dtype=dtype)
        self.least = least
        """Sums of squares up to this may have lost some of them."""


class _Bounds:
    """Bounds within which numbers are close however torch rounds on its way to say so."""

    def __init__(self, tolerance: Tolerance, dtype: torch.dtype) -> None:
        import torch

        kind = torch.finfo(dtype)
        slack = 1 - 8 * kind.eps
        self._most = kind.max / 2
        self._atol = tolerance.atol * slack - 8 * kind.tiny * kind.eps
        self.rtol = tolerance.rtol * slack if tolerance.asked and tolerance.rtol < _FAR else -1.0
        """Negative where nobody needs to calculate with it."""

    def hold(self, largest: float, excess: float) -> bool:
        """Whether a gap of at most `largest`, `excess` beyond `rtol` times |b|, is close."""
        return self.rtol >= 0 and largest < self._most and excess <= self._atol


class _Side:
    """A block of elements of one side."""

    def __init__(self, dtype: str, pairs: bool) -> None:
        halves = torch_dtype(_HALVES[dtype]) if dtype in _HALVES else None
        self._buffer = ElementBuffer(dtype, BLOCK, seen_as=halves)
        self._alone = pairs and halves is None

    def read(self, run: Elements, start: int, stop: int) -> torch.Tensor:
        """The numbers from `start` up to `stop`; complex ones, or all if `pairs`, as two each."""
        import torch

        numbers = self._buffer.read(run, start, stop - start)
        if not self._alone:
            return numbers
        both = torch.zeros(2 * len(numbers), dtype=torch.float64)
        both[::2] = numbers
        return both


def _sums(found: list[float], close: bool) -> Sums:
    """The figures of a block by their names."""
    mismatched, finite, nan_a, nan_b, inf_a, inf_b = (int(count) for count in found[:6])
    return Sums(
        mismatched,
        finite,
        nan_a,
        nan_b,
        inf_a,
        inf_b,
        total=found[6],
        product=found[10],
        norm=math.sqrt(found[7]),
        norm_a=math.sqrt(found[8]),
        norm_b=math.sqrt(found[9]),
        largest=found[12],
        ratio=found[14],
        close=close,
    )


def _norm(numbers: torch.Tensor) -> float:
    """The norm of numbers whose squares need not be numbers of their type."""
    largest = float(numbers.abs().amax())
    if largest in (0.0, math.inf):
        return largest
    return largest * math.sqrt(float(numbers.div(largest).square().sum()))


def _split(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers as the 32 bits above, which have the sign, and those below."""
    import torch

    if numbers.dtype == vars(torch).get("uint64"):
        bits = numbers.view(torch.int64)
        return (bits >> 32) & 0xFFFFFFFF, bits & 0xFFFFFFFF
    bits = numbers.to(torch.int64)
    return bits >> 32, bits & 0xFFFFFFFF


def _joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The numbers of such halves in float64, rounded once."""
    return high.double().mul_(1 << 32).add_(low)


_SHARED = 2 * BLOCK
"""Elements from which two threads take turns."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How the elements of b are not those of a, in the wider of their types.

    `max_abs` to `cosine` are of the elements that are finite in both; None where there are none.
    Complex numbers count by their magnitude.
    """

    elements: int
    mismatched: int
    """Elements that are not equal: NaN to nothing, unless `equal_nan`; -0.0 to 0.0."""
    close: bool | None
    """As `torch.allclose`; None: no tolerance was given."""
    max_abs: float | None
    mean_abs: float | None
    max_rel: float | None
    """The largest |a - b| / |b|: infinite where b is 0 and a is not, 0.0 where both are."""
    rmse: float | None
    cosine: float | None
    """None where either has no length, or one that float64 cannot tell beside the other's."""
    nan_a: int
    nan_b: int
    inf_a: int
    inf_b: int

    @property
    def share(self) -> float:
        """The mismatched elements of all."""
        return self.mismatched / self.elements if self.elements else 0.0


class Comparer:
    """Compares tensors, one pair after the other, with one set of buffers a thread."""

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
                raise UsageError(f"{name} is {value}: a tolerance is a number from 0 on")
        asked = atol is not None or rtol is not None
        self._tolerance = Tolerance(atol or 0.0, rtol or 0.0, equal_nan, asked)
        self._kernels: dict[tuple[str, str], list[Kernel]] = {}

    def compare(self, a: TensorRef, b: TensorRef, told: Told | None = None) -> Difference:
        """The difference of two tensors of one shape with `has_content`, b being the reference.

        Their types may differ, and are among `COMPARED`. Neither is ever in memory as a whole.
        `told` is told the bytes of `a` as they are compared.

        Raises:
            TorchMissing: torch is not installed.
            UnsupportedFormat: elements that are no numbers, or that this torch does not have.
            CheckpointError: the bytes of either cannot be read.
        """
        sums, count = Sums(), a.numel
        if count:
            one, other = _beside(a, b)
            plain = may_be_shared(one.data) and may_be_shared(other.data)
            kernels = self._started(a, b, 2 if plain and count >= _SHARED else 1)
            workers = [partial(kernel.meet, one, other) for kernel in kernels]
            in_turns(count, BLOCK, workers, told and _in_bytes(told, a.itemsize))
            sums = kernels[0].sums
            for kernel in kernels[1:]:
                sums.add(kernel.sums)
        return _difference(sums, count, asked=self._tolerance.asked)

    def _started(self, a: TensorRef, b: TensorRef, threads: int) -> list[Kernel]:
        """A kernel for each thread, made when it is first needed."""
        for tensor in (a, b):
            if tensor.dtype not in COMPARED:
                data = tensor.storage.data if tensor.storage is not None else None
                raise UnsupportedFormat(
                    f"elements of type {tensor.dtype} are no numbers that can be compared",
                    file=data.source.name if data else None,
                )
        known = self._kernels.setdefault((a.dtype, b.dtype), [])
        while len(known) < threads:
            known.append(Kernel(a.dtype, b.dtype, self._tolerance))
        for kernel in known[:threads]:
            kernel.start()
        return known[:threads]


def _in_bytes(told: Told, itemsize: int) -> Told:
    return lambda count: told(count * itemsize)


def _beside(a: TensorRef, b: TensorRef) -> tuple[Elements, Elements]:
    """All elements of both in one order: that in which both lie, if they do, else row-major."""
    if not ((a.is_contiguous and b.is_contiguous) or a.flags or b.flags):
        runs = side_by_side(a, b)
        if runs is not None and runs[0].length == a.nbytes and a.storage is not None:
            order = a.storage.byteorder
            return Elements(a.dtype, runs[0], order), Elements(b.dtype, runs[1], order)
    return elements_of(a), elements_of(b)


def _difference(sums: Sums, elements: int, *, asked: bool) -> Difference:
    finite = sums.finite
    return Difference(
        elements=elements,
        mismatched=sums.mismatched,
        close=sums.close if asked else None,
        max_abs=sums.largest if finite else None,
        mean_abs=sums.total / finite * sums.unit if finite else None,
        max_rel=sums.ratio if finite else None,
        rmse=sums.norm / math.sqrt(finite) * sums.unit if finite else None,
        cosine=_cosine(sums),
        nan_a=sums.nan_a,
        nan_b=sums.nan_b,
        inf_a=sums.inf_a,
        inf_b=sums.inf_b,
    )


def _cosine(sums: Sums) -> float | None:
    """Of the angle between the two; where their product is beyond float64, from three lengths."""
    a, b, gap = sums.norm_a, sums.norm_b, sums.norm
    if not (a and b):
        return None
    if sums.unit == 1 and 1e-140 < a < 1e140 and 1e-140 < b < 1e140:
        cosine = sums.product / a / b
    elif a / b > 1e6 or b / a > 1e6:
        return None  # the third is that of the longer one
    else:
        cosine = (a / b + b / a - gap / a * (gap / b)) / 2
    return max(-1.0, min(1.0, cosine))
