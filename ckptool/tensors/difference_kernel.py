"""The difference of two runs of elements, block by block, over buffers that are used again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptool.tensors.averaging import Elements
from ckptool.tensors.element_buffer import ElementBuffer
from ckptool.tensors.figures import CHUNK, fill, functions, magnitudes
from ckptool.tensors.runtime import require_torch, torch_dtype

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCK", "COMPARED", "Kernel", "Sums", "Tolerance"]

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
