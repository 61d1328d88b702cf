"""The file systems of fsspec: resolve addresses, read ranges, write objects.

An object is uploaded in parts as its bytes arrive, and appears with the last part; a failure before
that, Ctrl-C included, discards the parts. Several objects appear one after the other, the index
last. The size of each is checked afterwards; nothing is read back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import ceil
from typing import Any

from ckptool.errors import (
    CheckpointError,
    FileDenied,
    FileMissing,
    UnreadableFile,
    UnsupportedFormat,
    UsageError,
    WriteDenied,
    WriteError,
    warn,
)
from ckptool.files.atomic import STEP, FileOutput, Outputs, refuse_taken, shift_progress
from ckptool.files.http import RangeResponse, changed_error
from ckptool.files.source import Progress
from ckptool.words import listed

INSTALL = "pip install fsspec huggingface_hub"

Fetch = Callable[[int, int, str], RangeResponse]
"""Returns the bytes between two offsets of a file, if it still has the tag."""


def make_fsspec_fetcher(path: str) -> Fetch:
    """Return the function that fetches bytes of a file, whose size and tag are read now."""
    system, inner = find_file_system(path)
    with convert_errors(path):
        system.invalidate_cache()
        info = system.info(inner)
        if info["type"] == "directory":
            raise FileMissing("is a folder", file=path)
        size = int(info["size"])
        tags = (info.get(key) for key in ("ETag", "etag", "LastModified", "mtime"))
        tag_now = str(next(filter(None, tags), ""))

    def fetch_range(start: int, stop: int, tag: str) -> RangeResponse:
        """Return the bytes from `start` to `stop`; the size must not have changed.

        `tag` is not used: fsspec has no requests with a condition.
        """
        stop = max(min(stop, size), start)
        with convert_errors(path):
            data = system.cat_file(inner, start=start, end=stop) if stop > start else b""
        if len(data) != stop - start:
            raise changed_error(path)
        return RangeResponse(bytes(data), size, tag_now)

    return fetch_range


def find_file_system(path: str) -> tuple[Any, str]:
    """Return the fsspec file system of an address, and the path in it.

    Raises:
        UnsupportedFormat: fsspec, or the package of the file system, is not installed.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UnsupportedFormat(
            "reading this address needs fsspec, which is not installed", file=path, hint=INSTALL
        ) from error
    with convert_errors(path):  # resolving a chained address may send requests
        try:
            system_and_path: tuple[Any, str] = url_to_fs(path)
        except (ImportError, ValueError) as error:
            raise UnsupportedFormat(
                f"fsspec does not support this address: {error}", file=path
            ) from error
    return system_and_path


@contextmanager
def convert_errors(path: str, *, to_write: bool = False) -> Iterator[None]:
    """Convert the exceptions of a file system, of any type, to our errors.

    Raises:
        FileMissing, FileDenied, UnreadableFile: reading fails; WriteDenied, WriteError with
        `to_write`.
    """
    try:
        yield
    except CheckpointError as error:
        error.file = error.file or path
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not to_write:
            raise FileMissing("no such file", file=path) from error
        denied_class, failed_class = (
            (WriteDenied, WriteError) if to_write else (FileDenied, UnreadableFile)
        )
        error_class = denied_class if isinstance(error, PermissionError) else failed_class
        action = "written" if to_write else "downloaded"
        raise error_class(
            f"cannot be {action}: {type(error).__name__}, {error}", file=path
        ) from error


_PART_SIZE, _MAX_PARTS = 16 << 20, 9_000
"""The size of a part of an object, and the most parts: S3 allows 10,000."""


def refuse_object(path: str, *, overwrite: bool) -> None:
    """Refuse an address that cannot be written or must not be replaced.

    Raises:
        UsageError: ckptool does not write to addresses of this kind.
        TargetExists: it exists.
        WriteError: the file system fails to report whether it exists.
    """
    kind = path.partition("://")[0].lower()
    if kind in ("http", "https", "hf"):
        raise UsageError(
            f"cannot write to {kind}://, which cannot write a file atomically",
            hint="write a local file, then upload it" + (" with hf upload" if kind == "hf" else ""),
        )
    system, inner = find_file_system(path)
    with convert_errors(path, to_write=True):
        system.invalidate_cache()
        try:
            info = system.info(inner)
        except FileNotFoundError:
            return
    refuse_taken(path, is_folder=info["type"] == "directory", overwrite=overwrite)


@contextmanager
def upload_set(
    index: str,
    sizes: Mapping[str, int],
    *,
    overwrite: bool,
    check: Callable[[], None] | None,
    progress: Progress | None,
) -> Iterator[Outputs]:
    """Yield outputs for objects, used one by one, the index last; see `open_atomic_set`.

    `index` is the address of the last one; `sizes` has the size of each object by its address.
    `check` is called before the last one appears. After a failure, the objects that have appeared
    stay, and a `CheckpointWarning` lists them.

    Raises:
        TargetExists: an object exists and `overwrite` is false.
        WriteDenied, WriteError: the write fails, or the object has another size.
    """
    written: list[str] = []

    @contextmanager
    def open_output(name: str | os.PathLike[str]) -> Iterator[FileOutput]:
        """Yield the output of one object; check it before it appears."""
        path = os.fspath(name)
        # The progress is that of the whole set, so the objects before this one count as done.
        done, total = sum(sizes[sent] for sent in written), sum(sizes.values())
        with _upload(path, sizes[path], shift_progress(progress, done, total)) as output:
            yield output
            if check is not None and path == index:
                check()
            refuse_object(path, overwrite=overwrite)  # it may have appeared since
        written.append(path)

    try:
        yield open_output
    except BaseException:
        if written:
            warn(f"{index}: was not written, but these of its files were: {listed(written)}")
        raise


@contextmanager
def _upload(path: str, size: int, progress: Progress | None) -> Iterator[FileOutput]:
    """Yield an output; the object appears if the block succeeds."""
    system, inner = find_file_system(path)
    transaction = system.transaction
    transaction.start()  # every file system defers writes in a transaction, even `memory`
    file: Any = None
    try:
        part_size = max(_PART_SIZE, ceil(size / _MAX_PARTS))
        with convert_errors(path, to_write=True):
            file = system.open(inner, "wb", block_size=part_size)
        output = _Upload(file, path, size, progress)
        yield output
        with convert_errors(path, to_write=True):
            output.finish()
            file.close()
    except BaseException:
        with suppress(Exception):  # report the first error
            transaction.complete(commit=False)
        with suppress(AttributeError):
            file.closed = True  # otherwise the garbage collector closes it, and it may appear
        raise
    with convert_errors(path, to_write=True):
        transaction.complete(commit=True)
        system.invalidate_cache()
        actual_size = int(system.info(inner)["size"])
        if actual_size != size:
            system.rm_file(inner)
            raise WriteError(
                f"sent {size:,} bytes, but the object had {actual_size:,} and was removed",
                file=path,
            )


class _Upload(FileOutput):
    """An output that uploads its bytes."""

    def __init__(self, file: Any, path: str, size: int, progress: Progress | None) -> None:
        """Upload `size` bytes through an open file of fsspec."""
        super().__init__(-1, size, progress, path)
        self._file = file

    def _put(self, data: bytes | bytearray | memoryview) -> None:
        """Send `data` to the file system, and report the progress after each `STEP` bytes."""
        with convert_errors(self.name, to_write=True):
            self._file.write(data)
        self._written += len(data)
        if self._written - self._reported_bytes >= STEP:
            self._report()
