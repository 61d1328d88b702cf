"""Means and other mixtures of tensors, block by block; rows and grids made of a tensor's own."""

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
from ckptool.files.checksums import Checked
from ckptool.files.computed import ReadAhead, computed
from ckptool.files.source import BLOCK
from ckptool.tensors.casting import CHUNK, FLOATS, SATURATES, checked, checked_tensor, chunks
from ckptool.tensors.materialize import materialize, require_torch, torch_dtype
from ckptool.words import printable

if TYPE_CHECKING:
    import torch


class ElementBuffer:
    """Memory for so many elements of a type, and the torch tensor that looks at it."""

    def __init__(self, dtype: str, count: int, *, seen_as: torch.dtype | None = None) -> None:
        """Take memory for `count` elements of `dtype`.

        `seen_as` is the type of the tensor, where it is to be another: a complex number may be two
        real ones.
        """
        import torch

        kind = BY_NAME[dtype]
        self._size, self._swap = kind.itemsize, kind.swap_size
        self._raw = bytearray(count * self._size)
        self._tensor = torch.frombuffer(self._raw, dtype=seen_as or torch_dtype(dtype))
        self._parts = self._size // self._tensor.element_size()

    def read(self, run: Elements, start: int, count: int) -> torch.Tensor:
        """Return the `count` elements from `start`, in this machine's byte order.

        The next read overwrites them.
        """
        import torch

        run.data.read_into(memoryview(self._raw)[: count * self._size], start * self._size)
        elements = self._tensor[: count * self._parts]
        if run.byteorder != sys.byteorder and self._swap > 1:
            rows = elements.view(torch.uint8).view(-1, self._swap)
            rows.copy_(rows.flip(1))
        if "neg" in run.flags:
            elements.neg_()
        if "conj" in run.flags:
            _real(elements).view(-1, 2)[:, 1].neg_()
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
    """As `TensorRef.flags`: what is still to be done to the elements."""


def elements_of(tensor: TensorRef) -> Elements:
    """Return all elements of a tensor in row-major order, wherever they lie."""
    held = tensor.storage
    order = held.byteorder if held else "little"
    return Elements(tensor.dtype, tensor.row_major, order, held, tensor.flags)


PARALLEL, SHORT = 0.9995, 1e-8
"""The cosine from which `slerp` is linear, and the length up to which a vector has no direction.

Those of mergekit 0.1.5: `dot_threshold` and `eps` in `mergekit/merge_methods/slerp.py`.
"""


@dataclass(frozen=True, slots=True)
class _Mix:
    """The sum of runs, each times its weight, divided by `total`."""

    weights: tuple[float, ...]
    total: float
    bounded: bool = False
    """Whether the result lies between the runs, and so fits a type that all of them have."""


class Averager:
    """Makes storages that are the mean of others, with one set of buffers a thread."""

    def __init__(self) -> None:
        """Torch is imported when the first element is wanted."""
        self._kernels = local()
        self._ahead = ReadAhead()
        self._checked: dict[int, Checked] = {}
        """By the identity of a storage: several tensors may be in it."""

    def mean(
        self,
        runs: Sequence[Elements],
        like: Storage,
        dtype: str,
        name: str = "",
        *,
        weights: Sequence[float] = (),
    ) -> Storage:
        """Return the mean of runs of equally many elements, accumulated in float64 in their order.

        Each may have a weight, and the sum is divided by that of the weights. It is rounded to
        `dtype`, as torch does it; key and device are those of `like`. Reading a mean that is finite
        and does not fit `dtype` is an error (`NotRepresentable`, with `name`),
        and so is one of bytes that are not those that a file states (`CorruptFile`).
        """
        each = tuple(weights) or (1.0,) * len(runs)
        mix = _Mix(each, sum(each), min(each) >= 0)
        return self._computed(runs, like, dtype, name, lambda: mix)

    def slerp(
        self, runs: Sequence[Elements], like: Storage, dtype: str, name: str, t: float
    ) -> Storage:
        """Return two runs mixed along the arc between them, `t` of the way, as `mean` returns it.

        They are mixed along the straight line if their angle is near 0 or 180 degrees, or there is
        none, because a number is not finite.
        """

        @cache
        def mix() -> _Mix:
            self._check(runs)
            cosine = self._kernel(runs, dtype).cosine(runs)
            if not abs(cosine) <= PARALLEL:
                return _Mix((1 - t, t), 1.0, 0 <= t <= 1)
            angle = math.acos(cosine)
            arc = math.sin(angle)
            return _Mix((math.sin(angle - t * angle) / arc, math.sin(t * angle) / arc), 1.0)

        return self._computed(runs, like, dtype, name, mix)

    def _computed(
        self,
        runs: Sequence[Elements],
        like: Storage,
        dtype: str,
        name: str,
        mix: Callable[[], _Mix],
    ) -> Storage:
        for run in runs:
            held = run.storage
            if held is not None and held.data is not None:
                self._checked.setdefault(id(held), checked(held, held.data))
        count = runs[0].data.length // BY_NAME[runs[0].dtype].itemsize
        itemsize = BY_NAME[dtype].itemsize
        size = count * itemsize

        def fill(offset: int, buffer: memoryview) -> None:
            self._check(runs)
            kernel = self._kernel(runs, dtype)
            try:
                made = mix()
                for start, stop, room, skipped in chunks(offset, buffer, itemsize, count, CHUNK):
                    room[:] = kernel.mixed(runs, made, start, stop)[skipped : skipped + len(room)]
            except OverflowError as error:
                raise NotRepresentable(
                    f"the mean of {printable(name)!r} overflows {dtype}, its dtype in the "
                    "first file "
                    f"(the magnitude is {error})",
                    file=runs[0].data.source.name,
                    hint="give a file with a wider dtype first, or widen the first with "
                    "ckptool cast FIRST --dtype float32",
                ) from error

        ahead = self._ahead if all(run.data.source.is_shared for run in runs) else None
        data = computed([run.data for run in runs], size, fill, ahead=ahead)
        return Storage(like.key, data, size, like.device, sys.byteorder)

    def _check(self, runs: Sequence[Elements]) -> None:
        for run in runs:
            if id(run.storage) in self._checked:
                self._checked[id(run.storage)].check()

    def _kernel(self, runs: Sequence[Elements], target: str) -> _Kernel:
        sources = tuple(dict.fromkeys(run.dtype for run in runs))
        known: dict[Any, _Kernel] = self._kernels.__dict__
        key = f"{sources} {target}"
        if key not in known:
            known[key] = _Kernel(sources, target)
        return known[key]


class _Kernel:
    def __init__(self, sources: Sequence[str], target: str) -> None:
        """Take memory for chunks of these types."""
        require_torch()
        import torch

        self._kind = target
        self._others = any(source != target for source in sources)
        wide = torch.complex128 if target.startswith("complex") else torch.float64
        self._buffers = {name: ElementBuffer(name, CHUNK) for name in sources}
        self._made = bytearray(CHUNK * BY_NAME[target].itemsize)
        self._target = torch.frombuffer(self._made, dtype=torch_dtype(target))
        self._widest = not {"float64", "complex128"}.isdisjoint(sources)
        self._sum = torch.empty(CHUNK, dtype=wide, device="cpu")
        self._next = torch.empty(CHUNK, dtype=wide, device="cpu")

    def cosine(self, runs: Sequence[Elements]) -> float:
        """Return the cosine of the angle between two runs."""
        count = runs[0].data.length // BY_NAME[runs[0].dtype].itemsize
        dot = [0.0, 0.0, 0.0]
        for start in range(0, count, CHUNK):
            size = min(CHUNK, count - start)
            one, two = self._sum[:size], self._next[:size]
            one.copy_(self._buffers[runs[0].dtype].read(runs[0], start, size))
            two.copy_(self._buffers[runs[1].dtype].read(runs[1], start, size))
            for at, (left, right) in enumerate(((one, two), (one, one), (two, two))):
                dot[at] += float(_real(left).flatten() @ _real(right).flatten())
        for norm in map(math.sqrt, dot[1:]):
            dot[0] /= norm if norm > SHORT or math.isnan(norm) else 1.0
        return dot[0]

    def mixed(self, runs: Sequence[Elements], mix: _Mix, start: int, stop: int) -> memoryview:
        """Return the bytes of elements `start` to `stop`, which the next call overwrites.

        Raises:
            OverflowError: one is finite and not so in the target's type; the text tells it.
        """
        count = stop - start
        mean, target = self._added(runs, mix, start, count), self._target[:count]
        _real(mean).div_(mix.total)  # by a complex number there would be no -0.0
        if self._widest and not bool(mean.isfinite().all()):  # the sum may be beyond float64
            scale = 2.0 ** math.frexp(sum(map(abs, mix.weights)))[1]
            mean = self._added(runs, mix, start, count, 1 / scale)
            _real(mean).div_(mix.total).mul_(scale)
        target.copy_(mean)
        if self._others or not mix.bounded:
            self._refuse_overflow(_real(mean), _real(target).to(_real(mean).dtype))
        return memoryview(self._made)[: count * self._target.element_size()]

    def _added(
        self, runs: Sequence[Elements], mix: _Mix, start: int, count: int, scale: float = 1.0
    ) -> torch.Tensor:
        total, following = self._sum[:count], self._next[:count]
        for at, run in enumerate(runs):
            part = following if at else total  # a sum that begins with 0.0 has no -0.0
            part.copy_(self._buffers[run.dtype].read(run, start, count))
            factor = mix.weights[at] * scale
            if factor != 1.0:
                _real(part).mul_(factor)
            if at:
                total.add_(following)
        return total

    def _refuse_overflow(self, mean: torch.Tensor, made: torch.Tensor) -> None:
        kind = FLOATS.get(self._kind)
        over = mean.isfinite() & ~made.isfinite()
        over |= mean.isfinite() & (mean.abs() > SATURATES.get(self._kind, float("inf")))
        if kind is not None and not kind.signed:
            over |= mean < 0
        if bool(over.any()):
            raise OverflowError(f"{float(mean[over].abs().max()):.5g}")


def _real(elements: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.view_as_real(elements) if elements.is_complex() else elements


# tensors of another size


def more_rows(tensor: TensorRef, count: int, *, zero: bool) -> ByteRange:
    """Return rows to follow those of a tensor: zero, or the mean of its own, in float64."""
    width = prod(tensor.sizes[1:]) * tensor.itemsize

    @cache
    def row() -> bytes:
        return bytes(width) if zero else _mean(tensor)

    def fill(offset: int, buffer: memoryview) -> None:
        begin = offset % width
        buffer[:] = (row() * (len(buffer) // width + 2))[begin : begin + len(buffer)]

    return _computed(tensor, count * width, fill)


def interpolated(
    tensor: TensorRef, prefix: int, old: tuple[int, int], new: tuple[int, int]
) -> ByteRange:
    """Return the elements of position embeddings for another grid.

    The last dimensions are positions, of which the first `prefix` stay, and channels. As
    `resample_abs_pos_embed` of timm: bicubic, antialiased, in float32.
    """
    width = tensor.shape[-1] or 0

    @cache
    def made() -> bytes:
        import torch

        whole = checked_tensor(tensor).reshape(-1, width)
        grid = whole[prefix:].float().reshape(1, *old, width).permute(0, 3, 1, 2)
        grid = torch.nn.functional.interpolate(grid, size=new, mode="bicubic", antialias=True)
        rows = grid.permute(0, 2, 3, 1).reshape(-1, width).to(whole.dtype)
        return _bytes(torch.cat([whole[:prefix], rows]))

    def fill(offset: int, buffer: memoryview) -> None:
        buffer[:] = made()[offset : offset + len(buffer)]

    return _computed(tensor, (prefix + prod(new)) * width * tensor.itemsize, fill)


def _computed(tensor: TensorRef, size: int, fill: Callable[[int, memoryview], None]) -> ByteRange:
    data = tensor.storage.data if tensor.storage else None
    if data is None:
        raise NotRepresentable(f"a {tensor.kind} tensor without bytes cannot be reshaped")
    return computed((data,), size, fill)


def _mean(tensor: TensorRef) -> bytes:
    """Return the mean of the rows, of which a block is held at a time."""
    count, rest = tensor.shape[0] or 0, tensor.shape[1:]
    step = max(BLOCK // max(prod(size or 0 for size in rest) * tensor.itemsize, 1), 1)
    total: torch.Tensor | float = 0.0
    for start in range(0, count, step):
        rows, place = min(step, count - start), tensor.offset + start * tensor.stride[0]
        part = replace(tensor, shape=(rows, *rest), offset=place)
        one = materialize(part).detach() if start else checked_tensor(part)
        dtype = one.dtype
        total = total + one.double().sum(0)
    return _bytes((total / count).to(dtype))  # type: ignore[union-attr]


def _bytes(tensor: torch.Tensor) -> bytes:
    import torch

    raw = tensor.contiguous().reshape(-1, 1).view(torch.uint8)
    return (raw.flip(1) if sys.byteorder == "big" else raw).numpy().tobytes()
