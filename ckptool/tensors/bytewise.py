"""Compare tensors by their bytes and count NaN and infinities, without torch."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from threading import local

from ckptool.core.model import TensorRef
from ckptool.dtypes import PACKED
from ckptool.files import ByteRange
from ckptool.files.source import BytesDone
from ckptool.files.threads import run_in_order

_STEP_BYTES = 512 << 10
"""Bytes compared at a time: those of both sides are still in the processor's cache."""
_MIN_PARALLEL_BYTES = 4 << 20
"""Bytes from which a second thread takes its part."""


def has_same_content(a: TensorRef, b: TensorRef, on_progress: BytesDone | None = None) -> bool:
    """Return True if two tensors of one dtype and shape have equal bytes.

    Both must have `has_content`. NaN is equal to itself, -0.0 is not equal to 0.0. `on_progress` is
    called with the bytes compared on one side; comparing ends at the first difference.

    Raises:
        CheckpointError: the bytes of a tensor cannot be read.
    """
    if a.numel == 0:
        return True
    runs = align_runs(a, b)
    if runs is None:
        return _has_same_blocks(a.content(), b.content(), on_progress)
    return _has_same_bytes(*runs, on_progress)


def has_same_elements(a: TensorRef, b: TensorRef) -> bool:
    """Return True if two tensors of one dtype and shape have equal bytes.

    Checksums decide if the file has them. False if a tensor has no plain bytes (`has_content`).
    """
    equal = compare_checksums(a, b)
    if equal is not None:
        return equal
    return a.has_content and b.has_content and has_same_content(a, b)


def compare_checksums(a: TensorRef, b: TensorRef) -> bool | None:
    """Compare two tensors of one dtype and shape by the CRC-32 of their storages.

    True: both are the same range of storages of equal size and CRC-32. False: both cover
    their storages, whose CRC-32 differ. None: not decided, because a CRC-32 is missing, a storage
    has other elements too, or a tensor has no content (`TensorRef.has_content`).
    """
    storage_a, storage_b = (tensor.storage if tensor.has_content else None for tensor in (a, b))
    if storage_a is None or storage_b is None or storage_a.crc32 is None or storage_b.crc32 is None:
        return None
    runs = align_runs(a, b)
    if runs is None or storage_a.nbytes != storage_b.nbytes or a.offset != b.offset:
        return None
    if storage_a.crc32 == storage_b.crc32:
        return True
    covers_storage = runs[0].length == storage_a.nbytes
    return False if covers_storage else None  # the difference may be in other elements


def align_runs(a: TensorRef, b: TensorRef) -> tuple[ByteRange, ByteRange] | None:
    """Return the bytes of two tensors of one shape as runs with the same order of elements.

    None if a tensor has holes, or if strides, flags or byte orders differ. Tensors that are
    transposed alike are compared in memory order, and expanded elements once.
    """
    if _layout_of(a) != _layout_of(b):
        return None
    run_a, run_b = _run_of(a), _run_of(b)
    return None if run_a is None or run_b is None else (run_a, run_b)


def _layout_of(tensor: TensorRef) -> tuple[object, ...]:
    """Return the properties in which two tensors must agree to be compared by bytes."""
    pairs = zip(tensor.shape, tensor.stride, strict=True)
    order = tensor.storage.byteorder if tensor.storage else "little"
    # The stride of a dimension of size 1 moves nothing.
    return tensor.flags, order, [step for size, step in pairs if size != 1]


def _run_of(tensor: TensorRef) -> ByteRange | None:
    """Return the bytes from the first element to the last in memory; None if there are holes.

    Expanded elements are in them once. Elements smaller than a byte must be in row-major order.
    """
    if tensor.is_contiguous:
        return tensor.data
    if tensor.dtype in PACKED or not tensor.has_content:
        return None
    unrepeated = tensor.unrepeated
    in_memory_order = unrepeated.permuted(unrepeated.memory_order)
    return in_memory_order.data if in_memory_order.is_contiguous else None


def _has_same_bytes(a: ByteRange, b: ByteRange, on_progress: BytesDone | None) -> bool:
    """Return True if two ranges have equal bytes; compare large ones in two threads."""
    thread = local()

    def compare_step(start: int) -> int:
        """Return the size of the step at `start` if its bytes are equal, else 0."""
        size = min(_STEP_BYTES, a.length - start)
        # Each thread has two buffers. Only the last step is smaller and needs new ones: whole
        # arrays are compared at once, memory views byte by byte.
        if len(getattr(thread, "buffer_a", b"")) != size:
            thread.buffer_a, thread.buffer_b = bytearray(size), bytearray(size)
        a.read_into(memoryview(thread.buffer_a), start)
        b.read_into(memoryview(thread.buffer_b), start)
        return size if thread.buffer_a == thread.buffer_b else 0

    starts = range(0, a.length, _STEP_BYTES)
    is_parallel = a.length >= _MIN_PARALLEL_BYTES and a.source.is_shared and b.source.is_shared
    sizes = run_in_order(compare_step, starts) if is_parallel else map(compare_step, starts)
    for size in sizes:
        if not size:
            return False
        if on_progress is not None:
            on_progress(size)
    return True


def _has_same_blocks(a: Iterator[bytes], b: Iterator[bytes], on_progress: BytesDone | None) -> bool:
    """Return True if two streams of blocks of any size have equal bytes."""
    block_a = block_b = memoryview(b"")
    while True:
        block_a, block_b = block_a or memoryview(next(a, b"")), block_b or memoryview(next(b, b""))
        count = min(len(block_a), len(block_b))
        if not count:  # at least one stream is at its end
            return len(block_a) == len(block_b)
        if bytes(block_a[:count]) != bytes(block_b[:count]):
            return False
        block_a, block_b = block_a[count:], block_b[count:]
        if on_progress is not None:
            on_progress(count)


# The exponent of a NaN or an infinity is all ones. One slice with a step gives the highest byte of
# each number of a piece, and a search in it says whether there can be any. Only where there can be,
# each number is looked at. Types of one byte have few codes, which are counted.

_ARRAY_CODE_BY_SIZE = {2: "H", 4: "I", 8: "Q"}
"""The code of an unsigned number of so many bytes (`array`)."""
_PIECE_BYTES = 64 << 10
"""Bytes looked at as one: they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class _FloatFormat:
    """An IEEE 754 format, sizes in bits; a complex element consists of two `parts`."""

    width: int
    mantissa: int
    parts: int = 1

    @property
    def infinity(self) -> int:
        """The bits of positive infinity: ones in the exponent, zeros in sign and mantissa."""
        sign_bit, exponent_unit = 1 << self.width - 1, 1 << self.mantissa
        return sign_bit - exponent_unit

    def to_integers(self, piece: bytes) -> array[int]:
        """Return the bits of each number in a block of bytes."""
        numbers = array(_ARRAY_CODE_BY_SIZE[self.width // 8], piece)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    def count_nonfinite(self, piece: bytes) -> tuple[int, int]:
        """Return the number of NaN and of infinite elements in a block of bytes.

        A complex element is NaN if a part is NaN. Pieces without both are recognized quickly.
        """
        size = self.width // 8
        exponent_bits = self.infinity >> self.width - 8  # in the highest byte of a number
        highest_bytes = piece[size - 1 :: size]
        suspects = (byte for byte in range(256) if byte & exponent_bits == exponent_bits)
        if not any(byte in highest_bytes for byte in suspects):
            return 0, 0
        numbers = self.to_integers(piece)
        elements = zip(*(numbers[part :: self.parts] for part in range(self.parts)), strict=True)
        infinity, nan, infinite = self.infinity, 0, 0
        magnitude_mask = ~(1 << self.width - 1)  # all bits but the sign
        for parts, repeats in Counter(elements).items():
            largest = max(bits & magnitude_mask for bits in parts)
            nan += repeats * (largest > infinity)  # ones in the exponent, and a mantissa
            infinite += repeats * (largest == infinity)
        return nan, infinite


_FORMAT_BY_DTYPE = {
    "float64": _FloatFormat(64, 52),
    "float32": _FloatFormat(32, 23),
    "float16": _FloatFormat(16, 10),
    "bfloat16": _FloatFormat(16, 7),
    "complex128": _FloatFormat(64, 52, 2),
    "complex64": _FloatFormat(32, 23, 2),
    "complex32": _FloatFormat(16, 10, 2),
}
_NONFINITE_CODES = {
    "float8_e5m2": (b"\x7d\x7e\x7f\xfd\xfe\xff", b"\x7c\xfc"),
    "float8_e4m3fn": (b"\x7f\xff", b""),
    "float8_e4m3fnuz": (b"\x80", b""),
    "float8_e5m2fnuz": (b"\x80", b""),
    "float8_e8m0fnu": (b"\xff", b""),
}
"""The codes of NaN and of infinities, after c10/util/Float8_*.h, and OCP MX for e8m0."""


def is_floating(dtype: str) -> bool:
    """Return True if numbers of a dtype can be NaN or infinite."""
    return dtype in _FORMAT_BY_DTYPE or dtype in _NONFINITE_CODES


def is_infinity_or_zero(ref: TensorRef) -> bool:
    """Return True if every element is an infinity or zero, as in an additive mask.

    The search stops at the first other number. False for complex dtypes and tensors without bytes.
    """
    float_format = _FORMAT_BY_DTYPE.get(ref.dtype)
    if float_format is None or float_format.parts > 1 or not ref.has_content:
        return False
    sign_bit, infinity = 1 << float_format.width - 1, float_format.infinity
    allowed = {0, sign_bit, infinity, sign_bit | infinity}  # of both signs
    return all(
        allowed.issuperset(float_format.to_integers(block[start : start + _PIECE_BYTES]))
        for block in ref.unrepeated.content()
        for start in range(0, len(block), _PIECE_BYTES)
    )


def count_nonfinite_elements(
    ref: TensorRef, on_progress: BytesDone | None = None
) -> tuple[int, int]:
    """Return the number of NaN and of infinite elements; a complex one counts by its parts.

    Expanded elements are read once and counted each time. `on_progress` is called with the
    bytes of each block.
    """
    unrepeated = ref.unrepeated
    if not is_floating(ref.dtype) or not unrepeated.numel:
        return 0, 0
    nan = infinite = 0
    for block in unrepeated.content():
        for start in range(0, len(block), _PIECE_BYTES):
            piece = block[start : start + _PIECE_BYTES]
            if ref.dtype in _FORMAT_BY_DTYPE:
                nan_in_piece, infinite_in_piece = _FORMAT_BY_DTYPE[ref.dtype].count_nonfinite(piece)
                nan, infinite = nan + nan_in_piece, infinite + infinite_in_piece
            else:
                nan_codes, infinity_codes = _NONFINITE_CODES[ref.dtype]
                nan += sum(piece.count(code) for code in nan_codes if code in piece)
                infinite += sum(piece.count(code) for code in infinity_codes if code in piece)
        if on_progress is not None:
            on_progress(len(block))
    repeats = ref.numel // unrepeated.numel
    return nan * repeats, infinite * repeats
