"""Write a file, or a set of files with an index, so that it appears whole or not at all."""

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
    find_missing_folders,
    hold_edit_lock,
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
    hold_set_lock,
    rename_all,
    state_of,
)
from ckptool.files.source import BLOCK, ByteRange, Progress, Shared
from ckptool.files.system import (
    check_space,
    close_to_rename,
    convert_os_errors,
    copy_bytes,
    describe_process,
    hand_over,
    lock,
    make_opener,
    remove_unlocked,
    reserve,
    start_writeback,
    sync_folder,
    try_sharing_blocks,
    write_at,
)
from ckptool.files.temporary import journal_path, temporary_name
from ckptool.remedies import Remedy

STEP = 64 << 20
"""Bytes between two progress calls, and between two starts of writing to the disk."""
SMALL = 64 << 10
"""Ranges of up to this size are gathered with their neighbors, in one call instead of three."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """A range of the output that was copied by Python, not by the kernel."""

    length: int
    crc32: int


class FileOutput:
    """The output of a planned file: a descriptor that expects exactly `size` bytes, if stated."""

    def __init__(
        self, fd: int, size: int | None, progress: Progress | None = None, name: str = ""
    ) -> None:
        """Write to `fd` (-1: a subclass does) from its first byte, `size` bytes (None: any number).

        `progress` is called about every `STEP` bytes.
        """
        self.name = name
        """The path of the temporary file, not of the target."""
        self.streamed: dict[int, Streamed] = {}
        """By offset, the ranges that the kernel did not copy."""
        self.is_verified = True
        """True if streamed ranges are verified afterwards, so their CRC-32 is kept."""
        self._fd = fd
        self._size = size
        self._progress = progress
        self._unwritten = bytearray()
        """Small pieces that are not in the file yet."""
        self._written = 0
        """The number of bytes in the file."""
        self._reported_bytes = 0
        """The value of `_written` when `progress` was last called."""

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._written + len(self._unwritten)

    def write(self, data: bytes | memoryview) -> None:
        """Write `data`; small pieces are gathered, large ones go straight through."""
        self._check_room(len(data))
        if len(data) >= BLOCK:
            self._flush()
            self._put(data)
            return
        self._unwritten += data
        if len(self._unwritten) >= BLOCK:
            self._flush()

    def copy(self, data: ByteRange) -> None:
        """Copy a range; a small one with `write`, a longer one in a file with kernel copies.

        Without these, its CRC-32 is added to `streamed`, if `is_verified`.

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
            for block in data.iterate_reused():
                self.write(block)

    def copy_with_crc(self, data: ByteRange) -> int:
        """Copy a range and return its CRC-32.

        Raises:
            TruncatedFile: the source has become shorter.
        """
        return self.write_blocks(data.iterate_reused())

    def write_blocks(self, blocks: Iterable[bytes | memoryview]) -> int:
        """Write the blocks, add them to `streamed` as one range, and return their CRC-32."""
        start, crc = self.tell(), 0
        for block in blocks:
            crc = zlib.crc32(block, crc)
            self.write(block)
        self.streamed[start] = Streamed(self.tell() - start, crc)
        return crc

    def finish(self) -> None:
        """Write the pending bytes and check the size.

        Raises:
            WriteError: fewer bytes were written than planned.
        """
        self._flush()
        if self._size not in (None, self._written):
            raise WriteError(f"wrote {self._written:,} bytes, expected {self._size:,}")
        self._report()

    def _copy_file(self, data: ByteRange) -> None:
        """Copy a range of a file with kernel copies, `STEP` bytes at a time."""
        self._check_room(data.length)
        self._flush()
        for start in range(0, data.length, STEP):
            length = min(STEP, data.length - start)
            copy_bytes(data.source, data.offset + start, self._fd, self._written, length)
            self._written += length
            self._advance()

    def _flush(self) -> None:
        """Write the pending bytes to the file."""
        if self._unwritten:
            pending, self._unwritten = self._unwritten, bytearray()
            self._put(pending)

    def _put(self, data: bytes | bytearray | memoryview) -> None:
        """Write `data` at the end of the file."""
        write_at(self._fd, data, self._written)
        self._written += len(data)
        self._advance()

    def _check_room(self, length: int) -> None:
        """Raise `WriteError` if `length` more bytes exceed the stated size."""
        if self._size is not None and self.tell() + length > self._size:
            raise WriteError(f"wrote more than the expected {self._size:,} bytes")

    def _advance(self) -> None:
        """After each `STEP` bytes, start the write to the disk and report the progress."""
        if self._written - self._reported_bytes >= STEP:
            start_writeback(self._fd, self._reported_bytes, self._written - self._reported_bytes)
            self._report()

    def _report(self) -> None:
        """Call the progress callback with the bytes written so far."""
        self._reported_bytes = self._written
        if self._progress is not None:
            self._progress(self._written, self._size or self._written)


def _find_temporaries(target: str, ending_pattern: str) -> list[str]:
    """Return the temporary files of `target` with an ending that matches the pattern."""
    folder, prefix = os.path.split(temporary_name(target, ""))
    pattern = re.compile(re.escape(prefix) + ending_pattern)
    names: list[str] = []
    with suppress(OSError):  # a folder that can be written but not listed
        names = [name for name in os.listdir(folder) if pattern.fullmatch(name)]
    return [os.path.join(folder, name) for name in names]


@contextmanager
def _create_folder(target: str) -> Iterator[str]:
    """Yield the target's folder; create it if needed, and remove it again if the block fails.

    Parent folders are created and removed, too.
    """
    folder = os.path.dirname(target)
    missing = find_missing_folders(folder)  # the innermost first
    try:
        os.makedirs(folder, exist_ok=True)
        for missing_folder in missing:
            sync_folder(os.path.dirname(missing_folder))
        yield folder
    except BaseException:
        with suppress(OSError):  # another process may have put a file there
            for missing_folder in missing:
                os.rmdir(missing_folder)
        raise


def _finish_file(
    file: FileIO, output: FileOutput, old: os.stat_result | None, mode: int | None
) -> None:
    """Finish the output, and sync its file with the owner, group and mode of the one to replace.

    `mode` is the mode of a file that replaces nothing (None: unchanged).

    Raises:
        WriteError: fewer bytes were written than planned.
        OSError: the system call fails.
    """
    output.finish()
    if old is not None:
        hand_over(file.name, old)
        mode = stat.S_IMODE(old.st_mode)
    if mode is not None:  # last: changing the owner clears mode bits
        os.chmod(file.name, mode)
    os.fsync(file.fileno())


_TEMPORARY = r"\.ckptool-[0-9a-f]{12}\.tmp"


@contextmanager
def open_atomic_output(
    path: str | os.PathLike[str],
    size: int | None,
    *,
    overwrite: bool = False,
    mode: int | None = None,
    check: Callable[[], None] | None = None,
    progress: Progress | None = None,
    shared: Shared | None = None,
) -> Iterator[FileOutput]:
    """Yield an output for `size` bytes; they become the file at `path` if the block succeeds.

    If `size` is None (unknown), no space is reserved. Blocks that are `shared` with the source need
    no space either.

    If anything fails, or the process is killed, an old file is unchanged. The temporary file is
    removed, after a kill by the next run that writes to the same path. The writer locks the
    temporary file, so an unlocked one is debris (systems without locks keep it). Links are
    followed: the target of a link is replaced, the link stays. `mode` is the permission bits of a
    new file (None: from the umask); a replaced file passes on its mode, and its owner and group
    where permitted. `check` is called when everything is on the disk, just before the rename; if it
    raises, the old file stays. An interrupted edit of the target is recovered first, and the target
    is locked against edits, so that a journal is never next to a file that it does not belong to.

    Raises:
        FileBusy: another process or thread is editing or writing it; the message has its number.
        CorruptFile: the journal next to the target belongs to other content.
        TargetExists: the target exists and `overwrite` is false, or it is a folder.
        NoSpace: the disk cannot hold `size` bytes.
        WriteDenied: no permission to write there.
        WriteError: another system error, or more or fewer bytes than `size`.
    """
    target = os.path.realpath(path)
    with convert_os_errors(os.fspath(path)):
        old = refuse_target(path, overwrite=overwrite)
        recover_before_writing(target)
        with hold_edit_lock(target), _create_folder(target) as folder:
            _remove_debris(target)  # makes space, too
            check_space(folder, (size or 0) - (shared.length if shared else 0))
            # Until `_finish_file` sets this mode, which may be strict, only the owner has access.
            is_private = old is not None or mode is not None
            with _create_temporary(target, is_private=is_private) as file:
                # Again: of two writers that start together, at least one now sees the other's file.
                _remove_debris(target, file.name)
                if shared is None or not try_sharing_blocks(shared.run, file.fileno()):
                    check_space(folder, size or 0)
                    reserve(file.fileno(), size or 0)
                output = FileOutput(file.fileno(), size, progress, file.name)
                yield output
                _finish_file(file, output, old, mode)
                close_to_rename(file)
                refuse_target(path, overwrite=overwrite)  # it may have appeared since
                if check is not None:
                    check()
                os.replace(file.name, target)
        sync_folder(folder)


def refuse_target(path: str | os.PathLike[str], *, overwrite: bool) -> os.stat_result | None:
    """Return the status of a file that may be replaced; None if it does not exist.

    Raises:
        TargetExists: it exists and `overwrite` is false, or it is a folder.
        WriteDenied: it is not a regular file.
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
    """Refuse a target that exists.

    Raises:
        TargetExists: it is a folder, or `overwrite` is false.
    """
    if is_folder:
        raise TargetExists("is a folder", file=path, hint="give the path of a file")
    if not overwrite:
        hint = Remedy((("overwrite", True),), " replaces it; or choose another path")
        raise TargetExists("already exists", file=path, hint=hint)


def _remove_debris(target: str, own_path: str = "") -> None:
    """Remove temporary files of killed runs, and refuse a target that another process writes.

    Called again when our own temporary file, `own_path`, exists: of two processes that start at the
    same time both may be refused, but never neither.
    """
    for path in _find_temporaries(target, _TEMPORARY):
        if path != own_path and (holder := remove_unlocked(path)) is not None:
            raise FileBusy(
                f"is being written by {describe_process(holder)}",
                file=target,
                hint="try again when it has finished, or choose another path",
            )


@contextmanager
def _create_temporary(target: str, *, is_private: bool) -> Iterator[FileIO]:
    """Yield a new temporary file, open and locked; remove it if the block fails.

    If it `is_private`, only its owner can access it until it gets its mode.
    """
    opener = make_opener(is_private=is_private)
    while True:
        temporary = temporary_name(target, f".ckptool-{secrets.token_hex(6)}.tmp")
        try:
            with open(temporary, "xb", buffering=0, opener=opener) as file:
                lock(file.fileno())
                if not os.path.lexists(temporary):  # another writer took it for debris
                    continue
                yield file
                return
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise


Outputs = Callable[[str | os.PathLike[str]], AbstractContextManager[FileOutput]]
"""Opens the output of one file of a set, by its path."""


@contextmanager
def open_atomic_set(
    index: str | os.PathLike[str],
    sizes: Mapping[str, int],
    *,
    overwrite: bool = False,
    mode: int | None = None,
    check: Callable[[], None] | None = None,
    progress: Progress | None = None,
    shared: Shared | None = None,
) -> Iterator[Outputs]:
    """Yield a function that opens outputs by path; the files appear if the block succeeds.

    See `open_atomic_output`. Each is written to a temporary file in the same folder; when all are
    on the disk, they are renamed, the index last. If anything fails, the old files stay and the
    temporary files are removed. After a kill, the next run that writes the same index removes or
    finishes the set (`files.renames`). Files of an older set that have no new file stay. Get the
    outputs one by one, by path; a file is on the disk when the block of its output succeeds.

    Args:
        index: The last of the files, which lists the others.
        sizes: The size of each file in bytes, in the order of writing.
        overwrite: Replace existing files.
        mode: Permission bits of new files (None: from the umask).
        check: Called when everything is on the disk, before the first rename; if it raises, the old
            files stay.
        progress: Called with the bytes done and the bytes of all files.
        shared: As in `open_atomic_output`, for a set of one file.

    Raises:
        UsageError: the files are not in one folder, two are the same, or the index is not the last.
        CorruptFile: an earlier write was interrupted, and can be neither finished nor undone.
        WriteError: a file of the set was not written; and all errors of `open_atomic_output`.
    """
    path, target = os.fspath(index), os.path.realpath(index)
    files = plan_files(target, sizes, mode)
    if len(files) == 1:  # no journal is needed
        with open_atomic_output(
            path,
            files[0].size,
            overwrite=overwrite,
            mode=mode,
            check=check,
            progress=progress,
            shared=shared,
        ) as output:
            yield lambda _: nullcontext(output)
        return
    with begin_set(path, target, files, overwrite=overwrite), _remove_on_failure(files, target):
        for file in files:
            file.reserve()
        yield _make_outputs(files, progress)
        for file in files:
            file.check_finished(overwrite=overwrite)
        if check is not None:
            check()
        rename_all(target, [file.make_rename() for file in files])


def _make_outputs(files: Sequence[PendingFile], progress: Progress | None) -> Outputs:
    """Return the function that opens the output of one of the files, by its path."""
    file_by_path = {file.path: file for file in files}
    total = sum(file.size for file in files)
    done = 0

    @contextmanager
    def open_output(path: str | os.PathLike[str]) -> Iterator[FileOutput]:
        """Yield the output of one file of the set."""
        nonlocal done
        file = file_by_path[os.fspath(path)]
        with (
            convert_os_errors(file.path),
            file.open_output(shift_progress(progress, done, total)) as output,
        ):
            yield output
        done += file.size

    return open_output


@contextmanager
def _remove_on_failure(files: Sequence[PendingFile], target: str) -> Iterator[None]:
    """Remove the temporary files of a set if the block fails.

    They stay if the journal of the index `target` does: the next run finishes the renames.
    """
    try:
        yield
    except BaseException:
        if not os.path.lexists(journal_path(target)):
            for file in files:
                remove(file.temporary)
        raise


@contextmanager
def begin_set(
    path: str,
    target: str,
    files: Sequence[PendingFile],
    *,
    overwrite: bool,
    is_kept: Callable[[str], bool] = lambda name: False,
) -> Iterator[None]:
    """Lock a set of files for the block; finish a killed run, or remove its temporary files.

    `path` is the index, `target` the file that it leads to. Sets `old` of each file. The temporary
    files with a path that `is_kept` accepts stay, and need no more space.

    Raises:
        As `open_atomic_set`.
    """
    with (
        convert_os_errors(path),
        _create_folder(target) as folder,
        hold_set_lock(target, path) as is_locked,
    ):
        journal = read_journal(target)
        if journal is not None:
            finish_renames(target, journal)
            warn(f"{path}: {FINISHED}")
        for file in files:
            file.old = refuse_target(file.path, overwrite=overwrite)
            if file.target != target:  # the journal of the index was finished above
                recover_before_writing(file.target)
        if is_locked:  # without a lock, they may belong to a running process
            remove_unfinished(target)
            for leftover in _find_temporaries(target, PART):
                if not is_kept(leftover):
                    remove(leftover)
        check_space(folder, sum(file.size for file in files if not is_kept(file.temporary)))
        yield


def shift_progress(progress: Progress | None, done: int, total: int) -> Progress | None:
    """Return the progress callback of one file in a set, with `done` bytes in earlier files.

    It reports `total` bytes, those of the whole set. None without a `progress`.
    """
    return progress and (lambda written, _: progress(done + written, total))


@dataclass(slots=True)
class PendingFile:
    """One file of a set that is being written."""

    path: str
    """The path as given by the caller."""
    target: str
    """The path with links followed."""
    temporary: str
    """The path until all files of the set are renamed."""
    size: int
    mode: int | None
    """Permission bits, if it replaces no file (None: from the umask)."""
    old: os.stat_result | None = None
    """The file that it replaces."""
    inode: int | None = None
    """The inode of the finished file."""

    def reserve(self) -> None:
        """Create the file, and reserve its space."""
        is_private = self.old is not None or self.mode is not None  # until it has this mode
        opener = make_opener(is_private=is_private)
        with (
            convert_os_errors(self.path),
            open(self.temporary, "xb", buffering=0, opener=opener) as file,
        ):
            reserve(file.fileno(), self.size)

    @contextmanager
    def open_output(self, progress: Progress | None) -> Iterator[FileOutput]:
        """Yield its output; sync it to the disk if the block succeeds."""
        with open(self.temporary, "r+b", buffering=0) as file:
            output = FileOutput(file.fileno(), self.size, progress, self.temporary)
            yield output
            _finish_file(file, output, self.old, self.mode)
            self.inode = os.fstat(file.fileno()).st_ino

    def check_finished(self, *, overwrite: bool) -> None:
        """Update `old`; refuse a file that was not written, and a target that appeared since."""
        if self.inode is None:
            raise WriteError("was planned but not written", file=self.path)
        self.old = refuse_target(self.path, overwrite=overwrite)

    def make_rename(self) -> PendingRename:
        """Return the rename of the finished file to its target."""
        temporary, name = os.path.basename(self.temporary), os.path.basename(self.target)
        return PendingRename(temporary, name, self.inode or 0, self.size, state_of(self.old))


def plan_files(target: str, sizes: Mapping[str, int], mode: int | None) -> list[PendingFile]:
    """Return the files of a set, from the size by path; the last one is the index at `target`.

    Raises:
        UsageError: the files are not in one folder, two are the same, or the index is not the last.
    """
    token, files = secrets.token_hex(6), []
    for number, (path, size) in enumerate(sizes.items(), 1):
        temporary = temporary_name(target, f".ckptool-{token}-{number:05}.part")
        file = PendingFile(path, os.path.realpath(path), temporary, size, mode)
        if os.path.dirname(file.target) != os.path.dirname(target):
            raise UsageError(
                f"must be in the same folder as the index, {os.path.dirname(target)}",
                file=path,
                hint="check whether one of the files is a link to another folder",
            )
        files.append(file)
    if len({file.target for file in files}) != len(files):
        raise UsageError("the set lists the same file twice", file=target)
    if not files or files[-1].target != target:
        raise UsageError("must be the last file of the set", file=target)
    return files
