"""What bytes tell without torch: whether two tensors have the same, and what is NaN or infinite."""

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
from ckptool.files.threads import in_order

_STEP = 512 << 10
"""Bytes compared at a time: those of both sides are still in the processor's cache."""
_LARGE = 4 << 20
"""Bytes from which a second thread takes its part."""


def same_content(a: TensorRef, b: TensorRef, told: BytesDone | None = None) -> bool:
    """Return whether two tensors of one dtype and shape, with `has_content`, have equal elements.

    Equal as bytes (`TensorRef.content`): NaN is itself, -0.0 is not 0.0. `told` is told the bytes
    of one side as they are compared; it ends at the first difference.

    Raises:
        CheckpointError: the bytes of either cannot be read.
    """
    if a.numel == 0:
        return True
    runs = side_by_side(a, b)
    if runs is None:
        return _same_streams(a.content(), b.content(), told)
    return _same_runs(*runs, told)


def same_elements(a: TensorRef, b: TensorRef) -> bool:
    """Return whether two tensors of one type and shape have the same bytes.

    It is False if either has no plain bytes (`has_content`), unless checksums tell.
    """
    same = same_by_checksum(a, b)
    return (a.has_content and b.has_content and same_content(a, b)) if same is None else same


def same_by_checksum(a: TensorRef, b: TensorRef) -> bool | None:
    """Compare two tensors of one dtype and shape by the CRC-32 of their storages.

    True: the tensors are the same stretch of storages of one size and CRC-32. False: of storages
    that differ they are the whole. None: nothing, as one states no CRC-32, a storage has other
    elements too, or a tensor has no `has_content`.
    """
    one, other = (tensor.storage if tensor.has_content else None for tensor in (a, b))
    if one is None or other is None or one.crc32 is None or other.crc32 is None:
        return None
    runs = side_by_side(a, b)
    if runs is None or one.nbytes != other.nbytes or a.offset != b.offset:
        return None
    if one.crc32 == other.crc32:
        return True
    return False if runs[0].length == one.nbytes else None


def side_by_side(a: TensorRef, b: TensorRef) -> tuple[ByteRange, ByteRange] | None:
    """Return the bytes of two tensors of one shape as runs with the elements in one order.

    None if there are no such runs: a view with holes, strides, flags or byte orders that differ.
    Tensors that are transposed alike are compared as they lie, repeated elements once.
    """
    if _layout(a) != _layout(b):
        return None
    one, other = _run(a), _run(b)
    return None if one is None or other is None else (one, other)


def _layout(tensor: TensorRef) -> tuple[object, ...]:
    pairs = zip(tensor.shape, tensor.stride, strict=True)
    order = tensor.storage.byteorder if tensor.storage else "little"
    return tensor.flags, order, [step for size, step in pairs if size != 1]


def _run(tensor: TensorRef) -> ByteRange | None:
    """Return the bytes from the first element to the last, if there are no holes."""
    if tensor.is_contiguous:
        return tensor.data
    if tensor.dtype in PACKED or not tensor.has_content:
        return None
    once = tensor.unrepeated
    packed = once.permuted(once.memory_order)
    return packed.data if packed.is_contiguous else None


def _same_runs(a: ByteRange, b: ByteRange, told: BytesDone | None) -> bool:
    buffers = local()

    def same(start: int) -> int:
        """Return how many bytes from `start` are the same: those of a step, or none."""
        size = min(_STEP, a.length - start)
        if len(buffers.__dict__.get("one", "")) != size:
            buffers.one, buffers.other = bytearray(size), bytearray(size)
        a.read_into(memoryview(buffers.one), start)
        b.read_into(memoryview(buffers.other), start)
        return size if buffers.one == buffers.other else 0  # views are compared byte by byte

    starts = range(0, a.length, _STEP)
    divided = a.length >= _LARGE and a.source.is_shared and b.source.is_shared
    for size in (in_order if divided else map)(same, starts):
        if not size:
            return False
        if told is not None:
            told(size)
    return True


def _same_streams(a: Iterator[bytes], b: Iterator[bytes], told: BytesDone | None) -> bool:
    one = other = memoryview(b"")
    while True:
        one, other = one or memoryview(next(a, b"")), other or memoryview(next(b, b""))
        count = min(len(one), len(other))
        if not count:
            return len(one) == len(other)
        if bytes(one[:count]) != bytes(other[:count]):
            return False
        one, other = one[count:], other[count:]
        if told is not None:
            told(count)


# The exponent of a NaN or an infinity is all ones. One slice with a step gives the highest byte of
# each number of a piece, and a search in it says whether there can be any. Only where there can be,
# each number is looked at. Types of one byte have few codes, which are counted.

_LETTERS = {2: "H", 4: "I", 8: "Q"}
"""The code of an unsigned number of so many bytes (`array`)."""
_PIECE = 64 << 10
"""Bytes looked at as one: they stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class _Form:
    """A binary format of IEEE 754, sizes in bits; `parts` numbers are one element."""

    width: int
    mantissa: int
    parts: int = 1

    @property
    def infinity(self) -> int:
        """The bits of infinity: every bit of the exponent is one."""
        return (1 << self.width - 1) - (1 << self.mantissa)

    def numbers(self, piece: bytes) -> array[int]:
        """Return the bits of each number of a piece."""
        made = array(_LETTERS[self.width // 8], piece)
        if sys.byteorder == "big":
            made.byteswap()
        return made

    def count(self, piece: bytes) -> tuple[int, int]:
        """Return how many elements of a piece are NaN, and how many others infinite."""
        size = self.width // 8
        top = self.infinity >> self.width - 8
        highest = piece[size - 1 :: size]
        if not any(code in highest for code in range(256) if code & top == top):
            return 0, 0
        numbers = self.numbers(piece)
        elements = zip(*(numbers[part :: self.parts] for part in range(self.parts)), strict=True)
        infinity, nan, infinite = self.infinity, 0, 0
        for parts, times in Counter(elements).items():
            largest = max(bits & ~(1 << self.width - 1) for bits in parts)
            nan += times * (largest > infinity)
            infinite += times * (largest == infinity)
        return nan, infinite


_FORMS = {
    "float64": _Form(64, 52),
    "float32": _Form(32, 23),
    "float16": _Form(16, 10),
    "bfloat16": _Form(16, 7),
    "complex128": _Form(64, 52, 2),
    "complex64": _Form(32, 23, 2),
    "complex32": _Form(16, 10, 2),
}
_CODES = {
    "float8_e5m2": (b"\x7d\x7e\x7f\xfd\xfe\xff", b"\x7c\xfc"),
    "float8_e4m3fn": (b"\x7f\xff", b""),
    "float8_e4m3fnuz": (b"\x80", b""),
    "float8_e5m2fnuz": (b"\x80", b""),
    "float8_e8m0fnu": (b"\xff", b""),
}
"""The codes of NaN and of infinities, after c10/util/Float8_*.h, and OCP MX for e8m0."""


def is_floating(dtype: str) -> bool:
    """Return whether numbers of a type can be NaN or infinite."""
    return dtype in _FORMS or dtype in _CODES


def is_infinity_or_zero(ref: TensorRef) -> bool:
    """Return whether every element is an infinity or zero, as in a mask that is added.

    The search stops at the first other number. False for complex numbers, and without bytes.
    """
    form = _FORMS.get(ref.dtype)
    if form is None or form.parts > 1 or not ref.has_content:
        return False
    sign = 1 << form.width - 1
    allowed = {0, sign, form.infinity, sign | form.infinity}
    return all(
        allowed.issuperset(form.numbers(block[start : start + _PIECE]))
        for block in ref.unrepeated.content()
        for start in range(0, len(block), _PIECE)
    )


def nonfinite(ref: TensorRef, told: BytesDone | None = None) -> tuple[int, int]:
    """Return how many elements are NaN, and how many others infinite; parts of a complex count.

    Elements that strides repeat are read once and counted each time. `told` is called with the
    bytes of each block.
    """
    once = ref.unrepeated
    if not is_floating(ref.dtype) or not once.numel:
        return 0, 0
    nan = infinite = 0
    for block in once.content():
        for start in range(0, len(block), _PIECE):
            piece = block[start : start + _PIECE]
            if ref.dtype in _FORMS:
                more = _FORMS[ref.dtype].count(piece)
                nan, infinite = nan + more[0], infinite + more[1]
            else:
                nans, infinities = _CODES[ref.dtype]
                nan += sum(piece.count(code) for code in nans if code in piece)
                infinite += sum(piece.count(code) for code in infinities if code in piece)
        if told is not None:
            told(len(block))
    times = ref.numel // once.numel
    return nan * times, infinite * times
