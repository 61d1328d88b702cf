"""Bytes that no file holds: computed from others when they are read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

from ckptool.errors import TruncatedFile
from ckptool.files.source import BLOCK, ByteRange, FileSource, MemorySource

__all__ = ["ComputedSource", "may_be_shared"]

WORTH = 256 << 10
"""Bytes from which other threads are asked for what comes next."""
THREADS = 2
"""That compute while the reader's own writes: one for each block ahead."""


class ComputedSource:
    """A source (`source.Source`) whose bytes are computed block by block, and not kept.

    Where several threads may compute at once and it is read from front to back, the next blocks are
    computed while the last one is used.
    """

    def __init__(
        self,
        name: str,
        size: int,
        fill: Callable[[int, memoryview], None],
        *,
        parallel: bool = False,
    ) -> None:
        """Stand for `size` bytes; `fill(offset, buffer)` puts those from `offset` into `buffer`.

        `parallel`: it may be called from several threads at once (`may_be_shared`).
        """
        self._name = name
        self._size = size
        self._fill = fill
        self._parallel = parallel
        self._next = 0
        self._ahead: deque[tuple[int, int, Future[bytearray]]] = deque()
        """Offset and length of the blocks from `_next` on that are being computed."""

    @property
    def name(self) -> str:
        """The file that they are computed from."""
        return self._name

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`, or `TruncatedFile`."""
        self._check(offset, length)
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, or `TruncatedFile`."""
        self._check(offset, len(buffer))
        if not self._from_ahead(offset, buffer):
            self._fill(offset, buffer)
        follows, self._next = offset == self._next, offset + len(buffer)
        if self._parallel and follows and WORTH <= len(buffer) <= BLOCK:
            self._go_ahead(len(buffer))

    def _from_ahead(self, offset: int, buffer: memoryview) -> bool:
        """Fill `buffer` with a block that was computed ahead, if it is the right one."""
        ahead = self._ahead
        if ahead and ahead[0][0] == offset and ahead[0][1] == len(buffer):
            buffer[:] = ahead.popleft()[2].result()
            return True
        while ahead:  # in vain, and to be out of the way
            ahead.popleft()[2].cancel()
        return False

    def _go_ahead(self, length: int) -> None:
        """Have the blocks after the last one computed."""
        while len(self._ahead) < THREADS:
            start = self._next + sum(block[1] for block in self._ahead)
            length = min(length, self._size - start)
            if length < WORTH:
                return
            block = _threads().submit(self._computed, start, length)
            self._ahead.append((start, length, block))

    def _computed(self, offset: int, length: int) -> bytearray:
        data = bytearray(length)
        self._fill(offset, memoryview(data))
        return data

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self._size:
            raise TruncatedFile(
                f"{length:,} bytes are wanted at offset {offset:,} of {self._size:,} computed ones",
                file=self._name,
            )


def may_be_shared(data: ByteRange) -> bool:
    """Whether several threads may read it at once, in whatever order, at no cost.

    What is inflated or computed is not, nor a file where the system has no reads at a position.
    """
    plain = isinstance(data.source, (FileSource, MemorySource))
    return plain and hasattr(os, "preadv")


@cache
def _threads() -> ThreadPoolExecutor:
    """The same for all sources."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="ckptool-ahead")


if hasattr(os, "register_at_fork"):  # a process has not the threads of the one that it came from
    os.register_at_fork(after_in_child=_threads.cache_clear)
