"""Whether two tensors hold the same bytes, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Event, Lock

from ckptool.dtypes import PACKED
from ckptool.files import ByteRange
from ckptool.files.source import Told
from ckptool.model import TensorRef

__all__ = [
    "Worker",
    "in_turns",
    "same_by_checksum",
    "same_content",
    "same_elements",
    "side_by_side",
]

Worker = Callable[[int, int], bool]
"""Does what lies from the one position up to the other; False: the rest need not be done."""


def in_turns(length: int, step: int, workers: Sequence[Worker], told: Told | None = None) -> bool:
    """Have all positions below `length` worked on; return whether no worker returned False.

    `told` is told of them. Each worker has a thread, the first worker the caller's, and takes the
    next step when it has finished one: all are busy until the end, and a file is read nearly from
    front to back. An error in one worker stops all of them.
    """
    starts, lock, stopped = iter(range(0, length, step)), Lock(), Event()
    position = known = 0

    def tell() -> None:
        """Tell of the positions since the last time."""
        nonlocal known
        if told is not None and position > known and not stopped.is_set():
            told(position - known)
            known = position

    def work(worker: Worker, done: Callable[[], object] = bool) -> None:
        nonlocal position
        finished = False
        try:
            while not stopped.is_set():
                with lock:
                    start = next(starts, None)
                    if start is None:
                        break
                    position = stop = min(start + step, length)
                if not worker(start, stop):
                    return
                done()
            finished = True
        finally:
            if not finished:
                stopped.set()

    if len(workers) == 1 or length <= step:
        work(workers[0], tell)
        return not stopped.is_set()
    from concurrent.futures import ThreadPoolExecutor  # brings logging: milliseconds of every start

    with ThreadPoolExecutor(len(workers) - 1) as pool:
        others = [pool.submit(work, worker) for worker in workers[1:]]
        work(workers[0], tell)
    for other in others:
        other.result()
    tell()
    return not stopped.is_set()


_STEP = 512 << 10
"""Bytes compared at a time: those of both sides are still in the processor's cache."""
_SMALL = 64 << 10
"""Bytes up to which buffers cost more than they spare."""
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
    """Return whether two tensors of one type and shape have the same bytes; False without any."""
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
    if a.flags != b.flags or _order(a) != _order(b) or _byteorder(a) != _byteorder(b):
        return None
    one, other = _run(a), _run(b)
    return None if one is None or other is None else (one, other)


def _order(tensor: TensorRef) -> list[int]:
    """Return the strides of dimensions with several elements."""
    pairs = zip(tensor.shape, tensor.stride, strict=True)
    return [step for size, step in pairs if size != 1]


def _byteorder(tensor: TensorRef) -> str:
    return "little" if tensor.storage is None else tensor.storage.byteorder


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
    """Return whether two runs of one length are the same bytes."""
    if a.length <= _SMALL:
        same = a.read() == b.read()
        if same and told is not None:
            told(a.length)
        return same
    shared = a.length >= _LARGE and a.source.is_shared and b.source.is_shared
    workers = [_comparing(a, b) for _ in range(2 if shared else 1)]
    return in_turns(a.length, _STEP, workers, told)


def _comparing(a: ByteRange, b: ByteRange) -> Worker:
    """Return a worker with its own buffers. Bytearrays compare at once, views byte by byte."""
    size = min(a.length, _STEP)
    one, other = bytearray(size), bytearray(size)

    def is_same(start: int, stop: int) -> bool:
        nonlocal one, other
        if stop - start != len(one):  # the last step
            one, other = bytearray(stop - start), bytearray(stop - start)
        a.read_into(memoryview(one), start)
        b.read_into(memoryview(other), start)
        return one == other

    return is_same


def _same_streams(a: Iterator[bytes], b: Iterator[bytes], told: Told | None) -> bool:
    """Return whether two streams have the same bytes, in any blocks."""
    one = other = b""
    at = beside = 0
    while True:
        if at == len(one):
            one, at = next(a, b""), 0
        if beside == len(other):
            other, beside = next(b, b""), 0
        count = min(len(one) - at, len(other) - beside)
        if not count:
            return len(one) - at == len(other) - beside
        if one[at : at + count] != other[beside : beside + count]:
            return False
        at, beside = at + count, beside + count
        if told is not None:
            told(count)
