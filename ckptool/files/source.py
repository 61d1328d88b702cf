"""Where bytes come from: a file, a run of memory; and ranges of them.

Nothing is read until asked, and never by mapping the file: a mapped file that something else
truncates would kill the process.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ckptool.errors import FileDenied, FileMissing, TruncatedFile, UnreadableFile, UsageError

Progress = Callable[[int, int], None]
"""Is called with the bytes done and the bytes in all."""
BytesDone = Callable[[int], None]
"""Is called with the bytes done since the last call, by the thread that asked for the work."""

BLOCK = 4 << 20
"""Bytes handled at a time wherever content streams through Python."""


class Source:
    """Something with a size that can be read at any offset: a file, memory, what is computed.

    A kind of source has a `name`, a `size` and a `fill`.
    """

    name: str
    """What to call it in a message: the path of the file."""
    size: int
    """Bytes in all."""
    stated: Sequence[Stated] = ()
    """What it says of its own bytes, as far as a reader found."""
    overlaid = 0
    """First bytes that it gives otherwise than the open descriptor does."""
    is_shared = False
    """Whether several threads may read it at once, in whatever order, at no cost."""
    is_far = False
    """Whether a read may be a request to another machine."""
    rearranges = False
    """Whether its bytes are those of `made_of` in another order, which nobody checks on the way."""
    made_of: Sequence[ByteRange] = ()
    """What its bytes are computed or put together from, as far as that is known."""

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; the source has these bytes."""
        raise NotImplementedError

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`, or `TruncatedFile`."""
        self._check(offset, length)
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) from `offset`, or `TruncatedFile`."""
        self._check(offset, len(buffer))
        self.fill(offset, buffer)

    def fd(self) -> int | None:
        """Return the open descriptor, for copies and mappings by the kernel; None if none is.

        Raises:
            UsageError: the file has been closed.
        """
        return None

    def version(self) -> str:
        """Return what other content under the same name has not."""
        return str(self.size)

    def changed(self) -> str | None:
        """Return what has been done to it since it was opened; None: nothing."""
        return None

    def check_unchanged(self) -> None:
        """Refuse a source whose bytes may be of two states.

        Raises:
            UnreadableFile: something has written to it since it was opened.
        """
        change = self.changed()
        if change is not None:
            raise UnreadableFile(
                f"changed while it was read: {change}",
                file=self.name,
                hint="try again when no process is writing to it",
            )

    def take_as_it_is(self) -> None:
        """Take what has been done to it for what it was read as: we did it ourselves."""

    def close(self) -> None:
        """Give back what it holds of the system; harmless a second time."""

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise TruncatedFile(
                f"cannot read {length:,} bytes at offset {offset:,}: the file has {self.size:,}",
                file=self.name,
            )


# A pipe would wait for a writer; a regular file is never non-blocking.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)


def open_descriptor(path: str) -> int:
    """Open `path` for reading.

    Raises:
        FileMissing: there is no such file.
        FileDenied: the system refuses it.
        UnreadableFile: any other refusal.
    """
    try:
        return os.open(path, _OPEN_FLAGS)
    except FileNotFoundError as error:
        raise _missing(path) from error
    except PermissionError as error:
        raise FileDenied("permission denied", file=path) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnreadableFile(f"cannot be opened ({reason})", file=path) from error


def _missing(path: str) -> FileMissing:
    """Say why nothing is at `path`: a link leads nowhere, or it is no path but an address."""
    if os.path.islink(path):
        gone = os.path.realpath(path)
        hint = (
            "download or copy the target of the link; in the Hugging Face cache, run hf download "
            "again"
        )
        return FileMissing(f"is a link to {gone}, which does not exist", file=path, hint=hint)
    is_file_name = re.search(r"\.(?:pth?|th|tar|ckpt|bin|safetensors|pkl|npz|json)\Z", path)
    folder = re.fullmatch(r"([\w-][\w.-]*)/[\w.-]+", path)
    if folder and not is_file_name and not os.path.exists(folder[1]):
        hint = f"for a Hugging Face repository, use hf://{path}"
        return FileMissing("no such file", file=path, hint=hint)
    return FileMissing("no such file", file=path)


_Wanted = TypeVar("_Wanted")
_Got = TypeVar("_Got")


class FileSource(Source):
    """A file, opened once for reading; positions are never shared, so threads may read at will."""

    is_shared = hasattr(os, "preadv")
    """Otherwise the position of the file is shared by its readers."""

    def __init__(
        self, path: str | os.PathLike[str], *, size: int | None = None, head: bytes = b""
    ) -> None:
        """Open `path`; `size` and `head` show it as it was before an edit that was cut short.

        Args:
            path: A regular file.
            size: As if it ended there; None: where it ends.
            head: What is read in the place of as many first bytes.

        Raises:
            FileMissing: there is no such file.
            FileDenied: the system refuses it.
            UnreadableFile: any other refusal; a folder, a pipe, a device.
        """
        self.name = self.path = os.fspath(path)
        self._fd = open_descriptor(self.path)
        status = os.fstat(self._fd)
        self._stored = status.st_size
        self._mtime = status.st_mtime_ns
        self.size = self._stored if size is None else size
        self._head, self.overlaid = head, len(head)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise UnreadableFile("is not a regular file", file=self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Have copies and pickles open the file again: a descriptor means nothing elsewhere."""
        state = self._stored, self._mtime
        return _reopened, (os.path.abspath(self.path), state, self.size, self._head)

    def version(self) -> str:
        """Return size and time of the open file."""
        return f"{self.size} {self._mtime}"

    def fd(self) -> int:
        """Return the open descriptor.

        Raises:
            UsageError: the file has been closed.
        """
        if self._fd < 0:
            raise UsageError("the checkpoint has been closed", file=self.path)
        return self._fd

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`, or `TruncatedFile`."""
        self._check(offset, length)
        data = self._system(_pread, length, offset)
        return data if len(data) == length and not self._head else super().read(offset, length)

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        done = 0
        while done < len(buffer):
            count = self._system(_preadv, buffer[done:], offset + done)
            if count == 0:
                raise TruncatedFile(
                    f"the file ended at {offset + done:,} while it was read; "
                    f"it had {self.size:,} bytes when it was opened",
                    file=self.path,
                )
            done += count
        shown = self._head[offset : offset + len(buffer)]
        buffer[: len(shown)] = shown

    def changed(self) -> str | None:
        """Return what has been done to the open file since it was opened; None: nothing."""
        status = os.fstat(self.fd())
        if status.st_size != self._stored:
            return f"size was {self._stored:,} and is now {status.st_size:,}"
        return "its content was rewritten" if status.st_mtime_ns != self._mtime else None

    def take_as_it_is(self) -> None:
        """Take what has been done to the file for what it was read as: we did it ourselves."""
        status = os.fstat(self.fd())
        self._stored = self.size = status.st_size
        self._mtime = status.st_mtime_ns

    def close(self) -> None:
        """Give the descriptor back; harmless a second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _system(self, call: Callable[[int, _Wanted, int], _Got], wanted: _Wanted, at: int) -> _Got:
        """Return what a read of the open descriptor gives, its refusals put into words."""
        try:
            return call(self.fd(), wanted, at)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UnreadableFile(f"cannot be read at {at:,} ({reason})", file=self.path) from error


def _pread(fd: int, length: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, length, offset)
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, length)


def read_at(fd: int, offset: int, length: int) -> bytes:
    """`length` bytes of an open file from `offset`, fewer where it ends before."""
    parts = []
    while length:
        part = _pread(fd, length, offset)
        if not part:
            break
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return b"".join(parts)


def _preadv(fd: int, buffer: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    data = _pread(fd, min(len(buffer), BLOCK), offset)
    buffer[: len(data)] = data
    return len(data)


def _reopened(path: str, state: tuple[int, int], size: int, head: bytes) -> FileSource:
    """Return the file of a copied or unpickled source, if it is still the one that was read."""
    source = FileSource(path, size=size, head=head)
    status = os.fstat(source.fd())
    if (status.st_size, status.st_mtime_ns) != state:
        source.close()
        raise UnreadableFile("has changed since it was opened", file=path)
    return source


class FolderFile(Source):
    """A file of a folder, open only while it is read: there may be more than may be open."""

    def __init__(self, path: str, size: int) -> None:
        """Stand for the file, which had `size` bytes when the folder was listed."""
        self.name, self.size = path, size

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`.

        Raises:
            TruncatedFile: the file has another size by now.
        """
        source = FileSource(self.name)
        try:
            if source.size != self.size:
                raise TruncatedFile(
                    f"the file had {self.size:,} bytes when the folder was listed "
                    f"and has {source.size:,} now",
                    file=self.name,
                )
            source.fill(offset, buffer)
        finally:
            source.close()


class MemorySource(Source):
    """Bytes already in memory: a payload that lay inside a pickle."""

    is_shared = True

    def __init__(self, data: bytes, name: str) -> None:
        """Hold `data`; `name` is the file that it came from."""
        self._data = data
        self.name, self.size = name, len(data)

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        buffer[:] = memoryview(self._data)[offset : offset + len(buffer)]


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes of `source` from `offset`. Valid: it lies inside the source."""

    source: Source
    offset: int
    length: int

    def __post_init__(self) -> None:
        """Refuse a range that the source does not have."""
        if self.offset < 0 or self.length < 0 or self.offset + self.length > self.source.size:
            missing = self.offset + self.length - self.source.size
            raise TruncatedFile(
                f"cannot read {self.length:,} bytes at offset {self.offset:,}: the file ends "
                f"at {self.source.size:,}, {missing:,} bytes too early",
                file=self.source.name,
            )

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        """`length` bytes (all that remain, if None) from `start` within the range."""
        length = self.length - start if length is None else length
        return self.slice(start, length).source.read(self.offset + start, length)

    def read_into(self, buffer: memoryview, start: int = 0) -> None:
        """Fill `buffer` from `start` within the range."""
        self.slice(start, len(buffer)).source.read_into(self.offset + start, buffer)

    def slice(self, start: int, length: int) -> ByteRange:
        """Return the sub-range of `length` bytes from `start`."""
        if start < 0 or length < 0 or start + length > self.length:
            raise TruncatedFile(
                f"cannot read {length:,} bytes at {start:,} of a range of {self.length:,}",
                file=self.source.name,
            )
        return ByteRange(self.source, self.offset + start, length)

    def blocks(self, size: int = BLOCK) -> Iterator[bytes]:
        """Yield the content in order, at most `size` bytes at a time."""
        for start in range(0, self.length, size):
            yield self.source.read(self.offset + start, min(size, self.length - start))

    def reread(self, size: int = BLOCK) -> Iterator[memoryview]:
        """Yield the content in order, each block in the memory of the one before."""
        buffer = memoryview(bytearray(min(size, self.length)))
        for start in range(0, self.length, size):
            part = buffer[: self.length - start]
            self.read_into(part, start)
            yield part


def far_bytes(ranges: Iterable[ByteRange]) -> int:
    """Return how many bytes of other machines ranges take, what several take once."""
    known: dict[tuple[int, int, int], None] = {}
    todo = list(ranges)
    while todo:
        one = todo.pop()
        if one.source.made_of:
            todo.extend(one.source.made_of)
        elif not isinstance(one.source, MemorySource) and one.source.fd() is None:
            known[id(one.source), one.offset, one.length] = None
    return sum(length for _, _, length in known)


def neighbors(parts: Iterable[ByteRange]) -> list[ByteRange]:
    """Return the parts in order, those that follow each other in one source put together."""
    runs: list[ByteRange] = []
    for part in parts:
        last = runs[-1] if runs else None
        if last and last.source is part.source and last.offset + last.length == part.offset:
            runs[-1] = ByteRange(part.source, last.offset, last.length + part.length)
        else:
            runs.append(part)
    return runs


SHARED = 4096
"""File systems that share blocks (XFS, btrfs) share those that lie at the same place modulo it."""
MANY = 1 << 20
"""Fewer bytes are not worth sharing."""


class Shared(NamedTuple):
    """Bytes of a new file that take no space where the file system shares blocks."""

    length: int
    run: ByteRange
    """One of the ranges that they are copied from."""


Stated = tuple[str, ByteRange, int]
"""A run of bytes whose CRC-32 its file states, by name: a record of a zip."""
