"""Storages in another floating type, computed in blocks, and what that does to their elements.

The elements become exactly what `tensor.to(dtype)` of torch gives. What is lost is judged on the
source: some of torch's casts saturate (1e6 is 448 in float8_e4m3fn), others drop a sign.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from shlex import quote
from threading import Lock, local
from typing import TYPE_CHECKING

from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile, NotRepresentable
from ckptool.files import ByteRange
from ckptool.files.checksums import Checked
from ckptool.files.computed import Ahead, ComputedSource, may_be_shared
from ckptool.files.source import BLOCK
from ckptool.model import Storage, TensorRef
from ckptool.tensors.cast_kernel import CHUNK, Kernel, Losses, chunks
from ckptool.tensors.coverage import Owners, Spans
from ckptool.tensors.floats import FLOATS
from ckptool.tensors.runtime import require_torch, torch_dtype
from ckptool.words import printable

if TYPE_CHECKING:
    import torch

__all__ = ["Caster", "checked", "dequantized"]

_BLOCK = 128
"""Rows and columns that have one scale in the files of DeepSeek-V3."""


class Caster:
    """Casts storages from one floating type to another, with one set of buffers a thread."""

    def __init__(
        self,
        source: str,
        target: str,
        *,
        allow_overflow: bool,
        file: str = "",
        ahead: Ahead | None = None,
    ) -> None:
        """Cast `source` to `target`; `file` is for messages.

        Torch is imported when the first element is wanted. Unless overflow is allowed, reading the
        first element that does is an error (`NotRepresentable`), and so is reading the last byte
        of a storage that does not have the CRC-32 that its file states (`CorruptFile`). Casters
        with one `ahead` make storages that are read in the order in which they are made.
        """
        self.source = source
        self.target = target
        self.losses: dict[str, Losses] = {}
        """Of each tensor by its name, as far as its elements have been computed."""
        self.allow_overflow = allow_overflow
        self.lock = Lock()
        """To be held while something is counted."""
        self._file = file or None
        self._ahead = Ahead() if ahead is None else ahead
        self._kernels = local()

    def cast(self, storage: Storage, views: Iterable[tuple[str, TensorRef]]) -> Storage:
        """The storage in the other type, element by element, to be computed when it is read.

        Elements count for the first of `views` (names and tensors of the source type) that has
        them, once; those of no view are cast and not counted.
        """
        count = storage.nbytes // BY_NAME[self.source].itemsize
        size = count * BY_NAME[self.target].itemsize
        data = None
        if storage.data is not None:
            run = _Run(self, storage, storage.data, Owners(views))
            ahead = self._ahead if may_be_shared(storage.data) else None
            source = ComputedSource(storage.data.source.name, size, run.fill, ahead=ahead)
            data = ByteRange(source, 0, size)
        return replace(storage, data=data, nbytes=size, byteorder=sys.byteorder, crc32=None)

    @property
    def kernel(self) -> Kernel:
        """The buffers and the arithmetic, made once for each thread."""
        found: Kernel | None = getattr(self._kernels, "own", None)
        if found is None:
            found = self._kernels.own = Kernel(self.source, self.target)
        return found

    def refused(self, name: str, losses: Losses) -> NotRepresentable:
        """The error for a tensor that overflows where that is not allowed."""
        kind = FLOATS[self.target]
        reach = f"which ends at {kind.largest:.5g}" + ("" if kind.signed else " and has no sign")
        own = re.sub(r"([*?[])", r"[\1]", name.rpartition("/")[2])
        return NotRepresentable(
            f"{printable(name)!r} cannot be cast: {_some_of(losses)} {self.target}, {reach} "
            f"(the largest magnitude is {losses.largest:.5g})",
            file=self._file,
            hint="--allow-overflow casts it all the same, and lists every tensor that overflows; "
            f"--keep {quote(f'{own}={self.source}')} keeps this one",
        )


def _some_of(losses: Losses) -> str:
    """How many elements overflow."""
    if losses.elements == 1:
        return "its one element does not fit"
    return f"{losses.overflow:,} of its {losses.elements:,} elements do not fit"


def checked(storage: Storage, data: ByteRange) -> Checked:
    """The bytes of a storage, to be checked by the CRC-32 that its file states, if it does."""
    return Checked(
        data,
        storage.crc32,
        lambda: CorruptFile(
            f"storage {storage.key!r} is damaged: its bytes do not have the CRC-32 that the file "
            "states",
            file=data.source.name,
            hint="fetch the file again, or take another copy of it",
        ),
    )


def dequantized(weight: TensorRef, scale: TensorRef) -> TensorRef | None:
    """Weights times their scales in float32, to be computed when they are read.

    The scales are one for all, one for each index of the first dimension, or one for each block of
    128 x 128, cut at the edges. None: they are laid out otherwise. After `weight_dequant` of
    DeepSeek-V3 (inference/kernel.py), which rounds the same product to bfloat16.
    """
    shape, scales = (tuple(size or 0 for size in one.shape) for one in (weight, scale))
    rows = shape[0] if shape else 1
    columns = weight.numel // max(rows, 1)
    wide, across = max(columns, 1), 1
    if scale.numel == 1:
        high = max(rows, 1)
    elif scales in ((rows,), (rows, *[1] * (len(shape) - 1))):
        high = 1
    elif len(shape) == 2 and scales == tuple(-(-size // _BLOCK) for size in shape):
        high = wide = _BLOCK
        across = scales[1]
    else:
        return None
    held, beside = weight.storage, scale.storage
    if held is None or beside is None or beside.data is None or not weight.is_verbatim:
        return None
    data, scale_check = weight.data, checked(beside, beside.data)

    @cache
    def factors() -> torch.Tensor:
        import torch

        scale_check.check()
        found = torch.frombuffer(bytearray(scale.read()), dtype=torch_dtype(scale.dtype))
        return found.to(torch.float32)

    def fill(offset: int, buffer: memoryview) -> None:
        require_torch()
        import torch

        for start, stop, room, skipped in chunks(offset, buffer, 4):
            first, left = divmod(start, columns)
            index = torch.arange(left, left + stop - start, dtype=torch.int32)
            row = index // columns
            column = index - row * columns
            factor = factors()[(row + first) // high * across + column // wide]
            raw = bytearray(data.read(start, stop - start))
            numbers = torch.frombuffer(raw, dtype=torch_dtype(weight.dtype)).to(torch.float32)
            made = bytearray((stop - start) * 4)
            torch.mul(numbers, factor, out=torch.frombuffer(made, dtype=torch.float32))
            room[:] = made[skipped : skipped + len(room)]

    source = ComputedSource(data.source.name, weight.numel * 4, fill)
    made = ByteRange(source, 0, source.size)
    storage = Storage(held.key, made, source.size, held.device, sys.byteorder, whole=held.data)
    return replace(weight, dtype="float32", storage=storage, offset=0)


class _Run:
    """One storage on its way."""

    def __init__(self, caster: Caster, storage: Storage, data: ByteRange, owners: Owners) -> None:
        self._caster = caster
        self._data = data
        self._checked = checked(storage, data)
        self._swap = storage.byteorder != sys.byteorder
        self._owners = owners
        self._counted = Spans()
        self._left = data.length // BY_NAME[caster.source].itemsize
        """Elements that were not counted yet."""
        self._refused: NotRepresentable | None = None

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Put the bytes of the cast storage from `offset` into `buffer`."""
        if self._refused is not None:
            raise self._refused
        size = BY_NAME[self._caster.target].itemsize
        checked = self._checked.is_settled
        kernel, crc, first, last = self._caster.kernel, 0, offset // size, 0
        for start, last, room, skipped in chunks(offset, buffer, size):
            crc = kernel.read(self._data, start, last, None if checked else crc)
            if len(room) == (last - start) * size:
                kernel.cast(swap=self._swap, into=room)
            else:
                room[:] = kernel.cast(swap=self._swap)[skipped : skipped + len(room)]
            if self._left:
                self._count(kernel, start, last)
        if not checked:
            self._check(first, last, crc, regular=offset % BLOCK == 0)

    def _check(self, first: int, last: int, crc: int, *, regular: bool) -> None:
        """Check the storage by the parts that were read; where they are no blocks, all at once."""
        size = BY_NAME[self._caster.source].itemsize
        length = (last - first) * size
        block = BLOCK // BY_NAME[self._caster.target].itemsize * size
        if regular and (length == block or (length < block and last * size == self._data.length)):
            self._checked.met(first * size, length, crc)
        else:
            self._checked.check()

    def _count(self, kernel: Kernel, start: int, stop: int) -> None:
        """Count what was lost in the chunk that was just cast, unless it was counted before."""
        with self._caster.lock:
            fresh = self._counted.add(start, stop)
            self._left -= sum(last - first for first, last in fresh)
        for run in fresh:
            for piece in self._owners.pieces(*run):
                losses = kernel.losses(start, piece)
                with self._caster.lock:
                    self._caster.losses.setdefault(piece.name, Losses()).add(losses)
                if losses.overflow and not self._caster.allow_overflow:
                    self._checked.check()  # a damaged file is not to blame on its numbers
                    self._refused = self._caster.refused(piece.name, self._whole(piece.name))
                    raise self._refused

    def _whole(self, name: str) -> Losses:
        """The losses of a whole tensor, wherever its elements lie."""
        whole, kernel = Losses(), self._caster.kernel
        first, last = self._owners.extent(name)
        for start in range(first, last, CHUNK):
            stop = min(start + CHUNK, last)
            kernel.read(self._data, start, stop)
            kernel.cast(swap=self._swap)
            for piece in self._owners.pieces(start, stop):
                if piece.name == name:
                    whole.add(kernel.losses(start, piece))
        return whole
