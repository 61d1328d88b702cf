"""Weights of quantizers as plain numbers, in float32, computed when they are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

from ckptool.core.model import Global, TensorRef, row_major_strides
from ckptool.core.quantization_config import QuantizationConfig
from ckptool.core.quantizers import Quantized, plain_key
from ckptool.dtypes import CODES
from ckptool.tensors.casting import CHUNK
from ckptool.tensors.quantized_layouts import (
    of_awq,
    of_compressed_tensors,
    of_gptq,
    of_hqq,
    of_mlx,
    of_mxfp4,
    of_nvfp4,
    of_quanto,
    of_whole_bytes,
)
from ckptool.tensors.unpacking import (
    Parts,
    UnknownLayout,
    block_sizes,
    compute_blocks,
    compute_tensor,
    is_count,
    is_plain,
    read_elements,
    spread,
)
from ckptool.words import printable

if TYPE_CHECKING:
    import torch

_BLOCK = 128
"""Rows and columns that have one scale in the files of DeepSeek-V3."""
_MOST_FACTS = 1 << 16
"""Bytes of JSON that are read about one weight."""
PACKED = "_packed_params._packed_params"
_OF_TORCHAO = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
_PER_127 = 7.874015718698502e-3


def dequantized(
    state: Mapping[Any, Any],
    name: str,
    found: Quantized,
    config: QuantizationConfig,
) -> dict[str, TensorRef]:
    """Return the weight of a state dict as the numbers that it stands for, under the name "".

    Packed parameters (a name that ends with `PACKED`) become `weight` and `bias`.

    Raises:
        UnknownLayout: the quantizer is not among those that are known here, has another layout, or
            does not state all of it.
    """
    packed, make = state[name], _LAYOUTS.get(found.scheme)
    match packed:
        case (TensorRef() as codes, bias) if name.endswith(PACKED):
            return {"weight": _affine(codes)} | ({} if bias is None else {"bias": bias})
    beside = {one.rpartition(".")[2]: state[one] for one in found.companions}
    if make is None or not beside:
        return {"": _affine(packed)}
    if not all(map(is_plain, (packed, *beside.values()))):
        raise UnknownLayout("its parts are not plain tensors")
    plain = plain_key(found.scheme, name)
    if plain.removesuffix("weight") + "pre_quant_scale" in state:  # of NVIDIA's ModelOpt
        raise UnknownLayout("pre_quant_scale next to it scales what goes into its layer")
    return {"": make(Parts(name, state, packed, beside, plain, config))}


def can_dequantize(
    state: Mapping[Any, Any], name: str, found: Quantized, config: QuantizationConfig
) -> bool:
    """Return whether `dequantized` knows how."""
    try:
        return bool(dequantized(state, name, found, config))
    except UnknownLayout:
        return False


def _by_scales(parts: Parts) -> TensorRef:
    """Return weights times their scales.

    The scales are one for all, one for each index of the first dimension or each group of columns
    in it, or one for each block of 128 x 128, cut at the edges. After `weight_dequant` of
    DeepSeek-V3 (inference/kernel.py), which rounds the same product to bfloat16.
    """
    weight, scale = parts.weight, next(iter(parts.beside.values()))
    shape, scales = weight.sizes, scale.sizes
    if scale.numel == 1:
        block = shape
    elif scales in (shape[:1], (*shape[:1], *[1] * (len(shape) - 1))):
        block = (1, *shape[1:])
    elif len(shape) == 2 and scales == tuple(-(-size // _BLOCK) for size in shape):
        block = (_BLOCK, _BLOCK)
    elif len(shape) == 2 and scales[:1] == shape[:1] and block_sizes(shape, scales):
        block = block_sizes(shape, scales)
    else:
        raise UnknownLayout
    stated = parts.config.entries.get("weight_block_size")
    if scale.numel > 1 and isinstance(stated, list) and [*block] != stated:
        parts.refuse_contradiction()

    def numbers(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        factors = spread(tables[0].float(), shape, block, start, stop)
        return read_elements(weight, start, stop).float() * factors

    return compute_tensor(weight, shape, (scale,), numbers)


def _eight_bit(parts: Parts) -> TensorRef:
    """Return what `int8_vectorwise_dequant` of bitsandbytes makes: rows times 1/127 of their SCB.

    Raises:
        UnknownLayout: `weight_format` says that the rows are in tiles of a GPU.
    """
    weight, scale, layout = parts.weight, parts["SCB"], parts.get("weight_format")
    shape = weight.sizes
    if weight.dtype != "int8" or not shape or not _is_table(scale, shape[0]):
        raise UnknownLayout
    if layout is not None and any(layout.read() if layout.numel == 1 else b"?"):
        raise UnknownLayout

    def numbers(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        factors = spread(tables[0], shape, (1, *shape[1:]), start, stop)
        return read_elements(weight, start, stop) * factors * _PER_127

    return compute_tensor(weight, shape, (scale,), numbers)


def _four_bit(parts: Parts) -> TensorRef:
    """Return what `dequantize_4bit` of bitsandbytes makes: two elements a byte, high bits first.

    An element is its entry of `quant_map` times the `absmax` of its block. With nested maps
    `absmax` is quantized, a byte a block, after `nested_offset` was taken off.
    """
    weight, facts = parts.weight, _facts(parts.beside)
    codes, absmax = parts.get("quant_map"), parts["absmax"]
    shape, block = facts.get("shape", 0), facts.get("blocksize", 0)
    if not (isinstance(shape, list) and all(map(is_count, shape)) and is_count(block) and block):
        raise UnknownLayout
    blocks = -(-prod(shape) // block)
    if CHUNK % block or weight.nbytes != -(-prod(shape) // 2) or not _is_table(codes, 16):
        raise UnknownLayout
    outer, outer_codes = parts.get("nested_absmax"), parts.get("nested_quant_map")
    size, offset = facts.get("nested_blocksize", 0), facts.get("nested_offset", 0)
    if not _is_table(absmax, blocks, "float32" if outer is None else "uint8"):
        raise UnknownLayout
    tensors = [codes, absmax]
    if outer is not None:
        if not (is_count(size) and size and isinstance(offset, float)):
            raise UnknownLayout
        if not (_is_table(outer, -(-blocks // size)) and _is_table(outer_codes, 256)):
            raise UnknownLayout
        tensors += [outer, outer_codes]

    def elements(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        raw = weight.data.read(start // 2, -(-stop // 2) - start // 2)
        pairs = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        both = torch.stack((pairs >> 4, pairs & 15), 1).flatten()[: stop - start]
        first, last = start // block, -(-stop // block)
        scales = tables[1][first:last]
        if outer is not None:
            own = torch.index_select(tables[2], 0, torch.arange(first, last, device="cpu") // size)
            scales = torch.index_select(tables[3], 0, scales.int()) * own + offset
        numbers = torch.index_select(tables[0], 0, both.int())
        return numbers * scales.repeat_interleave(block)[: stop - start]

    return compute_tensor(weight, tuple(shape), tensors, elements)


def _affine(tensor: Any) -> TensorRef:
    """Return what `dequantize` of torch or torchao makes of a tensor that has its scales in it."""
    parts = (tensor.parts if isinstance(tensor, TensorRef) else None) or {}
    match parts:
        case {"quantizer": (Global(name="per_tensor_affine"), float(scale), int(zero))} if (
            -(1 << 31) <= zero < 1 << 31
        ):
            return compute_blocks(_codes(tensor), scale, zero, tensor.sizes, tensor)
        case {"quantizer": (Global(), TensorRef() as scales, TensorRef() as zeros, int(axis))}:
            block = tuple(1 if at == axis else size for at, size in enumerate(tensor.sizes))
            return compute_blocks(_codes(tensor), scales, zeros, block, tensor)
        case {"type": Global(name=name), "state": {**state}}:
            return _of_class(name, state)
        case _:
            raise UnknownLayout


def _of_torchao(parts: Parts) -> TensorRef:
    """Return the tensor of an entry of torchao's `flatten_tensor_state_dict`."""
    entry = parts.config.header.get(parts.plain)
    match entry:
        case {"_type": str(name), "_data": {**fields}, "_tensor_data_names": [*names]}:
            stem = parts.name.rpartition(".")[2].removesuffix("qdata")
            tensors = {one: parts[f"{stem}{one}"] for one in names if one != "qdata"}
            return _of_class(name, {**fields, **tensors, "qdata": parts.weight})
        case _:
            raise UnknownLayout("no entry of its file's __metadata__ states its class")


def _of_class(name: str, state: Mapping[Any, Any]) -> TensorRef:
    """Return what `dequantize` of a class of torchao makes of its attributes."""
    match state:
        case {
            "qdata": TensorRef() as codes,
            "scale": TensorRef() as scale,
            "block_size": [*block],
        } if name in _OF_TORCHAO and state.get("act_pre_scale") is None:
            return compute_blocks(codes, scale, state.get("zero_point"), tuple(block))
        case _:
            raise UnknownLayout(f"ckptool does not know the layout of this {printable(str(name))}")


def _codes(tensor: TensorRef) -> TensorRef:
    """Return the integers of a quantized tensor of torch, in row-major order."""
    codes = replace(tensor, dtype=CODES.get(tensor.dtype, tensor.dtype), kind="strided", parts=None)
    storage = codes.storage
    if codes.dtype == tensor.dtype or storage is None or storage.data is None:
        return tensor
    if codes.is_contiguous:
        return codes
    data = codes.row_major
    held = replace(storage, data=data, nbytes=data.length, crc32=None)
    return replace(codes, storage=held, stride=row_major_strides(codes.sizes), offset=0)


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


def _is_table(tensor: TensorRef | None, size: int, dtype: str = "float32") -> TypeGuard[TensorRef]:
    return tensor is not None and tensor.dtype == dtype and tensor.shape == (size,)


_LAYOUTS: dict[str, Callable[[Parts], TensorRef]] = {
    "fp8 with scales": _by_scales,
    "bitsandbytes 4 bit": _four_bit,
    "bitsandbytes 8 bit": _eight_bit,
    "torchao": _of_torchao,
    "quanto": of_quanto,
    "MLX": of_mlx,
    "int8 with scales": of_whole_bytes,
    "compressed-tensors": of_compressed_tensors,
    "GPTQ": of_gptq,
    "AWQ": of_awq,
    "NVFP4": of_nvfp4,
    "MXFP4": of_mxfp4,
    "HQQ": of_hqq,
}
"""By the scheme (`core/quantizers.py`), what makes plain numbers of a weight and its companions."""
