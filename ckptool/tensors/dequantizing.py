"""Convert quantized weights to float32 tensors, computed when they are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

from ckptool.core.model import Global, TensorRef, row_major_strides
from ckptool.core.quantization_config import QuantizationConfig
from ckptool.core.quantizers import Quantized, find_rival_scales, to_plain_key
from ckptool.dtypes import CODES
from ckptool.tensors.casting import CHUNK
from ckptool.tensors.quantized_layouts import (
    dequantize_awq,
    dequantize_compressed_tensors,
    dequantize_gptq,
    dequantize_hqq,
    dequantize_int8,
    dequantize_mlx,
    dequantize_mxfp4,
    dequantize_nvfp4,
    dequantize_quanto,
    refuse_entries,
    refuse_other_scheme,
)
from ckptool.tensors.unpacking import (
    Parts,
    UnknownLayout,
    block_sizes,
    compute_blocks,
    compute_tensor,
    expand_blocks,
    is_count,
    is_plain,
    read_elements,
)
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch

_FP8_SCALES = ("float16", "bfloat16", "float32", "float64", "float8_e8m0fnu")
_BLOCK = 128
"""Rows and columns that have one scale in the files of DeepSeek-V3."""
_MAX_JSON = 1 << 16
"""Bytes of JSON that are read about one weight."""
_MAX_DIMENSIONS = 64
"""Torch has no tensors with more."""
PACKED = "_packed_params._packed_params"
_TORCHAO_CLASSES = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
_PER_127 = 7.874015718698502e-3


def dequantize(
    state: Mapping[Any, Any],
    name: str,
    quantized: Quantized,
    config: QuantizationConfig,
    file: str = "",
) -> dict[str, TensorRef]:
    """Return the quantized weight at `name` of a state dict as a plain tensor, under the key "".

    Packed parameters (a name that ends with `PACKED`) become `weight` and `bias`. `file` is the
    path for errors when the tensor is read.

    Raises:
        UnknownLayout: if the scheme or its layout is not supported, or not completely stated.
    """
    packed, dequantize_layout = state[name], _LAYOUTS.get(quantized.scheme)
    match packed:
        case (TensorRef() as codes, bias) if str(name).endswith(PACKED):
            return {"weight": _dequantize_tensor(codes)} | ({} if bias is None else {"bias": bias})
    companions = {key.rpartition(".")[2]: state[key] for key in quantized.companions}
    if dequantize_layout is None or not companions:
        return {"": _dequantize_tensor(packed)}
    if not all(map(is_plain, (packed, *companions.values()))):
        raise UnknownLayout("its parts are not plain tensors")
    plain = to_plain_key(quantized.scheme, name)
    if plain.removesuffix("weight") + "pre_quant_scale" in state:  # of NVIDIA's ModelOpt
        raise UnknownLayout("pre_quant_scale next to it scales the input of its layer")
    return {"": dequantize_layout(Parts(name, state, packed, companions, plain, config, file))}


def can_dequantize(
    state: Mapping[Any, Any], name: str, found: Quantized, config: QuantizationConfig
) -> bool:
    """Return True if `dequantize` supports the quantized weight at `name`."""
    try:
        return bool(dequantize(state, name, found, config))
    except UnknownLayout:
        return False


def _dequantize_fp8(parts: Parts) -> TensorRef:
    """Return fp8 weights times their scales.

    There is one scale in all, one for each index of the first dimension or each group of columns
    in it, or one for each block of 128 x 128, cut at the edges. `weight_dequant` of DeepSeek-V3
    (inference/kernel.py) rounds the same product to bfloat16.
    """
    rivals = find_rival_scales(parts.state, parts.name, "fp8 with scales")
    if len(rivals) > 1:
        raise UnknownLayout(f"the file has two scales for it: {listed(rivals)}")
    refuse_entries(parts, "weight_g_idx", "weight_zero_point")
    weight, scale = parts.weight, next(iter(parts.companions.values()))
    if scale.dtype not in _FP8_SCALES:
        raise UnknownLayout(f"its scale is {scale.dtype}, which is not supported")
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
    refuse_other_scheme(parts, shape, scales, 8, "float")
    stated = parts.config.entries.get("weight_block_size")
    if scale.numel > 1 and isinstance(stated, list) and [*block] != stated:
        parts.refuse_contradiction()

    def numbers(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        factors = expand_blocks(tables[0].float(), shape, block, start, stop)
        return read_elements(weight, start, stop).float() * factors

    return compute_tensor(weight, shape, (scale,), numbers)


def _dequantize_bitsandbytes_8bit(parts: Parts) -> TensorRef:
    """Dequantize as `int8_vectorwise_dequant` of bitsandbytes: rows times 1/127 of their SCB.

    Raises:
        UnknownLayout: if `weight_format` states that the rows are in tiles for a GPU.
    """
    weight, scale, layout = parts.weight, parts["SCB"], parts.get("weight_format")
    shape = weight.sizes
    if weight.dtype != "int8" or not shape or not _is_vector(scale, shape[0]):
        raise UnknownLayout
    if layout is not None and any(layout.read() if layout.numel == 1 else b"?"):
        raise UnknownLayout

    def compute_elements(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return codes times the scale of their row, for a range of elements."""
        factors = expand_blocks(tables[0], shape, (1, *shape[1:]), start, stop)
        return read_elements(weight, start, stop) * factors * _PER_127

    return compute_tensor(weight, shape, (scale,), compute_elements)


def _dequantize_bitsandbytes_4bit(parts: Parts) -> TensorRef:
    """Dequantize as `dequantize_4bit` of bitsandbytes: two elements a byte, high bits first.

    An element is its entry of `quant_map` times the `absmax` of its block. With nested maps
    `absmax` is quantized, a byte a block, after subtracting `nested_offset`.
    """
    weight, facts = parts.weight, _read_quant_state(parts.companions)
    code_map, absmax = parts.get("quant_map"), parts["absmax"]
    shape, block = facts.get("shape", 0), facts.get("blocksize", 0)
    if not (isinstance(shape, list) and all(map(is_count, shape)) and is_count(block) and block):
        raise UnknownLayout
    if len(shape) > _MAX_DIMENSIONS:
        raise UnknownLayout
    blocks = -(-prod(shape) // block)
    if CHUNK % block or weight.nbytes != -(-prod(shape) // 2) or not _is_vector(code_map, 16):
        raise UnknownLayout
    outer, outer_codes = parts.get("nested_absmax"), parts.get("nested_quant_map")
    size, offset = facts.get("nested_blocksize", 0), facts.get("nested_offset", 0)
    if not _is_vector(absmax, blocks, "float32" if outer is None else "uint8"):
        raise UnknownLayout
    tensors = [code_map, absmax]
    if outer is not None:
        if not (is_count(size) and size and isinstance(offset, float)):
            raise UnknownLayout
        if not (_is_vector(outer, -(-blocks // size)) and _is_vector(outer_codes, 256)):
            raise UnknownLayout
        tensors += [outer, outer_codes]

    def compute_elements(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Look the codes of the range up in `quant_map`, and scale them by block."""
        import torch

        code_values, block_scales, *outer_tables = tables
        raw = weight.data.read(start // 2, -(-stop // 2) - start // 2)
        pairs = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        codes = torch.stack((pairs >> 4, pairs & 15), 1).flatten()[: stop - start]
        first_block, last_block = start // block, -(-stop // block)
        scales = block_scales[first_block:last_block]
        if outer_tables:  # the scales are codes themselves
            outer_scales, scale_values = outer_tables
            outer_index = torch.arange(first_block, last_block, device="cpu") // size
            factors = torch.index_select(outer_scales, 0, outer_index)
            scales = torch.index_select(scale_values, 0, scales.int()) * factors + offset
        values = torch.index_select(code_values, 0, codes.int())
        return values * scales.repeat_interleave(block)[: stop - start]

    return compute_tensor(weight, tuple(shape), tensors, compute_elements)


def _dequantize_tensor(tensor: Any) -> TensorRef:
    """Dequantize a tensor of torch or torchao that contains its scales, as their `dequantize`."""
    parts = (tensor.parts if isinstance(tensor, TensorRef) else None) or {}
    match parts:
        case {"quantizer": (Global(name="per_tensor_affine"), float(scale), int(zero))} if (
            -(1 << 31) <= zero < 1 << 31
        ):
            return compute_blocks(_integers(tensor), scale, zero, tensor.sizes, tensor)
        case {"quantizer": (Global(), TensorRef() as scales, TensorRef() as zeros, int(axis))}:
            block = tuple(1 if at == axis else size for at, size in enumerate(tensor.sizes))
            return compute_blocks(_integers(tensor), scales, zeros, block, tensor)
        case {"type": Global(name=name), "state": {**state}}:
            return _dequantize_class(name, state)
        case _:
            raise UnknownLayout


def _dequantize_torchao(parts: Parts) -> TensorRef:
    """Dequantize a tensor that torchao's `flatten_tensor_state_dict` took apart."""
    entry = parts.config.header.get(parts.plain)
    match entry:
        case {"_type": str(name), "_data": {**fields}, "_tensor_data_names": [*names]}:
            stem = parts.name.rpartition(".")[2].removesuffix("qdata")
            tensors = {field: parts[f"{stem}{field}"] for field in names if field != "qdata"}
            return _dequantize_class(name, {**fields, **tensors, "qdata": parts.weight})
        case _:
            raise UnknownLayout("no entry of its file's __metadata__ states its class")


def _dequantize_class(name: str, state: Mapping[Any, Any]) -> TensorRef:
    """Dequantize a tensor of the torchao class `name` with the attributes `state`."""
    match state:
        case {
            "qdata": TensorRef() as codes,
            "scale": TensorRef() as scale,
            "block_size": [*block],
        } if name in _TORCHAO_CLASSES and state.get("act_pre_scale") is None:
            return compute_blocks(codes, scale, state.get("zero_point"), tuple(block))
        case _:
            raise UnknownLayout(f"ckptool does not know the layout of this {printable(str(name))}")


def _integers(tensor: TensorRef) -> TensorRef:
    """Return the integers of a quantized tensor of torch, in row-major order."""
    codes = replace(tensor, dtype=CODES.get(tensor.dtype, tensor.dtype), kind="strided", parts=None)
    storage = codes.storage
    if codes.dtype == tensor.dtype or storage is None or storage.data is None:
        return tensor
    if codes.is_contiguous:
        return codes
    data = codes.row_major
    storage = replace(storage, data=data, nbytes=data.length, crc32=None)
    return replace(codes, storage=storage, stride=row_major_strides(codes.sizes), offset=0)


def _read_quant_state(companions: Mapping[str, TensorRef]) -> dict[str, Any]:
    """Return the JSON object in `quant_state.bitsandbytes__nf4`; {} if it is damaged."""
    texts = [one for name, one in companions.items() if name.startswith("bitsandbytes__")]
    if len(texts) != 1 or texts[0].nbytes > _MAX_JSON:
        return {}
    try:
        quant_state = json.loads(texts[0].read())
    except (ValueError, RecursionError):
        return {}
    return quant_state if isinstance(quant_state, dict) else {}


def _is_vector(tensor: TensorRef | None, size: int, dtype: str = "float32") -> TypeGuard[TensorRef]:
    """Return True for a tensor with `size` elements of `dtype` in one dimension."""
    return tensor is not None and tensor.dtype == dtype and tensor.shape == (size,)


_LAYOUTS: dict[str, Callable[[Parts], TensorRef]] = {
    "fp8 with scales": _dequantize_fp8,
    "bitsandbytes 4 bit": _dequantize_bitsandbytes_4bit,
    "bitsandbytes 8 bit": _dequantize_bitsandbytes_8bit,
    "torchao": _dequantize_torchao,
    "quanto": dequantize_quanto,
    "MLX": dequantize_mlx,
    "int8 with scales": dequantize_int8,
    "compressed-tensors": dequantize_compressed_tensors,
    "GPTQ": dequantize_gptq,
    "AWQ": dequantize_awq,
    "NVFP4": dequantize_nvfp4,
    "MXFP4": dequantize_mxfp4,
    "HQQ": dequantize_hqq,
}
"""By the scheme (`core/quantizers.py`), the function that dequantizes a weight."""
