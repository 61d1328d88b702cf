"""Plain weights computed from packed codes and scales, a block at a time when they are read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from ckptool.core.model import Storage, TensorRef, row_major_strides
from ckptool.core.quantization_config import QuantizationConfig
from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile, NotRepresentable
from ckptool.files.computed import computed
from ckptool.tensors.casting import CHUNK, checked, chunks
from ckptool.tensors.materialize import require_torch, torch_dtype
from ckptool.words import listed

if TYPE_CHECKING:
    import torch

_MOST_SMALL = 64
"""Integers in a tensor that states a shape or a word."""
_FP4 = [sign * one for sign in (1.0, -1.0) for one in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
"""The numbers of e2m1, by their codes."""
CONFIG_HINT = "put the config.json of the model into the folder of the file"


class UnknownLayout(NotRepresentable):
    """The layout of a quantized weight is not known, or not all of it is stated."""

    def __init__(
        self, fact: str = "ckptool does not know this layout", *, hint: str | None = None
    ) -> None:
        """Say what is missing, and what helps."""
        super().__init__(fact, hint=hint)


@dataclass(frozen=True)
class Parts:
    """A quantized weight and what it needs."""

    name: str
    state: Mapping[Any, Any]
    weight: TensorRef
    beside: Mapping[str, TensorRef]
    """The companions, by the last parts of their keys."""
    plain: str
    """The key of the plain weight."""
    config: QuantizationConfig

    @property
    def stem(self) -> str:
        """The key of its layer, with a dot at the end."""
        return self.plain.removesuffix("weight")

    def __getitem__(self, ending: str) -> TensorRef:
        """Return a companion.

        Raises:
            UnknownLayout: it is not there.
        """
        if ending not in self.beside:
            raise UnknownLayout(f"{ending} is missing next to it")
        return self.beside[ending]

    def get(self, ending: str) -> TensorRef | None:
        """Return a companion, or None."""
        return self.beside.get(ending)

    def stated(self, key: str, entries: Mapping[str, Any] | None = None) -> int:
        """Return a positive number that the configuration states.

        Raises:
            UnknownLayout: it does not.
        """
        value = (self.config.entries if entries is None else entries).get(key)
        if not (is_count(value) and value):
            raise UnknownLayout(f"no config.json next to it states {key}", hint=CONFIG_HINT)
        return int(value)

    def small(self, ending: str) -> list[int]:
        """Return the integers of a companion with a few of them, such as a shape.

        Raises:
            UnknownLayout: it has others.
        """
        tensor = self[ending]
        if tensor.dtype not in ("uint8", "int32", "int64") or tensor.numel > _MOST_SMALL:
            raise UnknownLayout
        size, raw = tensor.itemsize, tensor.read()
        parts = (raw[at : at + size] for at in range(0, len(raw), size))
        found = [int.from_bytes(one, "little", signed=size > 1) for one in parts]
        if not all(map(is_count, found)):
            raise UnknownLayout
        return found

    def text(self, ending: str) -> str:
        """Return the text of a companion that has its characters."""
        return "".join(map(chr, self.small(ending)))

    def refuse_contradiction(self) -> NoReturn:
        """Raise `UnknownLayout`: shapes and configuration differ."""
        block = self.config.entries.get("weight_block_size")
        stated = listed([*self.config.sizes, *([f"blocks of {block}"] if block else [])])
        raise UnknownLayout(f"its tensors contradict {self.config.where} ({stated})")


def is_plain(tensor: Any) -> TypeGuard[TensorRef]:
    """Return True if the bytes of a tensor in its file are its elements in order."""
    return isinstance(tensor, TensorRef) and tensor.has_content and tensor.is_verbatim


def is_count(value: Any) -> bool:
    """Return True for an integer from 0 that fits 64 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def read_elements(tensor: TensorRef, start: int, stop: int) -> torch.Tensor:
    """Return the elements of a contiguous tensor from `start` up to `stop`."""
    import torch

    size = BY_NAME[tensor.dtype].itemsize
    raw = bytearray(tensor.data.read(start * size, (stop - start) * size))
    return torch.frombuffer(raw, dtype=torch_dtype(tensor.dtype))


def read_rows(tensor: TensorRef, count: int, first: int, last: int) -> torch.Tensor:
    """Return the bytes of the rows from `first` up to `last` of a contiguous tensor of `count`."""
    import torch

    size = tensor.nbytes // count
    raw = bytearray(tensor.data.read(first * size, (last - first) * size))
    return torch.frombuffer(raw, dtype=torch.uint8).view(last - first, size)


def read_planes(
    weight: TensorRef, start: int, stop: int, shifts: Sequence[int], bits: int
) -> torch.Tensor:
    """Return codes, of which each element of `weight` has one for each shift.

    Those with the first shift are the first ones, in the order of the elements.
    """
    import torch

    count, found = weight.numel, []
    for plane in range(start // count, -(-stop // count)):
        first, last = max(start - plane * count, 0), min(stop - plane * count, count)
        found.append(read_elements(weight, first, last) >> shifts[plane] & ((1 << bits) - 1))
    return torch.cat(found)


def unpack_bits(raw: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes in rows of bytes as int32: a stream of bits, the lowest ones first."""
    import torch

    size = bits // gcd(bits, 8)
    groups = raw.view(len(raw), -1, size).int()  # of whole codes in whole bytes
    codes = []
    for at in range(0, 8 * size, bits):
        byte, shift = divmod(at, 8)
        code = groups[..., byte] >> shift
        if shift + bits > 8:
            code = code | groups[..., byte + 1] << (8 - shift)
        codes.append(code & ((1 << bits) - 1))
    return torch.stack(codes, -1).view(len(raw), -1)


def decode_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Return the fp4 numbers (e2m1) of their codes."""
    import torch

    values = torch.tensor(_FP4, device="cpu")
    return torch.index_select(values, 0, codes.flatten().int()).view(codes.shape)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return two to the power of exponents that have a bias of 127 (e8m0)."""
    import torch

    return torch.exp2(exponents.view(torch.uint8).float() - 127)


def checked_index(index: torch.Tensor, count: int) -> torch.Tensor:
    """Return indexes of groups.

    Raises:
        CorruptFile: there is no such group.
    """
    if not bool(((index >= 0) & (index < count)).all()):
        raise CorruptFile(f"g_idx of a quantized weight leads to groups beyond its {count:,}")
    return index.long()


def block_sizes(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of the blocks of a tensor that have one scale each; () if it cannot be."""
    if prod(scales) == 1:
        return shape
    if len(scales) != len(shape) or not all(scales):
        return ()
    pairs = list(zip(shape, scales, strict=True))
    return (
        tuple(whole // count for whole, count in pairs) if not any(a % b for a, b in pairs) else ()
    )


def spread(
    table: torch.Tensor, shape: Sequence[int], block: Sequence[int], start: int, stop: int
) -> torch.Tensor:
    """Return for each element from `start` up to `stop` of a tensor the entry of its block.

    Unlike `table[index]` torch's `index_select` does not wait for other threads.
    """
    import torch

    dtype = torch.int32 if prod(shape) < 1 << 31 else torch.int64
    left = torch.arange(start, stop, dtype=dtype, device="cpu")
    at = torch.zeros_like(left)
    for size, own, step in zip(shape, block, row_major_strides(tuple(shape)), strict=True):
        index = left // step
        left = left - index * step
        at = at * -(-size // own) + index // own
    return torch.index_select(table, 0, at)


def rearranged(weight: TensorRef, shape: tuple[int, ...], stride: tuple[int, ...]) -> TensorRef:
    """Return a view of a weight with other dimensions, gathered as it is read."""
    view = replace(weight, shape=shape, stride=stride)
    data = view.row_major
    if weight.storage is None:
        raise UnknownLayout
    storage = replace(weight.storage, data=data, nbytes=data.length, crc32=None)
    return replace(view, storage=storage, stride=row_major_strides(shape), offset=0)


def compute_blocks(
    codes: TensorRef,
    scale: TensorRef | float,
    zero: TensorRef | int | None,
    block: tuple[int, ...],
    whole: TensorRef | None = None,
) -> TensorRef:
    """Return codes less a zero point, times a scale, each for a block of the tensor.

    `whole` is the quantized tensor that the codes were taken from.
    """
    if not is_plain(codes) or len(block) != len(codes.shape):
        raise UnknownLayout
    shape = codes.sizes
    pairs = list(zip(block, shape, strict=True))
    if not all(is_count(own) and own and not size % own for own, size in pairs):
        raise UnknownLayout
    blocks = prod(size // own for own, size in pairs)
    tables = [one for one in (scale, zero) if one is not None and not isinstance(one, (float, int))]
    if not all(is_plain(one) and one.numel == blocks for one in tables):
        raise UnknownLayout

    def numbers(start: int, stop: int, found: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        elements = read_elements(codes, start, stop)
        if isinstance(scale, float):
            shifted = elements.int() - zero if isinstance(zero, int) else elements
            return shifted * torch.tensor(scale, dtype=torch.float32, device="cpu")
        factors, *less = (spread(one, shape, block, start, stop) for one in found)
        wide = torch.float64 if scale.dtype == "float64" else torch.float32
        return (elements.float() - (less[0].float() if less else 0)) * factors.to(wide)

    others = [] if whole is None or whole.is_contiguous else [whole]
    return compute_tensor(codes, shape, tables, numbers, others)


def compute_rows(
    weight: TensorRef,
    shape: tuple[int, ...],
    parts: Sequence[TensorRef],
    rows: Callable[[int, int, Sequence[torch.Tensor]], torch.Tensor],
    *,
    per: int = 1,
    prepared: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = tuple,
    checked_only: Sequence[TensorRef] = (),
) -> TensorRef:
    """Like `compute_tensor`, but `rows` computes whole rows, in multiples of `per`."""
    columns = shape[-1]
    unit = per * columns
    if not unit:
        raise UnknownLayout

    def numbers(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        return rows(start // columns, stop // columns, tables).flatten()

    step = max(CHUNK // unit, 1) * unit
    return compute_tensor(weight, shape, parts, numbers, checked_only, step=step, prepared=prepared)


def compute_tensor(
    weight: TensorRef,
    shape: tuple[int, ...],
    parts: Sequence[TensorRef],
    numbers: Callable[[int, int, Sequence[torch.Tensor]], torch.Tensor],
    checked_only: Sequence[TensorRef] = (),
    *,
    step: int = CHUNK,
    prepared: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = tuple,
) -> TensorRef:
    """Return a tensor of float32 in the place of a weight, of elements that `numbers` makes.

    Give it the elements of `parts`, which are in memory from the first to the last of the weight,
    and a range of elements that begins at a multiple of `step`. Each is made once if they are read
    in order. `prepared` makes once for all ranges what they need of the parts. Parts and
    `checked_only` are checked by their CRC-32.
    """
    held, data, count = weight.storage, weight.data, prod(shape)
    beside = {id(one.storage): one.storage for one in (*parts, *checked_only)}.values()
    checks = [checked(one, one.data) for one in beside if one is not None and one.data is not None]
    tables: Sequence[torch.Tensor] = ()
    last, made, lock = -1, bytearray(), Lock()
    if held is None or (count and not all(one.numel for one in parts)):
        raise UnknownLayout

    def fill(offset: int, buffer: memoryview) -> None:
        require_torch()
        import torch

        nonlocal tables, last, made
        if not buffer:
            return
        with lock:
            for check in checks:
                check.check()
            tables = tables or prepared([read_elements(one, 0, one.numel) for one in parts])
            for start, stop, room, skipped in chunks(offset, buffer, 4, count, step):
                if start != last:
                    made = bytearray((stop - start) * 4)
                    elements = torch.frombuffer(made, dtype=torch.float32)
                    elements.copy_(numbers(start, stop, tables))
                    last = start
                room[:] = made[skipped : skipped + len(room)]
            if offset + len(buffer) == count * 4:
                tables, last, made = (), -1, bytearray()

    source = computed((data,), count * 4, fill)
    storage = Storage(held.key, source, source.length, held.device, sys.byteorder, whole=held.data)
    stride = row_major_strides(shape)
    return replace(weight, dtype="float32", shape=shape, stride=stride, storage=storage, offset=0)
