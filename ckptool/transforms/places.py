"""Where in its storage a tensor lies: what it reaches, and whether it has holes."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ckptool.dtypes import BY_NAME
from ckptool.model import TensorRef

__all__ = ["CARRIER", "Place", "is_array", "place_of"]

CARRIER = "cpu_tensor"
"""What the tensor of a TPU may be carried by."""


class Place(NamedTuple):
    """The elements of a strided tensor over a storage; tied names have one place."""

    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return BY_NAME[self.dtype].itemsize

    @property
    def extent(self) -> tuple[int, int]:
        """The first byte that it reaches, and the end; nothing where it has no elements."""
        if 0 in self.shape:
            return 0, 0
        steps = [(size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)]
        first = self.offset + sum(step for step in steps if step < 0)
        last = self.offset + sum(step for step in steps if step > 0)
        return first * self.itemsize, (last + 1) * self.itemsize

    @property
    def axes(self) -> list[tuple[int, int]]:
        """Size and step of each dimension that moves, the largest step first, all forwards."""
        moving = zip(self.shape, self.stride, strict=True)
        axes = [(size, abs(step)) for size, step in moving if size > 1 and step]
        return sorted(axes, key=lambda axis: -axis[1])

    @property
    def distinct(self) -> bool:
        """Whether different indices are different elements (but along a step of 0)."""
        reach = 0
        for size, step in reversed(self.axes):
            if step <= reach:
                return False
            reach += (size - 1) * step
        return True

    @property
    def packed_bytes(self) -> int:
        """Bytes that it takes without holes, what is repeated by a step of 0 once."""
        return prod(size for size, _ in self.axes) * self.itemsize

    def packed_order(self) -> list[int]:
        """The dimensions, that with the largest step first: how the bytes are put in a row."""
        return sorted(range(len(self.shape)), key=lambda dim: -abs(self.stride[dim]))

    def packed_stride(self) -> tuple[int, ...]:
        """The strides without holes: the order of the dimensions in memory is kept, 0 stays 0."""
        stride, step = [0] * len(self.shape), 1
        for dim in reversed(self.packed_order()):
            repeated = self.stride[dim] == 0 and self.shape[dim] > 1
            stride[dim] = 0 if repeated else step
            step *= 1 if repeated else self.shape[dim]
        return tuple(stride)


def place_of(tensor: TensorRef) -> Place:
    """The place of a tensor that is plainly strided."""
    shape = tuple(size or 0 for size in tensor.shape)
    return Place(tensor.dtype, tensor.offset, shape, tensor.stride)


def is_array(tensor: TensorRef) -> bool:
    """Return whether the tensor is pickled as an array of numpy."""
    parts = tensor.parts or {}
    return "array" in parts or parts.get("carrier", CARRIER) != CARRIER
