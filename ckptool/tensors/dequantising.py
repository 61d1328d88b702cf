"""Weights of quantisers as plain numbers, in float32, computed when they are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

from ckptool.dtypes import BY_NAME
from ckptool.files import ByteRange
from ckptool.files.computed import ComputedSource, gathered
from ckptool.model import Global, Storage, TensorRef, row_major_strides
from ckptool.quantisers import Quantised
from ckptool.tensors.casting import CHUNK, checked, chunks
from ckptool.tensors.runtime import require_torch, torch_dtype

if TYPE_CHECKING:
    import torch

__all__ = ["PACKED", "dequantized"]

_BLOCK = 128
"""Rows and columns that have one scale in the files of DeepSeek-V3."""
_MOST_FACTS = 1 << 16
"""Bytes of JSON that are read about one weight."""
PACKED = "_packed_params._packed_params"
_CODES = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
_OF_TORCHAO = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
_PER_127 = 7.874015718698502e-3


def dequantized(
    state: Mapping[Any, Any], name: str, found: Quantised
) -> dict[str, TensorRef] | None:
    """Return the weight of a state dict as the numbers that it stands for, under the name "".

    Packed parameters (a name that ends with `PACKED`) become `weight` and `bias` in its place.
    None: the quantiser is not among those that are known here, or has another layout.
    """
    packed = state[name]
    match packed:
        case (TensorRef() as codes, bias) if name.endswith(PACKED):
            weight = _affine(codes)
            both = {"weight": weight, "bias": bias}
            return {key: one for key, one in both.items() if one is not None} if weight else None
    make = _SCHEMES.get(found.scheme)
    beside = {one.rpartition(".")[2]: state[one] for one in found.companions}
    if make is not None and beside and all(map(_is_plain, (packed, *beside.values()))):
        weight = make(packed, beside)
    else:
        weight = _affine(packed)
    return None if weight is None else {"": weight}


def _is_plain(tensor: Any) -> TypeGuard[TensorRef]:
    return isinstance(tensor, TensorRef) and tensor.has_content and tensor.is_verbatim


def _by_scales(weight: TensorRef, beside: Mapping[str, TensorRef]) -> TensorRef | None:
    """Return weights times their scales.

    The scales are one for all, one for each index of the first dimension, or one for each block of
    128 x 128, cut at the edges; None for any other layout. After `weight_dequant` of
    DeepSeek-V3 (inference/kernel.py), which rounds the same product to bfloat16.
    """
    scale = next(iter(beside.values()))
    shape, scales = _shape(weight), _shape(scale)
    rows = shape[0] if shape else 1
    columns = weight.numel // max(rows, 1)
    wide, across = max(columns, 1), 1
    if scale.numel == 1:
        high = max(rows, 1)
    elif scales in ((rows,), (rows, *[1] * (len(shape) - 1))):
        high = 1
    elif len(shape) == 2 and scales == tuple(-(-size // _BLOCK) for size in shape):
        high = wide = _BLOCK
        across = scales[1]
    else:
        return None

    @cache
    def factors() -> torch.Tensor:
        return _elements(scale, 0, scale.numel).float()

    def numbers(start: int, stop: int) -> torch.Tensor:
        import torch

        first, left = divmod(start, columns)
        index = torch.arange(left, left + stop - start, dtype=torch.int32)
        row = index // columns
        column = index - row * columns
        factor = factors()[(row + first) // high * across + column // wide]
        return _elements(weight, start, stop).float() * factor

    return _computed(weight, shape, (scale,), numbers)


def _eight_bit(weight: TensorRef, beside: Mapping[str, TensorRef]) -> TensorRef | None:
    """Return what `int8_vectorwise_dequant` of bitsandbytes makes: rows times 1/127 of their SCB.

    None where `weight_format` says that the rows are in tiles of a GPU.
    """
    scale, layout, shape = beside["SCB"], beside.get("weight_format"), _shape(weight)
    rows = shape[0] if shape else 0
    if weight.dtype != "int8" or scale.dtype != "float32" or scale.shape != (rows,):
        return None
    if layout is not None and any(layout.read() if layout.numel == 1 else b"?"):
        return None
    columns = weight.numel // max(rows, 1)

    def numbers(start: int, stop: int) -> torch.Tensor:
        import torch

        first, last = start // columns, -(-stop // columns)
        row = torch.arange(start, stop) // columns - first
        return _elements(weight, start, stop) * _elements(scale, first, last)[row] * _PER_127

    return _computed(weight, shape, (scale,), numbers)


def _four_bit(weight: TensorRef, beside: Mapping[str, TensorRef]) -> TensorRef | None:
    """Return what `dequantize_4bit` of bitsandbytes makes: two elements a byte, high bits first.

    An element is its entry of `quant_map` times the `absmax` of its block.
    """
    facts, codes = _facts(beside), beside.get("quant_map")
    shape, block = facts.get("shape", 0), facts.get("blocksize", 0)
    if not (isinstance(shape, list) and all(map(_is_count, shape)) and _is_count(block)):
        return None
    count = prod(shape)
    if not block or CHUNK % block or weight.nbytes != -(-count // 2) or not _is_table(codes, 16):
        return None
    scales = _block_scales(beside, facts, -(-count // block))
    if scales is None:
        return None

    def numbers(start: int, stop: int) -> torch.Tensor:
        import torch

        raw = weight.data.read(start // 2, -(-stop // 2) - start // 2)
        pairs = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        both = torch.stack((pairs >> 4, pairs & 15), 1).flatten()[: stop - start]
        factors = scales(start // block, -(-stop // block)).repeat_interleave(block)
        return _elements(codes, 0, 16)[both.int()] * factors[: stop - start]

    tables = (one for name, one in beside.items() if not name.startswith("bitsandbytes__"))
    return _computed(weight, tuple(shape), tuple(tables), numbers)


def _block_scales(
    beside: Mapping[str, TensorRef], facts: Mapping[str, Any], blocks: int
) -> Callable[[int, int], torch.Tensor] | None:
    """Return the function of the `absmax` of some blocks.

    With nested maps `absmax` is quantised, a byte a block, after `nested_offset` was taken off.
    """
    absmax, outer, codes = (
        beside.get(one) for one in ("absmax", "nested_absmax", "nested_quant_map")
    )
    if outer is None:
        return partial(_elements, absmax) if _is_table(absmax, blocks) else None
    size, offset = facts.get("nested_blocksize", 0), facts.get("nested_offset")
    if not (
        _is_count(size)
        and size
        and isinstance(offset, float)
        and _is_table(absmax, blocks, "uint8")
        and _is_table(outer, -(-blocks // size))
        and _is_table(codes, 256)
    ):
        return None

    def scales(first: int, last: int) -> torch.Tensor:
        import torch

        low, high = first // size, -(-last // size)
        own = _elements(outer, low, high)[torch.arange(first, last) // size - low]
        index = _elements(absmax, first, last).int()
        return torch.add(_elements(codes, 0, 256)[index] * own, offset)

    return scales


def _affine(tensor: Any) -> TensorRef | None:
    """Return what `dequantize` of torch or torchao makes of a tensor that has its scales in it.

    That is codes less a zero point, times a scale, each of which counts for a block of the tensor.
    """
    parts = (tensor.parts if isinstance(tensor, TensorRef) else None) or {}
    codes: TensorRef | None
    scale: Any
    zero: Any
    match parts:
        case {"quantizer": (Global(name="per_tensor_affine"), float(scale), int(zero))}:
            codes, block = _codes(tensor), _shape(tensor)
            if not -(1 << 31) <= zero < 1 << 31:
                return None
        case {"quantizer": (Global(), TensorRef() as scale, TensorRef() as zero, int(axis))}:
            codes = _codes(tensor)
            block = tuple(1 if at == axis else size for at, size in enumerate(_shape(tensor)))
        case {
            "type": Global(name=name),
            "state": {
                "qdata": codes,
                "scale": TensorRef() as scale,
                "block_size": [*sizes],
                **others,
            },
        } if name in _OF_TORCHAO and others.get("act_pre_scale") is None:
            block, zero = tuple(sizes), others.get("zero_point")
        case _:
            return None
    if not _is_plain(codes) or len(block) != len(codes.shape):
        return None
    shape = _shape(codes)
    pairs = list(zip(block, shape, strict=True))
    if not all(_is_count(own) and own and not size % own for own, size in pairs):
        return None
    grid = tuple(size // own for own, size in pairs)
    tables = [one for one in (scale, zero) if one is not None and not isinstance(one, (float, int))]
    if not all(_is_plain(one) and one.numel == prod(grid) for one in tables):
        return None

    def numbers(start: int, stop: int) -> torch.Tensor:
        import torch

        elements = _elements(codes, start, stop)
        if isinstance(scale, float):
            return torch.mul(elements.int() - zero, torch.tensor(scale, dtype=torch.float32))
        index = torch.arange(start, stop)
        at = torch.zeros_like(index)
        for own, count, step in zip(block, grid, row_major_strides(shape), strict=True):
            at = at * count + index // step // own % count
        first, last = int(at.min()), int(at.max()) + 1
        less = 0 if zero is None else _elements(zero, first, last).float()[at - first]
        wide = torch.float64 if scale.dtype == "float64" else torch.float32
        return (elements.float() - less) * _elements(scale, first, last).to(wide)[at - first]

    gathered_from = [] if tensor.is_contiguous else [tensor]
    return _computed(codes, shape, [*tables, *gathered_from], numbers)


def _codes(tensor: TensorRef) -> TensorRef:
    """Return the integers of a quantised tensor of torch, in row-major order."""
    codes = replace(
        tensor, dtype=_CODES.get(tensor.dtype, tensor.dtype), kind="strided", parts=None
    )
    storage = codes.storage
    if codes.dtype == tensor.dtype or storage is None or storage.data is None:
        return tensor
    if codes.is_contiguous:
        return codes
    shape = _shape(codes)
    data = gathered(
        storage.data,
        itemsize=codes.itemsize, shape=shape, stride=codes.stride, offset=codes.offset,
    )  # fmt: skip
    held = replace(storage, data=data, nbytes=data.length, crc32=None)
    return replace(codes, storage=held, stride=row_major_strides(shape), offset=0)


def _facts(beside: Mapping[str, TensorRef]) -> dict[str, Any]:
    """Return what the JSON in `quant_state.bitsandbytes__nf4` says; {} if that is damaged."""
    packed = [one for name, one in beside.items() if name.startswith("bitsandbytes__")]
    if len(packed) != 1 or packed[0].nbytes > _MOST_FACTS:
        return {}
    try:
        found = json.loads(packed[0].read())
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_table(tensor: TensorRef | None, size: int, dtype: str = "float32") -> TypeGuard[TensorRef]:
    return tensor is not None and tensor.dtype == dtype and tensor.shape == (size,)


def _shape(tensor: TensorRef) -> tuple[int, ...]:
    return tuple(size or 0 for size in tensor.shape)


def _elements(tensor: TensorRef, start: int, stop: int) -> torch.Tensor:
    """Return the elements of a contiguous tensor from `start` up to `stop`."""
    import torch

    size = BY_NAME[tensor.dtype].itemsize
    raw = bytearray(tensor.data.read(start * size, (stop - start) * size))
    return torch.frombuffer(raw, dtype=torch_dtype(tensor.dtype))


def _computed(
    weight: TensorRef,
    shape: tuple[int, ...],
    parts: Sequence[TensorRef],
    numbers: Callable[[int, int], torch.Tensor],
) -> TensorRef | None:
    """Return a tensor of float32 in the place of a weight, of elements that `numbers` makes.

    `parts` are checked by their CRC-32 before the first is made.
    """
    held, data, count = weight.storage, weight.data, prod(shape)
    beside = {id(one.storage): one.storage for one in parts}.values()
    checks = [checked(one, one.data) for one in beside if one is not None and one.data is not None]
    if held is None:
        return None

    def fill(offset: int, buffer: memoryview) -> None:
        require_torch()
        import torch

        for check in checks:
            check.check()
        for start, stop, room, skipped in chunks(offset, buffer, 4, count):
            made = bytearray((stop - start) * 4)
            torch.frombuffer(made, dtype=torch.float32).copy_(numbers(start, stop))
            room[:] = made[skipped : skipped + len(room)]

    source = ComputedSource(data.source.name, count * 4, fill)
    source.made_of = (data,)
    made = ByteRange(source, 0, source.size)
    storage = Storage(held.key, made, source.size, held.device, sys.byteorder, whole=held.data)
    stride = row_major_strides(shape)
    return replace(weight, dtype="float32", shape=shape, stride=stride, storage=storage, offset=0)


_SCHEMES: dict[str, Callable[[TensorRef, Mapping[str, TensorRef]], TensorRef | None]] = {
    "fp8 with scales": _by_scales,
    "bitsandbytes 4 bit": _four_bit,
    "bitsandbytes 8 bit": _eight_bit,
}
"""By the scheme (`quantisers.py`) what makes plain numbers of a weight and what is beside it."""
