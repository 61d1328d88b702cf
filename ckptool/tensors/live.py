"""Live Python and torch objects as the tree of a checkpoint.

`LiveTree` makes new containers, with a leaf for each tensor and object: for transforms of dicts in
memory, and for loading from them. `freeze` makes the checkpoint to save: plain data, and tensors
that are read from memory when they are written. It refuses other objects, with their path and a
remedy, because a reader would have to import their classes. `locate_tensor` returns the location of
a tensor in memory.
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
from ckptool.tensors.storages import view_memory
from ckptool.words import printable

if TYPE_CHECKING:
    import torch

_PLAIN_TYPES = frozenset((type(None), bool, int, float, complex, str, bytes))
_MAX_INTEGER_BITS = 8 * 255 - 1
"""Bits of an integer that torch's safe unpickler reads."""
_KEY_TYPES = (str, int, float, complex, bytes, bool, type(None), tuple, DeviceValue, Global)
_WITHOUT_STORAGE = frozenset(("xla", "maia", "mtia"))
"""Devices with storages that have no bytes (`Tensor._reduce_ex_internal`)."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LiveObject:
    """A leaf for an object in memory that is neither plain data nor a tensor."""

    original: Any


class LiveTree:
    """The tree of live objects; each object has one node, so shared objects stay shared."""

    def __init__(self) -> None:
        """Start with an empty tree."""
        self.path: list[Any] = []
        """The keys on the way to the object that is being looked at."""
        self.originals: dict[int, Any] = {}
        """The tensor or object of a leaf, by the `id` of the leaf."""
        self.containers: dict[int, Any] = {}
        """The original dict, list or tuple of a container, by the `id` of the container."""
        self._made: dict[int, tuple[Any, Any]] = {}
        """By `id` of an object, the object (so that its `id` is not reused) and its node."""

    def make_node(self, original: Any) -> Any:
        """Return the node of the tree for an object; make it if it is new."""
        kind = type(original)
        if kind in _PLAIN_TYPES:
            return original
        if id(original) in self._made:
            _, existing_node = self._made[id(original)]
            return existing_node
        if kind is dict:
            node: Any = self.fill_mapping(original, {})
        elif kind is OrderedDict:
            node = self.fill_mapping(original, OrderedMap())
        elif kind is list:
            node = []
            self._made[id(original)] = original, node  # first: an item may contain the list
            node.extend(self.make_child(index, item) for index, item in enumerate(original))
        elif kind is tuple:
            node = tuple([self.make_child(index, item) for index, item in enumerate(original)])
        else:
            node = self.make_leaf(original)
        if isinstance(node, (dict, list, tuple)):
            self.containers[id(node)] = original
        _, node = self._made.setdefault(id(original), (original, node))
        return node

    def fill_mapping(self, original: Mapping[Any, Any], mapping: dict[Any, Any]) -> dict[Any, Any]:
        """Fill `mapping` with nodes for the items of a mapping, and return it.

        An `OrderedMap` gets the attributes too, such as `_metadata` of a state dict.
        """
        self._made[id(original)] = original, mapping  # first: an item may contain the mapping
        for key, value in original.items():
            mapping[self.make_key(key)] = self.make_child(key, value)
        if isinstance(mapping, OrderedMap):
            if isinstance(original, OrderedMap):
                attributes = original.attributes
            else:
                attributes = vars(original) if isinstance(original, OrderedDict) else {}
            mapping.attributes = {
                key: self.make_child(key, value) for key, value in attributes.items()
            }
        return mapping

    def make_child(self, key: Any, value: Any) -> Any:
        """Return the node of the value at `key` of the current object, with `key` in `path`."""
        self.path.append(key)
        child = self.make_node(value)
        self.path.pop()
        return child

    def make_key(self, key: Any) -> Any:
        """Return the key of the tree for a key of a dict."""
        return key

    def make_leaf(self, original: Any) -> Any:
        """Return the node of an object that is neither plain data nor a plain container."""
        return self.register_leaf(original, LiveObject(original))

    def register_leaf(self, original: Any, leaf: Any) -> Any:
        """Record `leaf` as the node of `original`, unless it has one, and return `leaf`."""
        self.originals[id(leaf)] = original
        self._made.setdefault(id(original), (original, leaf))
        return leaf


def describe_tensor(tensor: torch.Tensor) -> TensorRef:
    """Return a reference with the dtype, shape and device of a tensor, without its data."""
    return TensorRef(dtype_name(tensor), shape_of(tensor) or (), (), 0, None, str(tensor.device))


def is_array(node: Any) -> bool:
    """Return True if an object is a numpy array. numpy is not imported."""
    return type(node).__module__ == "numpy" and type(node).__name__ == "ndarray"


def shape_of(tensor: torch.Tensor) -> tuple[int | None, ...] | None:
    """Return the shape, with None for each ragged dimension; None for a lazy parameter."""
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
    """Return torch's name of the dtype, without `torch.`."""
    return _dtype_name(tensor.dtype)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# where elements lie in memory


class Memory(NamedTuple):
    """The location of a strided tensor in memory; equal if two tensors are the same elements.

    `storage` identifies a storage as long as it exists.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def locate_tensor(tensor: torch.Tensor) -> Memory | None:
    """Return the location of a tensor; None if it has no storage of its own, or a freed one.

    Sparse, quantized, nested and lazy tensors have none, nor has a DTensor, or a tensor that torch
    conjugates or negates when it is read.
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


def span_of_strides(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last of a strided tensor, inclusive."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def is_expanded(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if a dimension is expanded: torch copies nothing into such a tensor."""
    return any(size > 1 and not step for size, step in zip(shape, stride, strict=True))


def iterate_blocks(shape: Sequence[int], max_elements: int) -> Iterator[tuple[Any, ...]]:
    """Yield indexes of blocks with at most `max_elements` elements that cover a tensor once."""
    if 0 in shape:
        return
    row_size = prod(shape[1:])
    if not shape or shape[0] * row_size <= max_elements:
        yield ()
    elif row_size <= max_elements:
        rows = max_elements // row_size
        for start in range(0, shape[0], rows):
            yield (slice(start, start + rows),)
    else:
        for index in range(shape[0]):
            for inner in iterate_blocks(shape[1:], max_elements):
                yield (index, *inner)


# what is saved


def freeze(root: Any, *, replacements: Mapping[int, Any], file: str) -> Checkpoint:
    """Return the checkpoint to write to `file`; no tensor is copied or moved yet.

    Shared objects and storages stay shared. `replacements` maps the `id` of an object to its
    replacement. The file will have tensors without a graph, on the CPU.

    Raises:
        NotRepresentable: an object is not plain data, or a tensor has no elements here.
    """
    tree = _Frozen(replacements, file)
    try:
        checkpoint = Checkpoint(tree.make_node(root), "torch-zip", file)
    except RecursionError as error:
        text = "containers are nested deeper than Python's stack"
        raise NotRepresentable(text, file=file) from error
    return checkpoint


class _Frozen(LiveTree):
    """A tree of plain data and tensors only; it refuses other objects."""

    def __init__(self, replacements: Mapping[int, Any], file: str) -> None:
        """Start with an empty tree; `replacements` maps an `id` to a replacement."""
        super().__init__()
        self._storage_by_memory: dict[tuple[int, str], Storage] = {}
        """By the address of torch's storage and the dtype of its elements."""
        self._replacements = replacements
        self._file = file
        self._open_tuples: set[int] = set()
        """The `id` of each tuple around the current object."""

    def make_node(self, original: Any) -> Any:
        """Return the node for an object, or for its replacement.

        Raises:
            NotRepresentable: it is a huge integer, or a tuple that contains itself.
        """
        if type(original) is int and original.bit_length() > _MAX_INTEGER_BITS:
            self._refuse(original, f"has {original.bit_length():,} bits, more than torch can read")
        original = self._replacements.get(id(original), original)
        if type(original) is not tuple:
            return super().make_node(original)
        if id(original) in self._open_tuples:
            self._refuse(original, "contains itself")
        self._open_tuples.add(id(original))
        node = super().make_node(original)
        self._open_tuples.discard(id(original))
        return node

    def make_key(self, key: Any) -> Any:
        """Return the key of the tree for a key of a dict; refuse keys that are not plain."""
        if type(key) is str:
            return key
        plain_key = self.make_child(key, key)
        if not isinstance(plain_key, _KEY_TYPES):
            self._refuse(key, "is a key, but not a plain one")
        return plain_key

    def make_leaf(self, original: Any) -> Any:
        """Return the node of a tensor, a set, a Counter, or a value of torch or numpy.

        Raises:
            NotRepresentable: the object is none of these.
        """
        import torch

        kind = type(original)
        if isinstance(original, torch.Tensor):
            try:
                return self._freeze_tensor(original)
            except NotRepresentable as error:
                message = f"{self._place}: {error.message}"
                raise NotRepresentable(message, file=self._file, hint=error.hint) from error
        if kind is set:
            return Opaque(
                Global("builtins", "set"),
                ([self.make_key(item) for item in _sort_items(original)],),
            )
        if kind is Counter:
            return Opaque(
                Global("collections", "Counter"), (self.fill_mapping(dict(original), {}),)
            )
        if kind is torch.Size:
            return Size(original)
        if kind is torch.device:
            return DeviceValue(str(original))
        if kind is torch.dtype:
            return Global("torch", _dtype_name(original))
        number = _to_plain_number(original)
        return self._refuse(original) if number is None else self.make_node(number)

    def _refuse(self, node: Any, fact: str = "is not plain data") -> NoReturn:
        """Raise the error that an object is not plain data, with its path and a remedy.

        The remedy calls the object by its key, or `value` if that is not an identifier.
        """
        cls, key = type(node), self.path[-1]
        module = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
        name = key if isinstance(key, str) and key.isidentifier() else "value"
        raise NotRepresentable(
            f"{self._place}: {module}{cls.__qualname__} {fact}",
            file=self._file,
            hint=f"save {_suggest_expression(node, name)} instead",
        )

    @property
    def _place(self) -> str:
        """The path of the current object, for messages."""
        return printable(name_of(tuple(self.path)))

    def _freeze_tensor(self, tensor: torch.Tensor) -> TensorRef:
        """Return a reference to the tensor: detached, of torch's own class, and on the CPU.

        Sparse tensors become their parts, and tensors of other unusual layouts dense. Conjugate and
        negative bits are resolved.

        Raises:
            NotRepresentable: if it is nested, or only its class can read it.
        """
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
            return self._freeze_sparse(plain, parts, is_coalesced=plain.is_coalesced())
        by_row = plain.layout in (torch.sparse_csr, torch.sparse_bsr)
        if by_row or plain.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = {
                "compressed_indices": plain.crow_indices() if by_row else plain.ccol_indices(),
                "plain_indices": plain.col_indices() if by_row else plain.row_indices(),
                "values": plain.values(),
            }
            return self._freeze_sparse(plain, parts)
        if plain.layout is not torch.strided:
            return self._freeze_strided(plain.to_dense())
        if plain.is_quantized:
            return self._freeze_strided(
                plain, kind="quantized", parts={"quantizer": self._quantizer_of(plain)}
            )
        return self._freeze_strided(plain.resolve_conj().resolve_neg())

    def _freeze_strided(self, tensor: torch.Tensor, **fields: Any) -> TensorRef:
        """Return a reference to a strided tensor over its storage; `fields` are further fields."""
        import torch

        dtype = dtype_name(tensor)
        if dtype not in BY_NAME:
            raise NotRepresentable(f"a tensor of {dtype} cannot be written to a file")
        if tensor.device.type in _WITHOUT_STORAGE or not torch._C._has_storage(tensor):
            tensor = tensor.cpu()
        storage = self._freeze_storage(tensor, dtype)
        if tensor.numel() and not storage.nbytes:
            raise NotRepresentable(
                "the memory of this tensor has been freed",
                hint="save an FSDP model as a whole, with model=",
            )
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return TensorRef(dtype, shape, stride, offset, storage, "cpu", **fields)

    def _freeze_storage(self, tensor: torch.Tensor, dtype: str) -> Storage:
        """Return the storage of a tensor as elements of `dtype`.

        torch reads a storage with the dtype of its first tensor, so each dtype has its own.
        """
        data = tensor.untyped_storage()
        key = data._cdata, dtype
        if key not in self._storage_by_memory:
            itemsize = BY_NAME[dtype].itemsize
            nbytes = data.nbytes() // itemsize * itemsize  # without the rest of an element
            byte_range = ByteRange(_Memory(data, nbytes), 0, nbytes)
            self._storage_by_memory[key] = Storage(
                str(len(self._storage_by_memory)), byte_range, nbytes, byteorder=sys.byteorder
            )
        return self._storage_by_memory[key]

    def _freeze_sparse(
        self, tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor], **fields: Any
    ) -> TensorRef:
        """Return a reference to a sparse tensor; `tensors` are its components by name.

        The parts are the arguments of `_rebuild_sparse_tensor`, which has further `fields`.
        """
        shape = tuple(tensor.shape)
        parts = {
            "layout": Opaque(Global("torch.serialization", "_get_layout"), (str(tensor.layout),)),
            **{name: self._freeze_tensor(component) for name, component in tensors.items()},
            "size": shape,
            **fields,
        }
        kind = str(tensor.layout).removeprefix("torch.")
        return TensorRef(
            dtype_name(tensor), shape, stride=(), offset=0, storage=None, device="cpu",
            kind=kind, parts=parts,
        )  # fmt: skip

    def _quantizer_of(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return the quantizer of a tensor as `Tensor._reduce_ex_internal` writes it."""
        scheme = Global("torch", str(tensor.qscheme()).removeprefix("torch."))
        if scheme.name == "per_tensor_affine":
            return scheme, tensor.q_scale(), tensor.q_zero_point()
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return (
            scheme,
            self._freeze_tensor(scales),
            self._freeze_tensor(zeros),
            tensor.q_per_channel_axis(),
        )


def _sort_items(items: set[Any]) -> list[Any]:
    """Return the items of a set, sorted if possible, so that equal sets make equal files."""
    try:
        return sorted(items)
    except TypeError:
        return list(items)


def _to_plain_number(node: Any) -> Any:
    """Return the Python number or string of a numpy scalar; None for other objects.

    numpy is not imported: its scalars are recognized by the name of their base class.
    """
    class_names = {(cls.__module__, cls.__name__) for cls in type(node).__mro__}
    number = node.item() if ("numpy", "generic") in class_names else None
    return number if type(number) in (bool, int, float, complex, str, bytes) else None


def _suggest_expression(node: Any, name: str) -> str:
    """Return an expression that makes plain data from an object, for example `vars(args)`."""
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
    """Raise if a tensor has no data or only its class can read it."""
    import torch

    cls = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        raise NotRepresentable(
            "a lazy parameter has no shape and no data yet",
            hint="run the model once before saving it",
        )
    # A class with its own dispatch may keep its elements anywhere, not only in a storage.
    if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        has_full_tensor = callable(getattr(cls, "full_tensor", None))
        raise NotRepresentable(
            f"{cls.__module__}.{cls.__qualname__} is a tensor that only its class can read",
            hint="gather it with .full_tensor()"
            if has_full_tensor
            else "convert it to a plain tensor first",
        )
    if tensor.is_meta:
        raise NotRepresentable(
            "a tensor on the meta device has no data", hint="fill the model before saving it"
        )


class _Memory(Source):
    """A source over the storage of a tensor, on any device."""

    name = "memory"

    def __init__(self, storage: torch.UntypedStorage, size: int) -> None:
        """Represent the first `size` bytes of a storage."""
        self.size = size
        self._storage = storage
        self._cpu_bytes: memoryview | None = None
        if storage.device.type == "cpu" and size:
            self._cpu_bytes = view_memory(storage.data_ptr(), size)

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset`.

        On the CPU it copies without torch, whose threads wait for each other at every block.
        """
        if self._cpu_bytes is not None:
            buffer[:] = self._cpu_bytes[offset : offset + len(buffer)]
        elif buffer:
            import torch

            device_bytes = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
            device_bytes.set_(self._storage)
            target = torch.frombuffer(buffer, dtype=torch.uint8)
            target.copy_(device_bytes[offset : offset + len(buffer)])
