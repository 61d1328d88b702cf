"""The file systems of fsspec: what an address names there, and the ranges of its files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ckptool.errors import (
    CheckpointError,
    FileDenied,
    FileMissing,
    UnreadableFile,
    UnsupportedFormat,
)
from ckptool.files.http import Part

__all__ = ["INSTALL", "Fetch", "by_fsspec", "system_of", "told_by"]

_Told = TypeVar("_Told")

INSTALL = "pip install fsspec huggingface_hub"

Fetch = Callable[[int, int, str], Part]
"""Bytes from an offset to another, of the file that still has a tag."""


def by_fsspec(path: str) -> Fetch:
    """Return what fetches the bytes of a file."""
    system, inner = system_of(path)

    def facts() -> tuple[int, str]:
        system.invalidate_cache()
        told = told_by(path, lambda: system.info(inner))
        if told["type"] == "directory":
            raise FileMissing("is a folder", file=path)
        tags = (told.get(key) for key in ("ETag", "etag", "LastModified", "mtime"))
        return int(told["size"]), str(next(filter(None, tags), ""))

    size, known = facts()

    def ask(start: int, stop: int, tag: str) -> Part:
        stop = max(min(stop, size), start)
        data = (
            told_by(path, lambda: system.cat_file(inner, start=start, end=stop))
            if stop > start
            else b""
        )
        if len(data) != stop - start:
            raise UnreadableFile("changed while it was read: it is shorter by now", file=path)
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

    def find() -> tuple[Any, str]:
        try:
            found: tuple[Any, str] = url_to_fs(path)
        except ImportError as error:
            raise UnsupportedFormat(f"cannot be read: {error}", file=path) from error
        except ValueError as error:
            raise UnsupportedFormat(
                f"is not an address that fsspec knows: {error}", file=path
            ) from error
        return found

    return told_by(path, find)  # a chain asks for what it leads through


def told_by(path: str, work: Callable[[], _Told]) -> _Told:
    """Do the work of a file system, whose errors are of any kind."""
    try:
        return work()
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise FileMissing("there is no such file", file=path) from error
    except PermissionError as error:
        raise FileDenied(f"it is not given to us: {error}", file=path) from error
    except Exception as error:
        raise UnreadableFile(
            f"cannot be fetched: {type(error).__name__}, {error}", file=path
        ) from error
