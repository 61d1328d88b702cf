"""Casts: what a float type holds, what a cast loses, and the kernel that casts and counts."""

from __future__ import annotations

import re
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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
from ckptool.tensors.runtime import require_torch, torch_dtype
from ckptool.words import printable

if TYPE_CHECKING:
    import torch

__all__ = [
    "CHUNK",
    "FLOATS",
    "SATURATES",
    "Caster",
    "Grid",
    "Kernel",
    "Losses",
    "Owners",
    "Piece",
    "Spans",
    "checked",
    "chunks",
    "dequantized",
    "is_exact",
    "own_elements",
]


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


class Spans:
    """Positions that were met, as disjoint runs in order."""

    def __init__(self) -> None:
        """None was met yet."""
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Meet the positions from `start` up to `stop`; the runs of them that are new."""
        if start >= stop:
            return []
        low = bisect_left(self._stops, start)
        high = bisect_right(self._starts, stop)
        fresh, at = [], start
        for known, end in zip(self._starts[low:high], self._stops[low:high], strict=True):
            if at < known:
                fresh.append((at, known))
            at = max(at, end)
        if at < stop:
            fresh.append((at, stop))
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high], self._stops[low:high] = [start], [stop]
        return fresh


@dataclass(frozen=True, slots=True)
class Grid:
    """The elements of a view with holes: steps and sizes, the widest step first."""

    first: int
    axes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one tensor: from `start` up to `stop`; of a view with holes those on `grid`.

    Those on a grid `before` are another tensor's.
    """

    name: str
    start: int
    stop: int
    grid: Grid | None = None
    before: tuple[Grid, ...] = ()


class Owners:
    """The tensors over one storage, each with the elements that are counted as its own.

    What several look at belongs to the first of them, and to one without holes before one with
    holes. A view whose steps overlap is taken to have all from its first element to its last.
    """

    def __init__(self, views: Iterable[tuple[str, TensorRef]]) -> None:
        """Divide a storage among `views`, all of one element type, by their names."""
        taken = Spans()
        self._dense: list[Piece] = []
        self._holed: list[tuple[str, int, int, Grid]] = []
        for name, view in views:
            start, stop, grid = _extent(view)
            if grid is None:
                self._dense.extend(Piece(name, *run) for run in taken.add(start, stop))
            else:
                self._holed.append((name, start, stop, grid))
        self._dense.sort(key=lambda piece: piece.start)
        self._starts = [piece.start for piece in self._dense]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """What of the elements from `start` up to `stop` belongs to whom, disjoint."""
        at = start
        for piece in self._dense[max(bisect_right(self._starts, start) - 1, 0) :]:
            if piece.start >= stop:
                break
            low, high = max(piece.start, at), min(piece.stop, stop)
            if low < high:
                yield from self._between(at, low)
                yield Piece(piece.name, low, high)
                at = high
        yield from self._between(at, stop)

    def extent(self, name: str) -> tuple[int, int]:
        """The first element of a tensor's own, and the one after the last."""
        own = [(piece.start, piece.stop) for piece in self._dense if piece.name == name]
        own += [(start, stop) for holed, start, stop, _ in self._holed if holed == name]
        return min(start for start, _ in own), max(stop for _, stop in own)

    def _between(self, start: int, stop: int) -> Iterator[Piece]:
        """Elements that no tensor without holes has."""
        before: list[Grid] = []
        for name, first, last, grid in self._holed:
            low, high = max(first, start), min(last, stop)
            if low < high:
                yield Piece(name, low, high, grid, tuple(before))
                before.append(grid)


def _extent(view: TensorRef) -> tuple[int, int, Grid | None]:
    """A tensor's first element in its storage, the one after its last, and its grid, if any."""
    sizes = [size or 0 for size in view.shape]
    if 0 in sizes:
        return view.offset, view.offset, None
    pairs = zip(view.stride, sizes, strict=True)
    axes = sorted((step, size) for step, size in pairs if step > 0 and size > 1)
    span, gaps, nested = 1, False, True
    for step, size in axes:
        gaps, nested = gaps or step > span, nested and step >= span
        span += (size - 1) * step
    grid = Grid(view.offset, tuple(reversed(axes))) if gaps and nested else None
    return view.offset, view.offset + span, grid


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


CHUNK = 1 << 15
"""Elements handled at a time: they stay in the processor's cache, and below what torch divides
among threads, whose waiting for each other costs more than it gains where the machine is busy."""


def chunks(
    offset: int, buffer: memoryview, size: int
) -> Iterator[tuple[int, int, memoryview, int]]:
    """The elements, of `size` bytes, that a buffer for the bytes from `offset` has a part of.

    Of each chunk the first element and the one after its last, the part of the buffer that its
    bytes go to, and how many of its first bytes lie before that.
    """
    first, last = offset // size, -(-(offset + len(buffer)) // size)
    for start in range(first, last, CHUNK):
        stop = min(start + CHUNK, last)
        at = start * size - offset
        yield start, stop, buffer[max(at, 0) : at + (stop - start) * size], max(-at, 0)


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


class Kernel:
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
        # A type that has all values of both, in which they can be compared, and its bits.
        double = source == "float64"
        self._wide = torch.float64 if double else torch.float32
        self._bits = torch.int64 if double else torch.int32
        self._size, self._back = (torch.empty(CHUNK, dtype=self._wide) for _ in range(2))
        self._raw = bytearray(CHUNK * self._itemsize)
        self._made = bytearray(CHUNK * BY_NAME[target].itemsize)
        self._source = torch.frombuffer(self._raw, dtype=torch_dtype(source))
        self._own = self._target = torch.frombuffer(self._made, dtype=torch_dtype(target))
        self._count = 0

    def read(self, data: ByteRange, start: int, stop: int, crc: int | None = None) -> int:
        """Take the elements from `start` up to `stop`; the CRC-32 that goes on from `crc`."""
        self._count = stop - start
        raw = memoryview(self._raw)[: self._count * self._itemsize]
        data.read_into(raw, start * self._itemsize)
        return 0 if crc is None else zlib.crc32(raw, crc)

    def cast(self, *, swap: bool, into: memoryview | None = None) -> memoryview:
        """The elements that were read in the target's type: `into` there, or until the next are."""
        import torch

        source, size = self._source[: self._count], self._itemsize
        own = self._own.dtype
        self._target = self._own if into is None else torch.frombuffer(into, dtype=own)
        if swap and size > 1:
            rows = source.view(torch.uint8).view(-1, size)
            rows.copy_(rows.flip(1))
        self._target[: self._count].copy_(source)
        return into or memoryview(self._made)[: self._count * own.itemsize]

    def losses(self, start: int, piece: Piece) -> Losses:
        """What became of a piece of the chunk that was just cast, which began at `start`."""
        chosen = slice(piece.start - start, piece.stop - start)
        own = None if piece.grid is None else own_elements(piece)
        if self._exact:
            return Losses(chosen.stop - chosen.start if own is None else int(own.sum()))
        old = self._source[chosen].to(self._wide)
        back = self._back[chosen].copy_(self._target[chosen])
        if own is not None:
            old, back = old[own], back[own]
        return self._compared(old, back) if old.numel() else Losses()

    def _compared(self, old: torch.Tensor, back: torch.Tensor) -> Losses:
        """The losses in few passes, where nothing overflows and there is no NaN."""
        import torch

        kind, size = self._kind, torch.abs(old, out=self._size[: old.numel()])
        low, high = (end.item() for end in torch.aminmax(size))
        if not high <= kind.largest or not (kind.signed or float(old.min()) >= 0):
            return self._sorted_out(old, back)
        gone = 0
        if low < 2.0**kind.lowest and kind.signed:
            gone = _nonzero(old) - _nonzero(back)
        zeros = 0 if kind.signed else old.numel() - _nonzero(old)
        changed = _nonzero(back.sub_(old).view(self._bits))
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


def own_elements(piece: Piece) -> torch.Tensor:
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
