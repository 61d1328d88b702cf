"""The file systems of fsspec: what an address names there, and the ranges of its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ckptool.errors import (
    CheckpointError,
    FileDenied,
    FileMissing,
    UnreadableFile,
    UnsupportedFormat,
    WriteDenied,
    WriteError,
)
from ckptool.files.http import Part, changed

__all__ = ["INSTALL", "Fetch", "asked", "by_fsspec", "system_of"]

INSTALL = "pip install fsspec huggingface_hub"

Fetch = Callable[[int, int, str], Part]
"""Bytes from an offset to another, of the file that still has a tag."""


def by_fsspec(path: str) -> Fetch:
    """Return what fetches the bytes of a file."""
    system, inner = system_of(path)
    with asked(path):
        system.invalidate_cache()
        told = system.info(inner)
        if told["type"] == "directory":
            raise FileMissing("is a folder", file=path)
        size = int(told["size"])
        tags = (told.get(key) for key in ("ETag", "etag", "LastModified", "mtime"))
        known = str(next(filter(None, tags), ""))

    def ask(start: int, stop: int, tag: str) -> Part:
        stop = max(min(stop, size), start)
        with asked(path):
            data = system.cat_file(inner, start=start, end=stop) if stop > start else b""
        if len(data) != stop - start:
            raise changed(path)
        return Part(bytes(data), size, known)

    return ask


def system_of(path: str) -> tuple[Any, str]:
    """Return the file system of fsspec that an address names, and the path in there.

    Raises:
        UnsupportedFormat: fsspec, or the package of the file system, is not installed.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UnsupportedFormat(
            "is read by fsspec, which is not installed", file=path, hint=INSTALL
        ) from error
    with asked(path):  # a chain asks for what it leads through
        try:
            found: tuple[Any, str] = url_to_fs(path)
        except (ImportError, ValueError) as error:
            raise UnsupportedFormat(
                f"is not an address that fsspec knows here: {error}", file=path
            ) from error
    return found


@contextmanager
def asked(path: str, *, to_write: bool = False) -> Iterator[None]:
    """Put into words what a file system raises, which is of any kind.

    Raises:
        FileMissing, FileDenied, UnreadableFile: it gives nothing; WriteDenied, WriteError if asked
            `to_write`.
    """
    try:
        yield
    except CheckpointError as error:
        error.file = error.file or path
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not to_write:
            raise FileMissing("there is no such file", file=path) from error
        denied, failed = (WriteDenied, WriteError) if to_write else (FileDenied, UnreadableFile)
        raise (denied if isinstance(error, PermissionError) else failed)(
            f"cannot be {'written' if to_write else 'fetched'}: {type(error).__name__}, {error}",
            file=path,
        ) from error
