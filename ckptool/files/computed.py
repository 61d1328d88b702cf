"""Bytes that no file holds: computed from others when they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

from ckptool.errors import TruncatedFile
from ckptool.files.source import BLOCK

__all__ = ["ComputedSource"]

_WORTH = 256 << 10
"""Bytes from which a second thread is asked for what comes next."""


class ComputedSource:
    """A source (`source.Source`) whose bytes are computed block by block, and not kept.

    Where it is read from front to back, the next block is computed while the last one is used.
    """

    def __init__(self, name: str, size: int, fill: Callable[[int, memoryview], None]) -> None:
        """Stand for `size` bytes; `fill(offset, buffer)` puts those from `offset` into `buffer`.

        It may be called from another thread, though never from two at once.
        """
        self._name = name
        self._size = size
        self._fill = fill
        self._next = 0
        self._ahead: Future[bytearray] | None = None
        """The block at `_next`, if it is being computed."""

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
        length = len(buffer)
        self._check(offset, length)
        ahead, self._ahead = self._ahead, None
        ready = b"" if ahead is None else ahead.result()
        if ready and offset == self._next and length <= len(ready):
            buffer[:] = memoryview(ready)[:length]
        else:
            self._fill(offset, buffer)
        follows, self._next = offset == self._next, offset + length
        following = min(length, self._size - self._next)
        if follows and _WORTH <= following <= BLOCK:
            self._ahead = _second_thread().submit(self._computed, self._next, following)

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


@cache
def _second_thread() -> ThreadPoolExecutor:
    """One for all sources: whoever reads needs the first."""
    return ThreadPoolExecutor(1, thread_name_prefix="ckptool-ahead")


if hasattr(os, "register_at_fork"):  # a process has not the threads of the one that it came from
    os.register_at_fork(after_in_child=_second_thread.cache_clear)
