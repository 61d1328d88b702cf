"""Ranges of bytes that are not in a file: computed, gathered from a view, or joined."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ckptool.files.source import BLOCK, ByteRange, Source, join_neighbors
from ckptool.files.strided import iterate_row_major

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

MIN_AHEAD_BYTES = 256 << 10
"""Bytes from which other threads compute the following blocks."""
THREADS = max(1, min(2, (os.cpu_count() or 1) - 1))
"""Threads that compute while the reader's thread writes, at most one per processor."""
DEPTH = 2
"""Blocks that are ready or being computed."""


class FilledSource(Source):
    """A source with bytes that `fill` copies from files into a buffer on demand.

    Unlike those of a `ComputedSource`, they are not read back after a write.
    """

    def __init__(self, name: str, size: int, fill: Callable[[int, memoryview], None]) -> None:
        """Represent `size` bytes; `fill(offset, buffer)` writes those from `offset` into `buffer`.

        `name` is a file with some of them, for messages.
        """
        self.name, self.size, self._filler = name, size, fill

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        self._filler(offset, buffer)


class ComputedSource(FilledSource):
    """A source with bytes that are computed block by block, and not kept."""

    def __init__(
        self,
        name: str,
        size: int,
        fill: Callable[[int, memoryview], None],
        *,
        ahead: ReadAhead | None = None,
    ) -> None:
        """Represent `size` bytes; `fill(offset, buffer)` writes those from `offset` into `buffer`.

        With `ahead`, other threads compute the next blocks, of this source and of those after it,
        while the last block is used; `fill` must allow calls from several threads at once.
        """
        super().__init__(name, size, fill)
        self._ahead = ahead if size >= MIN_AHEAD_BYTES else None
        if self._ahead is not None:
            self._ahead.expect(self)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, or `TruncatedFile`; threads compute ahead of large reads."""
        self._check_range(offset, len(buffer))
        if self._ahead is None or len(buffer) < MIN_AHEAD_BYTES:
            self.fill(offset, buffer)
        else:
            self._ahead.read_into(self, offset, buffer)


class _PredictedBlock(NamedTuple):
    """A block that another thread computes."""

    source: ComputedSource
    offset: int
    length: int
    future: Future[None]
    """Done when the block is in `buffer`."""
    buffer: bytearray
    """Its first `length` bytes are the block."""


class ReadAhead:
    """Computes the next blocks of some sources in other threads.

    The sources are expected to be read in the order of their creation, each from front to back. If
    that is wrong more often than right, each source is predicted by itself.
    """

    def __init__(self) -> None:
        """Start without expected sources."""
        self._index_by_source_id: dict[int, int] = {}
        self._sources: list[ComputedSource] = []
        """All sources, in the order in which they are expected to be read."""
        self._blocks: deque[_PredictedBlock] = deque()
        """The predicted blocks, in the order of reading."""
        self._spare_buffers: list[bytearray] = []
        """The buffers of blocks that have been read, to be filled again."""
        self._last_end = (0, 0)
        """The index of a source, and the offset in it, up to which was read."""
        self._prediction_score = 1
        """Correct minus wrong predictions of the next source; above 0, sources are predicted."""

    def expect(self, source: ComputedSource) -> None:
        """Expect this source to be read after the earlier ones."""
        self._index_by_source_id[id(source)] = len(self._sources)
        self._sources.append(source)

    def read_into(self, source: ComputedSource, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from a block that was computed ahead, or compute it now.

        If this read follows the last one, or begins a source, the next blocks are computed ahead,
        unless it is longer than a block.
        """
        source_index = self._index_by_source_id[id(source)]
        end = offset + len(buffer)
        if not self._take_predicted(source, offset, buffer):
            source.fill(offset, buffer)
        follows_last = self._last_end == (source_index, offset)
        self._last_end = source_index, end
        if (follows_last or offset == 0) and len(buffer) <= BLOCK:
            # The last block of a source may be short: the next source has full ones.
            next_length = len(buffer) if end < source.size else BLOCK
            self._compute_next(source_index, end, next_length)

    def _take_predicted(self, source: ComputedSource, offset: int, buffer: memoryview) -> bool:
        """Fill `buffer` from the first predicted block and return True, if it is the one to read.

        Else drop all predicted blocks, and return False. The score rises by 1 with the first block
        of a predicted source, and falls by 2 if another source is read.
        """
        if not self._blocks:
            return False
        block = self._blocks[0]
        if (block.source, block.offset, block.length) == (source, offset, len(buffer)):
            self._blocks.popleft()
            block.future.result()
            buffer[:] = memoryview(block.buffer)[: block.length]
            self._spare_buffers.append(block.buffer)
            if offset == 0:
                self._prediction_score += 1
            return True
        if block.source is not source:
            self._prediction_score -= 2
        while self._blocks:  # not needed, and must not delay others
            self._blocks.popleft().future.cancel()
        return False

    def _compute_next(self, source_index: int, offset: int, length: int) -> None:
        """Start to compute blocks of `length` bytes from `offset`, until `DEPTH` are predicted.

        If some are predicted, continue after the last one. After the end of a source, the next
        source is predicted, if that was right often enough. Blocks that are too short for another
        thread are left out.
        """
        if self._blocks:
            last = self._blocks[-1]
            source_index = self._index_by_source_id[id(last.source)]
            offset = last.offset + last.length
        while len(self._blocks) < DEPTH:
            source = self._sources[source_index]
            size = min(length, source.size - offset)
            if size < MIN_AHEAD_BYTES:  # go on to the next source
                source_index, offset, length = source_index + 1, 0, BLOCK
                if self._prediction_score <= 0 or source_index == len(self._sources):
                    return
                continue
            buffer = self._spare_buffers.pop() if self._spare_buffers else bytearray(BLOCK)
            future = _get_thread_pool().submit(source.fill, offset, memoryview(buffer)[:size])
            self._blocks.append(_PredictedBlock(source, offset, size, future, buffer))
            offset += size


@cache
def _get_thread_pool() -> ThreadPoolExecutor:
    """Return the thread pool that all sources share."""
    from concurrent.futures import ThreadPoolExecutor  # imports logging: milliseconds

    return ThreadPoolExecutor(THREADS, thread_name_prefix="ckptool-ahead")


if hasattr(os, "register_at_fork"):  # a forked process does not have the threads of its parent
    os.register_at_fork(after_in_child=_get_thread_pool.cache_clear)


def make_computed_range(
    made_of: Sequence[ByteRange],
    size: int,
    fill: Callable[[int, memoryview], None],
    *,
    ahead: ReadAhead | None = None,
) -> ByteRange:
    """Return `size` bytes that `fill` computes from `made_of`; see `ComputedSource`.

    In messages they have the name of the first file that they are made of.
    """
    source = ComputedSource(made_of[0].source.name, size, fill, ahead=ahead)
    source.made_of = made_of
    return ByteRange(source, 0, size)


def gather_view(
    data: ByteRange,
    *,
    itemsize: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
) -> ByteRange:
    """Return the elements of a view of `data` in row-major order, gathered on demand.

    `stride` and `offset` count elements of `itemsize` bytes; the view is inside `data`. Sequential
    reads take one pass; a jump starts at the row of its offset.
    """
    one_element = [(1, 1)]  # a scalar has no axes
    axes = list(zip(shape, stride, strict=True)) or one_element
    rows = _Rows(data, itemsize, axes, offset)
    gathered = make_computed_range((data,), rows.size, rows.read_into)
    gathered.source.rearranges = True  # so a CRC-32 of `data` checks these elements too
    return gathered


class _Rows:
    """Reads a view from front to back, starting at any byte."""

    def __init__(
        self, data: ByteRange, itemsize: int, axes: list[tuple[int, int]], offset: int
    ) -> None:
        """Represent the view of `data` from element `offset` with (size, stride) of each axis."""
        self.size = prod(size for size, _ in axes) * itemsize
        self._data = data
        self._itemsize = itemsize
        self._axes = axes
        self._offset = offset
        self._blocks: Iterator[bytes] = iter(())
        """The blocks after `_pending`, in row-major order."""
        self._pending = memoryview(b"")
        """The bytes of the current block that were not read yet."""
        self._position = -1
        """The offset of `_pending` in the result; -1 before the first read and after the end."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `offset` of the elements in row-major order."""
        if offset != self._position:
            self._seek(offset)
        done = 0
        while done < len(buffer):
            block = self._pending or memoryview(next(self._blocks))
            part = block[: len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)
            self._pending = block[len(part) :]
        self._position = offset + done
        if self._position == self.size:  # otherwise each of many views would keep its last blocks
            self._blocks, self._pending, self._position = iter(()), memoryview(b""), -1

    def _seek(self, offset: int) -> None:
        """Begin at the row of the first axis that contains `offset`; skip the bytes before it."""
        (rows, step), *inner_axes = self._axes
        inner_shape = [size for size, _ in inner_axes]
        skipped_rows, bytes_to_skip = divmod(offset, prod(inner_shape) * self._itemsize)
        self._blocks = iterate_row_major(
            self._data,
            itemsize=self._itemsize,
            shape=(rows - skipped_rows, *inner_shape),
            stride=tuple(step for _, step in self._axes),
            offset=self._offset + skipped_rows * step,
        )
        self._pending = memoryview(b"")
        while bytes_to_skip:
            block = memoryview(next(self._blocks))
            self._pending = block[bytes_to_skip:]
            bytes_to_skip = max(bytes_to_skip - len(block), 0)


def join_ranges(parts: Sequence[ByteRange]) -> ByteRange:
    """Return the parts as one range, in their own source if they are adjacent there."""
    runs = join_neighbors(parts)
    if len(runs) == 1:
        return runs[0]
    *starts, size = accumulate((run.length for run in runs), initial=0)

    def fill(offset: int, buffer: memoryview) -> None:
        """Write the bytes from `offset` into `buffer`, from all parts that have some of them."""
        index, done = bisect_right(starts, offset) - 1, 0
        while done < len(buffer):
            run = runs[index]
            start_in_run = offset + done - starts[index]
            count = min(run.length - start_in_run, len(buffer) - done)
            run.read_into(buffer[done : done + count], start_in_run)
            index += 1
            done += count

    source = FilledSource(runs[0].source.name, size, fill)
    source.made_of, source.rearranges = runs, True
    return ByteRange(source, 0, size)
