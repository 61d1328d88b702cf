"""Where the elements of a torch tensor lie in memory, and how to visit them block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.tensors.live import dtype_name

if TYPE_CHECKING:
    import torch

__all__ = ["Memory", "cuts", "extent", "memory_of", "repeats"]


class Memory(NamedTuple):
    """The place of a strided tensor; equal for two tensors that are the same elements.

    `storage` identifies the storage as long as it lives.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    nbytes: int
    """Bytes of the whole storage."""

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of the storage, from and to, that the tensor covers."""
        import torch

        size: int = getattr(torch, self.dtype).itemsize
        return self.offset * size, (self.offset + extent(self.shape, self.stride)) * size


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """Return the place of a tensor; None where it has no storage of its own, or a freed one.

    Sparse, quantised, nested and lazy tensors have none, nor has a DTensor.
    """
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if tensor.is_conj() or tensor.is_neg() or (not nbytes and tensor.numel()):
        return None
    return Memory(
        storage._cdata,
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tensor.stride(),
        dtype_name(tensor),
        nbytes,
    )


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements lie from the first to the last of these, both counted."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def repeats(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether a dimension is expanded: torch copies nothing into such a tensor."""
    return any(size > 1 and not step for size, step in zip(shape, stride, strict=True))


def cuts(shape: Sequence[int], most: int) -> Iterator[tuple[Any, ...]]:
    """Yield indexes that together visit every element once, in blocks of at most `most`."""
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
