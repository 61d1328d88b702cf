"""Sources of bytes (a file, memory, computed bytes) and ranges of them.

Nothing is read before it is needed, and files are not mapped: if another process truncates a mapped
file, this process is killed.
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
"""Called with the bytes done and the total bytes."""
BytesDone = Callable[[int], None]
"""Called with the bytes done since the last call, in the thread of the caller."""

BLOCK = 4 << 20
"""The block size for content that streams through Python."""


class Source:
    """Bytes of known size that can be read at any offset: a file, memory, computed bytes.

    A subclass has a `name`, a `size` and a `fill`.
    """

    name: str
    """The name for messages: the path of the file."""
    size: int
    """The size in bytes."""
    stated: Sequence[Stated] = ()
    """The checksums that the file states about its bytes, as far as a reader found them."""
    overlaid = 0
    """The number of first bytes that differ from those of the open descriptor."""
    is_shared = False
    """True if several threads can read it at once, in any order, at no cost."""
    is_far = False
    """True if a read may be a request to another machine."""
    rearranges = False
    """True if it has the bytes of `made_of` in another order, so that their checksums apply."""
    made_of: Sequence[ByteRange] = ()
    """The ranges that its bytes are computed or assembled from, as far as known."""

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`; the source has these bytes."""
        raise NotImplementedError

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`, or raise `TruncatedFile`."""
        self._check_range(offset, length)
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (bytes) from `offset`, or raise `TruncatedFile`."""
        self._check_range(offset, len(buffer))
        self.fill(offset, buffer)

    def fd(self) -> int | None:
        """Return the open descriptor for kernel copies, or None.

        Raises:
            UsageError: the file has been closed.
        """
        return None

    def version(self) -> str:
        """Return a text that changes with the content; here, only with its size."""
        return str(self.size)

    def describe_change(self) -> str | None:
        """Return the change since it was opened, as a clause; None if it has not changed."""
        return None

    def check_unchanged(self) -> None:
        """Refuse a source that changed, with bytes that may be from two states.

        Raises:
            UnreadableFile: it has changed since it was opened.
        """
        change = self.describe_change()
        if change is not None:
            raise UnreadableFile(
                f"changed while it was read: {change}",
                file=self.name,
                hint="try again when no process is writing to it",
            )

    def accept_current_state(self) -> None:
        """Accept the current state as the one that was read: we changed it ourselves."""

    def close(self) -> None:
        """Release system resources; harmless a second time."""

    def _check_range(self, offset: int, length: int) -> None:
        """Raise `TruncatedFile` if a range is not inside the source."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise TruncatedFile(
                f"cannot read {length:,} bytes at offset {offset:,}: the file has {self.size:,}",
                file=self.name,
            )


# Otherwise opening a pipe waits for a writer; regular files ignore the flag.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)


def open_descriptor(path: str) -> int:
    """Open `path` for reading.

    Raises:
        FileMissing: it does not exist.
        FileDenied: no permission to read it.
        UnreadableFile: another system error.
    """
    try:
        return os.open(path, _OPEN_FLAGS)
    except FileNotFoundError as error:
        raise _missing_error(path) from error
    except PermissionError as error:
        raise FileDenied("permission denied", file=path) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise UnreadableFile(f"cannot be opened ({reason})", file=path) from error


def _missing_error(path: str) -> FileMissing:
    """Return the error for a missing file, which may be a broken link or a repository name."""
    if os.path.islink(path):
        link_target = os.path.realpath(path)
        hint = (
            "download or copy the target of the link; in the Hugging Face cache, run hf download "
            "again"
        )
        return FileMissing(
            f"is a link to {link_target}, which does not exist", file=path, hint=hint
        )
    is_file_name = re.search(r"\.(?:pth?|th|tar|ckpt|bin|safetensors|pkl|npz|json)\Z", path)
    folder = re.fullmatch(r"([\w-][\w.-]*)/[\w.-]+", path)
    if folder and not is_file_name and not os.path.exists(folder[1]):
        hint = f"for a Hugging Face repository, use hf://{path}"
        return FileMissing("no such file", file=path, hint=hint)
    return FileMissing("no such file", file=path)


_Wanted = TypeVar("_Wanted")
_Got = TypeVar("_Got")


class FileSource(Source):
    """A file, opened once for reading; it has no position, so threads can read freely."""

    is_shared = hasattr(os, "preadv")
    """Without `preadv`, readers share the position of the file."""

    def __init__(
        self, path: str | os.PathLike[str], *, size: int | None = None, head: bytes = b""
    ) -> None:
        """Open `path`; `size` and `head` present it as before an interrupted edit.

        Args:
            path: A regular file.
            size: The presented size (None: the real one).
            head: Bytes that replace as many first bytes.

        Raises:
            FileMissing: it does not exist.
            FileDenied: no permission to read it.
            UnreadableFile: it is a folder, a pipe or a device, or another system error.
        """
        self.name = self.path = os.fspath(path)
        self._fd = open_descriptor(self.path)
        status = os.fstat(self._fd)
        self._size_on_disk = status.st_size
        self._mtime = status.st_mtime_ns
        self.size = self._size_on_disk if size is None else size
        self._head, self.overlaid = head, len(head)  # kernel copies must not read the first bytes
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise UnreadableFile("is not a regular file", file=self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make copies and pickles open the file again, since the descriptor is only valid here."""
        state = self._size_on_disk, self._mtime
        return _reopen, (os.path.abspath(self.path), state, self.size, self._head)

    def version(self) -> str:
        """Return the size and time of the open file."""
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
        """Return exactly `length` bytes from `offset`, or raise `TruncatedFile`."""
        self._check_range(offset, length)
        data = self._call_system(_read_once, length, offset)
        if len(data) == length and not self._head:
            return data
        return super().read(offset, length)  # `fill` continues a short read, and puts the head in

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`, with the first bytes that `head` replaces."""
        done = 0
        while done < len(buffer):
            count = self._call_system(_fill_once, buffer[done:], offset + done)
            if count == 0:
                raise TruncatedFile(
                    f"the file ended at {offset + done:,} while it was read; "
                    f"it had {self.size:,} bytes when it was opened",
                    file=self.path,
                )
            done += count
        overlay = self._head[offset : offset + len(buffer)]
        buffer[: len(overlay)] = overlay

    def describe_change(self) -> str | None:
        """Return the change since the file was opened, as a clause; None if it has not changed."""
        status = os.fstat(self.fd())
        if status.st_size != self._size_on_disk:
            return f"size was {self._size_on_disk:,} and is now {status.st_size:,}"
        return "its content was rewritten" if status.st_mtime_ns != self._mtime else None

    def accept_current_state(self) -> None:
        """Accept the current state as the one that was read: we changed the file ourselves."""
        status = os.fstat(self.fd())
        self._size_on_disk = self.size = status.st_size
        self._mtime = status.st_mtime_ns

    def close(self) -> None:
        """Close the descriptor; harmless a second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _call_system(
        self, call: Callable[[int, _Wanted, int], _Got], target: _Wanted, offset: int
    ) -> _Got:
        """Call a read function on the open descriptor; convert system errors to ours."""
        try:
            return call(self.fd(), target, offset)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UnreadableFile(
                f"cannot be read at {offset:,} ({reason})", file=self.path
            ) from error


def _read_once(fd: int, length: int, offset: int) -> bytes:
    """Read up to `length` bytes at `offset` in one call."""
    if hasattr(os, "pread"):
        return os.pread(fd, length, offset)
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, length)


def read_at(fd: int, offset: int, length: int) -> bytes:
    """Return `length` bytes of an open file from `offset`, fewer if it ends before."""
    parts = []
    while length:
        part = _read_once(fd, length, offset)
        if not part:
            break
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return b"".join(parts)


def _fill_once(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset` in one call, and return the number of bytes."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    data = _read_once(fd, min(len(buffer), BLOCK), offset)  # a copy, so it must not be large
    buffer[: len(data)] = data
    return len(data)


def _reopen(path: str, state: tuple[int, int], size: int, head: bytes) -> FileSource:
    """Return the file of a copied or unpickled source, if it has not changed.

    `state` is its size and time on the disk; `size` and `head` are as in `FileSource`.
    """
    source = FileSource(path, size=size, head=head)
    status = os.fstat(source.fd())
    if (status.st_size, status.st_mtime_ns) != state:
        source.close()
        raise UnreadableFile("has changed since it was opened", file=path)
    return source


class FolderFile(Source):
    """A file in a folder, open only while it is read, since there may be very many."""

    def __init__(self, path: str, size: int) -> None:
        """Represent a file that had `size` bytes when the folder was listed."""
        self.name, self.size = path, size

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`.

        Raises:
            TruncatedFile: the size of the file has changed.
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
    """Bytes in memory, for example a payload from inside a pickle."""

    is_shared = True

    def __init__(self, data: bytes, name: str) -> None:
        """Store `data`; `name` is the file that it came from."""
        self._data = data
        self.name, self.size = name, len(data)

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`."""
        buffer[:] = memoryview(self._data)[offset : offset + len(buffer)]


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes of `source` from `offset`, which are inside the source."""

    source: Source
    offset: int
    length: int

    def __post_init__(self) -> None:
        """Refuse a range that is not inside the source."""
        if self.offset < 0 or self.length < 0 or self.offset + self.length > self.source.size:
            missing = self.offset + self.length - self.source.size
            raise TruncatedFile(
                f"cannot read {self.length:,} bytes at offset {self.offset:,}: the file ends "
                f"at {self.source.size:,}, {missing:,} bytes too early",
                file=self.source.name,
            )

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes (None: all that remain) from `start` within the range."""
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

    def iterate_blocks(self, size: int = BLOCK) -> Iterator[bytes]:
        """Yield the content in order, at most `size` bytes at a time."""
        for start in range(0, self.length, size):
            yield self.source.read(self.offset + start, min(size, self.length - start))

    def iterate_reused(self, size: int = BLOCK) -> Iterator[memoryview]:
        """Yield the content in order, each block in the memory of the previous one."""
        buffer = memoryview(bytearray(min(size, self.length)))
        for start in range(0, self.length, size):
            part = buffer[: self.length - start]
            self.read_into(part, start)
            yield part


def count_far_bytes(ranges: Iterable[ByteRange]) -> int:
    """Count the bytes of ranges on other machines, a range that occurs twice once.

    Computed and assembled ranges count as the ranges that they are made of.
    """
    far_ranges: set[tuple[int, int, int]] = set()  # (id of the source, offset, length)
    pending = list(ranges)
    while pending:
        item = pending.pop()
        if item.source.made_of:
            pending.extend(item.source.made_of)
        elif not isinstance(item.source, MemorySource) and item.source.fd() is None:
            far_ranges.add((id(item.source), item.offset, item.length))
    return sum(length for _, _, length in far_ranges)


def join_neighbors(parts: Iterable[ByteRange]) -> list[ByteRange]:
    """Return the parts in order, with adjacent parts of one source joined."""
    runs: list[ByteRange] = []
    for part in parts:
        last = runs[-1] if runs else None
        if last and last.source is part.source and last.offset + last.length == part.offset:
            runs[-1] = ByteRange(part.source, last.offset, last.length + part.length)
        else:
            runs.append(part)
    return runs


SHARED = 4096
"""File systems that share blocks (XFS, btrfs) need equal offsets modulo this size."""
WORTH_SHARING = 1 << 20
"""The fewest bytes that are worth sharing."""


class Shared(NamedTuple):
    """Bytes of a new file that need no space if the file system shares blocks."""

    length: int
    run: ByteRange
    """One of the ranges that they are copied from."""


Stated = tuple[str, ByteRange, int]
"""A range with a CRC-32 that its file states, and its name: a record of a zip."""
