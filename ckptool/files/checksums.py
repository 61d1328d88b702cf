"""Compute CRC-32 (of ranges that are read in parts, and of many ranges in threads) and CRC-32C."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain
from threading import Lock
from typing import NamedTuple

from ckptool.errors import CorruptFile
from ckptool.files.source import ByteRange, BytesDone
from ckptool.files.threads import run_in_order

_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32, with its bits reversed."""


class CheckedRange:
    """A range of bytes with a known CRC-32, which is checked while the range is read."""

    def __init__(
        self, data: ByteRange, crc32: int | None, make_error: Callable[[], Exception]
    ) -> None:
        """Expect `crc32` (None: unknown) for `data`; `make_error` makes the error of a mismatch."""
        self._data = data
        self._make_error = make_error
        self._expected = crc32
        """The CRC-32 of the range; None if it is unknown, or was compared."""
        self._parts: dict[int, tuple[int, int]] = {}
        """By its first byte, the length and the CRC-32 of each part that was read."""
        self._length_read = 0
        self._lock = Lock()

    @property
    def is_known(self) -> bool:
        """True if nothing remains to be checked: it was compared, or the CRC-32 is unknown."""
        return self._expected is None

    def add_part(self, start: int, length: int, crc32: int) -> None:
        """Add the CRC-32 of a part that was read; parts do not overlap.

        Raises the error from `make_error` if all parts have been read and the CRC-32 does not
        match.
        """
        with self._lock:
            is_checked = self._expected is None
            if is_checked or start in self._parts:
                return
            self._parts[start] = length, crc32
            self._length_read += length
            if self._length_read < self._data.length:
                return
            crc_so_far = 0
            for _, (size, crc) in sorted(self._parts.items()):
                crc_so_far = combine_crc32(crc_so_far, crc, size)
            self._compare(crc_so_far)

    def check(self) -> None:
        """Read and check the whole range now, unless it was checked; raises as `add_part`."""
        with self._lock:
            if self._expected is None:
                return
            self._compare(compute_crc32(self._data.iterate_reused()))

    def _compare(self, crc32: int) -> None:
        """Raise the error if the whole range has another CRC-32; or else expect nothing more."""
        if crc32 != self._expected:
            raise self._make_error()
        self._expected = None
        self._parts.clear()


def compute_crc32(blocks: Iterable[bytes | memoryview]) -> int:
    """Return the CRC-32 of consecutive blocks."""
    crc = 0
    for block in blocks:
        crc = zlib.crc32(block, crc)
    return crc


def crc32c(data: bytes, crc: int = 0) -> int:
    """Return the CRC-32C of `data`, continued from `crc`."""
    import google_crc32c  # only TensorFlow files have these checksums

    return int(google_crc32c.extend(crc, data))


def compute_crc32cs(runs: Sequence[ByteRange], on_progress: BytesDone) -> Iterator[int]:
    """Yield the CRC-32C of each range; `on_progress` is called with the bytes done."""
    for run in runs:
        crc = 0
        for block in run.iterate_blocks(_READ_BYTES):
            crc = crc32c(block, crc)
            on_progress(len(block))
        yield crc


def combine_crc32(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two consecutive ranges, the second of `length` bytes."""
    if first == 0:
        return second
    return _multiply(_shift_factor(length), first) ^ second


@lru_cache(maxsize=64)
def _shift_factor(length: int) -> int:
    """Return the factor of a CRC-32 before `length` more bytes: x to the power of their bits.

    By repeated squaring, as in `crc32_combine` of zlib 1.2.12.
    """
    power, square = 1 << 31, 1 << 23  # x**0, and x**8 for one byte: bit 31 - n is x**n
    while length:
        if length & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        length >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    """Multiply two polynomials modulo the CRC-32 polynomial; the highest bit is the power 0."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)  # times x
        bit >>= 1
    return product


class _Piece(NamedTuple):
    """A piece of a range: the number of the range, and the first byte and the length in it."""

    range_number: int
    start: int
    length: int


class _PieceResult(NamedTuple):
    """The result for a piece: the number of its range, its length, its CRC-32 or the error."""

    range_number: int
    length: int
    crc32: int | CorruptFile


_JOB_BYTES = 32 << 20
"""Bytes of one job of a thread: a piece of a long range, or many short ranges."""
_READ_BYTES = 512 << 10
"""Bytes read at a time, few enough to be in the processor's cache for the checksum."""
_RANGE_COST = 16 << 10
"""The fixed cost of a range, in bytes."""
_MIN_THREADED_BYTES = 4 << 20
"""Total bytes from which threads pay off."""


def compute_crc32s(
    runs: Sequence[ByteRange], on_progress: BytesDone | None = None
) -> Iterator[int | CorruptFile]:
    """Yield the CRC-32 of each range, in order, or the error if it cannot be inflated.

    Threads compute the CRC-32 of pieces, which are combined; the first error in a range is its
    result. `on_progress` is called with the length of each piece.

    Raises:
        UnreadableFile: a file cannot be read.
    """
    jobs = _divide_into_jobs(runs)
    compute_job = partial(_compute_job, runs)
    is_large = sum(run.length for run in runs) >= _MIN_THREADED_BYTES
    results = run_in_order(compute_job, jobs) if is_large else map(compute_job, jobs)
    current_range = 0
    crc: int | CorruptFile = 0  # of the pieces of the current range so far
    for range_number, length, piece_crc in chain.from_iterable(results):
        if range_number != current_range:
            yield crc
            current_range, crc = range_number, 0
        if isinstance(crc, int) and isinstance(piece_crc, int):
            crc = combine_crc32(crc, piece_crc, length)
        elif isinstance(crc, int):
            crc = piece_crc
        if on_progress is not None:
            on_progress(length)
    if runs:
        yield crc


def _divide_into_jobs(runs: Iterable[ByteRange]) -> Iterator[list[_Piece]]:
    """Divide all ranges, in order, into jobs of about equal work.

    A long range is divided into pieces, unless its source cannot be read by several threads. An
    empty range is one piece.
    """
    job: list[_Piece] = []
    weight = 0
    for range_number, run in enumerate(runs):
        max_length = _JOB_BYTES if run.source.is_shared else max(run.length, 1)
        for start in range(0, max(run.length, 1), max_length):
            length = min(max_length, run.length - start)
            job.append(_Piece(range_number, start, length))
            weight += length + _RANGE_COST
            if weight >= _JOB_BYTES:
                yield job
                job, weight = [], 0
    if job:
        yield job


def _compute_job(runs: Sequence[ByteRange], job: list[_Piece]) -> list[_PieceResult]:
    """Return the results for the pieces of one job."""
    return [
        _PieceResult(number, length, _compute_or_error(runs[number].slice(start, length)))
        for number, start, length in job
    ]


def _compute_or_error(data: ByteRange) -> int | CorruptFile:
    """Return the CRC-32 of a range, or the error if it cannot be inflated."""
    try:
        return compute_crc32(data.iterate_reused(_READ_BYTES))
    except CorruptFile as error:
        return error
