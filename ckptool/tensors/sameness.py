"""Whether two tensors hold the same bytes, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from threading import local

from ckptool.dtypes import PACKED
from ckptool.files import ByteRange
from ckptool.files.source import Told
from ckptool.files.threads import in_order
from ckptool.model import TensorRef

__all__ = ["same_by_checksum", "same_content", "same_elements", "side_by_side"]

_STEP = 512 << 10
"""Bytes compared at a time: those of both sides are still in the processor's cache."""
_LARGE = 4 << 20
"""Bytes from which a second thread takes its part."""


def same_content(a: TensorRef, b: TensorRef, told: Told | None = None) -> bool:
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


def _same_runs(a: ByteRange, b: ByteRange, told: Told | None) -> bool:
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


def _same_streams(a: Iterator[bytes], b: Iterator[bytes], told: Told | None) -> bool:
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
