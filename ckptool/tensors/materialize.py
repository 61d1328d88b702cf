"""Make torch tensors from references to bytes; look up dtypes and devices of torch."""

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
from ckptool.core.tree import walk_everything
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
    """Import torch, or raise `TorchMissing` with the command that installs it."""
    try:
        with pause_gc():
            import torch  # noqa: F401
    except ImportError as error:
        raise TorchMissing(
            f"tensors need torch, which cannot be imported: {error}", hint="pip install torch"
        ) from error


_THREADS_BEFORE: list[int] = []
"""The number of torch's threads at the start of each running `use_one_thread`."""
_THREADS_LOCK = Lock()
"""Guards `_THREADS_BEFORE` and torch's number of threads."""


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Let torch use only the calling thread.

    Its threads spin while they wait for each other. On a busy machine a pass over half a million
    elements takes twenty times as long with them, and on an idle one they gain little.

    Raises:
        TorchMissing: torch is not installed.
    """
    require_torch()
    import torch

    with _THREADS_LOCK:
        _THREADS_BEFORE.append(torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        # Calls may overlap and end in any order. The last one that ends restores the first entry,
        # the number before all of them; every other entry is 1.
        with _THREADS_LOCK:
            torch.set_num_threads(_THREADS_BEFORE.pop())


def get_torch_dtype(name: str, *, file: str | None = None) -> torch.dtype:
    """Return the `torch.dtype` with this name.

    Raises:
        UnsupportedFormat: the installed torch does not have it.
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


def check_float_dtype(dtype: torch.dtype | str | None) -> str | None:
    """Return torch's name of a requested floating dtype, such as `float16`; None for None.

    Raises:
        UsageError: torch has no floating dtype with this name.
    """
    if dtype is None:
        return None
    import torch

    name = str(dtype).removeprefix("torch.")
    torch_dtype = vars(torch).get(name)
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise UsageError(
            f"dtype {name!r} is not a floating-point dtype of torch {torch.__version__}",
            hint="use float32, float16 or bfloat16, for example",
        )
    return str(torch_dtype).removeprefix("torch.")


def describe_name(name: str) -> str:
    """Return the words for a tensor in a message; it may have no name."""
    return f"tensor {printable(name)!r}" if name else "the tensor"


def set_attributes(instance: Any, attributes: Mapping[Any, Any], where: str) -> None:
    """Set attributes from a file on `instance`, except those that its class has.

    So no file replaces a method or a property. A `CheckpointWarning` names the refused attributes
    and `where`.
    """
    refused: list[str] = []
    for name, value in attributes.items():
        if isinstance(name, str) and name[:2] != "__" and not hasattr(type(instance), name):
            setattr(instance, name, value)
        elif name not in vars(instance):  # torch has set those of a jagged tensor already
            refused.append(str(name))
    if refused:
        names, kind = listed(refused), type(instance).__name__
        warn(f"left out attributes of {where} that class {kind} already has: {names}")


MapLocation: TypeAlias = (
    "str | torch.device | Mapping[str, str] | Callable[[torch.UntypedStorage, str], Any] | None"
)
"""None, a string, a `torch.device`, a dict of tags, or a callable `(storage, tag) -> storage`."""


class Placement:
    """Moves storages to the devices that one `map_location` gives.

    As in torch: None keeps every device, a dict keeps the devices that it does not list, and so
    does a function that returns None.
    """

    def __init__(self, map_location: MapLocation) -> None:
        """Accept the values of `map_location` that `torch.load` accepts.

        Raises:
            DeviceError: it is none of these.
        """
        import torch

        if isinstance(map_location, torch.device):
            map_location = str(map_location)
        elif not (isinstance(map_location, (str, Mapping, type(None))) or callable(map_location)):
            raise DeviceError(
                f"map_location is a {type(map_location).__name__}, expected a device or a function",
                hint="give a string, a torch.device, a dict of tags, a function, or None",
            )
        self._map_location: Any = map_location
        self._available_devices: set[str] = set()
        """Devices that were checked and are available."""

    def target_of(self, tag: str) -> str | None:
        """Return the device for storages saved on `tag`; None if a function decides."""
        map_location = self._map_location
        if isinstance(map_location, Mapping):
            return str(map_location.get(tag, tag))
        if map_location is None:
            return tag
        return map_location if isinstance(map_location, str) else None

    def check_device(self, tag: str, *, name: str, file: str | None) -> None:
        """Raise `DeviceError` if the target device is not available, before any data is read."""
        target = self.target_of(tag)
        if target is None or target in self._available_devices:
            return
        import torch

        empty = torch.empty(0, device="cpu").untyped_storage()  # moved to see whether torch can
        _restore_storage(empty, target, tag=tag, name=name, file=file)
        self._available_devices.add(target)

    def place(
        self, storage: torch.UntypedStorage, tag: str, *, name: str, file: str | None
    ) -> torch.UntypedStorage:
        """Move a storage that was saved on `tag` from the CPU's memory to its target device."""
        target = self.target_of(tag)
        if target is not None:
            return _move_storage(storage, target)
        placed = self._map_location(storage, tag)  # a function
        if placed is not None:
            return _to_untyped(placed)
        return _restore_storage(storage, tag, tag=tag, name=name, file=file)  # keep the device


def _move_storage(storage: torch.UntypedStorage, target: str) -> torch.UntypedStorage:
    """Move a storage to a device as `torch.load` does."""
    from torch.serialization import default_restore_location

    return _to_untyped(default_restore_location(storage, target))  # type: ignore[no-untyped-call]


def _restore_storage(
    storage: torch.UntypedStorage, target: str, *, tag: str, name: str, file: str | None
) -> torch.UntypedStorage:
    """Move a storage saved on the device `tag` to `target`; raise `DeviceError` if torch cannot."""
    try:
        return _move_storage(storage, target)
    except Exception as error:  # each back end refuses in its own way
        mapping = "" if target == tag else f" and map_location gives {target!r}"
        raise DeviceError(
            f"{describe_name(name)} is on {tag!r}{mapping}, which is not available on this machine",
            file=file,
            hint=f'load it with map_location="cpu", or run ckptool remap --to cpu {file or "FILE"}',
        ) from error


def _to_untyped(storage: Any) -> torch.UntypedStorage:
    """Return the untyped storage of a typed or untyped one that `map_location` returned."""
    import torch

    untyped = getattr(storage, "_untyped_storage", storage)
    if not isinstance(untyped, torch.UntypedStorage):
        raise DeviceError(f"map_location returned a {type(storage).__name__}, expected a storage")
    return untyped


_ALIGNMENT = 64
"""Spans begin at a multiple of this, so that offsets stay whole in elements of any type."""
_MIN_SHARED_READ_BYTES = 8 << 20
"""Bytes from which a second thread takes half: touching new memory costs as much as copying."""
_WRITABLE = 0x200  # PyBUF_WRITE
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


class StorageReader:
    """Makes the torch storage of each storage of a file, once.

    Only the span given to `announce_span` is read, by default all of it. So a small view of a huge
    storage costs its own bytes, and views that share a storage still share it.
    """

    def __init__(self, placement: Placement, *, mapped: bool, dtype: str | None) -> None:
        """Map files privately if `mapped` is True and no byte changes; cast floats to `dtype`."""
        self._placement = placement
        self._mapped = mapped
        self._requested_dtype = dtype
        self._spans: dict[int, tuple[int, int]] = {}
        """By `id` of a storage, the bytes to read (start, stop)."""
        self._made_by_storage: dict[tuple[int, str, str], tuple[Storage, torch.UntypedStorage]] = {}
        """By storage (`id`), device, and dtype if bytes change: the storage and torch's storage."""
        self._mapping_by_source: dict[int, mmap.mmap] = {}
        """By `id` of a file's source, the mapping of the whole file."""

    def announce_span(self, storage: Storage, span: tuple[int, int]) -> None:
        """Announce a span of bytes (start, stop) that will be read; call it before `get`.

        One storage has one span, which grows to contain all announced spans.
        """
        # A storage with only empty tensors keeps the span (0, 0): nothing of it is read.
        start_so_far, stop_so_far = self._spans.setdefault(id(storage), (0, 0))
        start, stop = span
        if not stop:  # an empty tensor
            return
        start -= start % _ALIGNMENT
        if stop_so_far:
            start, stop = min(start, start_so_far), max(stop, stop_so_far)
        self._spans[id(storage)] = (start, stop)

    def get(
        self, storage: Storage, dtype: str, *, device: str, name: str, cast: bool = True
    ) -> tuple[torch.UntypedStorage, int]:
        """Return torch's storage for elements of `dtype`, and the index of its first element.

        The index counts from the start of the storage in the file. `cast` allows the requested
        change of floating dtypes. If bytes must change for a dtype, each dtype has its own storage.

        Raises:
            DeviceError: the device is not available on this machine.
            TruncatedFile: the file ends before the bytes do.
        """
        start, stop = self._spans.get(id(storage), (0, storage.nbytes))
        dtype_info = BY_NAME[dtype]
        needs_cast = cast and dtype_info.floating and self._requested_dtype not in (None, dtype)
        needs_swap = storage.byteorder != sys.byteorder and dtype_info.swap_size > 1
        target = self._placement.target_of(device) or device
        key = (id(storage), target, dtype if needs_cast or needs_swap else "")
        if key not in self._made_by_storage:
            file = storage.data.source.name if storage.data else None
            self._placement.check_device(device, name=name, file=file)
            loaded = self._load_storage(
                storage, start, stop, device, swap=dtype_info.swap_size if needs_swap else 1
            )
            if needs_cast:
                loaded = self._cast_storage(loaded, dtype, name, file)
            if loaded.device.type != "meta":
                loaded = self._placement.place(loaded, device, name=name, file=file)
            self._made_by_storage[key] = (storage, loaded)  # keeps `storage`, so its id stays valid
        return self._made_by_storage[key][1], start // dtype_info.itemsize

    def forget(self) -> None:
        """Release the storages and mappings; tensors made from them keep theirs."""
        self._made_by_storage.clear()
        self._mapping_by_source.clear()

    def _load_storage(
        self, storage: Storage, start: int, stop: int, device: str, *, swap: int
    ) -> torch.UntypedStorage:
        """Return the bytes `start` to `stop` of a storage: mapped, or read and swapped.

        `swap` is the size of the units in which bytes must be reversed; 1 if they are in order. For
        the meta device, or without data in the file, the storage has no bytes.
        """
        import torch

        size = stop - start
        if storage.data is None or self._placement.target_of(device) == "meta":
            return _allocate_storage(size, "meta")
        fd = storage.data.source.fd() if size and self._mapped and swap == 1 else None
        if fd is not None:
            return self._map_storage(fd, storage.data.slice(start, size))
        loaded = _allocate_storage(size)
        _read_into_view(view_memory(loaded.data_ptr(), size), storage.data, start)
        if swap > 1:
            unit = {2: torch.int16, 4: torch.int32, 8: torch.int64}[swap]
            loaded.byteswap(unit)  # type: ignore[no-untyped-call]
        return loaded

    def _map_storage(self, fd: int, data: ByteRange) -> torch.UntypedStorage:
        """Return a private mapping of the open file: writes to the tensor stay in memory."""
        import torch

        source = data.source
        if id(source) not in self._mapping_by_source:
            try:
                mapping = mmap.mmap(fd, source.size, access=mmap.ACCESS_COPY)
            except ValueError as error:
                raise TruncatedFile(
                    f"was truncated after it was opened: it had {source.size:,} bytes",
                    file=source.name,
                ) from error
            self._mapping_by_source[id(source)] = mapping
        mapped = self._mapping_by_source[id(source)]
        return torch.frombuffer(
            mapped, dtype=torch.uint8, count=data.length, offset=data.offset
        ).untyped_storage()

    def _cast_storage(
        self, storage: torch.UntypedStorage, saved_dtype: str, name: str, file: str | None
    ) -> torch.UntypedStorage:
        """Return a storage of `saved_dtype` in the dtype requested of this reader.

        All of its elements are cast, not those of one tensor, so that views and ties stay.
        """
        import torch

        count = storage.nbytes() // BY_NAME[saved_dtype].itemsize
        empty = torch.empty(
            (0,), dtype=get_torch_dtype(saved_dtype, file=file), device=storage.device
        )
        elements = empty.set_(storage, 0, (count,), (1,))  # a view of all elements
        try:
            target_dtype = get_torch_dtype(self._requested_dtype or saved_dtype)
            return elements.to(target_dtype).untyped_storage()
        except RuntimeError as error:
            raise UnsupportedFormat(
                f"{describe_name(name)} is {saved_dtype}, which torch cannot cast to "
                f"{self._requested_dtype}",
                file=file,
                hint="load it without dtype",
            ) from error


def view_memory(address: int, size: int) -> memoryview:
    """Return a writable view of memory owned by torch; the caller keeps its owner alive."""
    view: memoryview = _memory_view(address, size, _WRITABLE)
    return view


def _read_into_view(view: memoryview, data: ByteRange, start: int) -> None:
    """Read bytes from `start` into a view; share a large read with a second thread."""
    if len(view) < _MIN_SHARED_READ_BYTES or not data.source.is_shared:
        data.read_into(view, start)
        return
    half = len(view) // 2
    from concurrent.futures import ThreadPoolExecutor  # slow to import; few reads need it

    with ThreadPoolExecutor(1) as second:
        upper_half = second.submit(data.read_into, view[half:], start + half)
        data.read_into(view[:half], start)
        upper_half.result()


def _allocate_storage(size: int, device: str = "cpu") -> torch.UntypedStorage:
    """Return a new storage; raise MemoryError if there is no memory for it."""
    import torch

    try:
        return torch.UntypedStorage(size, device=device)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise MemoryError(f"not enough memory for a storage of {size:,} bytes") from error


def _make_quantized(
    ref: TensorRef, quantizer: tuple[Any, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return an empty quantized tensor with the quantizer that `_rebuild_qtensor` was given.

    `quantizer` is the scheme, then scale and zero point, or these per channel and the axis.

    Raises:
        ValueError: if the scheme is unknown, or the quantizer does not fit the shape.
    """
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
        is_integer = name == "per_channel_affine"  # the other scheme has zero points of float
        scales = torch.tensor(scales, dtype=torch.float64 if is_integer else torch.float32)
        zero_points = torch.tensor(zero_points, dtype=torch.int64 if is_integer else torch.float32)
    if not scales.numel() == zero_points.numel() == ref.shape[axis]:
        raise ValueError(f"it has {scales.numel()} scales for {ref.shape[axis]} channels")
    # torch checks the channels of an empty tensor too, but needs no memory for it: a stride of zero
    # may give a small storage an enormous shape.
    empty_shape = [0] * len(ref.shape)
    empty_shape[axis] = scales.numel()
    return torch._empty_per_channel_affine_quantized(
        empty_shape,
        scales=scales.to(device),
        zero_points=zero_points.to(device),
        axis=axis,
        dtype=dtype,
        device=device,
    )


_KINDS_OF_PARTS = (
    "sparse_coo",
    "sparse_csr",
    "sparse_csc",
    "sparse_bsr",
    "sparse_bsc",
    "nested",
    "meta",
)
"""Kinds of tensors that have no storage of their own."""


def _assemble_parts(ref: TensorRef, parts: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without storage of its own, made from its loaded parts.

    Its kind is meta, sparse or nested. Invariants are checked, unless the parts are on the meta
    device and have no elements.
    """
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
    if "state" in parts:  # a nested tensor with the jagged layout is pickled with its attributes
        return _make_jagged(parts["state"])
    buffer, sizes, strides, offsets = (
        parts[name] for name in ("buffer", "sizes", "strides", "offsets")
    )
    if buffer.device.type != "meta":
        _check_nested(buffer, sizes.cpu(), strides.cpu(), offsets.cpu())
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


def _check_nested(
    buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Raise ValueError if a component of a nested tensor is outside of its buffer."""
    import torch

    if any(table.dtype != torch.int64 for table in (sizes, strides, offsets)):
        raise ValueError("its sizes, strides and offsets are not int64")
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError("its buffer is not contiguous")
    if sizes.shape != strides.shape or offsets.shape != sizes.shape[:1]:
        raise ValueError("its sizes, strides and offsets are inconsistent")
    rows = zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    for size, stride, offset in rows:
        is_scalar = not isinstance(size, list)  # a component without dimensions
        dimensions = [] if is_scalar else list(zip(size, stride, strict=True))
        if offset < 0 or any(count < 0 or step < 0 for count, step in dimensions):
            raise ValueError("a component has a negative size, stride or offset")
        if all(count for count, _ in dimensions):  # others have no elements
            last = offset + sum((count - 1) * step for count, step in dimensions)
            if last >= buffer.numel():
                raise ValueError(f"a component reaches element {last:,} of {buffer.numel():,}")


def _make_jagged(state: Mapping[str, Any]) -> torch.Tensor:
    """Return the jagged tensor of its state: values, offsets and lengths."""
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
    """Raise ValueError if offsets or lengths do not fit the values.

    `ragged` is the ragged dimension of the jagged tensor, which has the batch as dimension 0. The
    values have no batch dimension.
    """
    if type(ragged) is not int or not 1 <= ragged <= values.dim() or offsets.dim() != 1:
        raise ValueError(f"its ragged dimension {ragged!r} does not exist")
    starts = offsets.tolist()  # of the components, and the end of the last one
    ends = starts[1:]
    if lengths is not None:
        counts = lengths.tolist()
        ends = [start + count for start, count in zip(starts, counts, strict=False)]
        if len(counts) != len(starts) - 1 or any(count < 0 for count in counts):
            raise ValueError("its lengths do not fit its offsets")
    row_count = values.shape[ragged - 1]
    is_rising = all(start <= end for start, end in zip(starts, ends, strict=False))
    if not starts or starts[0] < 0 or not is_rising or max((*ends, *starts)) > row_count:
        raise ValueError(f"its offsets exceed the {row_count:,} rows of its values")


def materialize(
    ref: TensorRef,
    *,
    map_location: MapLocation = "cpu",
    mmap: bool = False,
    dtype: torch.dtype | str | None = None,
) -> torch.Tensor:
    """Return the tensor of `ref`; options as in `ckptool.load_state_dict`.

    Only tensors made by one `Materializer` share storages.
    """
    maker = Materializer(ref, map_location=map_location, mmap=mmap, dtype=dtype)
    return maker.make_tensor(ref)


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
        """Plan the reads for the tensors below `root`; nothing is read yet.

        `convert` converts the values among a tensor's own attributes; without it only the tensors
        among them are converted.

        Raises:
            TorchMissing: torch is not installed.
            DeviceError: `map_location` is not a value that `torch.load` accepts.
            UsageError: `dtype` is not a floating dtype.
        """
        require_torch()
        self._convert = convert
        self._requested_dtype = check_float_dtype(dtype)
        self._storage_reader = StorageReader(
            Placement(map_location), mapped=mmap, dtype=self._requested_dtype
        )
        self._tensor_by_ref: dict[tuple[int, bool], tuple[TensorRef, torch.Tensor]] = {}
        """By `id` of a `TensorRef` and `cast`: the reference, and its tensor."""
        for node in walk_everything(root):
            if isinstance(node, StorageRef):
                self._storage_reader.announce_span(node.storage, (0, node.storage.nbytes))
            elif isinstance(node, TensorRef) and node.storage is not None:
                self._storage_reader.announce_span(node.storage, node.reach)

    def make_tensor(self, ref: TensorRef, name: str = "", *, cast: bool = True) -> torch.Tensor:
        """Return the tensor of `ref`, always the same object for the same `ref`.

        A numpy array becomes a tensor. A subclass with a storage becomes a plain tensor with its
        attributes from the file, and so does a DTensor of which this file has all. `name` is for
        messages; `cast` allows the requested change of floating dtypes.

        Raises:
            DeviceError: its device is not available; the message has a remedy.
            CorruptFile: torch rejects the description in the file.
            UnsupportedFormat: a wrapper (DTensor, ShardedTensor) of which this file has a part.
        """
        cached = self._tensor_by_ref.get((id(ref), cast))
        if cached is not None:
            return cached[1]
        if is_one_part(ref):
            raise only_part_error(ref, name)
        tensor = self._assemble(ref.whole or ref, name, cast=cast)
        self._tensor_by_ref[id(ref), cast] = (ref, tensor)  # alive, a ref keeps its id
        for layer in ref.wrapping:
            set_attributes(tensor, self._load_attributes(layer), describe_name(name))
        return tensor

    def make_storage(
        self, ref: StorageRef, name: str = ""
    ) -> torch.UntypedStorage | torch.storage.TypedStorage:
        """Return a storage that is a value of the tree, typed or untyped as in the file.

        The requested dtype is only for tensors, so it is not cast.
        """
        import torch

        loaded, _ = self._storage_reader.get(
            ref.storage, ref.dtype, device=ref.storage.device, name=name, cast=False
        )
        if ref.untyped:
            return loaded
        dtype = get_torch_dtype(ref.dtype)
        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
            wrap_storage=loaded, dtype=dtype, _internal=True
        )

    def forget(self) -> None:
        """Release all tensors and storages made so far; only the caller's references keep them."""
        self._tensor_by_ref.clear()
        self._storage_reader.forget()
        self._convert = None

    def _assemble(self, ref: TensorRef, name: str, *, cast: bool) -> torch.Tensor:
        """Return the tensor with its wrapping layers, but without their attributes.

        Raises:
            CorruptFile: torch rejects the description in the file.
        """
        import torch

        is_cast = cast and BY_NAME[ref.dtype].floating
        dtype_name = (self._requested_dtype if is_cast else None) or ref.dtype
        dtype = get_torch_dtype(dtype_name, file=_file_of(ref))
        # The scales of a quantized tensor are not weights: they keep their dtype.
        parts = self._load_parts(ref, name, cast=cast and ref.kind != "quantized")
        storage, offset = None, 0
        if ref.storage is not None:
            storage, first = self._storage_reader.get(
                ref.storage, ref.dtype, device=ref.device, name=name, cast=cast
            )
            offset = max(0, ref.offset - first)  # an empty tensor may be before the first
        try:
            if storage is None:
                return _wrap_layers(_assemble_parts(ref, parts, dtype), ref)
            # As torch rebuilds tensors: an empty one is set to the storage.
            if ref.kind == "quantized":
                tensor = _make_quantized(ref, parts["quantizer"], dtype, storage.device)
            else:
                tensor = torch.empty((0,), dtype=dtype, device=storage.device)
            tensor.set_(storage, offset, ref.sizes, ref.stride)
            if ref.flags:
                flags = dict.fromkeys(ref.flags, True)
                torch._utils.set_tensor_metadata(tensor, flags)  # type: ignore[no-untyped-call]
            return _wrap_layers(tensor, ref)
        except (CheckpointError, torch.cuda.OutOfMemoryError):
            raise
        except _REFUSALS as error:
            raise _creation_error(ref, name, error) from error

    def _load_parts(self, ref: TensorRef, name: str, *, cast: bool) -> dict[str, Any]:
        """Return the parts of a tensor with tensors loaded; {} if its kind is not made of parts."""
        if ref.kind not in _KINDS_OF_PARTS and ref.kind != "quantized":  # it has a quantizer
            return {}
        return {
            key: self._load_part(part, name, cast=cast) for key, part in (ref.parts or {}).items()
        }

    def _load_part(self, part: Any, name: str, *, cast: bool) -> Any:
        """Return a part with every tensor in it loaded."""
        if isinstance(part, TensorRef):
            return self.make_tensor(part, name, cast=cast)
        if isinstance(part, tuple):
            return tuple(self._load_part(item, name, cast=cast) for item in part)
        if isinstance(part, dict):  # of a jagged tensor
            return {key: self._load_part(item, name, cast=cast) for key, item in part.items()}
        return part

    def _load_attributes(self, layer: Wrapping) -> dict[Any, Any]:
        """Return the Python attributes in the state of a layer, with values converted.

        A class with slots has a state of two dicts: its `__dict__`, and the slots.
        """
        # Without a `convert` given to the call, only the tensors in the state are converted.
        convert = self._convert or (lambda state: self._load_part(state, "", cast=False))
        state = convert(layer.state)
        groups = state if isinstance(state, tuple) else (state,)
        return {
            name: value
            for group in groups
            if isinstance(group, dict)
            for name, value in group.items()
        }


_REFUSALS = (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError)
"""The errors of torch for invalid arguments."""


def _wrap_layers(tensor: torch.Tensor, ref: TensorRef) -> torch.Tensor:
    """Wrap a tensor in its Parameter layers, innermost first; subclasses are never created.

    A tensor that is not a Parameter only gets its `requires_grad`.
    """
    import torch

    if not ref.is_parameter:
        return tensor.requires_grad_() if ref.requires_grad else tensor
    for layer in ref.wrapping:
        if layer.kind != "type":  # "type" is the layer of a subclass
            tensor = torch.nn.Parameter(tensor, layer.requires_grad)
    return tensor


def is_one_part(ref: TensorRef) -> bool:
    """Return True if only its class can make the tensor: this file may have just a part of it.

    This is a subclass without a storage, except a DTensor that is complete in this file.
    """
    return ref.kind == "subclass" and ref.storage is None and ref.whole is None


def only_part_error(ref: TensorRef, name: str) -> UnsupportedFormat:
    """Return the error for a distributed tensor or a subclass that cannot be made."""
    class_name = ref.class_name.rpartition(".")[2]
    if not ref.is_spread:  # a subclass in one process, for example of torchao
        return UnsupportedFormat(
            f"{describe_name(name)} is a {ref.class_name}, which only its class can assemble",
            file=_file_of(ref),
            hint="convert torchao tensors with ckptool cast --dequantize float32, or call "
            ".dequantize() before saving",
        )
    return UnsupportedFormat(
        f"{describe_name(name)} is a {class_name}, distributed over ranks; "
        "this file has only one part",
        file=_file_of(ref),
        hint="gather it before saving (full_tensor(), get_model_state_dict with full_state_dict), "
        "or read this part with ckptool.open(FILE)[NAME].local.torch()",
    )


def _creation_error(ref: TensorRef, name: str, error: Exception) -> Exception:
    """Return the error to raise if torch or a check rejected the description of a tensor."""
    import torch

    reason = str(error).strip().partition("\n")[0][:200]
    if isinstance(error, NotImplementedError):
        return DeviceError(
            f"{describe_name(name)} is {ref.kind}, which torch {torch.__version__} cannot create "
            f"on the requested device ({reason})",
            file=_file_of(ref),
            hint='map_location="cpu"',
        )
    return CorruptFile(
        f"{describe_name(name)} ({ref.kind}) cannot be created: {reason}", file=_file_of(ref)
    )


def _file_of(ref: TensorRef) -> str | None:
    """Return the name of the file with the data of a tensor, or of the first of its components.

    None if it has no data.
    """
    if ref.storage is not None:
        return ref.storage.data.source.name if ref.storage.data else None
    component = next(ref.tensors_inside(), None)
    return None if component is None else _file_of(component)
