"""Means of tensors, block by block."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from threading import local
from typing import TYPE_CHECKING, Any

from ckptool.dtypes import BY_NAME
from ckptool.errors import NotRepresentable
from ckptool.files import ByteRange
from ckptool.files.checksums import Checked
from ckptool.files.computed import Ahead, ComputedSource, gathered
from ckptool.model import Storage, TensorRef
from ckptool.tensors.casting import CHUNK, FLOATS, SATURATES, checked, chunks
from ckptool.tensors.runtime import require_torch, torch_dtype
from ckptool.words import printable

if TYPE_CHECKING:
    import torch

__all__ = ["Averager", "ElementBuffer", "Elements", "elements_of"]


class ElementBuffer:
    """Memory for so many elements of a type, and the torch tensor that looks at it."""

    def __init__(self, dtype: str, count: int, *, seen_as: torch.dtype | None = None) -> None:
        """Take memory for `count` elements of `dtype`.

        `seen_as` is the type of the tensor, where it is to be another: a complex number may be two
        real ones.

        Raises:
            UnsupportedFormat: this torch does not have the type.
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
    if held is None or held.data is None or tensor.is_contiguous:
        data = tensor.data
    else:
        data = gathered(
            held.data,
            itemsize=tensor.itemsize,
            shape=tuple(size or 0 for size in tensor.shape),
            stride=tensor.stride,
            offset=tensor.offset,
        )
    return Elements(tensor.dtype, data, held.byteorder if held else "little", held, tensor.flags)


class Averager:
    """Makes storages that are the mean of others, with one set of buffers a thread."""

    def __init__(self) -> None:
        """Torch is imported when the first element is wanted."""
        self._kernels = local()
        self._ahead = Ahead()
        self._checked: dict[int, Checked] = {}
        """By the identity of a storage: several tensors may be in it."""

    def mean(self, runs: Sequence[Elements], like: Storage, dtype: str, name: str = "") -> Storage:
        """Return the mean of runs of equally many elements, accumulated in float64 in their order.

        It is rounded to `dtype`, as torch does it; key and device are those of `like`. Reading a
        mean that is finite and does not fit `dtype` is an error (`NotRepresentable`, with `name`),
        and so is one of bytes that are not those that a file states (`CorruptFile`).
        """
        for run in runs:
            held = run.storage
            if held is not None and held.data is not None:
                self._checked.setdefault(id(held), checked(held, held.data))
        count = runs[0].data.length // BY_NAME[runs[0].dtype].itemsize
        size = count * BY_NAME[dtype].itemsize

        def fill(offset: int, buffer: memoryview) -> None:
            for run in runs:
                if id(run.storage) in self._checked:
                    self._checked[id(run.storage)].check()
            try:
                self._fill(runs, dtype, offset, buffer)
            except OverflowError as error:
                raise _refused(name, dtype, str(error), runs[0].data.source.name) from error

        ahead = self._ahead if all(run.data.source.is_shared for run in runs) else None
        source = ComputedSource(runs[0].data.source.name, size, fill, ahead=ahead)
        source.made_of = [run.data for run in runs]
        return Storage(like.key, ByteRange(source, 0, size), size, like.device, sys.byteorder)

    def _fill(self, runs: Sequence[Elements], dtype: str, offset: int, buffer: memoryview) -> None:
        kernel = self._kernel(tuple(dict.fromkeys(run.dtype for run in runs)), dtype)
        count = runs[0].data.length // BY_NAME[runs[0].dtype].itemsize
        size = BY_NAME[dtype].itemsize
        for start, stop, room, skipped in chunks(offset, buffer, size, count):
            room[:] = kernel.mean(runs, start, stop)[skipped : skipped + len(room)]

    def _kernel(self, sources: tuple[str, ...], target: str) -> _Kernel:
        known: dict[Any, _Kernel] = self._kernels.__dict__
        key = f"{sources} {target}"
        if key not in known:
            known[key] = _Kernel(sources, target)
        return known[key]


class _Kernel:
    """The arithmetic on one chunk, over buffers that are used again and again."""

    def __init__(self, sources: Sequence[str], target: str) -> None:
        """Take memory for chunks of these types.

        Raises:
            TorchMissing: torch is not installed.
            UnsupportedFormat: this torch has not one of the types.
        """
        require_torch()
        import torch

        self._kind = target
        self._others = any(source != target for source in sources)
        wide = torch.complex128 if target.startswith("complex") else torch.float64
        self._buffers = {name: ElementBuffer(name, CHUNK) for name in sources}
        self._made = bytearray(CHUNK * BY_NAME[target].itemsize)
        self._target = torch.frombuffer(self._made, dtype=torch_dtype(target))
        self._widest = not {"float64", "complex128"}.isdisjoint(sources)
        self._sum = torch.empty(CHUNK, dtype=wide)
        self._next = torch.empty(CHUNK, dtype=wide)

    def mean(self, runs: Sequence[Elements], start: int, stop: int) -> memoryview:
        """Return the bytes of elements `start` to `stop`, which the next call overwrites.

        Raises:
            OverflowError: one is finite and not so in the target's type; the text tells it.
        """
        count = stop - start
        mean, target = self._added(runs, start, count), self._target[:count]
        _real(mean).div_(len(runs))  # by a complex number there would be no -0.0
        if self._widest and not bool(mean.isfinite().all()):
            mean = self._of_smaller(mean.clone(), runs, start)
        target.copy_(mean)
        if self._others:
            self._refuse_overflow(_real(mean), _real(target).to(_real(mean).dtype))
        return memoryview(self._made)[: count * self._target.element_size()]

    def _added(
        self, runs: Sequence[Elements], start: int, count: int, scale: float = 1.0
    ) -> torch.Tensor:
        total, following = self._sum[:count], self._next[:count]
        for at, run in enumerate(runs):
            part = following if at else total  # a sum that begins with 0.0 has no -0.0
            part.copy_(self._buffers[run.dtype].read(run, start, count))
            if scale != 1.0:
                _real(part).mul_(scale)
            if at:
                total.add_(following)
        return total

    def _of_smaller(self, mean: torch.Tensor, runs: Sequence[Elements], start: int) -> torch.Tensor:
        """Return the mean where the sum is beyond float64: numbers are made smaller first."""
        import torch

        scale = 2.0 ** len(runs).bit_length()
        again = self._added(runs, start, len(mean), 1 / scale)
        plain, again = _real(mean), _real(again).div_(len(runs)).mul_(scale)
        plain.copy_(torch.where(plain.isfinite(), plain, again))
        return mean

    def _refuse_overflow(self, mean: torch.Tensor, made: torch.Tensor) -> None:
        kind = FLOATS.get(self._kind)
        over = mean.isfinite() & ~made.isfinite()
        over |= mean.isfinite() & (mean.abs() > SATURATES.get(self._kind, float("inf")))
        if kind is not None and not kind.signed:
            over |= mean < 0
        if bool(over.any()):
            raise OverflowError(f"{float(mean[over].abs().max()):.5g}")


def _real(elements: torch.Tensor) -> torch.Tensor:
    """Return the elements, complex numbers as pairs of real numbers."""
    import torch

    return torch.view_as_real(elements) if elements.is_complex() else elements


def _refused(name: str, dtype: str, magnitude: str, file: str) -> NotRepresentable:
    return NotRepresentable(
        f"the mean of {printable(name)!r} does not fit {dtype}, which it has in the first file "
        f"(the magnitude is {magnitude})",
        file=file,
        hint="name a file with a wider type first, or widen the first: "
        "ckptool cast FIRST --dtype float32",
    )
