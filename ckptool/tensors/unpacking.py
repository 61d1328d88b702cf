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
from ckptool.files.computed import make_computed_range
from ckptool.tensors.casting import CHUNK, check_storage, iterate_chunks
from ckptool.tensors.storages import get_torch_dtype, require_torch
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch

_MAX_INTEGERS = 64
"""Integers in a tensor that states a shape or a word."""
_SCALE_DTYPES = ("float16", "bfloat16", "float32", "float64")
_INDEX_DTYPES = ("int32", "int64")
_FLOAT32_SIZE = BY_NAME["float32"].itemsize
_FP4 = [sign * one for sign in (1.0, -1.0) for one in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
"""The numbers of e2m1, by their codes."""
CONFIG_HINT = "put the config.json of the model into the folder of the file"


class UnknownLayout(NotRepresentable):
    """The layout of a quantized weight is not known, or not all of it is stated."""

    def __init__(
        self, fact: str = "ckptool does not know this layout", *, hint: str | None = None
    ) -> None:
        """Create the error; `fact` continues a sentence about the weight."""
        super().__init__(fact, hint=hint)


@dataclass(frozen=True)
class Parts:
    """A quantized weight with its companions."""

    name: str
    """The key of the codes."""
    state: Mapping[Any, Any]
    """The state dict that has the weight."""
    weight: TensorRef
    """The codes."""
    companions: Mapping[str, TensorRef]
    """The companions, by the last parts of their keys."""
    plain_key: str
    """The key of the plain weight."""
    config: QuantizationConfig
    file: str
    """The path of the file, for errors."""

    @property
    def stem(self) -> str:
        """The key of its layer, with a dot at the end."""
        return self.plain_key.removesuffix("weight")

    def __getitem__(self, ending: str) -> TensorRef:
        """Return the companion with a key that ends with `ending`.

        Raises:
            UnknownLayout: if the file does not have it.
        """
        if ending not in self.companions:
            raise UnknownLayout(f"{ending} is missing next to it")
        return self.companions[ending]

    def get(self, ending: str) -> TensorRef | None:
        """Return the companion with a key that ends with `ending`; None if there is none."""
        return self.companions.get(ending)

    def require_floats(self, ending: str) -> TensorRef:
        """Return a companion with scales or zero points in floating point.

        Raises:
            UnknownLayout: if the file does not have it, or it has another dtype.
        """
        tensor = self[ending]
        if tensor.dtype not in _SCALE_DTYPES:
            raise UnknownLayout(f"{ending} is {tensor.dtype}, which is not supported")
        return tensor

    def require_indexes(self, ending: str) -> TensorRef | None:
        """Return the companion with the group of each column, or None.

        Raises:
            UnknownLayout: if it does not have one 32-bit or 64-bit integer for each column.
        """
        tensor = self.get(ending)
        if tensor is not None and (tensor.dtype not in _INDEX_DTYPES or len(tensor.shape) != 1):
            raise UnknownLayout(f"{ending} is {tensor.dtype} {list(tensor.shape)}")
        return tensor

    def require_size(self, key: str, entries: Mapping[str, Any] | None = None) -> int:
        """Return the positive integer at `key` of the configuration, or of `entries` if given.

        Raises:
            UnknownLayout: if it has no positive integer at `key`.
        """
        value = (self.config.entries if entries is None else entries).get(key)
        if not (is_count(value) and value):
            raise UnknownLayout(f"no config.json next to it states {key}", hint=CONFIG_HINT)
        return int(value)

    def read_integers(self, ending: str) -> list[int]:
        """Return the integers of a small companion, such as a shape.

        Raises:
            UnknownLayout: if it is large, or has elements that are not counts.
        """
        tensor = self[ending]
        if tensor.dtype not in ("uint8", "int32", "int64") or tensor.numel > _MAX_INTEGERS:
            raise UnknownLayout
        size, content = tensor.itemsize, tensor.read()
        elements = (content[at : at + size] for at in range(0, len(content), size))
        integers = [int.from_bytes(raw, "little", signed=size > 1) for raw in elements]
        if not all(map(is_count, integers)):
            raise UnknownLayout
        return integers

    def read_text(self, ending: str) -> str:
        """Return the text of a companion that has its ASCII codes as integers.

        Raises:
            UnknownLayout: if an integer is not an ASCII code.
        """
        codes = self.read_integers(ending)
        if not all(code < 128 for code in codes):
            raise UnknownLayout
        return "".join(map(chr, codes))

    def refuse_contradiction(self) -> NoReturn:
        """Raise `UnknownLayout` because the shapes of the tensors contradict the configuration."""
        block = self.config.entries.get("weight_block_size")
        stated = listed([*self.config.sizes, *([f"blocks of {block}"] if block else [])])
        raise UnknownLayout(f"its tensors contradict {self.config.where} ({stated})")


def is_plain(tensor: Any) -> TypeGuard[TensorRef]:
    """Return True for a tensor whose bytes in the file are its elements, in row-major order."""
    return isinstance(tensor, TensorRef) and tensor.has_content and tensor.is_verbatim


def is_count(value: Any) -> bool:
    """Return True for an integer from 0 that fits 64 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def read_elements(tensor: TensorRef, start: int, stop: int) -> torch.Tensor:
    """Return the elements of a contiguous tensor from `start` up to `stop`."""
    import torch

    size = BY_NAME[tensor.dtype].itemsize
    raw = bytearray(tensor.data.read(start * size, (stop - start) * size))
    return torch.frombuffer(raw, dtype=get_torch_dtype(tensor.dtype))


def read_rows(tensor: TensorRef, count: int, first: int, last: int) -> torch.Tensor:
    """Return the bytes of the rows from `first` up to `last` of a contiguous tensor of `count`."""
    import torch

    size = tensor.nbytes // count
    raw = bytearray(tensor.data.read(first * size, (last - first) * size))
    return torch.frombuffer(raw, dtype=torch.uint8).view(last - first, size)


def read_planes(
    weight: TensorRef, start: int, stop: int, shifts: Sequence[int], bits: int
) -> torch.Tensor:
    """Return the codes from `start` up to `stop` of a tensor with several codes in each element.

    A plane has one code of every element: the first plane those at `shifts[0]`, the next one those
    at `shifts[1]`. Codes count plane after plane.
    """
    import torch

    size_of_plane, code_mask = weight.numel, (1 << bits) - 1
    codes = []
    for plane in range(start // size_of_plane, -(-stop // size_of_plane)):
        first_of_plane = plane * size_of_plane
        first, end = max(start - first_of_plane, 0), min(stop - first_of_plane, size_of_plane)
        codes.append(read_elements(weight, first, end) >> shifts[plane] & code_mask)
    return torch.cat(codes)


def unpack_bits(raw: torch.Tensor, bits: int) -> torch.Tensor:
    """Return rows of codes as int32 from rows of bytes: a bit stream, the lowest bits first."""
    import torch

    # The fewest bytes that have only whole codes: 3 bytes for 3 bits (8 codes).
    bytes_per_group = bits // gcd(bits, 8)
    groups = raw.view(len(raw), -1, bytes_per_group).int()
    codes = []
    for bit in range(0, 8 * bytes_per_group, bits):
        byte, shift = divmod(bit, 8)
        code = groups[..., byte] >> shift
        if shift + bits > 8:  # the upper bits of the code are in the next byte
            code = code | groups[..., byte + 1] << (8 - shift)
        codes.append(code & ((1 << bits) - 1))
    return torch.stack(codes, -1).view(len(raw), -1)


def decode_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Return the fp4 numbers (e2m1) with these codes."""
    import torch

    values = torch.tensor(_FP4, device="cpu")  # even if torch's default is another device
    return torch.index_select(values, 0, codes.flatten().int()).view(codes.shape)


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return the powers of two with these exponents, stored with a bias of 127 (e8m0)."""
    import torch

    return torch.exp2(exponents.view(torch.uint8).float() - 127)


def check_group_index(parts: Parts, index: torch.Tensor, count: int) -> torch.Tensor:
    """Return `index`, the group of each column of a weight, as int64.

    Raises:
        CorruptFile: if a group does not exist; `count` is the number of groups.
    """
    if not bool(((index >= 0) & (index < count)).all()):
        fact = f"{printable(parts.name)!r}: its g_idx has groups beyond the {count:,} of its scales"
        raise CorruptFile(fact, file=parts.file)
    return index.long()


def block_sizes(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the blocks with one scale each: shape [4, 6], scales [4, 2] -> (1, 3).

    () if the numbers of scales do not divide the sizes of the tensor.
    """
    if prod(scales) == 1:
        return shape
    if len(scales) != len(shape) or not all(scales):
        return ()
    pairs = list(zip(shape, scales, strict=True))
    if any(size % count for size, count in pairs):
        return ()
    return tuple(size // count for size, count in pairs)


def expand_blocks(
    table: torch.Tensor, shape: Sequence[int], block: Sequence[int], start: int, stop: int
) -> torch.Tensor:
    """Return the entry of `table` for each element from `start` up to `stop` of a tensor.

    The tensor has `shape` and is divided into blocks of the shape `block`, smaller at the edges.
    `table` has an entry for each block, in row-major order.
    """
    import torch

    dtype = torch.int32 if prod(shape) < 1 << 31 else torch.int64
    remainders = torch.arange(start, stop, dtype=dtype, device="cpu")
    block_numbers = torch.zeros_like(remainders)
    for size, length, stride in zip(shape, block, row_major_strides(tuple(shape)), strict=True):
        index = remainders // stride  # in this dimension
        remainders = remainders - index * stride
        blocks_in_dimension = -(-size // length)
        block_numbers = block_numbers * blocks_in_dimension + index // length
    # Unlike `table[block_numbers]`, `index_select` does not wait for other threads.
    return torch.index_select(table, 0, block_numbers)


def rearrange(weight: TensorRef, shape: tuple[int, ...], stride: tuple[int, ...]) -> TensorRef:
    """Return a contiguous tensor of the elements of a weight at another shape and stride.

    Its bytes are gathered when they are read; their CRC-32 is not known.
    """
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
    """Return codes minus a zero point, times a scale, computed when they are read.

    A number as `scale` or `zero` is for all codes; a tensor has one for each block of the shape
    `block`. If `scale` is a number, `zero` is one or None; otherwise it is a tensor or None.
    `whole` is the quantized tensor that `codes` were gathered from, if it is another.
    """
    if not is_plain(codes) or len(block) != len(codes.shape):
        raise UnknownLayout
    shape = codes.sizes
    pairs = list(zip(block, shape, strict=True))
    if not all(is_count(length) and length and not size % length for length, size in pairs):
        raise UnknownLayout
    block_count = prod(size // length for length, size in pairs)
    tables = [
        table
        for table in (scale, zero)
        if table is not None and not isinstance(table, (float, int))
    ]
    if not all(is_plain(table) and table.numel == block_count for table in tables):
        raise UnknownLayout
    if isinstance(scale, TensorRef) and scale.dtype not in (*_SCALE_DTYPES, "float8_e8m0fnu"):
        raise UnknownLayout(f"its scale is {scale.dtype}, which is not supported")

    def compute_elements(start: int, stop: int, loaded: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return codes minus zero points, times scales, for a range of elements."""
        import torch

        elements = read_elements(codes, start, stop)
        if isinstance(scale, float):  # then the zero point is a number, too, or there is none
            shifted = elements.int() - zero if isinstance(zero, int) else elements
            return shifted * torch.tensor(scale, dtype=torch.float32, device="cpu")
        factors, *zeros = (expand_blocks(table, shape, block, start, stop) for table in loaded)
        wide = torch.float64 if scale.dtype == "float64" else torch.float32
        return (elements.float() - (zeros[0].float() if zeros else 0)) * factors.to(wide)

    # The storage of gathered codes has no CRC-32, so that of the whole tensor is checked instead.
    checked_only = [] if whole is None or whole.is_contiguous else [whole]
    return compute_tensor(codes, shape, tables, compute_elements, checked_only)


def compute_rows(
    weight: TensorRef,
    shape: tuple[int, ...],
    parts: Sequence[TensorRef],
    compute_row_range: Callable[[int, int, Sequence[torch.Tensor]], torch.Tensor],
    *,
    row_multiple: int = 1,
    prepare: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = tuple,
    checked_only: Sequence[TensorRef] = (),
) -> TensorRef:
    """Like `compute_tensor`, but by whole rows, a multiple of `row_multiple` at a time.

    `compute_row_range(first, end, tables)` returns the rows from `first` up to `end`. Rows are
    those of the tensor as a matrix with its last dimension as columns.
    """
    columns = shape[-1]
    unit = row_multiple * columns
    if not unit:
        raise UnknownLayout

    def compute_elements(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a range of elements, which are whole rows."""
        return compute_row_range(start // columns, stop // columns, tables).flatten()

    step = max(CHUNK // unit, 1) * unit
    return compute_tensor(
        weight, shape, parts, compute_elements, checked_only, step=step, prepare=prepare
    )


def compute_tensor(
    weight: TensorRef,
    shape: tuple[int, ...],
    parts: Sequence[TensorRef],
    compute_elements: Callable[[int, int, Sequence[torch.Tensor]], torch.Tensor],
    checked_only: Sequence[TensorRef] = (),
    *,
    step: int = CHUNK,
    prepare: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = tuple,
) -> TensorRef:
    """Return a float32 tensor in place of a weight, with elements computed when they are read.

    `compute_elements(start, stop, tables)` computes the elements from `start`, a multiple of
    `step`, up to `stop`; each once if they are read in order. `prepare` makes the `tables` from the
    elements of `parts`, once for all ranges; they stay in memory until the last element was read.
    The CRC-32 of `parts` and of `checked_only` is verified.
    """
    weight_storage, data, count = weight.storage, weight.data, prod(shape)
    storages = {id(tensor.storage): tensor.storage for tensor in (*parts, *checked_only)}.values()
    storage_checks = [
        check_storage(storage, storage.data)
        for storage in storages
        if storage and storage.data is not None
    ]
    tables: Sequence[torch.Tensor] = ()
    last_start, chunk, lock = -1, bytearray(), Lock()
    has_empty_part = not all(tensor.numel for tensor in parts)
    if weight_storage is None or (count and has_empty_part):
        raise UnknownLayout

    def fill(offset: int, buffer: memoryview) -> None:
        """Write the computed bytes from `offset` into `buffer`.

        The last chunk is kept, because the next range usually begins inside of it.
        """
        require_torch()
        import torch

        nonlocal tables, last_start, chunk
        if not buffer:
            return
        with lock:
            for check in storage_checks:
                check.check()
            tables = tables or prepare([read_elements(tensor, 0, tensor.numel) for tensor in parts])
            chunks = iterate_chunks(offset, buffer, _FLOAT32_SIZE, count, step)
            for start, stop, room, skipped in chunks:
                if start != last_start:
                    chunk = bytearray((stop - start) * _FLOAT32_SIZE)
                    elements = torch.frombuffer(chunk, dtype=torch.float32)
                    elements.copy_(compute_elements(start, stop, tables))
                    last_start = start
                room[:] = chunk[skipped : skipped + len(room)]
            if offset + len(buffer) == count * _FLOAT32_SIZE:  # the end: release the memory
                tables, last_start, chunk = (), -1, bytearray()

    source = make_computed_range((data,), count * _FLOAT32_SIZE, fill)
    storage = Storage(
        weight_storage.key,
        source,
        source.length,
        weight_storage.device,
        sys.byteorder,
        whole=weight_storage.data,
    )
    stride = row_major_strides(shape)
    return replace(weight, dtype="float32", shape=shape, stride=stride, storage=storage, offset=0)
