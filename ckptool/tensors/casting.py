"""Storages in another floating type, computed in blocks, and what that does to their elements.

The elements become exactly what `tensor.to(dtype)` of torch gives. What is lost is judged on the
source: some of torch's casts saturate (1e6 is 448 in float8_e4m3fn), others drop a sign.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
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
from ckptool.paths import printable
from ckptool.tensors.coverage import Grid, Owners, Piece, Spans
from ckptool.tensors.runtime import require_torch, torch_dtype

if TYPE_CHECKING:
    import torch

__all__ = ["FLOATS", "SATURATES", "Caster", "Losses", "checked", "is_exact"]

CHUNK = 1 << 15
"""Elements handled at a time: they stay in the processor's cache, and below what torch divides
among threads, whose waiting for each other costs more than it gains where the machine is busy."""


@dataclass(frozen=True, slots=True)
class FloatType:
    """What a floating type can express.

    Sources: IEEE 754, the OCP specification of 8-bit and microscaling formats, and the notes on the
    `fnuz` types in c10/util/Float8_*.h.
    """

    digits: int
    """Significant bits, the implicit one too."""
    lowest: int
    """Exponent of two of the smallest positive value."""
    largest: float
    infinite: bool = True
    """Whether it has infinities."""
    signed: bool = True
    """Whether it has signs, and a zero."""


FLOATS = {
    "float64": FloatType(53, -1074, sys.float_info.max),
    "float32": FloatType(24, -149, (2 - 2.0**-23) * 2.0**127),
    "float16": FloatType(11, -24, 65504.0),
    "bfloat16": FloatType(8, -133, (2 - 2.0**-7) * 2.0**127),
    "float8_e4m3fn": FloatType(4, -9, 448.0, infinite=False),
    "float8_e5m2": FloatType(3, -16, 57344.0),
    "float8_e4m3fnuz": FloatType(4, -10, 240.0, infinite=False),
    "float8_e5m2fnuz": FloatType(3, -17, 57344.0, infinite=False),
    "float8_e8m0fnu": FloatType(1, -127, 2.0**127, infinite=False, signed=False),
}
"""The types that are cast from and to."""

SATURATES = {"float8_e4m3fn": 464.0}
"""Types of which torch makes what is too large the largest: beyond this nothing rounds to it."""


def is_exact(source: str, target: str) -> bool:
    """Whether every value of the one type is one of the other."""
    old, new = FLOATS[source], FLOATS[target]
    return old == new or (
        new.digits >= old.digits
        and new.lowest <= old.lowest
        and new.largest >= old.largest
        and (new.infinite or not old.infinite)
        and new.signed
    )


@dataclass(slots=True)
class Losses:
    """How many elements were cast, and of those how many are not what they were."""

    elements: int = 0
    overflow: int = 0
    """Finite and beyond the largest finite value, or infinite or negative where there is no such.

    After rounding: 65519 is 65504 in float16.
    """
    underflow: int = 0
    """Not zero, and zero now."""
    precision: int = 0
    """Another value now, neither of the above."""
    largest: float = 0.0
    """The largest magnitude of those that overflow."""
    zeros: int = 0
    """Zero, and the smallest value now, as the type has no zero."""

    def add(self, other: Losses) -> None:
        """Count those too."""
        self.elements += other.elements
        self.overflow += other.overflow
        self.underflow += other.underflow
        self.precision += other.precision
        self.zeros += other.zeros
        self.largest = max(self.largest, other.largest)


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
        return Storage(storage.key, data, size, storage.device, sys.byteorder)

    @property
    def kernel(self) -> _Kernel:
        """The buffers and the arithmetic, made once for each thread."""
        found: _Kernel | None = getattr(self._kernels, "own", None)
        if found is None:
            found = self._kernels.own = _Kernel(self.source, self.target)
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
        first, last = offset // size, -(-(offset + len(buffer)) // size)
        checked = self._checked.is_settled
        kernel, crc = self._caster.kernel, 0
        for start in range(first, last, CHUNK):
            stop = min(start + CHUNK, last)
            crc = kernel.read(self._data, start, stop, None if checked else crc)
            at = start * size - offset
            room = buffer[max(at, 0) : at + (stop - start) * size]
            if at >= 0 and len(room) == (stop - start) * size:
                kernel.cast(swap=self._swap, into=room)
            else:
                made = kernel.cast(swap=self._swap)[max(-at, 0) :]
                room[:] = made[: len(room)]
            if self._left:
                self._count(kernel, start, stop)
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

    def _count(self, kernel: _Kernel, start: int, stop: int) -> None:
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


class _Kernel:
    """The arithmetic on one chunk, over buffers that are used again and again."""

    def __init__(self, source: str, target: str) -> None:
        """Take memory for chunks of these types.

        Raises:
            TorchMissing: torch is not installed.
            UnsupportedFormat: this torch has not one of the types.
        """
        require_torch()
        import torch

        self._exact = is_exact(source, target)
        self._kind = FLOATS[target]
        self._limit = SATURATES.get(target, float("inf"))
        self._itemsize = BY_NAME[source].itemsize
        wide = torch.float64 if source == "float64" else torch.float32
        self._bits = torch.int64 if source == "float64" else torch.int32
        self._raw = bytearray(CHUNK * self._itemsize)
        self._made = bytearray(CHUNK * BY_NAME[target].itemsize)
        self._source = torch.frombuffer(self._raw, dtype=torch_dtype(source))
        self._own = self._target = torch.frombuffer(self._made, dtype=torch_dtype(target))
        # Both types in one that has all their values, where they can be compared.
        self._back = torch.empty(CHUNK, dtype=wide)
        self._size = torch.empty(CHUNK, dtype=wide)
        self._low_bits: torch.Tensor | None = None
        if (source, target) == ("float32", "bfloat16"):  # the lower half of the bits goes
            halves = self._source.view(torch.int16)
            self._low_bits = halves[sys.byteorder == "big" :: 2]
        self._old = self._source
        if self._source.dtype != wide and not self._exact:
            self._old = torch.empty(CHUNK, dtype=wide)
        self._count = 0
        self._widened = False

    def read(self, data: ByteRange, start: int, stop: int, crc: int | None = None) -> int:
        """Take the elements from `start` up to `stop`; the CRC-32 that goes on from `crc`."""
        self._count, self._widened = stop - start, False
        raw = memoryview(self._raw)[: self._count * self._itemsize]
        data.read_into(raw, start * self._itemsize)
        return 0 if crc is None else zlib.crc32(raw, crc)

    def cast(self, *, swap: bool, into: memoryview | None = None) -> memoryview:
        """The elements that were read in the target's type: `into` there, or until the next are."""
        import torch

        source, size = self._source[: self._count], self._itemsize
        self._target = self._own if into is None else torch.frombuffer(into, dtype=self._own.dtype)
        if swap and size > 1:
            rows = source.view(torch.uint8).view(-1, size)
            rows.copy_(rows.flip(1))
        self._target[: self._count].copy_(source)
        return memoryview(self._made)[: self._count * self._own.element_size()]

    def losses(self, start: int, piece: Piece) -> Losses:
        """What became of a piece of the chunk that was just cast, which began at `start`.

        Few passes where nothing overflows and there is no NaN, which is nearly everywhere.
        """
        chosen = slice(piece.start - start, piece.stop - start)
        if self._exact:
            mask = None if piece.grid is None else _own(piece)
            count = chosen.stop - chosen.start if mask is None else int(mask.sum())
            return Losses(count)
        if self._low_bits is not None and piece.grid is None:
            return self._halved(chosen)
        if not self._widened:
            self._widen()
        old, back = self._old[chosen], self._back[chosen]
        if piece.grid is not None:
            mask = _own(piece)
            old, back = old[mask], back[mask]
        return self._compared(old, back) if old.numel() else Losses()

    def _widen(self) -> None:
        """Have the chunk before and after in a type where both can be compared."""
        cast = slice(self._count)
        self._back[cast].copy_(self._target[cast])
        if self._old is not self._source:
            self._old[cast].copy_(self._source[cast])
        self._widened = True

    def _reach(self, old: torch.Tensor) -> tuple[float, float]:
        """The least and the largest magnitude; NaN where there is one."""
        import torch

        size = torch.abs(old, out=self._size[: old.numel()])
        low, high = torch.aminmax(size)
        return low.item(), high.item()

    def _halved(self, chosen: slice) -> Losses:
        """The losses where the higher half of the bits is what remains, rounded."""
        old, low_bits = self._source[chosen], self._low_bits
        low, high = self._reach(old)
        if not high <= self._kind.largest or low_bits is None:
            return self._sorted_out(old, self._target[chosen].to(old.dtype))
        gone = 0
        if low < 2.0**self._kind.lowest:
            gone = _nonzero(old) - _nonzero(self._target[chosen])
        return Losses(old.numel(), 0, gone, _nonzero(low_bits[chosen]) - gone)

    def _compared(self, old: torch.Tensor, back: torch.Tensor) -> Losses:
        low, high = self._reach(old)
        kind = self._kind
        if not high <= kind.largest or not (kind.signed or float(old.min()) >= 0):
            return self._sorted_out(old, back)
        gone = 0
        if low < 2.0**kind.lowest and kind.signed:
            gone = _nonzero(old) - _nonzero(back)
        zeros = 0 if kind.signed else old.numel() - _nonzero(old)
        changed = _nonzero((back - old).view(self._bits))
        return Losses(old.numel(), 0, gone, changed - gone - zeros, zeros=zeros)

    def _sorted_out(self, old: torch.Tensor, back: torch.Tensor) -> Losses:
        """The same with NaN, infinities and what overflows told apart."""
        import torch

        size, finite = old.abs(), torch.isfinite(old)
        over = finite & (~torch.isfinite(back) | (size > self._limit))
        if not self._kind.infinite:
            over |= torch.isinf(old)
        if not self._kind.signed:
            over |= old < 0
        rest = finite & ~over
        gone = rest & (old != 0) & (back == 0)
        changed = rest & (old != back)
        overflow, underflow = int(over.sum()), int(gone.sum())
        largest = float(size[over].max()) if overflow else 0.0
        zeros = 0 if self._kind.signed else old.numel() - _nonzero(old)
        precision = int(changed.sum()) - underflow - zeros
        return Losses(old.numel(), overflow, underflow, precision, largest, zeros)


def _nonzero(elements: torch.Tensor) -> int:
    import torch

    return int(torch.count_nonzero(elements))


def _own(piece: Piece) -> torch.Tensor:
    """Which elements of a piece of a view with holes are its own."""
    import torch

    index = torch.arange(piece.start, piece.stop)
    own = torch.ones(index.numel(), dtype=torch.bool)
    for grid in piece.before:
        own &= ~_on_grid(index, grid)
    return own if piece.grid is None else own & _on_grid(index, piece.grid)


def _on_grid(index: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Which elements of the storage a view looks at."""
    rest = index - grid.first
    inside = rest >= 0
    for step, size in grid.axes:
        at = rest // step
        inside &= at < size
        rest = rest - at * step
    return inside & (rest == 0)
