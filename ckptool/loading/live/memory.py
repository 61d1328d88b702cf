"""Where the elements of a torch tensor lie in memory, and how they are gone through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = [
    "Memory",
    "cuts",
    "dtype_name",
    "extent",
    "memory_of",
    "repeats",
    "shape_of",
    "storage_of",
]


class Memory(NamedTuple):
    """The place of a plainly strided tensor: equal for two that are the same elements.

    `storage` tells storages apart while they live.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    nbytes: int
    """Of the whole storage."""

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of the storage, from and to, that it looks at."""
        import torch

        size: int = getattr(torch, self.dtype).itemsize
        return self.offset * size, (self.offset + extent(self.shape, self.stride)) * size


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """Where it lies; None where it has no storage of its own, or one that is freed.

    Sparse, quantised, nested and lazy tensors have none, nor has a DTensor.
    """
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    storage = tensor.untyped_storage()
    shape, stride, nbytes = tuple(tensor.shape), tensor.stride(), storage.nbytes()
    if tensor.is_conj() or tensor.is_neg() or (not nbytes and tensor.numel()):
        return None
    return Memory(
        storage._cdata, int(tensor.storage_offset()), shape, stride, dtype_name(tensor), nbytes
    )


def storage_of(tensor: torch.Tensor) -> int | None:
    """What tells its storage from others while they live; None where it has none."""
    try:
        storage: int = tensor.untyped_storage()._cdata
    except (RuntimeError, ValueError):  # it is no strided one, or a lazy parameter
        return None
    return storage


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements lie from the first to the last of these, both counted."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def repeats(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether an expanded dimension has one element several times: torch copies nothing into it."""
    return any(size > 1 and not step for size, step in zip(shape, stride, strict=True))


def cuts(shape: Sequence[int], most: int) -> Iterator[tuple[Any, ...]]:
    """Indexes that together take every element once, in order, each a block of at most `most`."""
    if 0 in shape:
        return
    row = prod(shape[1:])
    if not shape or shape[0] * row <= most:
        yield ()
    elif row <= most:
        step = most // row
        for start in range(0, shape[0], step):
            yield (slice(start, start + step),)
    else:
        for at in range(shape[0]):
            for rest in cuts(shape[1:], most):
                yield (at, *rest)


def shape_of(tensor: torch.Tensor) -> tuple[int | None, ...] | None:
    """Its shape, None for each ragged dimension; None where it has none yet (a lazy parameter)."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and _is_lazy(tensor):
        return None
    if not tensor.is_nested:
        return tuple(tensor.shape)
    try:
        return tuple(size if type(size) is int else None for size in tensor.shape)
    except RuntimeError:  # of the strided layout, which has no shape as a whole
        return (None,) * tensor.dim()


def _is_lazy(tensor: torch.Tensor) -> bool:
    from torch.nn.parameter import is_lazy

    return is_lazy(tensor)


def dtype_name(tensor: torch.Tensor) -> str:
    """Torch's name of its element type, without `torch.`."""
    return _name(tensor.dtype)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
