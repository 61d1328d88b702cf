"""Torch tensors made of references to bytes, and what is needed of torch itself."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptool._lazy import pause_gc
from ckptool.core.model import Global, Storage, StorageRef, TensorRef, Wrapping
from ckptool.core.tree import everything
from ckptool.dtypes import BY_NAME
from ckptool.errors import (
    CheckpointError,
    CorruptFile,
    DeviceError,
    TorchMissing,
    TruncatedFile,
    UnsupportedFormat,
    UsageError,
    warn,
)
from ckptool.files import ByteRange
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch


def require_torch() -> None:
    """Import torch, or raise `TorchMissing`, which says what to install."""
    try:
        with pause_gc():
            import torch  # noqa: F401
    except ImportError as error:
        raise TorchMissing(
            f"tensors need torch, which cannot be imported: {error}", hint="pip install torch"
        ) from error


_LOCK, _BEFORE = Lock(), list[int]()


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch calculate in the calling thread alone.

    Its threads wait for each other by spinning: on a machine that is busy a pass over half a
    million elements at a time takes twenty times as long, and elsewhere it gains little.

    Raises:
        TorchMissing: torch is not installed.
    """
    require_torch()
    import torch

    with _LOCK:
        _BEFORE.append(torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _LOCK:  # the first had the number of before, and the last gives it back
            torch.set_num_threads(_BEFORE.pop(1) if len(_BEFORE) > 1 else _BEFORE.pop())


def torch_dtype(name: str, *, file: str | None = None) -> torch.dtype:
    """Return the `torch.dtype` of a name.

    Raises:
        UnsupportedFormat: the torch that is installed has none.
    """
    import torch

    # vars, not getattr: a lookup must never make torch import one of its lazy submodules.
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedFormat(
            f"has {name} elements, which torch {torch.__version__} does not support",
            file=file,
            hint="pip install --upgrade torch",
        )
    return dtype


def wanted_dtype(dtype: torch.dtype | str | None) -> str | None:
    """Return the bare name of an element type that a caller asks for: `float16`; None for None.

    Raises:
        UsageError: it is no floating type of this torch.
    """
    if dtype is None:
        return None
    import torch

    name = str(dtype).removeprefix("torch.")
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(
            f"dtype {name!r} is not a floating-point dtype of torch {torch.__version__}",
            hint="use float32, float16 or bfloat16, for example",
        )
    return str(found).removeprefix("torch.")


def called(name: str) -> str:
    """Return how a message calls a tensor, which may stand alone."""
    return f"tensor {printable(name)!r}" if name else "the tensor"


def set_attributes(made: Any, attributes: Mapping[Any, Any], where: str) -> None:
    """Give `made` attributes that came from a file, but none that its class has.

    So no file replaces a method or a property of the object; a `CheckpointWarning` names what was
    refused, and `where`.
    """
    refused: list[str] = []
    for name, value in attributes.items():
        if isinstance(name, str) and name[:2] != "__" and not hasattr(type(made), name):
            setattr(made, name, value)
        elif name not in vars(made):  # a jagged tensor has been given its own already
            refused.append(str(name))
    if refused:
        names, kind = listed(refused), type(made).__name__
        warn(f"left out attributes of {where} that class {kind} already has: {names}")


MapLocation: TypeAlias = (
    "str | torch.device | Mapping[str, str] | Callable[[torch.UntypedStorage, str], Any] | None"
)
"""None, a string, a `torch.device`, a dict of tags, or a callable `(storage, tag) -> storage`."""


class Placement:
    """One `map_location`, applied to storage after storage.

    As in torch: None leaves every tag, a dict leaves the tags that it does not list, and a callable
    that returns None does too.
    """

    def __init__(self, map_location: MapLocation) -> None:
        """Take what `torch.load` takes."""
        import torch

        if isinstance(map_location, torch.device):
            map_location = str(map_location)
        elif not (isinstance(map_location, (str, Mapping, type(None))) or callable(map_location)):
            raise DeviceError(
                f"map_location is a {type(map_location).__name__}, expected a device or a function",
                hint="give a string, a torch.device, a dict of tags, a function, or None",
            )
        self._where: Any = map_location
        self._checked: set[str] = set()

    def target(self, tag: str) -> str | None:
        """Return the tag that storages of `tag` get; None if a function decides."""
        where = self._where
        if isinstance(where, Mapping):
            return str(where.get(tag, tag))
        if where is None:
            return tag
        return where if isinstance(where, str) else None

    def check(self, tag: str, *, name: str, file: str | None) -> None:
        """Refuse a device that is not here, before anything is read for it."""
        target = self.target(tag)
        if target is None or target in self._checked:
            return
        import torch

        nothing = torch.empty(0, device="cpu").untyped_storage()
        _restored(nothing, target, tag=tag, name=name, file=file)
        self._checked.add(target)

    def place(
        self, storage: torch.UntypedStorage, tag: str, *, name: str, file: str | None
    ) -> torch.UntypedStorage:
        """`storage`, read into the CPU's memory, on the device that it is meant for."""
        target = self.target(tag)
        if target is not None:
            return _moved(storage, target)
        placed = self._where(storage, tag)
        if placed is not None:
            return _untyped(placed)
        return _restored(storage, tag, tag=tag, name=name, file=file)


def _moved(storage: torch.UntypedStorage, target: str) -> torch.UntypedStorage:
    from torch.serialization import default_restore_location

    return _untyped(default_restore_location(storage, target))  # type: ignore[no-untyped-call]


def _restored(
    storage: torch.UntypedStorage, target: str, *, tag: str, name: str, file: str | None
) -> torch.UntypedStorage:
    try:
        return _moved(storage, target)
    except Exception as error:  # each back end refuses in its own way
        asked = "" if target == tag else f" and map_location gives {target!r}"
        raise DeviceError(
            f"{called(name)} is on {tag!r}{asked}, which is not available on this machine",
            file=file,
            hint=f'load it with map_location="cpu", or run ckptool remap --to cpu {file or "FILE"}',
        ) from error


def _untyped(storage: Any) -> torch.UntypedStorage:
    """Return the storage that a function returned, also where that is a typed one."""
    import torch

    found = getattr(storage, "_untyped_storage", storage)
    if not isinstance(found, torch.UntypedStorage):
        raise DeviceError(f"map_location returned a {type(storage).__name__}, expected a storage")
    return found


_ALIGNMENT = 64
"""Spans begin at a multiple of this, so that offsets stay whole in elements of any type."""
_SHARED_READ = 8 << 20
"""Bytes from which a second thread takes half: touching new memory costs as much as copying."""
_WRITABLE = 0x200  # PyBUF_WRITE
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


class StorageReader:
    """Gives each storage of a file as torch's, made once.

    Of a storage only the span is read that `cover` was told of, all of it by default: a small view
    of a huge storage costs its own bytes, and views that share a storage go on sharing it.
    """

    def __init__(self, placement: Placement, *, mapped: bool, dtype: str | None) -> None:
        """Map files privately if `mapped` and the bytes are right; cast floats to `dtype`."""
        self._placement = placement
        self._mapped = mapped
        self._dtype = dtype
        self._spans: dict[int, tuple[int, int]] = {}
        self._made: dict[tuple[int, str, str], tuple[Storage, torch.UntypedStorage]] = {}
        self._maps: dict[int, mmap.mmap] = {}

    def cover(self, storage: Storage, span: tuple[int, int]) -> None:
        """Announce which bytes will be wanted, from and to; before any `get`."""
        known = self._spans.setdefault(id(storage), (0, 0))
        if not span[1]:
            return
        start, stop = span[0] - span[0] % _ALIGNMENT, span[1]
        if known[1]:
            start, stop = min(start, known[0]), max(stop, known[1])
        self._spans[id(storage)] = (start, stop)

    def get(
        self, storage: Storage, dtype: str, *, device: str, name: str, cast: bool = True
    ) -> tuple[torch.UntypedStorage, int]:
        """Return the storage for elements of `dtype`, and which element of the file is its first.

        `cast` allows the change of floating types that was asked for. Storages whose bytes must be
        changed for an element type are one for each type that looks at them.

        Raises:
            DeviceError: there is no such device here.
            TruncatedFile: the file ends before the bytes do.
        """
        start, stop = self._spans.get(id(storage), (0, storage.nbytes))
        kind = BY_NAME[dtype]
        casts = cast and kind.floating and self._dtype not in (None, dtype)
        swaps = storage.byteorder != sys.byteorder and kind.swap_size > 1
        target = self._placement.target(device) or device
        key = (id(storage), target, dtype if casts or swaps else "")
        if key not in self._made:
            file = storage.data.source.name if storage.data else None
            self._placement.check(device, name=name, file=file)
            made = self._read(storage, start, stop, device, swap=kind.swap_size if swaps else 1)
            if casts:
                made = self._cast(made, dtype, name, file)
            if made.device.type != "meta":
                made = self._placement.place(made, device, name=name, file=file)
            self._made[key] = (storage, made)
        return self._made[key][1], start // kind.itemsize

    def forget(self) -> None:
        """Let go of the storages and mappings; the tensors made of them keep theirs."""
        self._made.clear()
        self._maps.clear()

    def _read(
        self, storage: Storage, start: int, stop: int, device: str, *, swap: int
    ) -> torch.UntypedStorage:
        import torch

        size = stop - start
        if storage.data is None or self._placement.target(device) == "meta":
            return _allocate(size, "meta")
        fd = storage.data.source.fd() if size and self._mapped and swap == 1 else None
        if fd is not None:
            return self._map(fd, storage.data.slice(start, size))
        made = _allocate(size)
        _fill(memory_view(made.data_ptr(), size), storage.data, start)
        if swap > 1:
            unit = {2: torch.int16, 4: torch.int32, 8: torch.int64}[swap]
            made.byteswap(unit)  # type: ignore[no-untyped-call]
        return made

    def _map(self, fd: int, data: ByteRange) -> torch.UntypedStorage:
        """Return a private mapping of the open file: writes to the tensor stay in memory."""
        import torch

        source = data.source
        if id(source) not in self._maps:
            try:
                made = mmap.mmap(fd, source.size, access=mmap.ACCESS_COPY)
            except ValueError as error:
                raise TruncatedFile(
                    f"was truncated after it was opened: it had {source.size:,} bytes",
                    file=source.name,
                ) from error
            self._maps[id(source)] = made
        whole = self._maps[id(source)]
        return torch.frombuffer(
            whole, dtype=torch.uint8, count=data.length, offset=data.offset
        ).untyped_storage()

    def _cast(
        self, made: torch.UntypedStorage, dtype: str, name: str, file: str | None
    ) -> torch.UntypedStorage:
        """Return the whole storage in the wanted type, so that views and ties stay."""
        import torch

        before = torch_dtype(dtype, file=file)
        count = made.nbytes() // BY_NAME[dtype].itemsize
        flat = torch.empty((0,), dtype=before, device=made.device).set_(made, 0, (count,), (1,))
        try:
            return flat.to(torch_dtype(self._dtype or dtype)).untyped_storage()
        except RuntimeError as error:
            raise UnsupportedFormat(
                f"{called(name)} is {dtype}, which torch cannot cast to {self._dtype}",
                file=file,
                hint="load it without dtype",
            ) from error


def memory_view(address: int, size: int) -> memoryview:
    """Torch's memory to read into; who uses it keeps alive what it belongs to."""
    view: memoryview = _memory_view(address, size, _WRITABLE)
    return view


def _fill(view: memoryview, data: ByteRange, start: int) -> None:
    if len(view) < _SHARED_READ or not data.source.is_shared:
        data.read_into(view, start)
        return
    half = len(view) // 2
    from concurrent.futures import ThreadPoolExecutor  # brings logging, which a header needs not

    with ThreadPoolExecutor(1) as second:
        rest = second.submit(data.read_into, view[half:], start + half)
        data.read_into(view[:half], start)
        rest.result()


def _allocate(size: int, device: str = "cpu") -> torch.UntypedStorage:
    import torch

    try:
        return torch.UntypedStorage(size, device=device)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise MemoryError(f"not enough memory for a storage of {size:,} bytes") from error


def _quantized(
    ref: TensorRef, quantizer: tuple[Any, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return an empty tensor with the quantizer of `_rebuild_qtensor`, scales made."""
    import torch

    scheme, *numbers = quantizer
    name = scheme.name if isinstance(scheme, Global) else str(scheme)
    if name == "per_tensor_affine":
        scale, zero_point = numbers
        return torch._empty_affine_quantized(
            (0,), scale=scale, zero_point=zero_point, dtype=dtype, device=device
        )
    if name not in ("per_channel_affine", "per_channel_affine_float_qparams"):
        raise ValueError(f"its scheme {name} is unknown")
    scales, zero_points, axis = numbers
    if type(axis) is not int or not 0 <= axis < len(ref.shape):
        raise ValueError(f"its axis {axis!r} is not one of its {len(ref.shape)} dimensions")
    if isinstance(scales, list):  # of torch 1.4
        whole = name == "per_channel_affine"
        scales = torch.tensor(scales, dtype=torch.float64 if whole else torch.float32)
        zero_points = torch.tensor(zero_points, dtype=torch.int64 if whole else torch.float32)
    if not scales.numel() == zero_points.numel() == ref.shape[axis]:
        raise ValueError(f"it has {scales.numel()} scales for {ref.shape[axis]} channels")
    size = [count or 0 if at == axis else 0 for at, count in enumerate(ref.shape)]
    return torch._empty_per_channel_affine_quantized(
        size,  # no memory is taken for a shape that a zero stride may have made enormous
        scales=scales.to(device),
        zero_points=zero_points.to(device),
        axis=axis,
        dtype=dtype,
        device=device,
    )


_OF_PARTS = ("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "nested", "meta")
"""Kinds of tensors that have no storage of their own."""


def _of_parts(ref: TensorRef, parts: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of these parts, in which the tensors have been made."""
    import torch

    if ref.kind == "meta":
        return torch.empty_strided(ref.sizes, ref.stride, dtype=dtype, device="meta")
    if ref.kind == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts["indices"],
            parts["values"],
            ref.sizes,
            check_invariants=parts["indices"].device.type != "meta",
            is_coalesced=parts.get("is_coalesced"),
        )
    if ref.kind != "nested":
        layout: torch.layout = vars(torch)[ref.kind]
        return torch.sparse_compressed_tensor(
            parts["compressed_indices"],
            parts["plain_indices"],
            parts["values"],
            ref.sizes,
            layout=layout,
            check_invariants=parts["values"].device.type != "meta",
        )
    if "state" in parts:
        return _jagged(parts["state"])
    buffer, sizes, strides, offsets = (
        parts[name] for name in ("buffer", "sizes", "strides", "offsets")
    )
    if buffer.device.type != "meta":
        _check_nested(buffer, sizes.cpu(), strides.cpu(), offsets.cpu())
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


def _check_nested(
    buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor
) -> None:
    import torch

    if any(table.dtype != torch.int64 for table in (sizes, strides, offsets)):
        raise ValueError("its sizes, strides and offsets are not int64")
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError("its buffer is not contiguous")
    if sizes.shape != strides.shape or offsets.shape != sizes.shape[:1]:
        raise ValueError("its sizes, strides and offsets are inconsistent")
    rows = zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    for size, stride, offset in rows:
        scalar = not isinstance(size, list)  # components without dimensions
        steps = [] if scalar else list(zip(size, stride, strict=True))
        if offset < 0 or any(count < 0 or step < 0 for count, step in steps):
            raise ValueError("a component has a negative size, stride or offset")
        if all(count for count, _ in steps):
            last = offset + sum((count - 1) * step for count, step in steps)
            if last >= buffer.numel():
                raise ValueError(f"a component reaches element {last:,} of {buffer.numel():,}")


def _jagged(state: Mapping[str, Any]) -> torch.Tensor:
    import torch

    if not hasattr(torch.nested, "nested_tensor_from_jagged"):
        raise UnsupportedFormat(
            f"has a jagged tensor, which torch {torch.__version__} does not support",
            hint="pip install --upgrade torch",
        )
    values, offsets, lengths = state["values"], state["offsets"], state.get("lengths")
    ragged = state.get("_ragged_idx", 1)
    if offsets.device.type != "meta":
        _check_jagged(values, offsets, lengths, ragged)
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged)


def _check_jagged(values: Any, offsets: Any, lengths: Any, ragged: Any) -> None:
    if type(ragged) is not int or not 1 <= ragged <= values.dim() or offsets.dim() != 1:
        raise ValueError(f"its ragged dimension {ragged!r} does not exist")
    starts = offsets.tolist()
    ends = starts[1:]
    if lengths is not None:
        counts = lengths.tolist()
        ends = [at + count for at, count in zip(starts, counts, strict=False)]
        if len(counts) != len(starts) - 1 or any(count < 0 for count in counts):
            raise ValueError("its lengths do not fit its offsets")
    extent = values.shape[ragged - 1]
    rising = all(start <= end for start, end in zip(starts, ends, strict=False))
    if not starts or starts[0] < 0 or not rising or max((*ends, *starts)) > extent:
        raise ValueError(f"its offsets exceed the {extent:,} rows of its values")


def materialize(
    ref: TensorRef,
    *,
    map_location: MapLocation = "cpu",
    mmap: bool = False,
    dtype: torch.dtype | str | None = None,
) -> torch.Tensor:
    """Make the tensor of `ref`; options as `ckptool.load_state_dict`.

    Tensors that share a storage share it only where one `Materializer` makes them all.
    """
    maker = Materializer(ref, map_location=map_location, mmap=mmap, dtype=dtype)
    return maker.tensor(ref)


class Materializer:
    """Makes the tensors of one tree: each `TensorRef` once, each storage once."""

    def __init__(
        self,
        root: Any,
        *,
        map_location: MapLocation = "cpu",
        mmap: bool = False,
        dtype: torch.dtype | str | None = None,
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        """Plan what to read for the tensors below `root`; nothing is read yet.

        `convert` makes the values among a tensor's own attributes; without it only the tensors
        among them are made.

        Raises:
            TorchMissing: torch is not installed.
            DeviceError: `map_location` is nothing that `torch.load` takes.
            UsageError: `dtype` is no floating element type.
        """
        require_torch()
        self._convert = convert
        self._dtype = wanted_dtype(dtype)
        self._storages = StorageReader(Placement(map_location), mapped=mmap, dtype=self._dtype)
        self._made: dict[tuple[int, bool], tuple[TensorRef, torch.Tensor]] = {}
        for node in everything(root):
            if isinstance(node, StorageRef):
                self._storages.cover(node.storage, (0, node.storage.nbytes))
            elif isinstance(node, TensorRef) and node.storage is not None:
                self._storages.cover(node.storage, node.reach)

    def tensor(self, ref: TensorRef, name: str = "", *, cast: bool = True) -> torch.Tensor:
        """Return the tensor of `ref`, always the same object for the same `ref`.

        A numpy array becomes a tensor. A subclass that has a storage becomes a plain tensor with
        the attributes that the file gives it. `name` is for messages; `cast` allows the change of
        floating types that was asked for.

        Raises:
            DeviceError: it lies on a device that is not here; the message says what helps.
            CorruptFile: torch refuses to make what the file describes.
            UnsupportedFormat: a wrapper (DTensor, ShardedTensor) of which this file has a part.
        """
        known = self._made.get((id(ref), cast))
        if known is not None:
            return known[1]
        if is_one_part(ref):
            raise only_a_part(ref, name)
        made = self._assembled(ref.whole or ref, name, cast=cast)
        self._made[id(ref), cast] = (ref, made)
        for layer in ref.wrapping:
            set_attributes(made, self._attributes(layer), called(name))
        return made

    def storage(
        self, ref: StorageRef, name: str = ""
    ) -> torch.UntypedStorage | torch.storage.TypedStorage:
        """Return a storage that is a value of the tree, typed or untyped as in the file."""
        import torch

        made, _ = self._storages.get(
            ref.storage, ref.dtype, device=ref.storage.device, name=name, cast=False
        )
        if ref.untyped:
            return made
        dtype = torch_dtype(ref.dtype)
        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=made, dtype=dtype, _internal=True
        )

    def forget(self) -> None:
        """Let go of all that was made: only the caller's references keep it from now on."""
        self._made.clear()
        self._storages.forget()
        self._convert = None

    def _assembled(self, ref: TensorRef, name: str, *, cast: bool) -> torch.Tensor:
        """Return the tensor with its layers, but without their attributes."""
        import torch

        casts = cast and self._dtype is not None and BY_NAME[ref.dtype].floating
        dtype = torch_dtype(self._dtype if casts and self._dtype else ref.dtype, file=_file(ref))
        # The scales of a quantized tensor are no weights: they keep their type.
        parts = self._parts(ref, name, cast=cast and ref.kind != "quantized")
        storage, offset = None, 0
        if ref.storage is not None:
            storage, first = self._storages.get(
                ref.storage, ref.dtype, device=ref.device, name=name, cast=cast
            )
            offset = max(0, ref.offset - first)
        try:
            if storage is None:
                return _with_layers(_of_parts(ref, parts, dtype), ref)
            if ref.kind == "quantized":
                made = _quantized(ref, parts["quantizer"], dtype, storage.device)
            else:
                made = torch.empty((0,), dtype=dtype, device=storage.device)
            made.set_(storage, offset, ref.sizes, ref.stride)
            if ref.flags:
                flags = dict.fromkeys(ref.flags, True)
                torch._utils.set_tensor_metadata(made, flags)  # type: ignore[no-untyped-call]
            return _with_layers(made, ref)
        except (CheckpointError, torch.cuda.OutOfMemoryError):
            raise
        except _REFUSALS as error:
            raise _refused(ref, name, error) from error

    def _parts(self, ref: TensorRef, name: str, *, cast: bool) -> dict[str, Any]:
        """Return the parts of a tensor, tensors made; empty for a plain or carried tensor."""
        if ref.kind not in _OF_PARTS and ref.kind != "quantized":
            return {}
        return {key: self._part(part, name, cast=cast) for key, part in (ref.parts or {}).items()}

    def _part(self, part: Any, name: str, *, cast: bool) -> Any:
        if isinstance(part, TensorRef):
            return self.tensor(part, name, cast=cast)
        if isinstance(part, tuple):
            return tuple(self._part(item, name, cast=cast) for item in part)
        if isinstance(part, dict):  # of a jagged tensor
            return {key: self._part(item, name, cast=cast) for key, item in part.items()}
        return part

    def _attributes(self, layer: Wrapping) -> dict[Any, Any]:
        """Return the Python attributes in the state of a layer, slots merged in, values made."""
        convert = self._convert or (lambda state: self._part(state, "", cast=False))
        state = convert(layer.state)
        groups = state if isinstance(state, tuple) else (state,)
        return {
            name: value
            for group in groups
            if isinstance(group, dict)
            for name, value in group.items()
        }


_REFUSALS = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)
"""What torch raises at arguments that it cannot use."""


def _with_layers(tensor: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """Parameters made of it, innermost first; a class that only the file knows is left out."""
    import torch

    if not ref.is_parameter:
        return tensor.requires_grad_() if ref.requires_grad else tensor
    for layer in ref.wrapping:
        if layer.kind != "type":
            tensor = torch.nn.Parameter(tensor, layer.requires_grad)
    return tensor


def is_one_part(ref: TensorRef) -> bool:
    """Return whether only its class makes a tensor of the parts that this file has."""
    return ref.kind == "subclass" and ref.storage is None and ref.whole is None


def only_a_part(ref: TensorRef, name: str) -> UnsupportedFormat:
    """Return the error for a tensor that cannot be made; `name` is for the message."""
    shown = ref.class_name.rpartition(".")[2]
    if not ref.is_spread:
        return UnsupportedFormat(
            f"{called(name)} is a {ref.class_name}, which only its class can assemble",
            file=_file(ref),
            hint="convert torchao tensors with ckptool cast --dequantize float32, or call "
            ".dequantize() before saving",
        )
    return UnsupportedFormat(
        f"{called(name)} is a {shown}, distributed over ranks; this file has only one part",
        file=_file(ref),
        hint="gather it before saving (full_tensor(), get_model_state_dict with full_state_dict), "
        "or read this part with ckptool.open(FILE)[NAME].local.torch()",
    )


def _refused(ref: TensorRef, name: str, error: Exception) -> Exception:
    """Return the error to raise if torch, or a check before it, refused to make a tensor."""
    import torch

    reason = str(error).strip().partition("\n")[0][:200]
    if isinstance(error, NotImplementedError):
        return DeviceError(
            f"{called(name)} is {ref.kind}, which torch {torch.__version__} cannot create on the "
            f"requested device ({reason})",
            file=_file(ref),
            hint='map_location="cpu"',
        )
    return CorruptFile(f"{called(name)} ({ref.kind}) cannot be created: {reason}", file=_file(ref))


def _file(ref: TensorRef) -> str | None:
    if ref.storage is not None:
        return ref.storage.data.source.name if ref.storage.data else None
    inside = next(ref.tensors_inside(), None)
    return None if inside is None else _file(inside)
