"""Tensors in tuples and dicts, as datasets and models give them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["as_dtype", "device_in", "emptied", "moved", "shape", "sum_of"]


def moved(value: Any, device: torch.device) -> Any:
    """The same, with every tensor on `device`."""
    return tree_map_only(torch.Tensor, lambda one: one.to(device, non_blocking=True), value)


def as_dtype(value: Any, dtype: torch.dtype) -> Any:
    """The same, with every floating-point tensor of another type as that one."""

    def cast(one: torch.Tensor) -> torch.Tensor:
        return one.to(dtype) if one.is_floating_point() else one

    return tree_map_only(torch.Tensor, cast, value)


def emptied(value: Any) -> Any:
    """The same, with no sample in any tensor."""
    return tree_map_only(torch.Tensor, lambda one: one[:0], value)


def sum_of(value: Any) -> torch.Tensor:
    """All numbers that a model gave, as one that leads back to its parameters."""
    return sum(
        (one.sum() for one in tree_leaves(value) if isinstance(one, torch.Tensor)), torch.zeros(())
    )


def shape(value: Any) -> tuple[int, ...]:
    """That of the first tensor."""
    return next((tuple(one.shape) for one in tree_leaves(value) if hasattr(one, "shape")), ())


def device_in(value: Any) -> str:
    """Where the first tensor lies."""
    return next((str(one.device) for one in tree_leaves(value) if hasattr(one, "device")), "")
