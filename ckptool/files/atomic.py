"""A file that appears whole or not at all; several of them, the last of which names the others."""

from __future__ import annotations

import os
import re
import secrets
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import FileIO

from ckptool.errors import FileBusy, TargetExists, UsageError, WriteDenied, WriteError, warn
from ckptool.files.journal import (
    hold_edit_lock,
    missing_folders,
    read_journal,
    remove,
    remove_unfinished,
)
from ckptool.files.recovery import recover_before_writing
from ckptool.files.renames import (
    FINISHED,
    PART,
    PendingRename,
    finish_renames,
    only_writer,
    rename_all,
    state_of,
)
from ckptool.files.source import BLOCK, ByteRange, Progress, Shared
from ckptool.files.system import (
    check_space,
    close_to_rename,
    copy_bytes,
    hand_over,
    lock,
    private,
    remove_unlocked,
    reserve,
    shares_blocks,
    start_writeback,
    sync_folder,
    who,
    worded,
    write_at,
)
from ckptool.files.temporary import journal_path, temporary_name
from ckptool.remedies import Remedy

STEP = 64 << 20
"""Bytes between two calls of the progress, and before writing to the disk begins."""
SMALL = 64 << 10
"""A range of up to so many bytes is gathered with its neighbors: one call in place of three."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """What went through Python on its way into a file."""

    length: int
    crc32: int


class FileOutput:
    """Where a planned file puts its bytes: a descriptor, to get exactly `size` bytes, if stated."""

    def __init__(
        self, fd: int, size: int | None, progress: Progress | None = None, name: str = ""
    ) -> None:
        """Write to `fd` from its first byte on; `progress` is told after every `STEP` or so."""
        self.name = name
        """The path of what is being written: not yet that of the target."""
        self.streamed: dict[int, Streamed] = {}
        """By offset, what was no kernel copy."""
        self.is_verified = True
        """Whether what is streamed is compared afterwards, and its CRC-32 kept for that."""
        self._fd = fd
        self._size = size
        self._progress = progress
        self._pending = bytearray()
        self._flushed = 0
        self._reported = 0

    def tell(self) -> int:
        """Return the bytes written so far."""
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
        elif self._fd >= 0 and data.source.fd() is not None:
            self._copy_file(data)
        elif self.is_verified:
            self.copy_with_crc(data)
        else:
            for block in data.reread():
                self.write(block)

    def copy_with_crc(self, data: ByteRange) -> int:
        """Copy a range and return its CRC-32.

        Raises:
            TruncatedFile: the source has become shorter.
        """
        return self.stream(data.reread())

    def stream(self, blocks: Iterable[bytes | memoryview]) -> int:
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
        if self._size not in (None, self._flushed):
            raise WriteError(f"wrote {self._flushed:,} bytes, expected {self._size:,}")
        self._report()

    def _copy_file(self, data: ByteRange) -> None:
        self._expect(data.length)
        self._flush()
        for start in range(0, data.length, STEP):
            length = min(STEP, data.length - start)
            copy_bytes(data.source, data.offset + start, self._fd, self._flushed, length)
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
        if self._size is not None and self.tell() + length > self._size:
            raise WriteError(f"wrote more than the expected {self._size:,} bytes")

    def _step(self) -> None:
        if self._flushed - self._reported >= STEP:
            start_writeback(self._fd, self._reported, self._flushed - self._reported)
            self._report()

    def _report(self) -> None:
        self._reported = self._flushed
        if self._progress is not None:
            self._progress(self._flushed, self._size or self._flushed)


def _found_beside(target: str, ending: str) -> list[str]:
    """Return the files beside `target` whose names `temporary_name` gives with such an ending."""
    folder, beginning = os.path.split(temporary_name(target, ""))
    pattern = re.compile(re.escape(beginning) + ending)
    found: list[str] = []
    with suppress(OSError):  # a folder that we may write to, and not list
        found = [name for name in os.listdir(folder) if pattern.fullmatch(name)]
    return [os.path.join(folder, name) for name in found]


@contextmanager
def _folder_of(target: str) -> Iterator[str]:
    """Give the target's folder, made if need be, and removed again if the block fails."""
    folder = os.path.dirname(target)
    missing = missing_folders(folder)
    try:
        os.makedirs(folder, exist_ok=True)
        for made in missing:
            sync_folder(os.path.dirname(made))
        yield folder
    except BaseException:
        with suppress(OSError):
            for made in missing:
                os.rmdir(made)
        raise


def _seal(file: FileIO, output: FileOutput, old: os.stat_result | None, mode: int | None) -> None:
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
    size: int | None,
    *,
    overwrite: bool = False,
    mode: int | None = None,
    check: Callable[[], None] | None = None,
    progress: Progress | None = None,
    shared: Shared | None = None,
) -> Iterator[FileOutput]:
    """Give an output for `size` bytes that become the file at `path` if the block ends well.

    `size` is None where it is not known before; the space is then not reserved, nor is it where
    blocks are `shared` with the source: a disk with room for the others will do.

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
        recover_before_writing(target)
        with hold_edit_lock(target), _folder_of(target) as folder:
            _remove_debris(target)
            check_space(folder, (size or 0) - (shared.length if shared else 0))
            with _temporary_file(target, mode if old is None else 0o600) as file:
                _remove_debris(target, file.name)
                if shared is None or not shares_blocks(shared.run, file.fileno()):
                    check_space(folder, size or 0)
                    reserve(file.fileno(), size or 0)
                output = FileOutput(file.fileno(), size, progress, file.name)
                yield output
                _seal(file, output, old, mode)
                close_to_rename(file)
                refuse_target(path, overwrite=overwrite)
                if check is not None:
                    check()
                os.replace(file.name, target)
        sync_folder(folder)


def refuse_target(path: str | os.PathLike[str], *, overwrite: bool) -> os.stat_result | None:
    """Return what the system says of a file that may be replaced; None where there is none.

    Raises:
        TargetExists: it is there and not to be overwritten, or is a folder.
        WriteDenied: it is a device, a pipe or the like.
    """
    try:
        old = os.stat(path)
    except FileNotFoundError:
        return None
    is_folder = stat.S_ISDIR(old.st_mode)
    if not (is_folder or stat.S_ISREG(old.st_mode)):
        raise WriteDenied(
            "is not a regular file", file=path, hint="give the path of a regular file"
        )
    refuse_taken(path, is_folder=is_folder, overwrite=overwrite)
    return old


def refuse_taken(path: str | os.PathLike[str], *, is_folder: bool, overwrite: bool) -> None:
    """Refuse the name of something that is there.

    Raises:
        TargetExists: it is a folder, or not to be overwritten.
    """
    if is_folder:
        raise TargetExists("is a folder", file=path, hint="give the path of a file")
    if not overwrite:
        hint = Remedy((("overwrite", True),), " replaces it; or choose another path")
        raise TargetExists("already exists", file=path, hint=hint)


def _remove_debris(target: str, own: str = "") -> None:
    """Remove what killed runs were to make `target` of, and refuse to write what another writes.

    Asked again once our `own` file shows that we write: of two that begin at the same moment both
    may be refused, never none.
    """
    for found in _found_beside(target, _TEMPORARY):
        if found != own and (holder := remove_unlocked(found)) is not None:
            raise FileBusy(
                f"is being written by {who(holder)}",
                file=target,
                hint="try again when it has finished, or choose another path",
            )


@contextmanager
def _temporary_file(target: str, mode: int | None) -> Iterator[FileIO]:
    """Give a new file beside the target, open and locked; remove it if the block fails."""
    while True:
        temporary = temporary_name(target, f".ckptool-{secrets.token_hex(6)}.tmp")
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


Outputs = Callable[[str | os.PathLike[str]], AbstractContextManager[FileOutput]]


@contextmanager
def atomic_set(
    index: str | os.PathLike[str],
    sizes: Mapping[str, int],
    *,
    overwrite: bool = False,
    mode: int | None = None,
    check: Callable[[], None] | None = None,
    progress: Progress | None = None,
    shared: Shared | None = None,
) -> Iterator[Outputs]:
    """Give outputs for files that appear together if the block ends well; see `atomic_output`.

    Each is written beside its target; when all are on the disk, they are renamed, the index last.
    Whatever else happens leaves the old files, and nothing beside them; what a kill leaves, the
    next run that writes the same index removes, or finishes (`files.renames`). Files of an older
    set that are not among the new ones stay. The outputs are asked for one after the other, by the
    path; a file is on the disk when the block of its output ends well.

    Args:
        index: The last of the files, for which the others are there.
        sizes: The bytes of every file, in the order in which they are written.
        overwrite: Replace files that are there.
        mode: Permission bits of new files (None: what the umask leaves).
        check: Called when all is on the disk, before the first rename; what it raises leaves the
            old files.
        progress: Told bytes done and bytes of all files.
        shared: As `atomic_output` takes it, where it is one file.

    Raises:
        UsageError: the files are not in one folder, two are the same, or the index is not the last.
        CorruptFile: an earlier write was cut short, and can be neither finished nor taken back.
        WriteError: a file of the set was not written; and all errors of `atomic_output`.
    """
    path, target = os.fspath(index), os.path.realpath(index)
    parts = parts_of(target, sizes, mode)
    if len(parts) == 1:
        with atomic_output(
            path,
            parts[0].size,
            overwrite=overwrite,
            mode=mode,
            check=check,
            progress=progress,
            shared=shared,
        ) as alone:
            yield lambda _: nullcontext(alone)
        return
    known, total, done = {part.path: part for part in parts}, sum(part.size for part in parts), 0

    @contextmanager
    def output_of(path: str | os.PathLike[str]) -> Iterator[FileOutput]:
        nonlocal done
        part = known[os.fspath(path)]
        with worded(part.path), part.output(counting_on(progress, done, total)) as output:
            yield output
        done += part.size

    with begun_set(path, target, parts, overwrite=overwrite):
        try:
            for part in parts:
                part.reserve()
            yield output_of
            for part in parts:
                part.check_finished(overwrite=overwrite)
            if check is not None:
                check()
            rename_all(target, [part.move() for part in parts])
        except BaseException:
            if not os.path.lexists(journal_path(target)):  # else it still needs them
                for part in parts:
                    remove(part.temporary)
            raise


@contextmanager
def begun_set(
    path: str,
    target: str,
    parts: Sequence[PendingFile],
    *,
    overwrite: bool,
    keeps: Callable[[str], bool] = lambda name: False,
) -> Iterator[None]:
    """Hold the lock on a set; what a kill left of it is finished, or removed unless `keeps` it.

    Raises:
        As `atomic_set`.
    """
    with worded(path), _folder_of(target) as folder, only_writer(target, path) as is_locked:
        journal = read_journal(target)
        if journal is not None:
            finish_renames(target, journal)
            warn(f"{path}: {FINISHED}")
        for part in parts:
            part.old = refuse_target(part.path, overwrite=overwrite)
            if part.target != target:
                recover_before_writing(part.target)
        if is_locked:
            remove_unfinished(target)
            for found in _found_beside(target, PART):
                if not keeps(found):
                    remove(found)
        check_space(folder, sum(part.size for part in parts if not keeps(part.temporary)))
        yield


def counting_on(progress: Progress | None, done: int, total: int) -> Progress | None:
    """Return the progress of one of several files, with `done` bytes in those before it."""
    return progress and (lambda now, _: progress(done + now, total))


@dataclass(slots=True)
class PendingFile:
    """One file of a set while it is written."""

    path: str
    """As the caller names it."""
    target: str
    temporary: str
    size: int
    mode: int | None
    old: os.stat_result | None = None
    """The file that it replaces."""
    inode: int | None = None
    """Of the finished file."""

    def reserve(self) -> None:
        """Make the file, with all the space that it will take."""
        mode = self.mode if self.old is None else 0o600
        with (
            worded(self.path),
            open(self.temporary, "xb", buffering=0, opener=private(mode)) as file,
        ):
            reserve(file.fileno(), self.size)

    @contextmanager
    def output(self, progress: Progress | None) -> Iterator[FileOutput]:
        """Write it, to the disk when the block ends well."""
        with open(self.temporary, "r+b", buffering=0) as file:
            output = FileOutput(file.fileno(), self.size, progress, self.temporary)
            yield output
            _seal(file, output, self.old, self.mode)
            self.inode = os.fstat(file.fileno()).st_ino

    def check_finished(self, *, overwrite: bool) -> None:
        """Refuse a file that did not come, and a target that appeared meanwhile."""
        if self.inode is None:
            raise WriteError("was planned but not written", file=self.path)
        self.old = refuse_target(self.path, overwrite=overwrite)

    def move(self) -> PendingRename:
        """Return what is left to do for it."""
        names = os.path.basename(self.temporary), os.path.basename(self.target)
        return PendingRename(*names, self.inode or 0, self.size, state_of(self.old))


def parts_of(target: str, sizes: Mapping[str, int], mode: int | None) -> list[PendingFile]:
    """Return the files, which lie in one folder, the index last."""
    token, parts = secrets.token_hex(6), []
    for number, (path, size) in enumerate(sizes.items(), 1):
        temporary = temporary_name(target, f".ckptool-{token}-{number:05}.part")
        part = PendingFile(path, os.path.realpath(path), temporary, size, mode)
        if os.path.dirname(part.target) != os.path.dirname(target):
            raise UsageError(
                f"must be in the same folder as the index, {os.path.dirname(target)}",
                file=path,
                hint="check whether one of the files is a link to another folder",
            )
        parts.append(part)
    if len({part.target for part in parts}) != len(parts):
        raise UsageError("the set lists the same file twice", file=target)
    if not parts or parts[-1].target != target:
        raise UsageError("must be the last file of the set", file=target)
    return parts
