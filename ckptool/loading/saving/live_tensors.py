"""Live tensors as those of a checkpoint: their bytes are read from memory when they are written."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ckptool.dtypes import BY_NAME
from ckptool.errors import NotRepresentable
from ckptool.files import ByteRange
from ckptool.model import Global, Opaque, Storage, TensorRef
from ckptool.tensors.materialise import memory_view

if TYPE_CHECKING:
    import torch

__all__ = ["LiveTensors"]


_WITHOUT_STORAGE = frozenset(("xla", "maia", "mtia"))
"""Devices whose storages hold no bytes (`Tensor._reduce_ex_internal`)."""


class LiveTensors:
    """Makes a `TensorRef` of each tensor; those that share a storage share one."""

    def __init__(self) -> None:
        """There is none yet."""
        self._storages: dict[tuple[int, str], Storage] = {}
        self._alive: list[Any] = []
        self._whole: set[Storage] = set()

    @property
    def see_parts(self) -> bool:
        """Whether there is a storage of which no tensor sees all."""
        return len(self._whole) < len(self._storages)

    def frozen(self, tensor: torch.Tensor) -> TensorRef:
        """The tensor detached, of torch's own class and on the CPU.

        Raises:
            NotRepresentable: it has no elements here, or of a kind that no file can hold.
        """
        import torch

        _refuse_class(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.detach()
            if type(plain) is not torch.Tensor:
                plain = plain.as_subclass(torch.Tensor)
        if plain.is_nested:
            return self._nested(plain)
        if plain.layout is torch.sparse_coo:
            return self._coordinates(plain)
        if plain.layout in (torch.sparse_csr, torch.sparse_bsr):
            return self._compressed(plain, plain.crow_indices(), plain.col_indices())
        if plain.layout in (torch.sparse_csc, torch.sparse_bsc):
            return self._compressed(plain, plain.ccol_indices(), plain.row_indices())
        if plain.layout is not torch.strided:
            return self._strided(plain.to_dense())
        if plain.is_quantized:
            return self._strided(plain, kind="quantized", parts={"quantizer": self._scales(plain)})
        return self._strided(plain.resolve_conj().resolve_neg())

    def _strided(self, tensor: torch.Tensor, **more: Any) -> TensorRef:
        import torch

        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in BY_NAME:
            raise NotRepresentable(f"a tensor of {dtype} cannot be written to a file")
        if tensor.device.type in _WITHOUT_STORAGE or not torch._C._has_storage(tensor):
            tensor = tensor.cpu()
        storage = self._storage(tensor, dtype)
        if _is_dense(tensor) and tensor.numel() * BY_NAME[dtype].itemsize == storage.nbytes:
            self._whole.add(storage)
        if tensor.numel() and not storage.nbytes:
            raise NotRepresentable(
                "the memory of this tensor has been freed",
                hint="a model that FSDP has sharded is to be saved as a whole, with model=",
            )
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return TensorRef(dtype, shape, stride, offset, storage, "cpu", **more)

    def _storage(self, tensor: torch.Tensor, dtype: str) -> Storage:
        """The storage as elements of one type: torch reads each as the first that it meets."""
        data = tensor.untyped_storage()
        key = data._cdata, dtype
        if key not in self._storages:
            nbytes = data.nbytes() // BY_NAME[dtype].itemsize * BY_NAME[dtype].itemsize
            held = ByteRange(_Memory(data, nbytes), 0, nbytes)
            self._alive.append(data)
            self._storages[key] = Storage(
                str(len(self._storages)), held, nbytes, byteorder=sys.byteorder
            )
        return self._storages[key]

    def _coordinates(self, tensor: torch.Tensor) -> TensorRef:
        parts = {
            "layout": _layout(tensor),
            "indices": self.frozen(tensor._indices()),
            "values": self.frozen(tensor._values()),
            "size": tuple(tensor.shape),
            "is_coalesced": tensor.is_coalesced(),
        }
        return _without_storage(tensor, "sparse_coo", parts)

    def _compressed(
        self, tensor: torch.Tensor, compressed: torch.Tensor, plain: torch.Tensor
    ) -> TensorRef:
        parts = {
            "layout": _layout(tensor),
            "compressed_indices": self.frozen(compressed),
            "plain_indices": self.frozen(plain),
            "values": self.frozen(tensor.values()),
            "size": tuple(tensor.shape),
        }
        return _without_storage(tensor, str(tensor.layout).removeprefix("torch."), parts)

    def _nested(self, tensor: torch.Tensor) -> TensorRef:
        parts = {
            "buffer": self.frozen(tensor.values()),
            "sizes": self.frozen(tensor._nested_tensor_size()),
            "strides": self.frozen(tensor._nested_tensor_strides()),
            "offsets": self.frozen(tensor._nested_tensor_storage_offsets()),
        }
        return _without_storage(tensor, "nested", parts)

    def _scales(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """The quantiser as `Tensor._reduce_ex_internal` spells it."""
        scheme = Global("torch", str(tensor.qscheme()).removeprefix("torch."))
        if scheme.name == "per_tensor_affine":
            return scheme, tensor.q_scale(), tensor.q_zero_point()
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return scheme, self.frozen(scales), self.frozen(zeros), tensor.q_per_channel_axis()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element stands where no other does, with none between: in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    axes = (axis for axis in zip(tensor.stride(), tensor.shape, strict=True) if axis[1] != 1)
    for step, size in sorted(axes):
        if step != expected:
            return False
        expected *= size
    return True


def _without_storage(tensor: torch.Tensor, kind: str, parts: dict[str, Any]) -> TensorRef:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = () if kind == "nested" else tuple(tensor.shape)
    return TensorRef(dtype, shape, (), 0, None, "cpu", kind=kind, parts=parts)


def _layout(tensor: torch.Tensor) -> Opaque:
    return Opaque(Global("torch.serialization", "_get_layout"), (str(tensor.layout),))


def _refuse_class(tensor: torch.Tensor) -> None:
    """Refuse what is no array of elements: a lazy parameter, a tensor of tensors, one on meta."""
    import torch
    from torch.nn.parameter import is_lazy

    kind = type(tensor)
    if is_lazy(tensor):
        raise NotRepresentable(
            "a lazy parameter has no shape and no elements yet",
            hint="run the model once before it is saved",
        )
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        full = callable(getattr(kind, "full_tensor", None))
        raise NotRepresentable(
            f"{kind.__module__}.{kind.__qualname__} is a tensor that only its class can read",
            hint=".full_tensor() gathers it" if full else "make a plain tensor of it first",
        )
    if tensor.is_meta:
        raise NotRepresentable(
            "a tensor on the meta device has no elements", hint="fill the model before it is saved"
        )


class _Memory:
    """A source (`files.Source`) over the storage of a tensor, on whatever device."""

    name = "memory"

    def __init__(self, storage: torch.UntypedStorage, size: int) -> None:
        """Stand for the first `size` bytes."""
        self.size = size
        self._storage = storage
        self._here: memoryview | None = None
        if storage.device.type == "cpu" and size:
            self._here = memory_view(storage.data_ptr(), size)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`.

        On the CPU not by torch, whose threads wait for each other at every block.
        """
        if self._here is not None:
            buffer[:] = self._here[offset : offset + len(buffer)]
        elif buffer:
            self._move(offset, buffer)

    def _move(self, offset: int, buffer: memoryview) -> None:
        """The same from another device."""
        import torch

        there = torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)
        here = torch.frombuffer(buffer, dtype=torch.uint8)
        here.copy_(there[offset : offset + len(buffer)])
