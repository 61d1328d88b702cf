"""A file that is being written from front to back: literals, kernel copies, streamed blocks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ckptool.errors import WriteError
from ckptool.files.copying import copy_bytes, write_at
from ckptool.files.source import BLOCK, ByteRange, FileSource
from ckptool.files.system import start_writeback

__all__ = ["FileOutput", "Output", "Progress", "Streamed"]

Progress = Callable[[int, int], None]
"""Told bytes done and bytes in all."""

STEP = 64 << 20
"""Bytes between two calls of the progress, and before writing to the disk begins."""
SMALL = 64 << 10
"""A range of up to so many bytes is gathered with its neighbours: one call in place of three."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """What went through Python on its way into a file."""

    length: int
    crc32: int


class Output(Protocol):
    """Where a `WritePlan` writes."""

    def tell(self) -> int:
        """Bytes written so far."""
        ...

    def write(self, data: bytes) -> None:
        """Write `data`."""
        ...

    def copy(self, data: ByteRange) -> None:
        """Copy a range, by the kernel where it lies in a file."""
        ...

    def copy_checked(self, data: ByteRange) -> int:
        """Copy a range and return its CRC-32."""
        ...

    def stream(self, blocks: Iterable[bytes]) -> int:
        """Write blocks as they come and return the CRC-32 of all."""
        ...


class FileOutput:
    """An `Output` over an open descriptor that must end up with exactly `size` bytes."""

    def __init__(
        self, fd: int, size: int, progress: Progress | None = None, name: str = ""
    ) -> None:
        """Write to `fd` from its first byte on; `progress` is told after every `STEP` or so."""
        self.name = name
        """The path of what is being written: not yet that of the target."""
        self.streamed: dict[int, Streamed] = {}
        """By offset, what was no kernel copy."""
        self._fd = fd
        self._size = size
        self._progress = progress
        self._pending = bytearray()
        self._flushed = 0
        self._reported = 0

    def tell(self) -> int:
        """Bytes written so far."""
        return self._flushed + len(self._pending)

    def write(self, data: bytes | memoryview) -> None:
        """Write `data`; small pieces are gathered, large ones go straight through."""
        self._expect(len(data))
        if len(data) < BLOCK:
            self._pending += data
        if len(data) >= BLOCK or len(self._pending) >= BLOCK:
            self._flush()
        if len(data) >= BLOCK:
            self._put(data)

    def copy(self, data: ByteRange) -> None:
        """Copy a range, by the kernel where it lies in a file.

        Raises:
            TruncatedFile: the source has become shorter.
        """
        if data.length <= SMALL:
            self.write(data.read())
        elif isinstance(data.source, FileSource):
            self._copy_file(data, data.source)
        else:
            self.stream(data.blocks())

    def copy_checked(self, data: ByteRange) -> int:
        """Copy a range and return its CRC-32.

        Raises:
            TruncatedFile: the source has become shorter.
        """
        buffer = memoryview(bytearray(min(BLOCK, data.length)))
        parts = (buffer[: data.length - start] for start in range(0, data.length, BLOCK))
        start, crc, done = self.tell(), 0, 0
        for part in parts:
            data.read_into(part, done)
            crc = zlib.crc32(part, crc)
            self.write(part)
            done += len(part)
        self.streamed[start] = Streamed(done, crc)
        return crc

    def stream(self, blocks: Iterable[bytes]) -> int:
        """Write blocks as they come and return the CRC-32 of all."""
        start, crc = self.tell(), 0
        for block in blocks:
            crc = zlib.crc32(block, crc)
            self.write(block)
        self.streamed[start] = Streamed(self.tell() - start, crc)
        return crc

    def finish(self) -> None:
        """Hand everything to the system.

        Raises:
            WriteError: fewer bytes came than were announced.
        """
        self._flush()
        if self._flushed != self._size:
            raise WriteError(f"{self._flushed:,} bytes came of the {self._size:,} planned")
        self._report()

    def _copy_file(self, data: ByteRange, source: FileSource) -> None:
        self._expect(data.length)
        self._flush()
        for start in range(0, data.length, STEP):
            length = min(STEP, data.length - start)
            copy_bytes(source, data.offset + start, self._fd, self._flushed, length)
            self._flushed += length
            self._step()

    def _flush(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._put(pending)

    def _put(self, data: bytes | bytearray | memoryview) -> None:
        write_at(self._fd, data, self._flushed)
        self._flushed += len(data)
        self._step()

    def _expect(self, length: int) -> None:
        if self.tell() + length > self._size:
            raise WriteError(f"more bytes came than the {self._size:,} planned")

    def _step(self) -> None:
        if self._flushed - self._reported >= STEP:
            start_writeback(self._fd, self._reported, self._flushed - self._reported)
            self._report()

    def _report(self) -> None:
        self._reported = self._flushed
        if self._progress is not None:
            self._progress(self._flushed, self._size)
