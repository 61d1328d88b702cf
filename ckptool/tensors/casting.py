"""Cast floats: the range of each dtype, the losses of a cast, the kernel that casts and counts."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from glob import escape
from shlex import quote
from threading import Lock, local
from typing import TYPE_CHECKING

from ckptool.core.model import Storage, TensorRef
from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile, NotRepresentable
from ckptool.files import ByteRange
from ckptool.files.checksums import CheckedRange
from ckptool.files.computed import ReadAhead, make_computed_range
from ckptool.files.source import BLOCK
from ckptool.tensors.materialize import materialize
from ckptool.tensors.storages import get_torch_dtype, require_torch
from ckptool.words import printable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FloatType:
    """The range and precision of a floating-point dtype.

    Sources: IEEE 754, the OCP specification of 8-bit and microscaling formats, and the notes on the
    `fnuz` types in c10/util/Float8_*.h.
    """

    digits: int
    """Significant bits, the implicit one too."""
    smallest_exponent: int
    """Exponent of two of the smallest positive value."""
    largest: float
    infinite: bool = True
    """True if it has infinities."""
    signed: bool = True
    """True if it has negative values and a zero."""


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
"""Dtypes that saturate in torch instead of overflowing, with the limit up to which they round."""


def is_exact(source: str, target: str) -> bool:
    """Return True if every value of the dtype `source` is a value of the dtype `target`."""
    old, new = FLOATS[source], FLOATS[target]
    return old == new or (
        new.digits >= old.digits
        and new.smallest_exponent <= old.smallest_exponent
        and new.largest >= old.largest
        and (new.infinite or not old.infinite)
        and new.signed  # an unsigned one has no zero either
    )


class Caster:
    """Casts storages from one floating type to another, with one set of buffers a thread."""

    def __init__(
        self,
        source: str,
        target: str,
        *,
        allow_overflow: bool,
        file: str = "",
        ahead: ReadAhead | None = None,
    ) -> None:
        """Cast from `source` to `target`; `file` is for messages.

        Torch is imported on the first read. Reading raises `NotRepresentable` at an overflow,
        unless it is allowed, and `CorruptFile` if a storage does not match the CRC-32 that its file
        states. `ahead` computes blocks before they are read, in the order in which storages are
        cast; casters may share one.
        """
        self.source = source
        self.target = target
        self.losses: dict[str, Losses] = {}
        """The losses computed so far, by the name of the first tensor of each storage."""
        self.allow_overflow = allow_overflow
        self.lock = Lock()
        """Guards the losses while a thread adds to them."""
        self._file = file or None
        self._ahead = ReadAhead() if ahead is None else ahead
        self._kernel_of_thread = local()

    def cast(self, storage: Storage, views: Iterable[tuple[str, TensorRef]]) -> Storage:
        """Return the storage in the target dtype; its bytes are computed when they are read.

        `views` are the names and tensors in the storage. Losses are counted under the first name,
        once for each element between the first and the last that the views cover.
        """
        count = storage.nbytes // BY_NAME[self.source].itemsize
        size = count * BY_NAME[self.target].itemsize
        data = None
        if storage.data is not None:
            storage_cast = _StorageCast(self, storage, storage.data, list(views))
            ahead = self._ahead if storage.data.source.is_shared else None
            data = make_computed_range((storage.data,), size, storage_cast.fill, ahead=ahead)
        return replace(storage, data=data, nbytes=size, byteorder=sys.byteorder, crc32=None)

    @property
    def kernel(self) -> Kernel:
        """The buffers and the arithmetic, made once for each thread."""
        kernel: Kernel | None = getattr(self._kernel_of_thread, "kernel", None)
        if kernel is None:
            kernel = self._kernel_of_thread.kernel = Kernel(self.source, self.target)
        return kernel

    def overflow_error(self, name: str, losses: Losses) -> NotRepresentable:
        """Return the error for a tensor that overflows without permission."""
        float_type = FLOATS[self.target]
        limit = f"maximum {float_type.largest:.5g}" + ("" if float_type.signed else ", unsigned")
        key = escape(name.rpartition("/")[2])
        return NotRepresentable(
            f"{printable(name)!r} cannot be cast: {losses.overflow:,} of {losses.elements:,} "
            "values "
            f"overflow {self.target} ({limit}); the largest magnitude is {losses.largest:.5g}",
            file=self._file,
            hint="add --allow-overflow to cast it anyway and list every tensor that overflows, or "
            f"--keep {quote(f'{key}={self.source}')} to keep this one",
        )


def check_storage(storage: Storage, data: ByteRange) -> CheckedRange:
    """Wrap the bytes of a storage, to be compared with the CRC-32 that its file states."""
    return CheckedRange(
        data,
        storage.crc32,
        lambda: CorruptFile(
            f"storage {storage.key!r} is damaged: its CRC-32 is not the one recorded in the file",
            file=data.source.name,
            hint="download the file again, or use another copy",
        ),
    )


def load_checked(ref: TensorRef) -> torch.Tensor:
    """Return the tensor of `ref` after its storage has passed the check of its CRC-32.

    Raises:
        CorruptFile: the bytes do not match the CRC-32 that the file states.
    """
    if ref.storage is not None and ref.storage.data is not None:
        check_storage(ref.storage, ref.storage.data).check()
    return materialize(ref).detach()


class _StorageCast:
    """The cast of one storage, chunk by chunk."""

    def __init__(
        self,
        caster: Caster,
        storage: Storage,
        data: ByteRange,
        views: Sequence[tuple[str, TensorRef]],
    ) -> None:
        """Find which elements the views cover; only these are counted as losses."""
        self._caster = caster
        self._data = data
        self._check = check_storage(storage, data)
        self._needs_swap = storage.byteorder != sys.byteorder
        self._count = data.length // BY_NAME[caster.source].itemsize
        self._name = views[0][0] if views else ""
        spans = [view.span for _, view in views if view.numel]
        self._first_covered = min((first for first, _ in spans), default=0)
        self._end_covered = max((end for _, end in spans), default=0)
        self._counted_chunks = bytearray(-(-self._count // CHUNK))
        """1 for each chunk with losses that were counted: a chunk may be read several times."""
        self._overflow_error: NotRepresentable | None = None
        """The error of an earlier read, which each later read raises again."""

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Write the bytes of the cast storage from `offset` into `buffer`.

        Also counts losses, and checks the CRC-32 of the bytes read.

        Raises:
            NotRepresentable: a value overflows, which is not allowed.
            CorruptFile: the bytes do not match the CRC-32 of the storage.
        """
        if self._overflow_error is not None:
            raise self._overflow_error
        itemsize, kernel = BY_NAME[self._caster.target].itemsize, self._caster.kernel
        # The source's checksum is compared here because nobody else reads its bytes. A chunk fits
        # the processor's cache, so that its CRC-32 costs no second read from memory.
        is_checked = self._check.is_known
        crc, first_read, end_read = 0, None, 0
        for start, stop, room, skipped in iterate_chunks(
            offset, buffer, itemsize, self._count, CHUNK
        ):
            crc = kernel.read(self._data, start, stop, None if is_checked else crc)
            if len(room) == (stop - start) * itemsize:
                kernel.cast(swap=self._needs_swap, into=room)
            else:  # the buffer begins or ends inside of the chunk
                room[:] = kernel.cast(swap=self._needs_swap)[skipped : skipped + len(room)]
            self._count_losses(kernel, start, stop)
            first_read, end_read = start if first_read is None else first_read, stop
        if not is_checked:
            self._check_part(first_read or 0, end_read, crc, starts_block=offset % BLOCK == 0)

    def _check_part(self, first: int, end: int, crc: int, *, starts_block: bool) -> None:
        """Check the storage by the CRC-32 of its elements `first` to `end`, which were just read.

        A writer reads the target block by block: the parts for whole blocks, and the last part,
        add up to the checksum of the storage. After any other read the whole storage is checked.
        """
        itemsize = BY_NAME[self._caster.source].itemsize
        length = (end - first) * itemsize
        length_for_block = BLOCK // BY_NAME[self._caster.target].itemsize * itemsize
        is_last = length < length_for_block and end * itemsize == self._data.length
        if starts_block and (length == length_for_block or is_last):
            self._check.add_part(first * itemsize, length, crc)
        else:
            self._check.check()

    def _count_losses(self, kernel: Kernel, start: int, stop: int) -> None:
        """Add the losses of the chunk that was just cast, unless they were added before.

        Raises:
            NotRepresentable: a value overflows, which is not allowed. The error counts the
                overflows of the whole storage.
        """
        with self._caster.lock:
            if self._counted_chunks[start // CHUNK]:
                return
            self._counted_chunks[start // CHUNK] = True
        losses = self._count_losses_in_views(kernel, start, stop)
        if losses.elements:
            with self._caster.lock:
                self._caster.losses.setdefault(self._name, Losses()).add(losses)
        if losses.overflow and not self._caster.allow_overflow:
            self._check.check()  # raises CorruptFile if damaged bytes are the reason
            losses_of_all = self._count_all_losses(kernel)
            self._overflow_error = self._caster.overflow_error(self._name, losses_of_all)
            raise self._overflow_error

    def _count_all_losses(self, kernel: Kernel) -> Losses:
        """Return the losses of the whole storage, reading and casting it once more."""
        total = Losses()
        for start in range(0, self._count, CHUNK):
            stop = min(start + CHUNK, self._count)
            kernel.read(self._data, start, stop)
            kernel.cast(swap=self._needs_swap)
            total.add(self._count_losses_in_views(kernel, start, stop))
        return total

    def _count_losses_in_views(self, kernel: Kernel, start: int, stop: int) -> Losses:
        """Return the losses of the chunk that was just cast, limited to elements in views."""
        first, end = max(start, self._first_covered), min(stop, self._end_covered)
        return kernel.count_losses(first - start, end - start) if first < end else Losses()


CHUNK = 1 << 15
"""Elements in a chunk. They stay in the processor's cache, and are too few for torch to divide
among threads: on a busy machine these wait for each other longer than they save."""


def iterate_chunks(
    offset: int, buffer: memoryview, itemsize: int, count: int, step: int = CHUNK
) -> Iterator[tuple[int, int, memoryview, int]]:
    """Yield the chunks of `count` elements that overlap a buffer of the bytes from `offset`.

    Chunks begin at multiples of `step`. Each item is the first element, the one after the last, the
    part of the buffer for the bytes of the chunk, and the number of bytes of the chunk that come
    before the buffer.
    """
    first_needed = offset // itemsize
    end_needed = -(-(offset + len(buffer)) // itemsize)
    for start in range(first_needed // step * step, end_needed, step):
        stop = min(start + step, count)
        chunk_begin, chunk_end = start * itemsize - offset, stop * itemsize - offset  # in buffer
        yield start, stop, buffer[max(chunk_begin, 0) : chunk_end], max(-chunk_begin, 0)


@dataclass(slots=True)
class Losses:
    """Counts of elements that a cast converted, overflowed or rounded."""

    elements: int = 0
    overflow: int = 0
    """Elements beyond the largest finite value, or infinite or negative in a type without these.

    After rounding: 65519 is 65504 in float16.
    """
    underflow: int = 0
    """Elements other than zero that became zero."""
    precision: int = 0
    """Elements with another value now, neither of the above."""
    largest: float = 0.0
    """The largest magnitude among the elements that overflow."""

    def add(self, other: Losses) -> None:
        """Add the counts of other elements."""
        self.elements += other.elements
        self.overflow += other.overflow
        self.underflow += other.underflow
        self.precision += other.precision
        self.largest = max(self.largest, other.largest)


class Kernel:
    """The arithmetic on one chunk of elements, with reused buffers."""

    def __init__(self, source: str, target: str) -> None:
        """Allocate memory for chunks of these dtypes."""
        require_torch()
        import torch

        self._is_exact = is_exact(source, target)
        self._target_format = FLOATS[target]
        self._saturation_limit = SATURATES.get(target, float("inf"))
        self._itemsize = BY_NAME[source].itemsize
        # Old and new numbers are compared in a dtype that has all values of both, or as its bits.
        is_double = source == "float64"
        self._wide_dtype = torch.float64 if is_double else torch.float32
        self._wide_bits_dtype = torch.int64 if is_double else torch.int32
        self._magnitude_buffer, self._restored_buffer = (
            torch.empty(CHUNK, dtype=self._wide_dtype, device="cpu") for _ in range(2)
        )
        self._source_bytes = bytearray(CHUNK * self._itemsize)
        self._target_bytes = bytearray(CHUNK * BY_NAME[target].itemsize)
        self._source = torch.frombuffer(self._source_bytes, dtype=get_torch_dtype(source))
        # `_target` is the memory of the last cast: the own buffer, or one given by the caller.
        self._own_target = self._target = torch.frombuffer(
            self._target_bytes, dtype=get_torch_dtype(target)
        )
        self._chunk_length = 0

    def read(self, data: ByteRange, start: int, stop: int, crc: int | None = None) -> int:
        """Read the elements `start` to `stop`; return their CRC-32, continued from `crc`.

        None as `crc`: it is not computed, and 0 is returned.
        """
        self._chunk_length = stop - start
        raw = memoryview(self._source_bytes)[: self._chunk_length * self._itemsize]
        data.read_into(raw, start * self._itemsize)
        return 0 if crc is None else zlib.crc32(raw, crc)

    def cast(self, *, swap: bool, into: memoryview | None = None) -> memoryview:
        """Cast the elements that were read, and return their bytes in `into` or a reused buffer.

        `swap` reverses the bytes of the elements first: they have the other byte order.
        """
        import torch

        source, target_dtype = self._source[: self._chunk_length], self._own_target.dtype
        self._target = (
            self._own_target if into is None else torch.frombuffer(into, dtype=target_dtype)
        )
        if swap and self._itemsize > 1:
            rows = source.view(torch.uint8).view(-1, self._itemsize)
            rows.copy_(rows.flip(1))
        self._target[: self._chunk_length].copy_(source)
        return into or memoryview(self._target_bytes)[: self._chunk_length * target_dtype.itemsize]

    def count_losses(self, first: int, end: int) -> Losses:
        """Return the losses of the elements `first` to `end` of the chunk that was just cast.

        `_classify_losses` counts them if there is NaN, infinity or overflow. All other chunks need
        fewer passes: an underflow is a number that became 0, and every other changed one lost
        precision.
        """
        import torch

        count = end - first
        if self._is_exact or not count:
            return Losses(count)
        old = self._source[first:end].to(self._wide_dtype)
        restored = self._restored_buffer[:count].copy_(self._target[first:end])
        target = self._target_format
        magnitudes = torch.abs(old, out=self._magnitude_buffer[:count])
        smallest, largest = (extreme.item() for extreme in torch.aminmax(magnitudes))
        is_in_range = largest <= target.largest  # False for NaN
        if not is_in_range or not (target.signed or float(old.min()) >= 0):
            return self._classify_losses(old, restored)
        underflow = 0
        if smallest < 2.0**target.smallest_exponent and target.signed:  # unsigned ones have no 0
            underflow = _count_nonzero(old) - _count_nonzero(restored)
        # torch counts the differences about twice as fast if it views them as integers.
        changed = _count_nonzero(restored.sub_(old).view(self._wide_bits_dtype))
        return Losses(count, 0, underflow, changed - underflow)

    def count_losses_of(self, elements: torch.Tensor) -> Losses:
        """Return the losses of casting a tensor in memory of at most `CHUNK` elements."""
        self._chunk_length = elements.numel()
        self._source[: self._chunk_length].copy_(elements.flatten())
        self.cast(swap=False)  # in memory, so in the machine's byte order
        return self.count_losses(0, self._chunk_length)

    def _classify_losses(self, old: torch.Tensor, restored: torch.Tensor) -> Losses:
        """Return the losses of elements with NaN, infinities or overflow.

        `restored` are the elements after the cast, in the dtype of `old`. Some dtypes saturate:
        their largest value then stands for larger ones, which overflow too.
        """
        import torch

        magnitudes, finite = old.abs(), torch.isfinite(old)
        overflowed = finite & (~torch.isfinite(restored) | (magnitudes > self._saturation_limit))
        if not self._target_format.infinite:
            overflowed |= torch.isinf(old)
        if not self._target_format.signed:
            overflowed |= old < 0
        finite_in_both = finite & ~overflowed
        vanished = finite_in_both & (old != 0) & (restored == 0)
        changed = finite_in_both & (old != restored)
        overflow, underflow = int(overflowed.sum()), int(vanished.sum())
        largest = float(magnitudes[overflowed].max()) if overflow else 0.0
        precision = int(changed.sum()) - underflow
        return Losses(old.numel(), overflow, underflow, precision, largest)


def _count_nonzero(elements: torch.Tensor) -> int:
    import torch

    return int(torch.count_nonzero(elements))


def count_cast_losses(blocks: Iterable[torch.Tensor], source: str, target: str) -> Losses:
    """Count the losses of casting blocks of elements, as a cast of a file does.

    Blocks have at most `CHUNK` elements of dtype `source`. If one of the dtypes is no float, a
    changed number counts in `precision`.

    Raises:
        RuntimeError, TypeError: torch lacks an operation for one of the dtypes.
    """
    total = Losses()
    kernel = Kernel(source, target) if {source, target} <= FLOATS.keys() else None
    for block in blocks:
        if kernel is not None:
            total.add(kernel.count_losses_of(block))
        else:
            changed = int(_mark_changed(block, get_torch_dtype(target)).sum())
            total.add(Losses(block.numel(), precision=changed))
    return total


def _mark_changed(block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask: True for the elements that a cast to `dtype` changes.

    A cast from complex to real numbers changes those with an imaginary part.
    """
    import torch

    if block.is_complex():
        pairs = torch.view_as_real(block.resolve_conj().to(torch.complex128))
        if dtype.is_complex:
            return _mark_changed(pairs, dtype.to_real()).any(-1)
        real, imaginary = pairs.unbind(-1)
        return _mark_changed(real, dtype) | (imaginary != 0)
    after = block.to(dtype.to_real() if dtype.is_complex else dtype)
    if after.is_floating_point() and not block.is_floating_point():
        # Integers are compared as integers, because floats do not have all of them.
        after = after.double()
        return ~after.isfinite() | (after.to(block.dtype) != block)
    wide = torch.float64 if block.is_floating_point() else torch.int64
    old, new = block.to(wide), after.to(wide)
    return ~((old == new) | (old.isnan() & new.isnan()))
