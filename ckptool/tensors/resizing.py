"""Elements of tensors with other shapes, computed as the bytes are asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from ckptool.errors import NotRepresentable
from ckptool.files import ByteRange
from ckptool.files.computed import computed
from ckptool.files.source import BLOCK
from ckptool.model import TensorRef
from ckptool.tensors.casting import checked_tensor
from ckptool.tensors.materialise import materialise

if TYPE_CHECKING:
    import torch

__all__ = ["interpolated", "more_rows"]


def more_rows(tensor: TensorRef, count: int, *, zero: bool) -> ByteRange:
    """Return rows to follow those of a tensor: zero, or the mean of its own, in float64."""
    width = prod(tensor.sizes[1:]) * tensor.itemsize

    @cache
    def row() -> bytes:
        return bytes(width) if zero else _mean(tensor)

    def fill(offset: int, buffer: memoryview) -> None:
        begin = offset % width
        buffer[:] = (row() * (len(buffer) // width + 2))[begin : begin + len(buffer)]

    return _computed(tensor, count * width, fill)


def interpolated(
    tensor: TensorRef, prefix: int, old: tuple[int, int], new: tuple[int, int]
) -> ByteRange:
    """Return the elements of position embeddings for another grid.

    The last dimensions are positions, of which the first `prefix` stay, and channels. As
    `resample_abs_pos_embed` of timm: bicubic, antialiased, in float32.
    """
    width = tensor.shape[-1] or 0

    @cache
    def made() -> bytes:
        import torch

        whole = checked_tensor(tensor).reshape(-1, width)
        grid = whole[prefix:].float().reshape(1, *old, width).permute(0, 3, 1, 2)
        grid = torch.nn.functional.interpolate(grid, size=new, mode="bicubic", antialias=True)
        rows = grid.permute(0, 2, 3, 1).reshape(-1, width).to(whole.dtype)
        return _bytes(torch.cat([whole[:prefix], rows]))

    def fill(offset: int, buffer: memoryview) -> None:
        buffer[:] = made()[offset : offset + len(buffer)]

    return _computed(tensor, (prefix + prod(new)) * width * tensor.itemsize, fill)


def _computed(tensor: TensorRef, size: int, fill: Callable[[int, memoryview], None]) -> ByteRange:
    data = tensor.storage.data if tensor.storage else None
    if data is None:
        raise NotRepresentable(f"a {tensor.kind} tensor without bytes has one shape alone")
    return computed((data,), size, fill)


def _mean(tensor: TensorRef) -> bytes:
    """Return the mean of the rows, of which a block is held at a time."""
    count, rest = tensor.shape[0] or 0, tensor.shape[1:]
    step = max(BLOCK // max(prod(size or 0 for size in rest) * tensor.itemsize, 1), 1)
    total: torch.Tensor | float = 0.0
    for start in range(0, count, step):
        rows, place = min(step, count - start), tensor.offset + start * tensor.stride[0]
        part = replace(tensor, shape=(rows, *rest), offset=place)
        one = materialise(part).detach() if start else checked_tensor(part)
        dtype = one.dtype
        total = total + one.double().sum(0)
    return _bytes((total / count).to(dtype))  # type: ignore[union-attr]


def _bytes(tensor: torch.Tensor) -> bytes:
    import torch

    raw = tensor.contiguous().reshape(-1, 1).view(torch.uint8)
    return (raw.flip(1) if sys.byteorder == "big" else raw).numpy().tobytes()
