"""The mean of several tensors, element by element, computed in blocks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import local
from typing import TYPE_CHECKING, Any

from ckptool.dtypes import BY_NAME
from ckptool.errors import TruncatedFile
from ckptool.files import ByteRange
from ckptool.files.computed import ComputedSource, may_be_shared
from ckptool.model import Storage, TensorRef
from ckptool.tensors.casting import CHUNK
from ckptool.tensors.runtime import require_torch, torch_dtype

if TYPE_CHECKING:
    import torch

__all__ = ["Averager", "Elements", "elements_of"]


@dataclass(frozen=True, slots=True)
class Elements:
    """A run of elements in a file."""

    dtype: str
    data: ByteRange
    byteorder: str = "little"


def elements_of(tensor: TensorRef) -> Elements:
    """All elements of a tensor in row-major order, wherever they lie."""
    if tensor.is_contiguous and not tensor.flags and tensor.storage is not None:
        return Elements(tensor.dtype, tensor.data, tensor.storage.byteorder)
    return Elements(tensor.dtype, ByteRange(_Content(tensor), 0, tensor.nbytes))


class _Content:
    """A source (`files.Source`) over the elements of a tensor that is not one run of bytes.

    Reading forwards costs one pass; reading backwards starts again.
    """

    def __init__(self, tensor: TensorRef) -> None:
        self._tensor = tensor
        self._blocks: Iterator[bytes] = iter(())
        self._pending = memoryview(b"")
        self._position = -1

    @property
    def name(self) -> str:
        """The file that they are in."""
        storage = self._tensor.storage
        return storage.data.source.name if storage is not None and storage.data else ""

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self._tensor.nbytes

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`, or `TruncatedFile`."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, or `TruncatedFile`."""
        if not 0 <= self._position <= offset:
            self._blocks, self._position = self._tensor.content(), 0
            self._pending = memoryview(b"")
        while self._position < offset:
            self._take(offset - self._position)
        while buffer:
            part = self._take(len(buffer))
            buffer[: len(part)] = part
            buffer = buffer[len(part) :]

    def _take(self, most: int) -> memoryview:
        """Between 1 and `most` bytes."""
        if not self._pending:
            self._pending = memoryview(next(self._blocks, b""))
        part, self._pending = self._pending[:most], self._pending[most:]
        if not part:
            raise TruncatedFile("the elements of a tensor end too early", file=self.name)
        self._position += len(part)
        return part


class Averager:
    """Makes storages that are the mean of others, with one set of buffers a thread."""

    def __init__(self) -> None:
        """Torch is imported when the first element is wanted."""
        self._kernels = local()

    def mean(self, runs: Sequence[Elements], like: Storage, dtype: str) -> Storage:
        """The mean of runs of equally many elements, accumulated in float64 in their order.

        It is rounded to `dtype`, as torch does it; key and device are those of `like`.
        """
        count = runs[0].data.length // BY_NAME[runs[0].dtype].itemsize
        size = count * BY_NAME[dtype].itemsize

        def fill(offset: int, buffer: memoryview) -> None:
            self._fill(runs, dtype, offset, buffer)

        parallel = all(may_be_shared(run.data) for run in runs)
        source = ComputedSource(runs[0].data.source.name, size, fill, parallel=parallel)
        return Storage(like.key, ByteRange(source, 0, size), size, like.device, sys.byteorder)

    def _fill(self, runs: Sequence[Elements], dtype: str, offset: int, buffer: memoryview) -> None:
        kernel = self._kernel(tuple(dict.fromkeys(run.dtype for run in runs)), dtype)
        size = BY_NAME[dtype].itemsize
        first, last = offset // size, -(-(offset + len(buffer)) // size)
        for start in range(first, last, CHUNK):
            made = kernel.mean(runs, start, min(start + CHUNK, last))
            at = start * size - offset
            skipped = max(-at, 0)
            made = made[skipped : len(buffer) - at]
            buffer[at + skipped : at + skipped + len(made)] = made

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

        wide = torch.complex128 if target.startswith("complex") else torch.float64
        self._raw: dict[str, tuple[bytearray, torch.Tensor]] = {}
        for name in sources:
            raw = bytearray(CHUNK * BY_NAME[name].itemsize)
            self._raw[name] = raw, torch.frombuffer(raw, dtype=torch_dtype(name))
        self._made = bytearray(CHUNK * BY_NAME[target].itemsize)
        self._target = torch.frombuffer(self._made, dtype=torch_dtype(target))
        self._sum = torch.empty(CHUNK, dtype=wide)
        self._next = torch.empty(CHUNK, dtype=wide)

    def mean(self, runs: Sequence[Elements], start: int, stop: int) -> memoryview:
        """The bytes of the elements from `start` up to `stop`, until the next call."""
        count = stop - start
        total, following = self._sum[:count], self._next[:count]
        total.zero_()
        for run in runs:
            following.copy_(self._read(run, start, count))
            total.add_(following)
        self._target[:count].copy_(total.div_(len(runs)))
        return memoryview(self._made)[: count * self._target.element_size()]

    def _read(self, run: Elements, start: int, count: int) -> torch.Tensor:
        """Elements of one file, in this machine's byte order."""
        import torch

        raw, elements = self._raw[run.dtype]
        size, swap = BY_NAME[run.dtype].itemsize, BY_NAME[run.dtype].swap_size
        run.data.read_into(memoryview(raw)[: count * size], start * size)
        if run.byteorder != sys.byteorder and swap > 1:
            rows = elements[:count].view(torch.uint8).view(-1, swap)
            rows.copy_(rows.flip(1))
        return elements[:count]
