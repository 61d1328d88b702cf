"""The containers and leaves of a checkpoint's tree, made by every reader, for every writer.

The tree has plain containers (`dict`, `OrderedMap`, `list`, `tuple`, `Size`) over
leaves: `None`, `bool`, `int`, `float`, `complex`, `str`, `bytes`, `TensorRef`, `StorageRef`,
`DeviceValue`, `Global` and `Opaque`. Identity is kept: an object that is shared in the file is one
object here, and tensors that share a storage share the `Storage`.

Objects are checked when they are made, so no later code repeats the checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ckptool._lazy import Result
from ckptool.dtypes import BY_NAME, PACKED
from ckptool.errors import CorruptFile, UsageError
from ckptool.files import ByteRange, InflatedSource
from ckptool.words import quoted

if TYPE_CHECKING:
    import torch

    from ckptool.tensors.storages import MapLocation


class OrderedMap(dict[Any, Any]):
    """A `collections.OrderedDict` of the file; `attributes` is its `__dict__`.

    Attributes are stored separately so that a file cannot replace a method of the object.
    """

    __slots__ = ("attributes",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the map from the arguments of `dict`, without attributes."""
        super().__init__(*args, **kwargs)
        self.attributes: dict[Any, Any] = {}

    @property
    def metadata(self) -> Any:
        """The `_metadata` of a state dict (module path -> version), or None."""
        return self.attributes.get("_metadata")


M = TypeVar("M", bound=dict[Any, Any])


def copy_with_items(mapping: M, items: Mapping[Any, Any] | Iterable[tuple[Any, Any]]) -> M:
    """Return a copy of a mapping with the same class and attributes, but other items."""
    copy = type(mapping)(items)
    if isinstance(copy, OrderedMap) and isinstance(mapping, OrderedMap):
        copy.attributes = mapping.attributes
    return copy


class ByteString(str):
    """A Python 2 `str` that is not ASCII: read as text, with its bytes kept."""

    __slots__ = ("raw",)
    raw: bytes


class Size(tuple[Any, ...]):
    """A `torch.Size`: walked like a tuple, and written back as a `torch.Size`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that the file refers to. It is never imported."""

    module: str
    name: str
    shown: str = ""
    """The name in Python 3, if the pickle has the Python 2 spelling."""

    @property
    def qualified(self) -> str:
        """`module.name`, in the Python 3 spelling."""
        return self.shown or f"{self.module}.{self.name}"

    @property
    def class_name(self) -> str:
        """`torch.dtype` for torch's dtypes, else the qualified name."""
        return "torch.dtype" if self.dtype else self.qualified

    @property
    def dtype(self) -> str | None:
        """The dtype, if this global is one."""
        return self.name if self.module == "torch" and self.name in BY_NAME else None


@dataclass(frozen=True, slots=True, repr=False)
class DeviceValue:
    """A `torch.device` value; `tag` is the text that torch prints (`cuda:0`, `cpu`)."""

    tag: str
    class_name = "torch.device"

    def __repr__(self) -> str:
        """Return the repr of torch: `device(type='cuda', index=0)`."""
        word, _, index = self.tag.partition(":")
        return f"device(type={word!r}, index={index})" if index else f"device(type={word!r})"


@dataclass(slots=True, eq=False, repr=False)
class Opaque(Result):
    """An object that is neither plain data nor a tensor: kept as data, and written back unchanged.

    The pickle creates it with `func(*args, **kwargs)` (`newobj`: `cls.__new__`), then applies
    `steps` in order: `("build", state)`, `("append", [item, ...])`, `("set", [(key, value), ...])`,
    `("add", [item, ...])`. A `persid` is a persistent id of an unknown kind, in `args`. The object
    is filled while the pickle is read, and never changes afterwards.
    """

    func: Any
    """Usually a `Global`: a class or function by name, not imported."""
    args: Any = ()
    kwargs: Any = None
    """The keyword arguments, or None."""
    maker: str = "reduce"
    """How the pickle creates it: `reduce`, `newobj` or `persid`."""
    steps: list[tuple[str, Any]] = field(default_factory=list)
    plain: tuple[str, Any] | None = None
    """Type and value, if the object is a plain value (a numpy scalar)."""
    find: Callable[[], Any] | None = None
    """Reads the actual node, if it is in a separate file."""

    @property
    def class_name(self) -> str:
        """The qualified name of its class, if the file shows it."""
        if self.maker == "persid":
            return "persistent id"
        if isinstance(self.func, Global):
            args = self.args if isinstance(self.args, tuple) else ()
            if self.func.name in _RECONSTRUCTORS and args and isinstance(args[0], Global):
                return args[0].qualified
            return _CLASS_BY_FUNCTION.get(self.func.name, self.func.qualified)
        match self.func:
            case Opaque(func=Global(name="getattr"), args=(Global() as owner, str() as name)):
                return f"{owner.qualified}.{name}"  # old protocols refer to an inner class this way
        return "object"

    @property
    def is_numpy(self) -> bool:
        """True for a numpy scalar or dtype: a value without further content."""
        if self.plain is not None:  # a scalar
            return True
        named = isinstance(self.func, Global) and self.func.qualified in _NUMPY_VALUES
        return named and next(find_tensors(self), None) is None

    @property
    def state(self) -> Any:
        """The state from the last BUILD opcode, or None."""
        return next((value for kind, value in reversed(self.steps) if kind == "build"), None)

    @property
    def attributes(self) -> dict[Any, Any]:
        """The attributes by name: the state if it is a dict, with slots merged in; else empty."""
        state = self.state
        if isinstance(state, dict):
            return state
        match state:
            case (None | dict() as plain, dict() as slots):
                return {**(plain or {}), **slots}
        return {}


_RECONSTRUCTORS = frozenset({"_reconstructor", "__newobj__", "__newobj_ex__", "_reconstruct"})
_CLASS_BY_FUNCTION = {"_frombuffer": "numpy.ndarray", "_get_layout": "torch.layout"}
"""The classes that some functions create, if their names do not show it."""
_NUMPY_VALUES = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


Path = tuple[Any, ...]
"""The keys from the root to a node: strings and integers, rarely other hashable objects."""

Shape = tuple[int | None, ...]
"""The sizes of the dimensions; None for a ragged dimension."""

STRIDED_KINDS = frozenset({"strided", "subclass", "numpy"})
SPARSE_KINDS = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
MAX_ELEMENTS = (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Storage(Result):
    """A range of bytes in a file, read on demand. Compared by identity."""

    key: str
    """The key of the storage in the file."""
    data: ByteRange | None
    """The bytes. None on the meta device, which has none."""
    nbytes: int
    """The size in bytes, including bytes that no tensor uses."""
    device: str = "cpu"
    """The device tag: an opaque string."""
    byteorder: str = "little"
    """`little` or `big`."""
    crc32: int | None = None
    """The CRC-32 of the bytes, if the file states a reliable one."""
    whole: ByteRange | None = None
    """The larger range that the bytes were part of, before the rest was left out."""

    def __post_init__(self) -> None:
        """Reject a storage with a false length."""
        if self.data is not None and self.data.length != self.nbytes:
            raise CorruptFile(
                f"storage {self.key!r} needs {self.nbytes:,} bytes, "
                f"but its record has {self.data.length:,}",
                file=self.data.source.name,
            )

    @property
    def compressed(self) -> bool:
        """True if the bytes must be inflated first, so that they cannot be mapped."""
        return self.data is not None and isinstance(self.data.source, InflatedSource)


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """A typed view of a whole storage, as the pickle passes it to the tensor functions."""

    storage: Storage
    dtype: str
    untyped: bool = False

    @property
    def class_name(self) -> str:
        """The name of its class in torch."""
        typed = None if self.untyped else BY_NAME[self.dtype].storage
        return f"torch.{typed}" if typed else "torch.storage.UntypedStorage"


@dataclass(frozen=True, slots=True, eq=False)
class Wrapping:
    """One layer around a tensor that makes it a Parameter or a subclass instance.

    `kind` is `parameter` (`_rebuild_parameter`, and the class called as torch < 0.4 did),
    `parameter_state` (`_rebuild_parameter_with_state`) or `type` (`_rebuild_from_type_v2`).
    `hooks` is the object stored as backward hooks, None for an empty OrderedDict.
    """

    kind: str
    requires_grad: bool = True
    hooks: Any = None
    type: Any = None
    state: Any = None


_CARRIER = "cpu_tensor"
"""The part that may carry a TPU tensor, if no array does."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TensorRef(Result):
    """A tensor that has not been read: its properties, and the location of its bytes.

    `offset` and `stride` count elements of `dtype`, as in torch. Ragged dimensions are None.
    `parts` has the components of a tensor that is not plainly strided (indices and values, scales,
    a numpy array, the state of a subclass). They belong to the tensor and are not listed.
    """

    dtype: str
    """The dtype without `torch.`: `float32`."""
    shape: tuple[int | None, ...]
    """One size per dimension; `()` for a scalar."""
    stride: tuple[int, ...]
    offset: int
    storage: Storage | None
    """The storage; None if the tensor consists of `parts`."""
    device: str
    """The device tag in the file, an opaque string: `cpu`, `cuda:3`, `xla:0`."""
    requires_grad: bool = False
    """The flag in the file."""
    kind: str = "strided"
    """`strided`, `sparse_coo` (`csr`, ...), `quantized`, `nested`, `meta`, `subclass`, `numpy`."""
    flags: tuple[str, ...] = ()
    """The lazy bits of torch: `conj` and `neg`."""
    hooks: Any = None
    """Backward hooks; None for the usual empty OrderedDict."""
    parts: Mapping[str, Any] | None = None
    wrapping: tuple[Wrapping, ...] = ()
    """The layers that make it a Parameter or a subclass instance, innermost first."""

    def __post_init__(self) -> None:
        """Reject a tensor that exceeds its storage or has more than 2**63 elements."""
        if self.storage is None:
            return
        shape, stride = self.shape, self.stride
        if len(shape) != len(stride):
            raise self._corrupt_error(f"has {len(shape)} sizes and {len(stride)} strides")
        count = 1
        for size in shape:
            if size is None or size < 0:
                raise self._corrupt_error(f"has a size of {size}")
            count *= size
        first, stop = self.span
        if count > MAX_ELEMENTS or first < 0 or self.offset > MAX_ELEMENTS:
            raise self._corrupt_error(
                f"of shape {list(shape)} at offset {self.offset} cannot exist"
            )
        if count and stop * self.itemsize > self.storage.nbytes * self._elements_per_byte:
            raise self._corrupt_error(
                f"of shape {list(shape)}, stride {list(stride)} and offset {self.offset} reaches "
                f"element {stop - 1:,}, outside its storage of {self.storage.nbytes:,} bytes"
            )

    @property
    def itemsize(self) -> int:
        """The size of one element in bytes."""
        return BY_NAME[self.dtype].itemsize

    @property
    def _elements_per_byte(self) -> int:
        """The number of elements in a byte; 1 for all but packed dtypes."""
        return PACKED.get(self.dtype, 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each dimension; 0 for a ragged one."""
        return tuple(size or 0 for size in self.shape)

    @property
    def numel(self) -> int:
        """The number of elements; 0 if a dimension is ragged (`parts` have the number)."""
        return math.prod(self.sizes)

    @property
    def place(self) -> tuple[Any, ...] | None:
        """Its elements in memory, equal for tied tensors. None for a tensor without a storage."""
        if self.storage is None:
            return None
        layout = self.offset, self.dtype, self.shape, self.stride, self.flags
        return id(self.storage), *layout

    @property
    def span(self) -> tuple[int, int]:
        """The range of its storage in elements: the first, and the one after the last."""
        first = last = self.offset
        for size, step in zip(self.shape, self.stride, strict=True):
            if size and step >= 0:
                last += (size - 1) * step
            elif size:
                first += (size - 1) * step
        return first, last + 1

    @property
    def reach(self) -> tuple[int, int]:
        """The range of its storage in bytes: the first, and the one after the last."""
        if self.dtype in PACKED and self.storage is not None:  # elements share bytes
            return 0, self.storage.nbytes
        first, stop = self.span if self.numel else (0, 0)
        return first * self.itemsize, stop * self.itemsize

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes; for sparse and nested tensors, that of the parts."""
        if self.kind in SPARSE_KINDS or self.kind == "nested":
            return sum(part.nbytes for part in self.tensors_inside())
        return -(-self.numel * self.itemsize // self._elements_per_byte)

    @property
    def is_contiguous(self) -> bool:
        """True if the elements are in row-major order without gaps, as in torch."""
        expected = 1
        # Not strict: sparse and nested tensors have no strides.
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=False):
            if size is None:
                return False
            if size != 1 and step != expected:
                return self.numel == 0
            expected *= size
        return True

    @property
    def memory_order(self) -> list[int]:
        """The axes in memory order: the largest stride first."""
        return sorted(range(len(self.stride)), key=lambda axis: -self.stride[axis])

    @property
    def is_verbatim(self) -> bool:
        """True if its bytes in the file equal `content`: nothing to reorder, swap or negate."""
        swapped = self.storage is not None and self.storage.byteorder == "big"
        return self.is_contiguous and not self.flags and not swapped

    @property
    def unrepeated(self) -> TensorRef:
        """A view of the same elements in which strides of zero, which repeat them, have size 1."""
        axes = zip(self.shape, self.stride, strict=True)
        shape = tuple(1 if size and not step else size for size, step in axes)
        return self if shape == self.shape else replace(self, shape=shape)

    @property
    def is_parameter(self) -> bool:
        """True if torch would load it as a `Parameter`."""
        return any(layer.kind != "type" for layer in self.wrapping)

    @property
    def has_content(self) -> bool:
        """True if it is a plain array of elements with bytes, so that `content` works."""
        stored = self.storage is not None and self.storage.data is not None
        return stored and self.kind in STRIDED_KINDS

    @property
    def class_name(self) -> str:
        """The qualified name of its class: that in the file for a subclass, else torch's."""
        # A subclass without a storage of its own has its class among its parts.
        own_class = (self.parts or {}).get("type") if self.storage is None else None
        types = (own_class, *(layer.type for layer in self.wrapping))
        class_names = (cls.qualified for cls in types if isinstance(cls, Global))
        return next(class_names, "torch.Tensor")

    @property
    def is_array(self) -> bool:
        """True if it is pickled as a numpy array, or is a TPU tensor carried by one."""
        parts = self.parts or {}
        return "array" in parts or parts.get("carrier", _CARRIER) != _CARRIER

    @property
    def is_spread(self) -> bool:
        """True if it is distributed over processes, each of which saves its own part."""
        spread = ("DTensor", "ShardedTensor")
        return self.storage is None and self.class_name.rpartition(".")[2] in spread

    @property
    def local(self) -> TensorRef | None:
        """The first tensor inside one without a storage, such as the local part of a DTensor.

        None if there is none, or for a tensor with a storage.
        """
        return next(self.tensors_inside(), None) if self.storage is None else None

    @property
    def whole(self) -> TensorRef | None:
        """The plain tensor of a DTensor that is complete in this file; None for any other.

        It is complete if the local part has its shape (one rank, or `Replicate`) and no sum is
        pending (`Partial`). Source: torch/distributed/tensor/_dtensor_spec.py.
        """
        match self.parts:
            case {"state": (_, {"_local_tensor": TensorRef() as local, "_spec": Opaque() as spec})}:
                placements = spec.attributes.get("placements")
            case _:
                return None
        if not self.is_spread or local.shape != self.shape or not isinstance(placements, tuple):
            return None
        names = (
            getattr(placement, "class_name", "Partial").rpartition(".")[2]
            for placement in placements
        )
        if any(name.endswith("Partial") for name in names):
            return None
        layers = (layer for layer in self.wrapping if layer.kind != "type")  # without DTensor
        return replace(local, requires_grad=self.requires_grad, wrapping=(*local.wrapping, *layers))

    @property
    def data(self) -> ByteRange:
        """The bytes of a contiguous tensor, in the byte order of its storage."""
        if not self.is_contiguous:
            raise UsageError("a tensor that is not contiguous has no single range of bytes")
        return self._require_data().slice(self.offset * self.itemsize, self.nbytes)

    @property
    def row_major(self) -> ByteRange:
        """The bytes of the elements in row-major order, with flags and byte order as stored."""
        if self.is_contiguous:
            return self.data
        from ckptool.files.computed import gather_view  # most operations need no elements

        return gather_view(self._require_data(), **self._view)

    def content(self) -> Iterator[bytes]:
        """Return the elements in row-major order, little-endian, conjugated and negated, in blocks.

        Raises:
            UsageError: if the tensor is not a plain array of elements (see `has_content`).
        """
        if self.dtype in PACKED:
            return self.data.iterate_blocks()
        # Imported here: most operations on a checkpoint need no elements.
        from ckptool.files.strided import flip_signs, iterate_row_major, swap_bytes

        dtype = BY_NAME[self.dtype]
        blocks = iterate_row_major(self._require_data(), **self._view)
        if self.storage is not None and self.storage.byteorder == "big":
            blocks = (swap_bytes(block, dtype.swap_size) for block in blocks)
        if self.flags:
            is_complex = self.dtype.startswith("complex")
            blocks = (
                flip_signs(block, dtype.swap_size, is_complex, self.flags) for block in blocks
            )
        return blocks

    def read(self) -> bytes:
        """Return all bytes of `content`."""
        return b"".join(self.content())

    def tensors_inside(self) -> Iterator[TensorRef]:
        """Yield the component tensors, in the order of `parts`."""
        return find_tensors(dict(self.parts or {}))

    def torch(
        self,
        *,
        map_location: MapLocation = "cpu",
        mmap: bool = False,
        dtype: torch.dtype | str | None = None,
    ) -> torch.Tensor:
        """Read the tensor. Arguments and errors are the same as for `ckptool.load_state_dict`."""
        from ckptool.tensors import materialize

        return materialize(self, map_location=map_location, mmap=mmap, dtype=dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the values for `numpy.asarray`, as float32 if numpy lacks the dtype (bfloat16)."""
        tensor = self.torch().detach().resolve_conj().resolve_neg()
        if self.dtype.startswith(("bfloat", "float8")):
            tensor = tensor.float()
        array = tensor.numpy()
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, index: Any) -> TensorRef:
        """Return a view by basic indexing (integers, slices, `...`), which reads only its bytes."""
        self._check_view("sliced")
        from ckptool.files.strided import narrow  # imported late: most commands take no views

        shape, stride, offset = narrow(self.sizes, self.stride, self.offset, index)
        # A view is a plain tensor: not a Parameter, nor an instance of a subclass (`wrapping`).
        return replace(self, shape=shape, stride=stride, offset=offset, parts=None, wrapping=())

    def permuted(self, order: Sequence[int]) -> TensorRef:
        """Return a plain view with its axes in another order, like `torch.Tensor.permute`.

        As in torch, the view is no Parameter and has none of the attributes of the tensor.
        """
        self._check_view("transposed")
        shape = tuple(self.shape[axis] for axis in order)
        stride = tuple(self.stride[axis] for axis in order)
        return replace(self, shape=shape, stride=stride, parts=None, wrapping=())

    def _check_view(self, verb: str) -> None:
        """Raise `UsageError` if a tensor has no strides to change; `verb` is for the message."""
        if self.kind not in STRIDED_KINDS or self.storage is None:
            raise UsageError(f"a {self.kind} tensor cannot be {verb}")
        if self.dtype in PACKED:
            raise UsageError(f"a {self.dtype} tensor cannot be {verb}: its elements share bytes")

    @property
    def _view(self) -> dict[str, Any]:
        """Its view of the storage, as arguments for the functions of `files`."""
        layout = {"shape": self.sizes, "stride": self.stride, "offset": self.offset}
        return {"itemsize": self.itemsize, **layout}

    def _require_data(self) -> ByteRange:
        """Return the bytes of the storage.

        Raises:
            UsageError: if the tensor is not a plain array of elements with bytes.
        """
        if not self.has_content or self.storage is None or self.storage.data is None:
            raise UsageError(f"a {self.kind} tensor on {self.device} has no plain bytes")
        return self.storage.data

    def _corrupt_error(self, fact: str) -> CorruptFile:
        """Return the error for a tensor that contradicts its storage."""
        storage = self.storage
        where = "" if storage is None else f" over storage {storage.key!r}"
        file = storage.data.source.name if storage is not None and storage.data else None
        return CorruptFile(f"a {self.dtype} tensor{where} {fact}", file=file)


def replace_elements(tensor: TensorRef, **fields: Any) -> TensorRef:
    """Return the tensor with another `dtype`, `shape`, `storage`, `offset`, `stride` or `flags`.

    A tensor of a back end without storages (a TPU) is then carried by a CPU tensor, which the file
    has in its place. A numpy array becomes a tensor, because its pickle has the old elements.
    """
    if fields and "array" in (tensor.parts or {}):
        fields = {"kind": "strided", "parts": None, **fields}
    copy = replace(tensor, **fields)
    if "carrier" not in (tensor.parts or {}):
        return copy
    data = replace(copy, device="cpu", requires_grad=False, hooks=None, wrapping=(), parts=None)
    return replace(copy, parts={"carrier": _CARRIER, "data": data})


def get_children(node: Any) -> Iterable[Any]:
    """Return the direct content of a container or object, in the order of the file."""
    if isinstance(node, OrderedMap):
        return (*node.keys(), *node.values(), *node.attributes.values())
    if isinstance(node, dict):
        return (*node.keys(), *node.values())
    if isinstance(node, (list, tuple)):
        return node
    if isinstance(node, Opaque):
        return (node.func, node.args, node.kwargs, *(value for _, value in node.steps))
    return ()


def find_tensors(root: Any) -> Iterator[TensorRef]:
    """Yield every tensor below `root` once, in the order of the file, also inside objects."""
    seen: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, TensorRef):
            if id(node) not in seen:
                seen.add(id(node))
                yield node
        elif isinstance(node, (dict, list, tuple, Opaque)) and id(node) not in seen:
            seen.add(id(node))
            pending.extend(reversed(tuple(get_children(node))))


def make_plain_tensor(
    key: str,
    dtype: str,
    shape: tuple[int, ...],
    data: ByteRange,
    device: str = "cpu",
    **stated: Any,
) -> TensorRef:
    """Return a tensor with the elements in `data`, row-major, over its own storage.

    `stated` has the byte order and the CRC-32 of the storage, if the file states them.

    Raises:
        CorruptFile: if `data` is longer or shorter than the elements.
    """
    # Rounded up: a byte of a packed dtype has several elements.
    nbytes = -(-math.prod(shape) * BY_NAME[dtype].itemsize // PACKED.get(dtype, 1))
    if nbytes != data.length:
        problem = f"needs {nbytes:,} bytes, but there are {data.length:,}"
        raise CorruptFile(f"storage {quoted(key)}: {dtype} and shape {list(shape)} {problem}")
    storage = Storage(key, data, nbytes, device, **stated)
    return TensorRef(dtype, shape, row_major_strides(shape), 0, storage, device)


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of this shape."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
