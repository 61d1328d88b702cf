"""Compute CRC-32 (of ranges that are read in parts, and of many ranges in threads) and CRC-32C."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain
from threading import Lock

from ckptool.errors import CorruptFile
from ckptool.files.source import ByteRange, BytesDone
from ckptool.files.threads import in_order

_POLYNOMIAL = 0xEDB88320
"""The polynomial of CRC-32, with its bits reversed."""


class Checked:
    """A range of bytes with a known CRC-32, which is checked while the range is read."""

    def __init__(
        self, data: ByteRange, crc32: int | None, refused: Callable[[], Exception]
    ) -> None:
        """Expect `crc32` (None: unknown) for `data`; `refused` makes the error of a mismatch."""
        self._data = data
        self._refused = refused
        self._expected = crc32
        self._parts: dict[int, tuple[int, int]] = {}
        """By its first byte, the length and the CRC-32 of each part that was read."""
        self._length_read = 0
        self._lock = Lock()

    @property
    def is_known(self) -> bool:
        """True if nothing remains to be checked."""
        return self._expected is None

    def add_part(self, start: int, length: int, crc32: int) -> None:
        """Add the CRC-32 of a part that was read; parts do not overlap.

        Raises the error from `refused` if all parts have been read and the CRC-32 does not match.
        """
        with self._lock:
            if self._expected is None or start in self._parts:
                return
            self._parts[start] = length, crc32
            self._length_read += length
            if self._length_read < self._data.length:
                return
            found = 0
            for _, (size, crc) in sorted(self._parts.items()):
                found = combined(found, crc, size)
            self._settle(found)

    def check(self) -> None:
        """Read and check all of it now, unless it was checked; raises as `add_part`."""
        with self._lock:
            if self._expected is None:
                return
            self._settle(crc32_of(self._data.reread()))

    def _settle(self, found: int) -> None:
        if found != self._expected:
            raise self._refused()
        self._expected = None
        self._parts.clear()


def crc32_of(blocks: Iterable[bytes | memoryview]) -> int:
    """Return the CRC-32 of consecutive blocks."""
    crc = 0
    for block in blocks:
        crc = zlib.crc32(block, crc)
    return crc


def crc32c(data: bytes, crc: int = 0) -> int:
    """Return the CRC-32C of `data`, continued from `crc`."""
    import google_crc32c  # only TensorFlow files have these checksums

    return int(google_crc32c.extend(crc, data))


def crc32cs(runs: Sequence[ByteRange], told: BytesDone) -> Iterator[int]:
    """Yield the CRC-32C of each range; `told` is called with the bytes done."""
    for run in runs:
        crc = 0
        for block in run.blocks(_BLOCK):
            crc = crc32c(block, crc)
            told(len(block))
        yield crc


def combined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two consecutive ranges, the second of `length` bytes."""
    if first == 0:
        return second
    return _product(_shift(length), first) ^ second


@lru_cache(maxsize=64)
def _shift(length: int) -> int:
    """Return the factor of a CRC-32 before `length` more bytes: x to the power of their bits.

    After `crc32_combine` of zlib 1.2.12.
    """
    power, square = 1 << 31, 1 << 23  # x**0, and x**8 for a byte
    while length:
        if length & 1:
            power = _product(power, square)
        square = _product(square, square)
        length >>= 1
    return power


def _product(one: int, other: int) -> int:
    """Multiply two polynomials modulo the CRC-32 polynomial; the highest bit is the power 0."""
    product, bit = 0, 1 << 31
    while bit:
        if one & bit:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
        bit >>= 1
    return product


_Piece = tuple[int, int, int]
"""A piece of a range: the number of the range, the first byte, the length."""
_Found = tuple[int, int, int | CorruptFile]
"""The result for a piece: the number of its range, its length, its CRC-32 or the error."""

_PIECE = 32 << 20
"""Bytes of one job of a thread: a piece of a long range, or many short ranges."""
_BLOCK = 512 << 10
"""Bytes read at a time, few enough to be in the processor's cache for the checksum."""
_CALL = 16 << 10
"""The fixed cost of a range, in bytes."""
_WORTH = 4 << 20
"""Total bytes from which threads pay off."""


def crc32s(runs: Sequence[ByteRange], told: BytesDone | None = None) -> Iterator[int | CorruptFile]:
    """Yield the CRC-32 of each range, in order, or the error if it cannot be inflated.

    `told` is called with the bytes done.

    Raises:
        UnreadableFile: a file cannot be read.
    """
    jobs = _jobs(runs)
    work = partial(_summed, runs)
    large = sum(run.length for run in runs) >= _WORTH
    found: int | CorruptFile = 0
    current = 0
    for index, length, part in chain.from_iterable((in_order if large else map)(work, jobs)):
        if index != current:
            yield found
            current, found = index, 0
        if isinstance(found, int):
            found = combined(found, part, length) if isinstance(part, int) else part
        if told is not None:
            told(length)
    if runs:
        yield found


def _jobs(runs: Iterable[ByteRange]) -> Iterator[list[_Piece]]:
    """Divide all ranges, in order, into jobs of about equal work."""
    job: list[_Piece] = []
    weight = 0
    for index, run in enumerate(runs):
        step = _PIECE if run.source.is_shared else max(run.length, 1)
        for start in range(0, max(run.length, 1), step):
            length = min(step, run.length - start)
            job.append((index, start, length))
            weight += length + _CALL
            if weight >= _PIECE:
                yield job
                job, weight = [], 0
    if job:
        yield job


def _summed(runs: Sequence[ByteRange], job: list[_Piece]) -> list[_Found]:
    return [
        (index, length, _crc32(runs[index].slice(start, length))) for index, start, length in job
    ]


def _crc32(data: ByteRange) -> int | CorruptFile:
    try:
        return crc32_of(data.reread(_BLOCK))
    except CorruptFile as error:
        return error
