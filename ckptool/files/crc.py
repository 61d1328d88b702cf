"""CRC-32 of many runs of bytes, by as many threads as help, in blocks that stay in the cache."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from ckptool.errors import CorruptFile
from ckptool.files.checksums import combined
from ckptool.files.computed import may_be_shared
from ckptool.files.source import ByteRange

__all__ = ["crc32s"]

Told = Callable[[int], None]
_Piece = tuple[int, int, int]
"""A part of a run: the number of the run, its first byte, its length."""
_Found = tuple[int, int, int | CorruptFile]
"""Of a part: the number of its run, its length, its CRC-32 or why it has none."""

_THREADS = min(2, os.cpu_count() or 1)
_PIECE = 32 << 20
"""Bytes that a thread is given at a time: parts of a long run, or many short ones."""
_BLOCK = 512 << 10
"""Bytes read at a time: they are still in the processor's cache when they are summed up."""
_CALL = 16 << 10
"""What a run costs whatever its length, in bytes."""
_WORTH = 4 << 20
"""Bytes in all from which threads are worth their start."""


def crc32s(runs: Sequence[ByteRange], told: Told | None = None) -> Iterator[int | CorruptFile]:
    """The CRC-32 of each run, in order; of one that cannot be inflated, the error.

    `told` is called with bytes done, now and then.

    Raises:
        UnreadableFile: the system cannot read a file.
    """
    large = sum(run.length for run in runs) >= _WORTH
    found: int | CorruptFile = 0
    current = 0
    for index, length, part in (_by_threads if large else _here)(runs):
        if index != current:
            yield found
            current, found = index, 0
        if isinstance(found, int):
            found = combined(found, part, length) if isinstance(part, int) else part
        if told is not None:
            told(length)
    if runs:
        yield found


def _here(runs: Sequence[ByteRange]) -> Iterator[_Found]:
    for job in _jobs(runs):
        yield from _summed(runs, job)


def _by_threads(runs: Sequence[ByteRange]) -> Iterator[_Found]:
    from concurrent.futures import ThreadPoolExecutor  # brings logging: milliseconds of every start

    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for found in pool.map(lambda job: _summed(runs, job), _jobs(runs)):
                yield from found
        finally:
            pool.shutdown(cancel_futures=True)


def _jobs(runs: Iterable[ByteRange]) -> Iterator[list[_Piece]]:
    """All runs in order, in pieces, about as much work in each list."""
    job: list[_Piece] = []
    weight = 0
    for index, run in enumerate(runs):
        step = _PIECE if may_be_shared(run) else max(run.length, 1)
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
    block = memoryview(bytearray(min(_BLOCK, max(length for _, _, length in job))))
    return [
        (index, length, _crc32(runs[index], start, length, block)) for index, start, length in job
    ]


def _crc32(run: ByteRange, start: int, length: int, block: memoryview) -> int | CorruptFile:
    """The CRC-32 of a piece, read into `block` part by part."""
    crc = 0
    try:
        for position in range(start, start + length, len(block) or 1):
            part = block[: start + length - position]
            run.read_into(part, position)
            crc = zlib.crc32(part, crc)
    except CorruptFile as error:
        return error
    return crc
