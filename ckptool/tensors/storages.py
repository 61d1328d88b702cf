"""Storages read once, straight into torch's memory, or mapped; shared by all their tensors."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckptool.dtypes import BY_NAME
from ckptool.errors import TruncatedFile, UnsupportedFormat
from ckptool.files import ByteRange, FileSource
from ckptool.model import Storage
from ckptool.tensors.placement import Placement
from ckptool.tensors.runtime import called, torch_dtype

if TYPE_CHECKING:
    import torch

__all__ = ["StorageReader", "memory_view"]

_ALIGNMENT = 64
"""Spans begin at a multiple of this, so that offsets stay whole in elements of any type."""
_SHARED_READ = 8 << 20
"""Bytes from which a second thread takes half: touching new memory costs as much as copying."""
_POSITIONED = hasattr(os, "preadv")
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
        """`mapped`: map files privately where that gives the right bytes; `dtype`: cast floats."""
        self._placement = placement
        self._mapped = mapped
        self._dtype = dtype
        self._spans: dict[int, tuple[int, int]] = {}
        self._made: dict[tuple[int, str, str], tuple[Storage, torch.UntypedStorage]] = {}
        self._maps: dict[int, mmap.mmap] = {}

    def cover(self, storage: Storage, span: tuple[int, int] | None) -> None:
        """Announce which bytes will be wanted, from and to (None: none); before any `get`."""
        known = self._spans.get(id(storage), (0, 0))
        if span is None:
            self._spans[id(storage)] = known
            return
        start, stop = span[0] - span[0] % _ALIGNMENT, span[1]
        if known[1]:
            start, stop = min(start, known[0]), max(stop, known[1])
        self._spans[id(storage)] = (start, stop)

    def get(
        self, storage: Storage, dtype: str, *, device: str, name: str, cast: bool = True
    ) -> tuple[torch.UntypedStorage, int]:
        """The storage for elements of `dtype`, and which element of the file's is its first.

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
        if size and self._mapped and swap == 1 and isinstance(storage.data.source, FileSource):
            return self._map(storage.data.source, storage.data.offset + start, size)
        made = _allocate(size)
        _fill(memory_view(made.data_ptr(), size), storage.data, start)
        if swap > 1:
            unit = {2: torch.int16, 4: torch.int32, 8: torch.int64}[swap]
            made.byteswap(unit)  # type: ignore[no-untyped-call]
        return made

    def _map(self, source: FileSource, offset: int, size: int) -> torch.UntypedStorage:
        """A private mapping of the open file: what is written to the tensor stays in memory."""
        import torch

        if id(source) not in self._maps:
            try:
                made = mmap.mmap(source.fileno(), source.size, access=mmap.ACCESS_COPY)
            except ValueError as error:
                raise TruncatedFile(
                    f"is shorter than the {source.size:,} bytes that it had when it was opened",
                    file=source.name,
                ) from error
            self._maps[id(source)] = made
        whole = self._maps[id(source)]
        return torch.frombuffer(
            whole, dtype=torch.uint8, count=size, offset=offset
        ).untyped_storage()

    def _cast(
        self, made: torch.UntypedStorage, dtype: str, name: str, file: str | None
    ) -> torch.UntypedStorage:
        """The whole storage in the wanted type, so that views and ties come along."""
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
    """Read into `view` from `start` within `data`, large runs of a file with a second thread."""
    # Without preadv the position of the file is shared by its readers.
    if len(view) < _SHARED_READ or not isinstance(data.source, FileSource) or not _POSITIONED:
        data.read_into(view, start)
        return
    half = len(view) // 2
    with ThreadPoolExecutor(1) as second:
        rest = second.submit(data.read_into, view[half:], start + half)
        data.read_into(view[:half], start)
        rest.result()


def _allocate(size: int, device: str = "cpu") -> torch.UntypedStorage:
    """Memory that nothing has been written to yet."""
    import torch

    try:
        return torch.UntypedStorage(size, device=device)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise MemoryError(f"there is no memory for a storage of {size:,} bytes") from error
