"""Tensors that are computed whole, one at a time, when their bytes are read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

from ckptool.core.model import Storage, TensorRef, row_major_strides
from ckptool.dtypes import BY_NAME
from ckptool.errors import NotRepresentable
from ckptool.files.computed import computed
from ckptool.tensors.casting import checked_tensor
from ckptool.tensors.materialize import require_torch

if TYPE_CHECKING:
    import torch


class Wholes:
    """Makes storages of computed tensors; the last one computed is kept while it is read."""

    def __init__(self) -> None:
        """Start with nothing computed."""
        self._last: tuple[object, memoryview] | None = None
        self._lock = Lock()

    def of(
        self, like: TensorRef, used: Sequence[TensorRef], make: Callable[[], torch.Tensor]
    ) -> Storage:
        """Return a storage for what `make` computes of `used`: as many elements as `like`.

        Raises:
            TorchMissing: torch is not installed.
        """
        require_torch()
        held = like.storage
        if held is None:
            raise NotRepresentable("cannot compute a tensor without bytes")
        size = like.numel * BY_NAME[like.dtype].itemsize

        def fill(offset: int, buffer: memoryview) -> None:
            with self._lock:
                if self._last is None or self._last[0] is not fill:
                    self._last = None
                    self._last = fill, _bytes(make())
                buffer[:] = self._last[1][offset : offset + len(buffer)]

        made_of = [one.storage.data for one in used if one.storage and one.storage.data]
        return Storage(held.key, computed(made_of, size, fill), size, held.device, sys.byteorder)


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def lerped(wholes: Wholes, start: TensorRef, end: TensorRef, weight: float) -> TensorRef:
    """Return `torch.lerp(start, end, weight)` in the dtype of `start`, with memory of its own."""

    def make() -> torch.Tensor:
        import torch

        held = checked_tensor(start)
        return torch.lerp(held, checked_tensor(end).to(held.dtype), weight)

    storage = wholes.of(start, (start, end), make)
    stride = row_major_strides(start.sizes)
    return replace(start, storage=storage, offset=0, stride=stride, flags=())
