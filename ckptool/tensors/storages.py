"""Make torch storages from bytes, on the requested devices; look up dtypes of torch."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptool._lazy import pause_gc
from ckptool.core.model import Storage
from ckptool.dtypes import BY_NAME
from ckptool.errors import (
    DeviceError,
    TorchMissing,
    TruncatedFile,
    UnsupportedFormat,
    UsageError,
)
from ckptool.files import ByteRange
from ckptool.words import printable

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
        placed = self._map_location(storage, tag)  # without a target, it is a function
        if placed is not None:
            return _to_untyped(placed)
        # Keep the device: the target is the saved tag.
        return _restore_storage(storage, tag, tag=tag, name=name, file=file)


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
