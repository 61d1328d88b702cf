"""Read the bytes of a file straight into a model's own tensors, without a copy."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ckptool.core.model import Storage, TensorRef
from ckptool.dtypes import PACKED
from ckptool.errors import CorruptFile
from ckptool.files import ByteRange, Source
from ckptool.files.checksums import compute_crc32s
from ckptool.files.threads import run_in_order
from ckptool.tensors.live import is_expanded, iterate_blocks, locate_tensor, span_of_strides
from ckptool.tensors.storages import describe_name, get_torch_dtype, view_memory
from ckptool.words import shell

if TYPE_CHECKING:
    import torch

_BYTES_PER_READ = 16 << 20
"""Bytes that a thread reads at a time."""
_MIN_PARALLEL_BYTES = 8 << 20
"""Total bytes from which a second thread helps."""
_BLOCK_ELEMENTS = 1 << 15
"""Elements that are cast or rearranged at a time: they stay in the processor's cache, and torch
does not divide them among threads, which wait for each other."""
_DEVICE_BLOCK_ELEMENTS = 1 << 22
"""Elements that are sent to another device at a time."""

Job = Callable[[], object]


class Fill(NamedTuple):
    """A tensor of a model, and the source of its new elements: a tensor in a file or in memory."""

    tensor: torch.Tensor
    source: TensorRef | torch.Tensor

    @property
    def is_direct(self) -> bool:
        """Whether the bytes in the file equal those in memory."""
        ref, tensor = self.source, self.tensor
        return (
            isinstance(ref, TensorRef)
            and ref.is_verbatim
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and str(tensor.dtype) == f"torch.{ref.dtype}"
            and not (tensor.is_conj() or tensor.is_neg())
        )


def can_fill(tensor: torch.Tensor, source: TensorRef | torch.Tensor | None) -> bool:
    """Return True if `fill` has the effect of `tensor.copy_`: both are plain, and of equal size."""
    if source is None or not _is_plain(tensor):
        return False
    if not isinstance(source, TensorRef):
        return _is_plain(source) and source.numel() == tensor.numel()
    return (
        source.has_content
        and source.numel == tensor.numel()
        and source.dtype not in PACKED
        and not source.flags
        and (source.storage is None or source.storage.byteorder == sys.byteorder)
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return True for a strided tensor of torch's own class with separate, writable elements."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        and not tensor.is_inference()
        and not is_expanded(tensor.shape, tensor.stride())
    )


def have_separate_memory(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if no plain tensor shares memory with another.

    Tensors that do must be filled in torch's order, because the last one counts.
    """
    spans = sorted(
        (
            str(tensor.device),
            tensor.data_ptr(),
            span_of_strides(tensor.shape, tensor.stride()) * tensor.element_size(),
        )
        for tensor in tensors
        if tensor.numel()
    )
    return not any(
        next_device == device and next_start < start + size
        for (device, start, size), (next_device, next_start, _) in pairwise(spans)
    )


def check_bytes(refs: Iterable[tuple[str, TensorRef]]) -> None:
    """Read the bytes of these tensors, each with its name, and compare them with their CRC-32.

    Storages are read completely; one without a CRC-32 in the file only has to be readable.

    Raises:
        CorruptFile: if the bytes have changed since the file was written.
        UnreadableFile: if the system cannot read them.
    """
    ranges: list[ByteRange] = []
    checksums: list[tuple[str, int | None]] = []  # of each range: tensor name, CRC-32 in the file
    for name, storage in _list_storages(refs):
        if storage.data is not None and storage.nbytes:
            ranges.append(storage.data)
            checksums.append((name, storage.crc32))
    computed_crc32s = compute_crc32s(ranges)
    for data, (name, expected), computed in zip(ranges, checksums, computed_crc32s, strict=True):
        if not isinstance(computed, int):  # the error of a failed read
            raise computed
        if expected is not None and computed != expected:
            raise CorruptFile(
                f"{describe_name(name)} is damaged: CRC-32 is {computed:08x}, "
                f"expected {expected:08x}",
                file=data.source.name,
                hint=f"check the file with ckptool verify {shell(data.source.name)}",
            )


def check_pickles(sources: Iterable[Source]) -> None:
    """Compare the pickles, which locate every tensor, with the CRC-32 in their files.

    Raises:
        CorruptFile: if a pickle has changed since the file was written.
    """
    for source in sources:
        for record, data, expected in source.stated:
            if record.endswith("data.pkl") and next(compute_crc32s([data])) != expected:
                raise CorruptFile(
                    f"record {record!r} is damaged: its CRC-32 is not {expected:08x}, as recorded "
                    "in the file",
                    file=source.name,
                    hint=f"check the file with ckptool verify {shell(source.name)}",
                )


def count_stored_bytes(refs: Iterable[tuple[str, TensorRef]]) -> int:
    """Return the number of bytes that `check_bytes` reads."""
    return sum(storage.nbytes for _, storage in _list_storages(refs) if storage.data is not None)


def _list_storages(refs: Iterable[tuple[str, TensorRef]]) -> Iterator[tuple[str, Storage]]:
    """Yield each storage of the tensors, and of tensors inside them, once, with the first name."""
    seen: set[int] = set()
    for name, ref in refs:
        for tensor in (ref, *ref.tensors_inside()):
            if tensor.storage is not None and id(tensor.storage) not in seen:
                seen.add(id(tensor.storage))
                yield name, tensor.storage


def fill(fills: Iterable[Fill]) -> None:
    """Copy the source of every fill into its tensor; no tensor may share memory with another.

    Bytes that are equal in file and memory are read directly into the tensor, by two threads if
    they are many. Others are cast, moved or rearranged block by block. A file's tensor
    without bytes leaves its target unchanged.
    """
    parallel: list[Job] = []  # reads of sources that several threads may use
    sequential: list[Job] = []
    parallel_bytes = 0
    for item in fills:
        source = item.source
        if not isinstance(source, TensorRef):
            sequential.append(partial(_copy, item.tensor, source))
        elif source.storage is None or source.storage.data is None:
            continue  # without bytes
        elif not item.is_direct:
            sequential.append(partial(_copy_in_blocks, item, source))
        elif source.storage.data.source.is_shared:
            parallel.extend(_make_read_jobs(item, source))
            parallel_bytes += source.nbytes
        else:
            sequential.extend(_make_read_jobs(item, source))
    if parallel_bytes >= _MIN_PARALLEL_BYTES:
        deque(run_in_order(lambda job: job(), parallel), maxlen=0)  # runs all; no job has a result
    else:
        sequential = parallel + sequential
    for job in sequential:
        job()


def _make_read_jobs(item: Fill, ref: TensorRef) -> Iterator[Job]:
    """Yield the jobs that read the bytes of the file into the tensor, piece by piece."""
    data = ref.data
    view = view_memory(item.tensor.data_ptr(), data.length)
    for start in range(0, data.length, _BYTES_PER_READ):
        yield partial(data.read_into, view[start : start + _BYTES_PER_READ], start)


def _copy_in_blocks(item: Fill, ref: TensorRef) -> None:
    """Cast, move or rearrange the elements block by block, and copy them into the tensor."""
    import torch

    target = item.tensor.data
    count = _BLOCK_ELEMENTS if target.device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
    staging = torch.empty(
        min(count, target.numel()), dtype=get_torch_dtype(ref.dtype), device="cpu"
    )
    elements, offset = ref.row_major, 0
    with torch.no_grad():
        for index in iterate_blocks(target.shape, count):
            part = target[index]
            block = staging[: part.numel()]
            elements.read_into(view_memory(block.data_ptr(), block.nbytes), offset)
            offset += block.nbytes
            part.copy_(block.view(part.shape))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the elements of a tensor in memory, resolving its conjugate and negative bits."""
    import torch

    with torch.no_grad():
        elements = source.detach().resolve_conj().resolve_neg()
        target.data.copy_(elements.reshape(target.shape))


class ReplacementMaker:
    """Creates new tensors to replace those of a model: one for all keys that are tied."""

    def __init__(self, *, cast: bool) -> None:
        """With `cast`, use the dtypes of the model."""
        self._cast = cast
        self._made_by_tie: dict[Hashable, torch.Tensor] = {}
        """The replacements by tie, or by `id` of the replaced tensor if it is not tied."""
        self._used_ranges: dict[tuple[int, str], list[tuple[int, int]]] = {}
        """By storage and device, the sorted byte ranges (start, stop) used by replacements."""

    def make(self, tensor: torch.Tensor, tie: Hashable, value: torch.Tensor) -> torch.Tensor:
        """Return the replacement of `tensor`, with the elements of `value`; made once for a tie.

        It is a Parameter if `tensor` is one, and requires gradients if `tensor` does. It uses the
        memory of `value` unless a cast or an overlap with another replacement needs a copy.
        """
        import torch

        key = id(tensor) if tie is None else tie
        if key in self._made_by_tie:
            return self._made_by_tie[key]
        new = value
        if not torch.nn.parameter.is_lazy(tensor):  # a lazy parameter has no shape or dtype to keep
            if not tensor.dim() and value.shape == (1,):  # as torch loads old scalars
                new = new.detach()[0]
            if self._cast and new.dtype != tensor.dtype:
                new = new.detach().to(tensor.dtype)
        if self._overlaps(new):
            new = new.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            requires_grad = tensor.requires_grad
            if not isinstance(new, torch.nn.Parameter) or new.requires_grad != requires_grad:
                new = torch.nn.Parameter(new.detach(), requires_grad=requires_grad)
        elif isinstance(new, torch.nn.Parameter):
            new = new.detach()
        self._made_by_tie[key] = new
        return new

    def _overlaps(self, tensor: torch.Tensor) -> bool:
        """Return True if another replacement uses the memory, or its own elements overlap.

        If False, the memory is recorded as used.
        """
        location = locate_tensor(tensor)
        if location is None or tensor.is_meta or not tensor.numel():
            return False
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        stop = start + span_of_strides(tensor.shape, tensor.stride()) * size
        if stop - start < tensor.nbytes:  # fewer bytes than its elements need
            return True
        ranges = self._used_ranges.setdefault((location.storage, str(tensor.device)), [])
        index = bisect_right(ranges, (start, stop))  # where the range would be inserted
        overlaps_previous = index > 0 and ranges[index - 1][1] > start
        overlaps_next = index < len(ranges) and ranges[index][0] < stop
        if overlaps_previous or overlaps_next:
            return True
        ranges.insert(index, (start, stop))
        return False
