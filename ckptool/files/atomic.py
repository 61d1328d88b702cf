"""A file that appears whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from typing import Protocol

from ckptool.errors import FileBusy, TargetExists, WriteDenied, WriteError
from ckptool.files.beside import beside
from ckptool.files.journal import undisturbed
from ckptool.files.recovery import settle
from ckptool.files.source import BLOCK, ByteRange, FileSource
from ckptool.files.system import (
    check_space,
    close_to_rename,
    copy_bytes,
    hand_over,
    holder_of,
    lock,
    remove_unlocked,
    reserve,
    start_writeback,
    sync_folder,
    who,
    worded,
    write_at,
)

__all__ = [
    "FileOutput",
    "Output",
    "Progress",
    "Streamed",
    "atomic_output",
    "folder_of",
    "found_beside",
    "private",
    "refuse_target",
    "seal",
]

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
    """Where the `write` of a planned file puts its bytes."""

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


def found_beside(target: str, ending: str) -> list[str]:
    """The files beside `target` of the name that `beside` gives with an ending of this pattern."""
    folder, beginning = os.path.split(beside(target, ""))
    pattern = re.compile(re.escape(beginning) + ending)
    found: list[str] = []
    with suppress(OSError):  # a folder that we may write to, and not list
        found = [name for name in os.listdir(folder) if pattern.fullmatch(name)]
    return [os.path.join(folder, name) for name in found]


@contextmanager
def folder_of(target: str) -> Iterator[str]:
    """The target's folder, made if need be; what was made goes again where the block fails."""
    folder = os.path.dirname(target)
    missing = []
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        for made in missing:
            sync_folder(os.path.dirname(made))
        yield os.path.dirname(target)
    except BaseException:
        with suppress(OSError):
            for made in missing:
                os.rmdir(made)
        raise


def private(mode: int | None) -> Callable[[str, int], int]:
    """An opener of a file for us alone while it is written, where its mode is set at the end."""
    return lambda path, flags: os.open(path, flags, 0o666 if mode is None else 0o600)


def seal(file: FileIO, output: FileOutput, old: os.stat_result | None, mode: int | None) -> None:
    """Put a file on the disk, with owner, group and mode of the one that it will replace.

    `mode` is that of a file that replaces none (None: as it was made).

    Raises:
        WriteError: fewer bytes came than were announced.
        OSError: the system refuses it.
    """
    output.finish()
    if old is not None:
        hand_over(file.name, old)
        mode = stat.S_IMODE(old.st_mode)
    if mode is not None:  # last: a change of the owner takes bits away
        os.chmod(file.name, mode)
    os.fsync(file.fileno())


_TEMPORARY = r"\.ckptool-[0-9a-f]{12}\.tmp"


@contextmanager
def atomic_output(
    path: str | os.PathLike[str],
    size: int,
    *,
    overwrite: bool = False,
    mode: int | None = None,
    check: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> Iterator[FileOutput]:
    """An output for exactly `size` bytes that become the file at `path` when the block ends well.

    Whatever else happens, a kill included, an old file stays as it was. The temporary file is
    removed; after a kill, by the next run that writes to the same name: whoever writes holds a
    lock on the temporary file, so one that nobody holds is debris (systems without such locks
    keep it). Links are resolved: what a link leads to is replaced, the link stays. `mode` is
    the permission bits of a new file (None: what the umask leaves); a file that is replaced hands
    on its own, and its owner and group where the system lets us. `check` is called when all is on
    the disk, right before the rename; what it raises leaves the old file. What a killed edit
    of the target left is set right first, and nobody can edit it meanwhile: a journal is never
    beside another file than its own.

    Raises:
        FileBusy: another process, or thread, is editing or writing it; the message says who.
        CorruptFile: the journal of an edit of other content lies beside the target.
        TargetExists: the target is there and not to be overwritten, or is a folder.
        NoSpace: the disk cannot hold `size` bytes.
        WriteDenied: the system does not let us write there.
        WriteError: another refusal of the system, or more or fewer bytes than `size`.
    """
    target = os.path.realpath(path)
    with worded(os.fspath(path)):
        old = refuse_target(path, overwrite=overwrite)
        settle(target)
        with undisturbed(target), folder_of(target) as folder:
            _remove_debris(target)
            check_space(folder, size)
            with _temporary_file(target, mode if old is None else 0o600) as file:
                _refuse_other_writers(target, file.name)
                reserve(file.fileno(), size)
                output = FileOutput(file.fileno(), size, progress, file.name)
                yield output
                seal(file, output, old, mode)
                close_to_rename(file)
                refuse_target(path, overwrite=overwrite)
                if check is not None:
                    check()
                os.replace(file.name, target)
        sync_folder(folder)


def refuse_target(path: str | os.PathLike[str], *, overwrite: bool) -> os.stat_result | None:
    """What the system says of a file that may be replaced; None where there is none.

    Raises:
        TargetExists: it is there and not to be overwritten, or is a folder.
        WriteDenied: it is a device, a pipe or the like.
    """
    try:
        old = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(old.st_mode):
        raise TargetExists("is a folder", file=path, hint="give the name of a file to write")
    if not stat.S_ISREG(old.st_mode):
        raise WriteDenied("is not a regular file", file=path, hint="give the name of a file")
    if not overwrite:
        raise TargetExists(
            "exists already", file=path, hint="--force replaces it; or choose another name"
        )
    return old


def _remove_debris(target: str) -> None:
    """Remove the temporary files of killed runs that were to become `target`."""
    for found in found_beside(target, _TEMPORARY):
        remove_unlocked(found)


def _refuse_other_writers(target: str, own: str) -> None:
    """Refuse to write what another process is writing, once our own file shows that we do.

    Of two that begin at the same moment both may be refused, never none.
    """
    for found in found_beside(target, _TEMPORARY):
        if found != own and (holder := holder_of(found)) is not None:
            raise FileBusy(
                f"is being written by {who(holder)}",
                file=target,
                hint="try again when it has finished, or choose another name",
            )


@contextmanager
def _temporary_file(target: str, mode: int | None) -> Iterator[FileIO]:
    """A new file beside the target, open and locked; it is removed where the block fails."""
    while True:
        temporary = beside(target, f".ckptool-{secrets.token_hex(6)}.tmp")
        try:
            with open(temporary, "xb", buffering=0, opener=private(mode)) as file:
                lock(file.fileno())
                if not os.path.lexists(temporary):  # taken for debris before it was locked
                    continue
                yield file
                return
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
