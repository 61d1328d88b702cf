"""The containers and leaves of a checkpoint's tree: what every reader makes and every writer takes.

The tree is of plain containers (`dict`, `OrderedMap`, `list`, `tuple`, `Size`) over
leaves: `None`, `bool`, `int`, `float`, `complex`, `str`, `bytes`, `TensorRef`, `StorageRef`,
`DeviceValue`, `Global` and `Opaque`. Identity is kept: what the file shares is one object here,
and tensors that share a storage share the `Storage`.

An object that exists is valid: the checks are where it is made, nothing downstream repeats them.
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

    from ckptool.tensors.materialize import MapLocation


class OrderedMap(dict[Any, Any]):
    """A `collections.OrderedDict` of the file; `attributes` is what its `__dict__` held.

    Attributes are kept apart so that a file cannot replace a method of the object.
    """

    __slots__ = ("attributes",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what `dict` takes; there are no attributes yet."""
        super().__init__(*args, **kwargs)
        self.attributes: dict[Any, Any] = {}

    @property
    def metadata(self) -> Any:
        """The state dict's `_metadata` (module path -> version), or None."""
        return self.attributes.get("_metadata")


M = TypeVar("M", bound=dict[Any, Any])


def remade(mapping: M, items: Mapping[Any, Any] | Iterable[tuple[Any, Any]]) -> M:
    """Return a mapping of the same class and attributes, with other items."""
    made = type(mapping)(items)
    if isinstance(made, OrderedMap) and isinstance(mapping, OrderedMap):
        made.attributes = mapping.attributes
    return made


class ByteString(str):
    """A Python 2 `str` beyond ASCII: read as text, its bytes kept."""

    __slots__ = ("raw",)
    raw: bytes


class Size(tuple[Any, ...]):
    """A `torch.Size`: walked like a tuple, written back as what it was."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function that the file names, and nobody imports."""

    module: str
    name: str
    shown: str = ""
    """The name in today's Python where the pickle spells it as Python 2 did."""

    @property
    def qualified(self) -> str:
        """`module.name`, in today's spelling."""
        return self.shown or f"{self.module}.{self.name}"

    @property
    def class_name(self) -> str:
        """`torch.dtype` for one of torch's element types, else the qualified name."""
        return "torch.dtype" if self.dtype else self.qualified

    @property
    def dtype(self) -> str | None:
        """The element type that this global is, if it is one."""
        return self.name if self.module == "torch" and self.name in BY_NAME else None


@dataclass(frozen=True, slots=True, repr=False)
class DeviceValue:
    """A `torch.device` among the values; `tag` as torch prints it (`cuda:0`, `cpu`)."""

    tag: str
    class_name = "torch.device"

    def __repr__(self) -> str:
        """As torch spells it: `device(type='cuda', index=0)`."""
        word, _, index = self.tag.partition(":")
        return f"device(type={word!r}, index={index})" if index else f"device(type={word!r})"


@dataclass(slots=True, eq=False, repr=False)
class Opaque(Result):
    """Anything that is neither plain data nor a tensor: kept as data, written back as it came.

    `func(*args, **kwargs)` made it (`newobj`: `cls.__new__`), then `steps` were applied in order:
    `("build", state)`, `("append", [item, ...])`, `("set", [(key, value), ...])`,
    `("add", [item, ...])`. A `persid` is a persistent id of a kind that is not known, in `args`.
    Filled while the pickle is read, and left alone afterwards.
    """

    func: Any
    """Mostly a `Global`: a class or function by its name, not imported."""
    args: Any = ()
    kwargs: Any = None
    """None where there were none."""
    maker: str = "reduce"
    """How it was made: `reduce`, `newobj` or `persid`."""
    steps: list[tuple[str, Any]] = field(default_factory=list)
    plain: tuple[str, Any] | None = None
    """Type and value, where the object is a plain value all the same (a numpy scalar)."""
    find: Callable[[], Any] | None = None
    """Reads the node that this one stands for, where that lies in a file of its own."""

    @property
    def class_name(self) -> str:
        """The qualified name of its class, as far as the file tells."""
        if self.maker == "persid":
            return "persistent id"
        if isinstance(self.func, Global):
            args = self.args if isinstance(self.args, tuple) else ()
            if self.func.name in _RECONSTRUCTORS and args and isinstance(args[0], Global):
                return args[0].qualified
            return _MADE_BY.get(self.func.name, self.func.qualified)
        match self.func:
            case Opaque(func=Global(name="getattr"), args=(Global() as owner, str() as name)):
                return f"{owner.qualified}.{name}"  # how old protocols name an inner class
        return "object"

    @property
    def is_numpy(self) -> bool:
        """Whether it is a scalar or dtype of numpy: a value, in which there is nothing to find."""
        if self.plain is not None:
            return True
        named = isinstance(self.func, Global) and self.func.qualified in _NUMPY
        return named and next(find_tensors(self), None) is None

    @property
    def state(self) -> Any:
        """What the last BUILD gave it; None where there was none."""
        return next((value for kind, value in reversed(self.steps) if kind == "build"), None)

    @property
    def attributes(self) -> dict[Any, Any]:
        """Its attributes by name: the state dict, slots merged in; empty for any other state."""
        state = self.state
        if isinstance(state, dict):
            return state
        match state:
            case (None | dict() as plain, dict() as slots):
                return {**(plain or {}), **slots}
        return {}


_RECONSTRUCTORS = frozenset({"_reconstructor", "__newobj__", "__newobj_ex__", "_reconstruct"})
_MADE_BY = {"_frombuffer": "numpy.ndarray", "_get_layout": "torch.layout"}
"""Classes of what functions of no telling name make."""
_NUMPY = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


Path = tuple[Any, ...]
"""The keys from the root to a node: strings and integers, rarely anything else hashable."""

Shape = tuple[int | None, ...]
"""Sizes of the dimensions; None where one is ragged."""

STRIDED_KINDS = frozenset({"strided", "subclass", "numpy"})
SPARSE_KINDS = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
MAX_ELEMENTS = (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Storage(Result):
    """A run of bytes in a file, never read until asked. Compared by identity."""

    key: str
    """Its name in the file, which tied tensors share."""
    data: ByteRange | None
    """None on the meta device, which has no bytes."""
    nbytes: int
    """Bytes of all of it, whatever tensors see."""
    device: str = "cpu"
    """The location tag: an opaque string."""
    byteorder: str = "little"
    """`little` or `big`."""
    crc32: int | None = None
    """CRC-32 of the bytes, where the file states one that counts."""
    whole: ByteRange | None = None
    """What the bytes were a part of before the rest was left out."""

    def __post_init__(self) -> None:
        """Refuse a storage that lies about its length."""
        if self.data is not None and self.data.length != self.nbytes:
            raise CorruptFile(
                f"storage {self.key!r} needs {self.nbytes:,} bytes, "
                f"but its record has {self.data.length:,}",
                file=self.data.source.name,
            )

    @property
    def compressed(self) -> bool:
        """Whether the bytes must be inflated first (mapping such a file gives garbage)."""
        return self.data is not None and isinstance(self.data.source, InflatedSource)


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """A typed view of a whole storage, as the pickle hands it to the tensor functions."""

    storage: Storage
    dtype: str
    untyped: bool = False

    @property
    def class_name(self) -> str:
        """The class that torch gives it."""
        typed = None if self.untyped else BY_NAME[self.dtype].storage
        return f"torch.{typed}" if typed else "torch.storage.UntypedStorage"


@dataclass(frozen=True, slots=True, eq=False)
class Wrapping:
    """One layer around a tensor: what made a Parameter or a subclass of it.

    `kind` is `parameter` (`_rebuild_parameter`, and the class called as torch < 0.4 did),
    `parameter_state` (`_rebuild_parameter_with_state`) or `type` (`_rebuild_from_type_v2`).
    `hooks` is what stood in the place of backward hooks, None for an empty OrderedDict.
    """

    kind: str
    requires_grad: bool = True
    hooks: Any = None
    type: Any = None
    state: Any = None


_CARRIER = "cpu_tensor"
"""The part that may carry the tensor of a TPU, if no array does."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TensorRef(Result):
    """A tensor that has not been read: what it is, and where its bytes lie.

    `offset` and `stride` count elements of `dtype`, as in torch. Dimensions that are ragged are
    None. `parts` is what a tensor that is not plainly strided is made of (indices and values,
    scales, a numpy array, a subclass's state): it belongs to the tensor and is not listed apart.
    """

    dtype: str
    """torch's name without `torch.`: `float32`."""
    shape: tuple[int | None, ...]
    """One size a dimension; `()` of a scalar."""
    stride: tuple[int, ...]
    offset: int
    storage: Storage | None
    """Where its bytes are; None where it has none of its own (it is made of `parts`)."""
    device: str
    """The tag in the file, an opaque string: `cpu`, `cuda:3`, `xla:0`."""
    requires_grad: bool = False
    """As the file has it."""
    kind: str = "strided"
    """`strided`, `sparse_coo` and its like, `quantized`, `nested`, `meta`, `subclass`, `numpy`."""
    flags: tuple[str, ...] = ()
    """`conj` and `neg`, the lazy bits of torch."""
    hooks: Any = None
    """Backward hooks where there are any; None for the usual empty OrderedDict."""
    parts: Mapping[str, Any] | None = None
    wrapping: tuple[Wrapping, ...] = ()
    """What made a Parameter or a subclass of it, the innermost first."""

    def __post_init__(self) -> None:
        """Refuse a tensor that reaches outside its storage or counts more than 2**63 elements."""
        if self.storage is None:
            return
        shape, stride = self.shape, self.stride
        if len(shape) != len(stride):
            raise self._corrupt(f"has {len(shape)} sizes and {len(stride)} strides")
        count = 1
        for size in shape:
            if size is None or size < 0:
                raise self._corrupt(f"has a size of {size}")
            count *= size
        first, stop = self.span
        if count > MAX_ELEMENTS or first < 0 or self.offset > MAX_ELEMENTS:
            raise self._corrupt(f"of shape {list(shape)} at offset {self.offset} cannot exist")
        if count and stop * self.itemsize > self.storage.nbytes * self._per_byte:
            raise self._corrupt(
                f"of shape {list(shape)}, stride {list(stride)} and offset {self.offset} reaches "
                f"element {stop - 1:,}, outside its storage of {self.storage.nbytes:,} bytes"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return BY_NAME[self.dtype].itemsize

    @property
    def _per_byte(self) -> int:
        return PACKED.get(self.dtype, 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """One size per dimension; 0 for a ragged dimension."""
        return tuple(size or 0 for size in self.shape)

    @property
    def numel(self) -> int:
        """Number of elements; 0 where a dimension is ragged (the parts know)."""
        return math.prod(self.sizes)

    @property
    def place(self) -> tuple[Any, ...] | None:
        """Its elements in memory: equal for tied tensors; None for a tensor without a storage."""
        if self.storage is None:
            return None
        layout = self.offset, self.dtype, self.shape, self.stride, self.flags
        return id(self.storage), *layout

    @property
    def span(self) -> tuple[int, int]:
        """The elements of the storage that it covers: the first, and the one after the last."""
        first = last = self.offset
        for size, step in zip(self.shape, self.stride, strict=True):
            if size and step >= 0:
                last += (size - 1) * step
            elif size:
                first += (size - 1) * step
        return first, last + 1

    @property
    def reach(self) -> tuple[int, int]:
        """The bytes of the storage that it covers: the first, and the one after the last."""
        if self.dtype in PACKED and self.storage is not None:
            return 0, self.storage.nbytes
        first, stop = self.span if self.numel else (0, 0)
        return first * self.itemsize, stop * self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that the elements take; for sparse and nested tensors, those of the parts."""
        if self.kind in SPARSE_KINDS or self.kind == "nested":
            return sum(part.nbytes for part in self.tensors_inside())
        return -(-self.numel * self.itemsize // self._per_byte)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without holes, as torch defines it."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=False):
            if size is None:
                return False
            if size != 1 and step != expected:
                return self.numel == 0
            expected *= size
        return True

    @property
    def memory_order(self) -> list[int]:
        """The axes in the order of memory: the one with the largest stride first."""
        return sorted(range(len(self.stride)), key=lambda axis: -self.stride[axis])

    @property
    def is_verbatim(self) -> bool:
        """Whether its bytes in the file are those of `content`: nothing to move, swap or flip."""
        swapped = self.storage is not None and self.storage.byteorder == "big"
        return self.is_contiguous and not self.flags and not swapped

    @property
    def unrepeated(self) -> TensorRef:
        """The same elements, those that a stride of zero repeats only once."""
        axes = zip(self.shape, self.stride, strict=True)
        shape = tuple(1 if size and not step else size for size, step in axes)
        return self if shape == self.shape else replace(self, shape=shape)

    @property
    def is_parameter(self) -> bool:
        """Whether torch would make a `Parameter` of it."""
        return any(layer.kind != "type" for layer in self.wrapping)

    @property
    def has_content(self) -> bool:
        """Whether it is a plain array of elements with bytes behind it (`content` works)."""
        stored = self.storage is not None and self.storage.data is not None
        return stored and self.kind in STRIDED_KINDS

    @property
    def class_name(self) -> str:
        """The qualified name of its class: of a subclass that of the file, else torch's own."""
        made_of = (self.parts or {}).get("type") if self.storage is None else None
        types = (made_of, *(layer.type for layer in self.wrapping))
        known = (cls.qualified for cls in types if isinstance(cls, Global))
        return next(known, "torch.Tensor")

    @property
    def is_array(self) -> bool:
        """Whether it is pickled as an array of numpy, or is a TPU's that such an array carries."""
        parts = self.parts or {}
        return "array" in parts or parts.get("carrier", _CARRIER) != _CARRIER

    @property
    def is_spread(self) -> bool:
        """Whether it is spread over processes, of which each saves its own part."""
        spread = ("DTensor", "ShardedTensor")
        return self.storage is None and self.class_name.rpartition(".")[2] in spread

    @property
    def local(self) -> TensorRef | None:
        """The first tensor that one without a storage is made of: a DTensor's local part."""
        return next(self.tensors_inside(), None) if self.storage is None else None

    @property
    def whole(self) -> TensorRef | None:
        """The plain tensor that a DTensor is, where this file has all of it; None of any other.

        All of it is there where the local part has its shape (one rank, or `Replicate`), unless a
        sum is pending (`Partial`). Source: torch/distributed/tensor/_dtensor_spec.py.
        """
        match self.parts:
            case {"state": (_, {"_local_tensor": TensorRef() as local, "_spec": Opaque() as spec})}:
                placements = spec.attributes.get("placements")
            case _:
                return None
        if not self.is_spread or local.shape != self.shape or not isinstance(placements, tuple):
            return None
        names = (getattr(one, "class_name", "Partial").rpartition(".")[2] for one in placements)
        if any(name.endswith("Partial") for name in names):
            return None
        layers = (layer for layer in self.wrapping if layer.kind != "type")
        return replace(local, requires_grad=self.requires_grad, wrapping=(*local.wrapping, *layers))

    @property
    def data(self) -> ByteRange:
        """The bytes of a contiguous tensor, in the byte order of its storage."""
        if not self.is_contiguous:
            raise UsageError("a tensor that is not contiguous has no single range of bytes")
        return self._stored().slice(self.offset * self.itemsize, self.nbytes)

    @property
    def row_major(self) -> ByteRange:
        """The bytes of the elements in row-major order, with flags and byte order as stored."""
        if self.is_contiguous:
            return self.data
        from ckptool.files.computed import gathered  # as in `content`

        return gathered(self._stored(), **self._view)

    def content(self) -> Iterator[bytes]:
        """Return the elements in row-major order, little-endian, conjugated and negated, in blocks.

        Raises:
            UsageError: a tensor that has no plain array of bytes (`has_content`).
        """
        if self.dtype in PACKED:
            return self.data.blocks()
        # Imported here: most that is done with a checkpoint asks for no elements.
        from ckptool.files.strided import flip_signs, row_major, swap_bytes

        dtype = BY_NAME[self.dtype]
        blocks = row_major(self._stored(), **self._view)
        if self.storage is not None and self.storage.byteorder == "big":
            blocks = (swap_bytes(block, dtype.swap_size) for block in blocks)
        if self.flags:
            is_complex = self.dtype.startswith("complex")
            blocks = (
                flip_signs(block, dtype.swap_size, is_complex, self.flags) for block in blocks
            )
        return blocks

    def read(self) -> bytes:
        """Return all of `content` at once."""
        return b"".join(self.content())

    def tensors_inside(self) -> Iterator[TensorRef]:
        """Return the tensors that this one is made of, in the order of its parts."""
        return find_tensors(dict(self.parts or {}))

    def torch(
        self,
        *,
        map_location: MapLocation = "cpu",
        mmap: bool = False,
        dtype: torch.dtype | str | None = None,
    ) -> torch.Tensor:
        """Return the tensor. Arguments and errors are those of `ckptool.load_state_dict`."""
        from ckptool.tensors import materialize

        return materialize(self, map_location=map_location, mmap=mmap, dtype=dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the values for `numpy.asarray`, in float32 if numpy lacks the type (bfloat16)."""
        tensor = self.torch().detach().resolve_conj().resolve_neg()
        if self.dtype.startswith(("bfloat", "float8")):
            tensor = tensor.float()
        array = tensor.numpy()
        return array if dtype is None else array.astype(dtype)

    def __getitem__(self, index: Any) -> TensorRef:
        """Return a view by basic indexing (integers, slices, `...`); only its bytes are read."""
        self._check_view("sliced")
        from ckptool.files.strided import narrow  # as in `content`

        shape, stride, offset = narrow(self.sizes, self.stride, self.offset, index)
        return replace(self, shape=shape, stride=stride, offset=offset, parts=None, wrapping=())

    def permuted(self, order: Sequence[int]) -> TensorRef:
        """Return a view with its axes in another order, as `torch.Tensor.permute`."""
        self._check_view("transposed")
        shape = tuple(self.shape[axis] for axis in order)
        stride = tuple(self.stride[axis] for axis in order)
        return replace(self, shape=shape, stride=stride, parts=None, wrapping=())

    def _check_view(self, verb: str) -> None:
        if self.kind not in STRIDED_KINDS or self.storage is None:
            raise UsageError(f"a {self.kind} tensor cannot be {verb}")
        if self.dtype in PACKED:
            raise UsageError(f"a {self.dtype} tensor cannot be {verb}: its elements share bytes")

    @property
    def _view(self) -> dict[str, Any]:
        """What it is of its storage, as the functions of `files` take it."""
        place = {"shape": self.sizes, "stride": self.stride, "offset": self.offset}
        return {"itemsize": self.itemsize, **place}

    def _stored(self) -> ByteRange:
        if not self.has_content or self.storage is None or self.storage.data is None:
            raise UsageError(f"a {self.kind} tensor on {self.device} has no plain bytes")
        return self.storage.data

    def _corrupt(self, fact: str) -> CorruptFile:
        storage = self.storage
        where = "" if storage is None else f" over storage {storage.key!r}"
        file = storage.data.source.name if storage is not None and storage.data else None
        return CorruptFile(f"a {self.dtype} tensor{where} {fact}", file=file)


def over_elements(tensor: TensorRef, **place: Any) -> TensorRef:
    """Return the tensor with another `dtype`, `shape`, `storage`, `offset`, `stride` or `flags`.

    A tensor of a back end without storages (a TPU) is then carried by a tensor of the CPU. A numpy
    array becomes a tensor: its pickle has the old elements.
    """
    if place and "array" in (tensor.parts or {}):
        place = {"kind": "strided", "parts": None, **place}
    made = replace(tensor, **place)
    if "carrier" not in (tensor.parts or {}):
        return made
    data = replace(made, device="cpu", requires_grad=False, hooks=None, wrapping=(), parts=None)
    return replace(made, parts={"carrier": _CARRIER, "data": data})


def children(node: Any) -> Iterable[Any]:
    """Return what a container or an object holds directly, in the file's order."""
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
    todo = [root]
    while todo:
        node = todo.pop()
        if isinstance(node, TensorRef):
            if id(node) not in seen:
                seen.add(id(node))
                yield node
        elif isinstance(node, (dict, list, tuple, Opaque)) and id(node) not in seen:
            seen.add(id(node))
            todo.extend(reversed(tuple(children(node))))


def plain_tensor(
    key: str,
    dtype: str,
    shape: tuple[int, ...],
    data: ByteRange,
    device: str = "cpu",
    **stated: Any,
) -> TensorRef:
    """Return a tensor whose elements fill `data` in row-major order, over a storage of its own.

    `stated` are the byte order and the CRC-32 of the storage, where the file has them.

    Raises:
        CorruptFile: `data` is longer or shorter than the elements.
    """
    nbytes = -(-math.prod(shape) * BY_NAME[dtype].itemsize // PACKED.get(dtype, 1))
    if nbytes != data.length:
        what = f"needs {nbytes:,} bytes, but there are {data.length:,}"
        raise CorruptFile(f"storage {quoted(key)}: {dtype} and shape {list(shape)} {what}")
    storage = Storage(key, data, nbytes, device, **stated)
    return TensorRef(dtype, shape, row_major_strides(shape), 0, storage, device)


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of that shape."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
