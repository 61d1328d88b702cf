"""Tensors for a model that is spread over ranks by `fully_shard` and its like."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["is_spread", "spread_like"]


def is_spread(tensor: Any) -> bool:
    """Whether it is a DTensor, of which this rank has a part."""
    import torch

    return isinstance(tensor, torch.Tensor) and callable(getattr(type(tensor), "full_tensor", None))


def spread_like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of `value`, which each rank has whole, spread as `tensor` is.

    Nothing is sent between ranks, as far as torch (2.6 and later) can do without.
    """
    if not is_spread(tensor) or is_spread(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    alone = "src_data_rank" in inspect.signature(distribute_tensor).parameters
    options: dict[str, Any] = {"src_data_rank": None} if alone else {}
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.detach(), mesh, placements, **options)
