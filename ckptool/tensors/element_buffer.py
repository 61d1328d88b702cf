"""Room for the elements of one type, filled from files again and again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ckptool.dtypes import BY_NAME
from ckptool.tensors.runtime import torch_dtype

if TYPE_CHECKING:
    import torch

    from ckptool.tensors.averaging import Elements

__all__ = ["ElementBuffer"]


class ElementBuffer:
    """Memory for so many elements of a type, and the torch tensor that looks at it."""

    def __init__(self, dtype: str, count: int, *, seen_as: torch.dtype | None = None) -> None:
        """Take memory for `count` elements of `dtype`.

        `seen_as` is the type of the tensor, where it is to be another: a complex number may be two
        real ones.

        Raises:
            UnsupportedFormat: this torch does not have the type.
        """
        import torch

        kind = BY_NAME[dtype]
        self._size, self._swap = kind.itemsize, kind.swap_size
        self._raw = bytearray(count * self._size)
        self._tensor = torch.frombuffer(self._raw, dtype=seen_as or torch_dtype(dtype))
        self._parts = self._size // self._tensor.element_size()

    def read(self, run: Elements, start: int, count: int) -> torch.Tensor:
        """The `count` elements from `start`, in this machine's byte order, until the next read."""
        import torch

        run.data.read_into(memoryview(self._raw)[: count * self._size], start * self._size)
        elements = self._tensor[: count * self._parts]
        if run.byteorder != sys.byteorder and self._swap > 1:
            rows = elements.view(torch.uint8).view(-1, self._swap)
            rows.copy_(rows.flip(1))
        return elements
