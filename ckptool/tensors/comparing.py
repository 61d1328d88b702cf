"""How much two tensors differ: figures over all elements, computed in blocks as they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from ckptool.errors import UnsupportedFormat, UsageError
from ckptool.files.computed import may_be_shared
from ckptool.model import TensorRef
from ckptool.tensors.averaging import Elements, elements_of
from ckptool.tensors.difference_kernel import BLOCK, COMPARED, Kernel, Sums, Tolerance
from ckptool.tensors.sameness import side_by_side
from ckptool.tensors.turns import Told, in_turns

__all__ = ["COMPARED", "Comparer", "Difference"]

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
