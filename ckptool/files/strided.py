"""Elements of a strided tensor as row-major bytes, without torch or numpy, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptool.files.source import BLOCK, ByteRange

__all__ = ["flip_signs", "narrow", "row_major", "swap_bytes"]


def row_major(
    data: ByteRange,
    *,
    itemsize: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    block: int = BLOCK,
) -> Iterator[bytes]:
    """The elements of a view of `data` in row-major order, about `block` bytes at a time.

    `stride` and `offset` count elements of `itemsize` bytes; the view lies inside `data`.
    """
    raise NotImplementedError


def swap_bytes(data: bytes, size: int) -> bytes:
    """`data` with each group of `size` bytes reversed."""
    raise NotImplementedError


def flip_signs(data: bytes, size: int, is_complex: bool, flags: tuple[str, ...]) -> bytes:
    """Apply torch's lazy `conj` and `neg` bits to little-endian floats of `size` bytes."""
    raise NotImplementedError


def narrow(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, index: Any
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, stride and offset of `view[index]` by basic indexing (integers, slices, `...`)."""
    raise NotImplementedError
