"""Live Python and torch objects as the tree of a checkpoint.

`LiveTree` makes new containers, with a stand-in for each tensor and object: for transforms of dicts
in memory, and for loading from them. `frozen` makes what is saved: plain data, and tensors whose
bytes are read from memory when they are written. An object that is not plain data is refused, with
its place and a remedy: nothing is pickled whose class a reader would have to import. `memory_of`
tells where the elements of a tensor lie.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import DeviceValue, Global, Opaque, OrderedMap, Size, Storage, TensorRef
from ckptool.core.tree import name_of
from ckptool.dtypes import BY_NAME
from ckptool.errors import NotRepresentable
from ckptool.files import ByteRange, Source
from ckptool.tensors.materialize import memory_view
from ckptool.words import printable

if TYPE_CHECKING:
    import torch

_AS_THEY_ARE = frozenset((type(None), bool, int, float, complex, str, bytes))
_MOST_BITS = 8 * 255 - 1
"""Bits of an integer that torch's safe unpickler reads."""
_KEYS = (str, int, float, complex, bytes, bool, type(None), tuple, DeviceValue, Global)
_WITHOUT_STORAGE = frozenset(("xla", "maia", "mtia"))
"""Devices whose storages hold no bytes (`Tensor._reduce_ex_internal`)."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LiveObject:
    """The node of an object of the caller's that is neither plain data nor a tensor."""

    original: Any


class LiveTree:
    """The tree of some live objects: each object has one node, so that what is shared stays so."""

    def __init__(self) -> None:
        """Begin without any."""
        self.path: list[Any] = []
        """The keys on the way to the object that is being looked at."""
        self.originals: dict[int, Any] = {}
        """The tensor or object that a leaf stands for, by the `id` of the leaf."""
        self.containers: dict[int, Any] = {}
        """The dict, list or tuple that a container stands for, by the `id` of the container."""
        self._made: dict[int, tuple[Any, Any]] = {}

    def node(self, node: Any) -> Any:
        """Return the node of the tree that stands for an object."""
        kind = type(node)
        if kind in _AS_THEY_ARE:
            return node
        known = self._made.get(id(node))
        if known is not None:
            return known[1]
        if kind is dict:
            made: Any = self.mapping(node, {})
        elif kind is OrderedDict:
            made = self.mapping(node, OrderedMap())
        elif kind is list:
            made = []
            self._made[id(node)] = node, made
            made.extend(self.below(at, item) for at, item in enumerate(node))
        elif kind is tuple:
            made = tuple([self.below(at, item) for at, item in enumerate(node)])
        else:
            made = self.other(node)
        if isinstance(made, (dict, list, tuple)):
            self.containers[id(made)] = node
        return self._made.setdefault(id(node), (node, made))[1]

    def mapping(self, node: Mapping[Any, Any], made: dict[Any, Any]) -> dict[Any, Any]:
        """Fill `made` with nodes for what a mapping holds, and for its attributes."""
        self._made[id(node)] = node, made
        for key, value in node.items():
            made[self.key(key)] = self.below(key, value)
        if isinstance(made, OrderedMap):
            if isinstance(node, OrderedMap):
                attributes = node.attributes
            else:
                attributes = vars(node) if isinstance(node, OrderedDict) else {}
            made.attributes = {key: self.below(key, value) for key, value in attributes.items()}
        return made

    def below(self, key: Any, node: Any) -> Any:
        """Return the node of what stands under a key of the object that is being looked at."""
        self.path.append(key)
        made = self.node(node)
        self.path.pop()
        return made

    def key(self, key: Any) -> Any:
        """Return the key of the tree for a key."""
        return key

    def other(self, node: Any) -> Any:
        """Return the node of an object that is neither plain data nor a plain container."""
        return self.standing_for(node, LiveObject(node))

    def standing_for(self, original: Any, leaf: Any) -> Any:
        """Return `leaf`, and remember what it stands for."""
        self.originals[id(leaf)] = original
        self._made.setdefault(id(original), (original, leaf))
        return leaf


def stand_in(tensor: torch.Tensor) -> TensorRef:
    """Return a reference of the shape, type and device of a tensor, without its elements."""
    return TensorRef(dtype_name(tensor), shape_of(tensor) or (), (), 0, None, str(tensor.device))


def is_array(node: Any) -> bool:
    """Return whether an object is an array of numpy. numpy is not imported."""
    return type(node).__module__ == "numpy" and type(node).__name__ == "ndarray"


def shape_of(tensor: torch.Tensor) -> tuple[int | None, ...] | None:
    """Return the shape, None for each ragged dimension; None for a lazy parameter."""
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        return None
    if not tensor.is_nested:
        return tuple(tensor.shape)
    try:
        return tuple(size if type(size) is int else None for size in tensor.shape)
    except RuntimeError:  # a nested tensor of the strided layout has no shape as a whole
        return (None,) * tensor.dim()


def dtype_name(tensor: torch.Tensor) -> str:
    """Return torch's name of the element type, without `torch.`."""
    return _name(tensor.dtype)


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# where elements lie in memory


class Memory(NamedTuple):
    """The place of a strided tensor; equal for two tensors that are the same elements.

    `storage` identifies the storage as long as it lives.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """Return the place of a tensor; None where it has no storage of its own, or a freed one.

    Sparse, quantized, nested and lazy tensors have none, nor has a DTensor.
    """
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
    if tensor.is_conj() or tensor.is_neg() or (tensor.numel() and not storage.nbytes()):
        return None
    return Memory(storage._cdata, offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)


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


# what is saved


def frozen(root: Any, *, instead: Mapping[int, Any], file: str) -> Checkpoint:
    """Return the checkpoint that is to become `file`; no tensor is copied or moved yet.

    Shared objects and storages stay shared. `instead`
    replaces some objects, by their `id`. Tensors become detached ones on the CPU.

    Raises:
        NotRepresentable: an object is not plain data, or a tensor has no elements here.
    """
    tree = _Frozen(instead, file)
    try:
        checkpoint = Checkpoint(tree.node(root), "torch-zip", file)
    except RecursionError as error:
        text = "containers are nested deeper than Python's stack"
        raise NotRepresentable(text, file=file) from error
    return checkpoint


class _Frozen(LiveTree):
    """A tree of plain data and tensors, and of nothing else."""

    def __init__(self, instead: Mapping[int, Any], file: str) -> None:
        super().__init__()
        self._storages: dict[tuple[int, str], Storage] = {}
        self._instead = instead
        self._file = file
        self._open: set[int] = set()

    def node(self, node: Any) -> Any:
        if type(node) is int and node.bit_length() > _MOST_BITS:
            self._refuse(node, f"has {node.bit_length():,} bits, more than torch can read")
        node = self._instead.get(id(node), node)
        if type(node) is not tuple:
            return super().node(node)
        if id(node) in self._open:
            self._refuse(node, "contains itself")
        self._open.add(id(node))
        made = super().node(node)
        self._open.discard(id(node))
        return made

    def key(self, key: Any) -> Any:
        if type(key) is str:
            return key
        made = self.below(key, key)
        if not isinstance(made, _KEYS):
            self._refuse(key, "is a key, but not a plain one")
        return made

    def other(self, node: Any) -> Any:
        import torch

        kind = type(node)
        if isinstance(node, torch.Tensor):
            try:
                return self._tensor(node)
            except NotRepresentable as error:
                message = f"{self._place}: {error.message}"
                raise NotRepresentable(message, file=self._file, hint=error.hint) from error
        if kind is set:
            return Opaque(Global("builtins", "set"), ([self.key(item) for item in _sorted(node)],))
        if kind is Counter:
            return Opaque(Global("collections", "Counter"), (self.mapping(dict(node), {}),))
        if kind is torch.Size:
            return Size(node)
        if kind is torch.device:
            return DeviceValue(str(node))
        if kind is torch.dtype:
            return Global("torch", _name(node))
        number = _plain_number(node)
        return self._refuse(node) if number is None else self.node(number)

    def _refuse(self, node: Any, fact: str = "is not plain data") -> NoReturn:
        kind, last = type(node), self.path[-1]
        owner = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        name = last if isinstance(last, str) and last.isidentifier() else "value"
        raise NotRepresentable(
            f"{self._place}: {owner}{kind.__qualname__} {fact}",
            file=self._file,
            hint=f"save {_plainly(node, name)} instead",
        )

    @property
    def _place(self) -> str:
        return printable(name_of(tuple(self.path)))

    def _tensor(self, tensor: torch.Tensor) -> TensorRef:
        """Return the tensor detached, of torch's own class and on the CPU."""
        import torch

        _refuse_class(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.detach()
            if type(plain) is not torch.Tensor:
                plain = plain.as_subclass(torch.Tensor)
        if plain.is_nested:
            raise NotRepresentable(
                "a nested tensor cannot be written to a file", hint="save the result of .unbind()"
            )
        if plain.layout is torch.sparse_coo:
            parts = {"indices": plain._indices(), "values": plain._values()}
            return self._sparse(plain, parts, is_coalesced=plain.is_coalesced())
        by_row = plain.layout in (torch.sparse_csr, torch.sparse_bsr)
        if by_row or plain.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = {
                "compressed_indices": plain.crow_indices() if by_row else plain.ccol_indices(),
                "plain_indices": plain.col_indices() if by_row else plain.row_indices(),
                "values": plain.values(),
            }
            return self._sparse(plain, parts)
        if plain.layout is not torch.strided:
            return self._strided(plain.to_dense())
        if plain.is_quantized:
            return self._strided(plain, kind="quantized", parts={"quantizer": self._scales(plain)})
        return self._strided(plain.resolve_conj().resolve_neg())

    def _strided(self, tensor: torch.Tensor, **more: Any) -> TensorRef:
        import torch

        dtype = dtype_name(tensor)
        if dtype not in BY_NAME:
            raise NotRepresentable(f"a tensor of {dtype} cannot be written to a file")
        if tensor.device.type in _WITHOUT_STORAGE or not torch._C._has_storage(tensor):
            tensor = tensor.cpu()
        storage = self._storage(tensor, dtype)
        if tensor.numel() and not storage.nbytes:
            raise NotRepresentable(
                "the memory of this tensor has been freed",
                hint="save an FSDP model as a whole, with model=",
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
            self._storages[key] = Storage(
                str(len(self._storages)), held, nbytes, byteorder=sys.byteorder
            )
        return self._storages[key]

    def _sparse(
        self, tensor: torch.Tensor, inside: Mapping[str, torch.Tensor], **more: Any
    ) -> TensorRef:
        shape = tuple(tensor.shape)
        parts = {
            "layout": Opaque(Global("torch.serialization", "_get_layout"), (str(tensor.layout),)),
            **{name: self._tensor(part) for name, part in inside.items()},
            "size": shape,
            **more,
        }
        kind = str(tensor.layout).removeprefix("torch.")
        return TensorRef(dtype_name(tensor), shape, (), 0, None, "cpu", kind=kind, parts=parts)

    def _scales(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return the quantizer as `Tensor._reduce_ex_internal` writes it."""
        scheme = Global("torch", str(tensor.qscheme()).removeprefix("torch."))
        if scheme.name == "per_tensor_affine":
            return scheme, tensor.q_scale(), tensor.q_zero_point()
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return scheme, self._tensor(scales), self._tensor(zeros), tensor.q_per_channel_axis()


def _sorted(items: set[Any]) -> list[Any]:
    """Return the items in order where they have one: equal sets make equal files."""
    try:
        return sorted(items)
    except TypeError:
        return list(items)


def _plain_number(node: Any) -> Any:
    kinds = ((kind.__module__, kind.__name__) for kind in type(node).__mro__)
    number = node.item() if ("numpy", "generic") in kinds else None
    return number if type(number) in (bool, int, float, complex, str, bytes) else None


def _plainly(node: Any, name: str) -> str:
    """Return the expression that makes plain data of an object, as advice: `vars(args)`."""
    if isinstance(node, enum.Enum):
        return f"{name}.value"
    if isinstance(node, (str, int, os.PathLike, date)):
        return f"str({name})"
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return f"dataclasses.asdict({name})"
    for method in ("tolist", "get_state", "getstate", "to_dict", "_asdict"):
        if callable(getattr(type(node), method, None)):
            return f"{name}.{method}()"
    if isinstance(node, (Mapping, Iterable)) and not isinstance(node, type):
        return f"{'dict' if isinstance(node, Mapping) else 'list'}({name})"
    return f"vars({name})" if getattr(node, "__dict__", None) else f"repr({name})"


def _refuse_class(tensor: torch.Tensor) -> None:
    import torch

    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        raise NotRepresentable(
            "a lazy parameter has no shape and no data yet",
            hint="run the model once before saving it",
        )
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        full = callable(getattr(kind, "full_tensor", None))
        raise NotRepresentable(
            f"{kind.__module__}.{kind.__qualname__} is a tensor that only its class can read",
            hint="gather it with .full_tensor()" if full else "convert it to a plain tensor first",
        )
    if tensor.is_meta:
        raise NotRepresentable(
            "a tensor on the meta device has no data", hint="fill the model before saving it"
        )


class _Memory(Source):
    """A source over the storage of a tensor, on whatever device."""

    name = "memory"

    def __init__(self, storage: torch.UntypedStorage, size: int) -> None:
        """Stand for the first `size` bytes of a storage."""
        self.size = size
        self._storage = storage
        self._here: memoryview | None = None
        if storage.device.type == "cpu" and size:
            self._here = memory_view(storage.data_ptr(), size)

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`.

        On the CPU without torch, whose threads wait for each other at every block.
        """
        if self._here is not None:
            buffer[:] = self._here[offset : offset + len(buffer)]
        elif buffer:
            import torch

            there = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
            there.set_(self._storage)
            here = torch.frombuffer(buffer, dtype=torch.uint8)
            here.copy_(there[offset : offset + len(buffer)])
