"""Where a torch tensor lies in memory, so that two names of one are known."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["Memory", "dtype_name", "memory_of", "shape_of"]


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


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """Where it lies; None where it has no storage of its own, or one that is freed.

    Sparse, quantised, nested and lazy tensors have none, nor has a DTensor.
    """
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
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
