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
from ckptool.files.computed import make_computed_range
from ckptool.tensors.casting import load_checked
from ckptool.tensors.storages import require_torch

if TYPE_CHECKING:
    import torch


class ComputedTensors:
    """Makes storages of computed tensors; keeps the last one computed while it is read."""

    def __init__(self) -> None:
        """Start with no computed tensor."""
        self._last: tuple[object, memoryview] | None = None
        """The `fill` function of the storage that was computed last, and its bytes."""
        self._lock = Lock()

    def compute_storage(
        self, like: TensorRef, used: Sequence[TensorRef], make: Callable[[], torch.Tensor]
    ) -> Storage:
        """Return a storage of the result of `make`, computed on the first read.

        `used` are the tensors that `make` reads. The result has as many elements as `like`, its
        dtype, key and device.

        Raises:
            TorchMissing: torch is not installed.
        """
        require_torch()
        storage = like.storage
        if storage is None:
            raise NotRepresentable("cannot compute a tensor without bytes")
        size = like.numel * BY_NAME[like.dtype].itemsize

        def fill(offset: int, buffer: memoryview) -> None:
            """Write the bytes from `offset` into `buffer`; compute the tensor if it is new."""
            with self._lock:
                if self._last is None or self._last[0] is not fill:
                    self._last = None  # releases the memory before `make` needs more
                    self._last = fill, _view_bytes(make())
                _, computed = self._last
                buffer[:] = computed[offset : offset + len(buffer)]

        sources = [tensor.storage.data for tensor in used if tensor.storage and tensor.storage.data]
        return Storage(
            storage.key,
            make_computed_range(sources, size, fill),
            size,
            storage.device,
            sys.byteorder,
        )


def _view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order."""
    import torch

    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def interpolate_linearly(
    computed_tensors: ComputedTensors, start: TensorRef, end: TensorRef, weight: float
) -> TensorRef:
    """Return `torch.lerp(start, end, weight)` in the dtype of `start`, with its own memory."""

    def make() -> torch.Tensor:
        """Return the interpolated tensor."""
        import torch

        first = load_checked(start)
        return torch.lerp(first, load_checked(end).to(first.dtype), weight)

    storage = computed_tensors.compute_storage(start, (start, end), make)
    stride = row_major_strides(start.sizes)
    # The computed elements are already conjugated or negated, if `start` has such a flag.
    return replace(start, storage=storage, offset=0, stride=stride, flags=())
