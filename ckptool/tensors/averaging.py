"""Average and mix tensors block by block; make rows and position grids for resized tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from threading import local
from typing import TYPE_CHECKING, Any

from ckptool.core.model import Storage, TensorRef
from ckptool.dtypes import BY_NAME
from ckptool.errors import NotRepresentable
from ckptool.files import ByteRange
from ckptool.files.checksums import CheckedRange
from ckptool.files.computed import ReadAhead, make_computed_range
from ckptool.files.source import BLOCK
from ckptool.tensors.casting import (
    CHUNK,
    FLOATS,
    SATURATES,
    check_storage,
    iterate_chunks,
    load_checked,
)
from ckptool.tensors.materialize import materialize
from ckptool.tensors.storages import get_torch_dtype, require_torch
from ckptool.words import printable

if TYPE_CHECKING:
    import torch


class ElementBuffer:
    """Memory for a number of elements of one dtype, and a torch tensor over it."""

    def __init__(self, dtype: str, count: int, *, seen_as: torch.dtype | None = None) -> None:
        """Allocate memory for `count` elements of `dtype`.

        `seen_as` gives the tensor another dtype, for example two real numbers for each complex one.
        """
        import torch

        kind = BY_NAME[dtype]
        # Bytes are swapped in units of `_swap_size`: one real number of a complex element.
        self._itemsize, self._swap_size = kind.itemsize, kind.swap_size
        self._bytes = bytearray(count * self._itemsize)
        self._tensor = torch.frombuffer(self._bytes, dtype=seen_as or get_torch_dtype(dtype))
        self._numbers_per_element = self._itemsize // self._tensor.element_size()

    def read(self, run: Elements, start: int, count: int) -> torch.Tensor:
        """Return the `count` elements from `start`, in this machine's byte order.

        The next read overwrites them.
        """
        import torch

        run.data.read_into(
            memoryview(self._bytes)[: count * self._itemsize], start * self._itemsize
        )
        # With `seen_as`, an element may be several numbers: a complex one is two.
        elements = self._tensor[: count * self._numbers_per_element]
        if run.byteorder != sys.byteorder and self._swap_size > 1:
            rows = elements.view(torch.uint8).view(-1, self._swap_size)
            rows.copy_(rows.flip(1))
        if "neg" in run.flags:
            elements.neg_()
        if "conj" in run.flags:
            _view_as_real(elements).view(-1, 2)[:, 1].neg_()
        return elements


@dataclass(frozen=True, slots=True)
class Elements:
    """A run of elements in a file."""

    dtype: str
    data: ByteRange
    byteorder: str = "little"
    storage: Storage | None = None
    """The storage of the elements: it is checked first, by the CRC-32 that its file states."""
    flags: tuple[str, ...] = ()
    """As `TensorRef.flags`: negation and conjugation to apply to the elements."""


def run_of_tensor(tensor: TensorRef) -> Elements:
    """Return all elements of a tensor as one run in row-major order."""
    storage = tensor.storage
    order = storage.byteorder if storage else "little"
    return Elements(tensor.dtype, tensor.row_major, order, storage, tensor.flags)


_PARALLEL_COSINE, _MIN_NORM = 0.9995, 1e-8
"""The cosine from which `slerp` is linear, and the length up to which a vector has no direction.

Those of mergekit 0.1.5: `dot_threshold` and `eps` in `mergekit/merge_methods/slerp.py`.
"""


@dataclass(frozen=True, slots=True)
class _Mix:
    """A weighted sum of runs, divided by `total`."""

    weights: tuple[float, ...]
    total: float
    bounded: bool = False
    """True if the result is between the runs, so that it fits a dtype that fits all of them."""


class Averager:
    """Makes storages that are means of others, with one set of buffers per thread."""

    def __init__(self) -> None:
        """Make an averager without buffers; torch is imported on the first read."""
        self._kernels_of_thread = local()
        self._read_ahead = ReadAhead()
        self._check_by_storage: dict[int, CheckedRange] = {}
        """By `id` of a storage, its check of the CRC-32; tensors in one storage share the check."""

    def average(
        self,
        runs: Sequence[Elements],
        like: Storage,
        dtype: str,
        name: str = "",
        *,
        weights: Sequence[float] = (),
    ) -> Storage:
        """Return the mean of runs of equal length, accumulated in float64 in their order.

        With `weights`, the weighted sum is divided by the sum of the weights. The result is rounded
        to `dtype` as torch does; key and device are those of `like`. Reading raises
        `NotRepresentable` (with `name`) if a finite mean overflows `dtype`, and `CorruptFile` if
        the bytes of a run do not match the CRC-32 that its file states.
        """
        factors = tuple(weights) or (1.0,) * len(runs)
        is_between = min(factors) >= 0  # then the mean is between the runs, and cannot overflow
        mix = _Mix(factors, sum(factors), bounded=is_between)
        return self._make_storage(runs, like, dtype, name, lambda: mix)

    def interpolate_on_arc(
        self, runs: Sequence[Elements], like: Storage, dtype: str, name: str, t: float
    ) -> Storage:
        """Return two runs mixed along the arc between them, `t` of the way, like `average`.

        They are mixed along a straight line if their angle is near 0 or 180 degrees, or if a number
        is not finite.
        """

        @cache
        def weigh_by_angle() -> _Mix:
            """Return the weights of the two runs, which depend on the angle between them."""
            self._check_storages(runs)
            cosine = self._kernel_for(runs, dtype).cosine_between(runs)
            if not abs(cosine) <= _PARALLEL_COSINE:  # nearly parallel, or NaN
                return _Mix((1 - t, t), total=1.0, bounded=0 <= t <= 1)
            angle = math.acos(cosine)
            weights = math.sin(angle - t * angle), math.sin(t * angle)
            return _Mix(tuple(weight / math.sin(angle) for weight in weights), total=1.0)

        return self._make_storage(runs, like, dtype, name, weigh_by_angle)

    def _make_storage(
        self,
        runs: Sequence[Elements],
        like: Storage,
        dtype: str,
        name: str,
        get_mix: Callable[[], _Mix],
    ) -> Storage:
        """Return a storage of `dtype`; its bytes are mixed from the runs when they are read.

        Key and device are those of `like`. `get_mix` is called when bytes are read, as it may read
        the runs itself. `name` is for the error of an overflow.
        """
        for run in runs:
            storage = run.storage
            if storage is not None and storage.data is not None:
                check = check_storage(storage, storage.data)
                self._check_by_storage.setdefault(id(storage), check)
        count = runs[0].data.length // BY_NAME[runs[0].dtype].itemsize
        itemsize = BY_NAME[dtype].itemsize
        size = count * itemsize

        def fill(offset: int, buffer: memoryview) -> None:
            """Write the mixed bytes from `offset` into `buffer`."""
            self._check_storages(runs)
            kernel = self._kernel_for(runs, dtype)
            try:
                mix, chunks = get_mix(), iterate_chunks(offset, buffer, itemsize, count, CHUNK)
                for start, stop, chunk_buffer, skipped_bytes in chunks:
                    mixed = kernel.mix_elements(runs, mix, start, stop)
                    chunk_buffer[:] = mixed[skipped_bytes : skipped_bytes + len(chunk_buffer)]
            except OverflowError as error:
                raise NotRepresentable(
                    f"the mean of {printable(name)!r} overflows {dtype}, its dtype in the "
                    "first file "
                    f"(the magnitude is {error})",
                    file=runs[0].data.source.name,
                    hint="give a file with a wider dtype first, or widen the first with "
                    "ckptool cast FIRST --dtype float32",
                ) from error

        # Other threads read ahead only in sources that several threads may read.
        ahead = self._read_ahead if all(run.data.source.is_shared for run in runs) else None
        data = make_computed_range([run.data for run in runs], size, fill, ahead=ahead)
        return Storage(like.key, data, size, like.device, sys.byteorder)

    def _check_storages(self, runs: Sequence[Elements]) -> None:
        """Compare the storages of the runs with the checksums in their files, once each."""
        for run in runs:
            if id(run.storage) in self._check_by_storage:
                self._check_by_storage[id(run.storage)].check()

    def _kernel_for(self, runs: Sequence[Elements], target: str) -> _Kernel:
        """Return this thread's kernel for the dtypes of the runs and the target; make it once."""
        sources = tuple(dict.fromkeys(run.dtype for run in runs))
        kernel_by_dtypes: dict[Any, _Kernel] = self._kernels_of_thread.__dict__  # one per thread
        dtypes = f"{sources} {target}"
        if dtypes not in kernel_by_dtypes:
            kernel_by_dtypes[dtypes] = _Kernel(sources, target)
        return kernel_by_dtypes[dtypes]


class _Kernel:
    """The arithmetic on a chunk of the elements of some runs, with reused buffers."""

    def __init__(self, sources: Sequence[str], target: str) -> None:
        """Allocate memory for chunks of the dtypes of the runs, and of the `target` dtype."""
        require_torch()
        import torch

        self._target_dtype = target
        self._has_other_dtypes = any(source != target for source in sources)
        wide = torch.complex128 if target.startswith("complex") else torch.float64
        self._buffers = {name: ElementBuffer(name, CHUNK) for name in sources}
        self._target_bytes = bytearray(CHUNK * BY_NAME[target].itemsize)
        self._target = torch.frombuffer(self._target_bytes, dtype=get_torch_dtype(target))
        # Sums of narrower numbers do not reach the limit of float64.
        self._may_overflow_sum = not {"float64", "complex128"}.isdisjoint(sources)
        self._sum_buffer = torch.empty(CHUNK, dtype=wide, device="cpu")
        self._addend_buffer = torch.empty(CHUNK, dtype=wide, device="cpu")

    def cosine_between(self, runs: Sequence[Elements]) -> float:
        """Return the cosine of the angle between two runs; about 0 if one is nearly zero.

        A complex number counts as two real ones.
        """
        run_a, run_b = runs
        count = run_a.data.length // BY_NAME[run_a.dtype].itemsize
        product = squares_a = squares_b = 0.0
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            wide_a, wide_b = self._sum_buffer[:size], self._addend_buffer[:size]
            wide_a.copy_(self._buffers[run_a.dtype].read(run_a, start, size))
            wide_b.copy_(self._buffers[run_b.dtype].read(run_b, start, size))
            a, b = _view_as_real(wide_a).flatten(), _view_as_real(wide_b).flatten()
            product += float(a @ b)
            squares_a += float(a @ a)
            squares_b += float(b @ b)
        for norm in (math.sqrt(squares_a), math.sqrt(squares_b)):
            if not norm <= _MIN_NORM:  # a NaN is divided by too, so that the result is NaN
                product /= norm
        return product

    def mix_elements(
        self, runs: Sequence[Elements], mix: _Mix, start: int, stop: int
    ) -> memoryview:
        """Return the bytes of the mixed elements `start` to `stop`; the next call overwrites them.

        Raises:
            OverflowError: a finite mean overflows the target dtype; the text is its magnitude.
        """
        count = stop - start
        mean, target = self._sum_runs(runs, mix, start, count), self._target[:count]
        _view_as_real(mean).div_(mix.total)  # a complex division would lose the sign of -0.0
        if self._may_overflow_sum and not bool(mean.isfinite().all()):
            # The sum may exceed float64 though the mean fits: sum with weights that add up to
            # less than 1. A scale that is a power of two changes no digits.
            _, exponent = math.frexp(sum(map(abs, mix.weights)))
            scale = 2.0**exponent
            mean = self._sum_runs(runs, mix, start, count, 1 / scale)
            _view_as_real(mean).div_(mix.total).mul_(scale)
        target.copy_(mean)
        # A mean between runs that are all of the target dtype fits this dtype.
        if self._has_other_dtypes or not mix.bounded:
            wide = _view_as_real(mean)
            self._refuse_overflow(wide, _view_as_real(target).to(wide.dtype))
        return memoryview(self._target_bytes)[: count * self._target.element_size()]

    def _sum_runs(
        self, runs: Sequence[Elements], mix: _Mix, start: int, count: int, scale: float = 1.0
    ) -> torch.Tensor:
        """Return the weighted sum of the runs' elements, each weight multiplied by `scale`."""
        total, following = self._sum_buffer[:count], self._addend_buffer[:count]
        for index, run in enumerate(runs):
            addend = following if index else total  # a sum that begins with 0.0 has no -0.0
            addend.copy_(self._buffers[run.dtype].read(run, start, count))
            factor = mix.weights[index] * scale
            if factor != 1.0:
                _view_as_real(addend).mul_(factor)
            if index:
                total.add_(following)
        return total

    def _refuse_overflow(self, mean: torch.Tensor, rounded: torch.Tensor) -> None:
        """Raise `OverflowError` with the magnitude if a finite element of `mean` overflows.

        `rounded` is `mean` in the target dtype, which may saturate, or may have no sign.
        """
        float_type = FLOATS.get(self._target_dtype)
        saturation_limit = SATURATES.get(self._target_dtype, math.inf)
        overflowed = mean.isfinite() & (~rounded.isfinite() | (mean.abs() > saturation_limit))
        if float_type is not None and not float_type.signed:
            overflowed |= mean < 0
        if bool(overflowed.any()):
            raise OverflowError(f"{float(mean[overflowed].abs().max()):.5g}")


def _view_as_real(elements: torch.Tensor) -> torch.Tensor:
    """Return a view of complex elements as pairs of real ones; real elements unchanged."""
    import torch

    return torch.view_as_real(elements) if elements.is_complex() else elements


# tensors of another size


def make_rows(tensor: TensorRef, count: int, *, zero: bool) -> ByteRange:
    """Return the bytes of `count` rows to append to a tensor: zeros, or the mean of its rows."""
    width = prod(tensor.sizes[1:]) * tensor.itemsize

    @cache
    def make_row() -> bytes:
        """Return the bytes of one row."""
        return bytes(width) if zero else _average_rows(tensor)

    def fill(offset: int, buffer: memoryview) -> None:
        """Write the bytes of the rows from `offset` into `buffer`."""
        begin = offset % width  # the position inside the row; all rows are equal
        # Enough rows for the buffer even if it begins and ends inside of a row.
        rows = make_row() * (len(buffer) // width + 2)
        buffer[:] = rows[begin : begin + len(buffer)]

    return _compute_range(tensor, count * width, fill)


def resample_positions(
    tensor: TensorRef, prefix: int, old: tuple[int, int], new: tuple[int, int]
) -> ByteRange:
    """Return the bytes of position embeddings, resampled from the `old` to the `new` grid.

    The last two dimensions are positions and channels. The first `prefix` positions (such as a
    class token) are kept. Like `resample_abs_pos_embed` of timm: bicubic, antialiased, in float32.
    """
    width = tensor.shape[-1] or 0

    @cache
    def resample() -> bytes:
        """Return the bytes of the resampled embeddings, computed once."""
        import torch

        embeddings = load_checked(tensor).reshape(-1, width)
        # (rows, columns, channels) of the grid -> the (1, channels, rows, columns) of an image
        grid = embeddings[prefix:].float().reshape(1, *old, width).permute(0, 3, 1, 2)
        grid = torch.nn.functional.interpolate(grid, size=new, mode="bicubic", antialias=True)
        rows = grid.permute(0, 2, 3, 1).reshape(-1, width).to(embeddings.dtype)
        return _little_endian_bytes(torch.cat([embeddings[:prefix], rows]))

    def fill(offset: int, buffer: memoryview) -> None:
        """Write the resampled bytes from `offset` into `buffer`."""
        buffer[:] = resample()[offset : offset + len(buffer)]

    return _compute_range(tensor, (prefix + prod(new)) * width * tensor.itemsize, fill)


def _compute_range(
    tensor: TensorRef, size: int, fill: Callable[[int, memoryview], None]
) -> ByteRange:
    """Return `size` bytes that `fill` computes from the data of a tensor."""
    data = tensor.storage.data if tensor.storage else None
    if data is None:
        raise NotRepresentable(f"a {tensor.kind} tensor without bytes cannot be reshaped")
    return make_computed_range((data,), size, fill)


def _average_rows(tensor: TensorRef) -> bytes:
    """Return the bytes of the mean row of a tensor, reading it block by block."""
    count, row_shape = tensor.shape[0] or 0, tensor.shape[1:]
    rows_per_block = max(
        BLOCK // max(prod(size or 0 for size in row_shape) * tensor.itemsize, 1), 1
    )
    total: torch.Tensor | float = 0.0
    for start in range(0, count, rows_per_block):
        rows, offset = min(rows_per_block, count - start), tensor.offset + start * tensor.stride[0]
        part = replace(tensor, shape=(rows, *row_shape), offset=offset)
        # The first load checks the whole storage.
        block = materialize(part).detach() if start else load_checked(part)
        dtype = block.dtype
        total = total + block.double().sum(0)
    return _little_endian_bytes((total / count).to(dtype))  # type: ignore[union-attr]


def _little_endian_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor in row-major order, little-endian."""
    import torch

    raw = tensor.contiguous().reshape(-1, 1).view(torch.uint8)
    return (raw.flip(1) if sys.byteorder == "big" else raw).numpy().tobytes()
