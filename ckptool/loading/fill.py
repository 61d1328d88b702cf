"""The bytes of a file straight into a model's own tensors, with no copy between."""

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
from ckptool.tensors.materialize import describe_name, get_torch_dtype, view_memory
from ckptool.words import shell

if TYPE_CHECKING:
    import torch

_PIECE = 16 << 20
"""Bytes that a thread reads at a time."""
_SHARED = 8 << 20
"""Bytes in all from which a second thread helps."""
_BLOCK = 1 << 15
"""Elements that are cast or rearranged at a time: they stay in the processor's cache, and torch
does not divide them among threads, which wait for each other."""
_SENT = 1 << 22
"""The same where they go to another device."""

Job = Callable[[], object]


class Fill(NamedTuple):
    """A tensor of a model, and the elements that it gets: of a file, or of another tensor."""

    tensor: torch.Tensor
    source: TensorRef | torch.Tensor

    @property
    def is_direct(self) -> bool:
        """Whether the bytes of the file are those that the tensor has in memory."""
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
    """Return whether `fill` does what `tensor.copy_` would: both are plain, and of one size."""
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
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_meta)
        and not tensor.is_inference()
        and not is_expanded(tensor.shape, tensor.stride())
    )


def are_apart(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether no plain tensor shares memory with another.

    Tensors that share some must be filled in torch's order, as the last one counts.
    """
    spans = sorted(
        (
            str(one.device),
            one.data_ptr(),
            span_of_strides(one.shape, one.stride()) * one.element_size(),
        )
        for one in tensors
        if one.numel()
    )
    return not any(
        home == device and begin < start + size
        for (device, start, size), (home, begin, _) in pairwise(spans)
    )


def check_bytes(refs: Iterable[tuple[str, TensorRef]]) -> None:
    """Read the bytes of these tensors, each with its name, and compare them with their CRC-32.

    A storage whose CRC-32 the file states is read whole.

    Raises:
        CorruptFile: bytes are not what they were when the file was written.
        UnreadableFile: the system cannot read them.
    """
    runs: list[ByteRange] = []
    wanted: list[tuple[str, int | None]] = []
    for name, storage in _stored(refs):
        if storage.data is not None and storage.nbytes:
            runs.append(storage.data)
            wanted.append((name, storage.crc32))
    for run, (name, expected), found in zip(runs, wanted, compute_crc32s(runs), strict=True):
        if not isinstance(found, int):
            raise found
        if expected is not None and found != expected:
            raise CorruptFile(
                f"{describe_name(name)} is damaged: CRC-32 is {found:08x}, expected {expected:08x}",
                file=run.source.name,
                hint=f"check the file with ckptool verify {shell(run.source.name)}",
            )


def check_pickles(sources: Iterable[Source]) -> None:
    """Compare the pickles, which place every tensor, with the CRC-32 that their files state."""
    for source in sources:
        for name, data, stated in source.stated:
            if name.endswith("data.pkl") and next(compute_crc32s([data])) != stated:
                raise CorruptFile(
                    f"record {name!r} is damaged: its CRC-32 is not {stated:08x}, as recorded "
                    "in the file",
                    file=source.name,
                    hint=f"check the file with ckptool verify {shell(source.name)}",
                )


def stored_bytes(refs: Iterable[tuple[str, TensorRef]]) -> int:
    """Return how many bytes `check_bytes` reads."""
    return sum(storage.nbytes for _, storage in _stored(refs) if storage.data is not None)


def _stored(refs: Iterable[tuple[str, TensorRef]]) -> Iterator[tuple[str, Storage]]:
    """Yield the storages of the tensors and of their parts, once each."""
    seen: set[int] = set()
    for name, ref in refs:
        for tensor in (ref, *ref.tensors_inside()):
            if tensor.storage is not None and id(tensor.storage) not in seen:
                seen.add(id(tensor.storage))
                yield name, tensor.storage


def fill(fills: Iterable[Fill]) -> None:
    """Give every tensor its elements. None may share memory with another (`are_apart`)."""
    shared: list[Job] = []
    single: list[Job] = []
    size = 0
    for one in fills:
        ref = one.source
        if isinstance(ref, TensorRef) and ref.storage is not None and ref.storage.data is not None:
            if one.is_direct and ref.storage.data.source.is_shared:
                shared.extend(_reads(one, ref))
                size += ref.nbytes
            else:
                single.extend(_reads(one, ref) if one.is_direct else [partial(_stage, one, ref)])
        elif not isinstance(ref, TensorRef):
            single.append(partial(_copy, one.tensor, ref))
    if size >= _SHARED:
        deque(run_in_order(lambda job: job(), shared), 0)
    else:
        single = shared + single
    for job in single:
        job()


def _reads(one: Fill, ref: TensorRef) -> Iterator[Job]:
    data = ref.data
    view = view_memory(one.tensor.data_ptr(), data.length)
    for start in range(0, data.length, _PIECE):
        yield partial(data.read_into, view[start : start + _PIECE], start)


def _stage(one: Fill, ref: TensorRef) -> None:
    """Cast, move or rearrange the elements on their way, block by block."""
    import torch

    target = one.tensor.data
    count = _BLOCK if target.device.type == "cpu" else _SENT
    staged = torch.empty(min(count, target.numel()), dtype=get_torch_dtype(ref.dtype), device="cpu")
    elements, done = ref.row_major, 0
    with torch.no_grad():
        for at in iterate_blocks(target.shape, count):
            part = target[at]
            block = staged[: part.numel()]
            elements.read_into(view_memory(block.data_ptr(), block.nbytes), done)
            done += block.nbytes
            part.copy_(block.view(part.shape))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    import torch

    with torch.no_grad():
        elements = source.detach().resolve_conj().resolve_neg()
        target.data.copy_(elements.reshape(target.shape))


class Assigned:
    """Makes the tensors that replace others: one object for what is one in the model."""

    def __init__(self, *, cast: bool) -> None:
        """`cast` to the types of the model."""
        self._cast = cast
        self._made: dict[Hashable, torch.Tensor] = {}
        self._taken: dict[tuple[int, str], list[tuple[int, int]]] = {}
        """By storage the bytes that a tensor was made of, from and to, in order."""

    def made(self, tensor: torch.Tensor, tie: Hashable, value: torch.Tensor) -> torch.Tensor:
        """Return what replaces `tensor`, with the elements of `value`; made once for a tie."""
        import torch

        key = (id(tensor), tie) if tie is None else tie
        if key in self._made:
            return self._made[key]
        made = value
        if not torch.nn.parameter.is_lazy(tensor):
            if not tensor.dim() and value.shape == (1,):
                made = made.detach()[0]
            if self._cast and made.dtype != tensor.dtype:
                made = made.detach().to(tensor.dtype)
        if self._is_taken(made):
            made = made.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            trained = tensor.requires_grad
            if not isinstance(made, torch.nn.Parameter) or made.requires_grad != trained:
                made = torch.nn.Parameter(made.detach(), requires_grad=trained)
        elif isinstance(made, torch.nn.Parameter):
            made = made.detach()
        self._made[key] = made
        return made

    def _is_taken(self, tensor: torch.Tensor) -> bool:
        """Return whether some of its memory is another tensor's, or its own elements overlap."""
        place = locate_tensor(tensor)
        if place is None or tensor.is_meta or not tensor.numel():
            return False
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        stop = start + span_of_strides(tensor.shape, tensor.stride()) * size
        if stop - start < tensor.nbytes:
            return True
        known = self._taken.setdefault((place.storage, str(tensor.device)), [])
        at = bisect_right(known, (start, stop))
        if (at and known[at - 1][1] > start) or (at < len(known) and known[at][0] < stop):
            return True
        known.insert(at, (start, stop))
        return False
