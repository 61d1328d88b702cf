"""Live Python and torch objects as the tree of a checkpoint: plain data, and tensors in memory.

An object that is no plain data is refused, with its place and what would help: nothing is pickled
whose class a reader would have to import. The bytes of tensors are read from memory when they are
written.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, NoReturn

from ckptool.checkpoint import Checkpoint
from ckptool.dtypes import BY_NAME
from ckptool.errors import NotRepresentable
from ckptool.files import ByteRange
from ckptool.model import DeviceValue, Global, Opaque, OrderedMap, Size, Storage, TensorRef
from ckptool.tensors.materialise import memory_view
from ckptool.words import printable

if TYPE_CHECKING:
    import torch

__all__ = ["frozen"]

_AS_THEY_ARE = frozenset((type(None), bool, float, complex, str, bytes))
_MOST_BITS = 8 * 255 - 1
"""Bits of an integer that torch's safe unpickler reads."""
_KEYS = (str, int, float, complex, bytes, bool, type(None), tuple, DeviceValue, Global)
_WITHOUT_STORAGE = frozenset(("xla", "maia", "mtia"))
"""Devices whose storages hold no bytes (`Tensor._reduce_ex_internal`)."""


def frozen(root: Any, *, instead: Mapping[int, Any], file: str) -> Checkpoint:
    """Return the checkpoint that is to become `file`; no tensor is copied or moved yet.

    Shared objects and storages stay shared; storages are cut down to what tensors see. `instead`
    replaces some objects, by their `id`. Tensors become detached ones on the CPU.

    Raises:
        NotRepresentable: an object is no plain data, or a tensor has no elements here.
    """
    freezer = _Freezer(instead, file)
    try:
        checkpoint = Checkpoint(freezer.node(root), "torch-zip", file)
    except RecursionError as error:
        text = "containers are nested deeper than Python's stack"
        raise NotRepresentable(text, file=file) from error
    return checkpoint.compact() if freezer.tensors.see_parts else checkpoint


class _Freezer:
    """One pass over a tree."""

    def __init__(self, instead: Mapping[int, Any], file: str) -> None:
        import torch

        self._instead = instead
        self._file = file
        self.tensors = _LiveTensors()
        self._done: dict[int, tuple[Any, Any]] = {}
        self._open: set[int] = set()
        self._path: list[Any] = []
        self._tensor = torch.Tensor
        self._makers: dict[type[Any], Callable[[Any], Any]] = {
            dict: self._mapping,
            OrderedDict: self._mapping,
            list: self._list,
            tuple: self._tuple,
            set: self._set,
            Counter: self._counter,
            torch.Size: self._size,
            torch.device: lambda node: DeviceValue(str(node)),
            torch.dtype: lambda node: Global("torch", str(node).removeprefix("torch.")),
        }

    def node(self, node: Any) -> Any:
        """Return the node of the tree that stands for `node`."""
        if type(node) in _AS_THEY_ARE:
            return node
        if type(node) is int:
            return self._integer(node)
        node = self._instead.get(id(node), node)
        known = self._done.get(id(node))
        if known is not None:
            return known[1]
        if id(node) in self._open:
            self._refuse(node, "holds itself")
        self._open.add(id(node))
        made = self._made(node)
        self._open.discard(id(node))
        return self._remember(node, made)

    def _made(self, node: Any) -> Any:
        maker = self._makers.get(type(node))
        if maker is not None:
            return maker(node)
        if isinstance(node, self._tensor):
            return self._tensor_over(node)
        number = _plain_number(node)
        return self._refuse(node) if number is None else self.node(number)

    def _tensor_over(self, node: Any) -> Any:
        try:
            return self.tensors.frozen(node)
        except NotRepresentable as error:
            message = f"{self._place()}: {error.message}"
            raise NotRepresentable(message, file=self._file, hint=error.hint) from error

    def _remember(self, node: Any, made: Any) -> Any:
        self._done[id(node)] = (node, made)
        return made

    def _refuse(self, node: Any, fact: str = "is no plain data") -> NoReturn:
        kind = type(node)
        owner = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        raise NotRepresentable(
            f"{self._place()}: {owner}{kind.__qualname__} {fact}",
            file=self._file,
            hint=_remedy(node, self._path),
        )

    def _place(self) -> str:
        """Return the place of the pass, as Python spells it."""
        return _spelled(self._path)

    def _below(self, key: Any, node: Any) -> Any:
        self._path.append(key)
        made = self.node(node)
        self._path.pop()
        return made

    def _integer(self, node: int) -> int:
        if node.bit_length() > _MOST_BITS:
            self._refuse(node, f"of {node.bit_length():,} bits is more than torch reads")
        return node

    def _mapping(self, node: dict[Any, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = OrderedMap() if isinstance(node, OrderedDict) else {}
        self._remember(node, made)
        for key, value in node.items():
            made[self._key(key)] = self._below(key, value)
        if isinstance(made, OrderedMap) and vars(node):
            made.attributes = {key: self._below(key, value) for key, value in vars(node).items()}
        return made

    def _key(self, key: Any) -> Any:
        if type(key) is str:
            return key
        made = self._below(key, key)
        if not isinstance(made, _KEYS):
            self._refuse(key, "is a key, and no plain one")
        return made

    def _list(self, node: list[Any]) -> list[Any]:
        made: list[Any] = []
        self._remember(node, made)
        made.extend(self._below(at, item) for at, item in enumerate(node))
        return made

    def _tuple(self, node: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([self._below(at, item) for at, item in enumerate(node)])

    def _size(self, node: tuple[int, ...]) -> Size:
        return Size(self._tuple(node))

    def _set(self, node: set[Any]) -> Opaque:
        """Sort the items where they have an order: equal sets make equal files."""
        try:
            items = sorted(node)
        except TypeError:
            items = list(node)
        return Opaque(Global("builtins", "set"), ([self._key(item) for item in items],))

    def _counter(self, node: Counter[Any]) -> Opaque:
        return Opaque(Global("collections", "Counter"), (self._mapping(dict(node)),))


def _plain_number(node: Any) -> Any:
    """Return the number, text or truth value that a numpy scalar is; None for anything else."""
    kinds = ((kind.__module__, kind.__name__) for kind in type(node).__mro__)
    number = node.item() if ("numpy", "generic") in kinds else None
    return number if type(number) in (bool, int, float, complex, str, bytes) else None


def _remedy(node: Any, path: Sequence[Any]) -> str:
    """Return the expression that makes plain data of the object at `path`, as advice.

    It names the last word of the path, and what follows that: `rng[1].tolist()`.
    """
    words = [at for at, key in enumerate(path) if isinstance(key, str) and key.isidentifier()]
    name = _spelled(path[words[-1] :]) if words else "value"
    return f"save {_expression(node, name)} in its place"


def _spelled(path: Iterable[Any]) -> str:
    """Return a place as Python spells it: `config.args`, `rng['numpy.state'][1]`."""
    text = ""
    for key in path:
        if isinstance(key, str) and key.isidentifier():
            text += f".{key}" if text else key
        else:
            text += f"[{printable(repr(key))}]"
    return text


def _expression(node: Any, name: str) -> str:
    if type(node) is int:  # one of more bits than torch reads
        return f"str({name})"
    for kind, expression in _BY_CLASS:
        if isinstance(node, kind):
            return expression.format(name)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return f"dataclasses.asdict({name})"
    for method in ("_asdict", "to_dict", "get_state", "getstate", "tolist"):
        if callable(getattr(type(node), method, None)):
            return f"{name}.{method}()"
    if isinstance(node, (Mapping, Iterable)) and not isinstance(node, type):
        return f"{'dict' if isinstance(node, Mapping) else 'list'}({name})"
    if callable(node) and hasattr(node, "__qualname__"):
        return f"{name}.__qualname__"
    return f"vars({name})" if getattr(node, "__dict__", None) else f"repr({name})"


_BY_CLASS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (enum.Enum, "{}.value"),
    (os.PathLike, "str({})"),
    (date, "{}.isoformat()"),
    ((bytearray, memoryview), "bytes({})"),
    (frozenset, "set({})"),
    (str, "str({})"),
    (bytes, "bytes({})"),
    (int, "int({})"),
    (float, "float({})"),
    (complex, "complex({})"),
)


class _LiveTensors:
    """Makes a `TensorRef` for each tensor; those that share a storage share one."""

    def __init__(self) -> None:
        """Begin without any."""
        self._storages: dict[tuple[int, str], Storage] = {}
        self._alive: list[Any] = []
        self._whole: set[Storage] = set()

    @property
    def see_parts(self) -> bool:
        """Whether some storage has bytes that no tensor sees."""
        return len(self._whole) < len(self._storages)

    def frozen(self, tensor: torch.Tensor) -> TensorRef:
        """Return the tensor detached, of torch's own class and on the CPU.

        Raises:
            NotRepresentable: it has no elements here, or its elements fit no file.
        """
        import torch

        _refuse_class(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.detach()
            if type(plain) is not torch.Tensor:
                plain = plain.as_subclass(torch.Tensor)
        if plain.is_nested:
            raise NotRepresentable(
                "a nested tensor cannot be written to a file", hint="save what .unbind() returns"
            )
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
        """Return the storage as elements of one type: torch reads it as the first it finds."""
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

    def _scales(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return the quantiser as `Tensor._reduce_ex_internal` writes it."""
        scheme = Global("torch", str(tensor.qscheme()).removeprefix("torch."))
        if scheme.name == "per_tensor_affine":
            return scheme, tensor.q_scale(), tensor.q_zero_point()
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return scheme, self.frozen(scales), self.frozen(zeros), tensor.q_per_channel_axis()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements, in whatever order, fill their memory without gaps."""
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
    shape = tuple(tensor.shape)
    return TensorRef(dtype, shape, (), 0, None, "cpu", kind=kind, parts=parts)


def _layout(tensor: torch.Tensor) -> Opaque:
    return Opaque(Global("torch.serialization", "_get_layout"), (str(tensor.layout),))


def _refuse_class(tensor: torch.Tensor) -> None:
    """Refuse a lazy parameter, a tensor of tensors, and one on the meta device."""
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
        """Stand for the first `size` bytes of a storage."""
        self.size = size
        self._storage = storage
        self._here: memoryview | None = None
        if storage.device.type == "cpu" and size:
            self._here = memory_view(storage.data_ptr(), size)

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`."""
        data = bytearray(length)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`.

        On the CPU without torch, whose threads wait for each other at every block.
        """
        if self._here is not None:
            buffer[:] = self._here[offset : offset + len(buffer)]
        elif buffer:
            self._move(offset, buffer)

    def _move(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from another device."""
        import torch

        there = torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)
        here = torch.frombuffer(buffer, dtype=torch.uint8)
        here.copy_(there[offset : offset + len(buffer)])
