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
    weight, dequantize_layout = state[name], _LAYOUTS.get(quantized.scheme)
    match weight:
        case (TensorRef() as codes, bias) if str(name).endswith(PACKED):
            return {"weight": _dequantize_tensor(codes)} | ({} if bias is None else {"bias": bias})
    companions = {key.rpartition(".")[2]: state[key] for key in quantized.companions}
    if dequantize_layout is None or not companions:  # the tensor itself contains its scales
        return {"": _dequantize_tensor(weight)}
    if not all(map(is_plain, (weight, *companions.values()))):
        raise UnknownLayout("its parts are not plain tensors")
    plain_key = to_plain_key(quantized.scheme, name)
    if plain_key.removesuffix("weight") + "pre_quant_scale" in state:  # of NVIDIA's ModelOpt
        raise UnknownLayout("pre_quant_scale next to it scales the input of its layer")
    return {"": dequantize_layout(Parts(name, state, weight, companions, plain_key, config, file))}


def can_dequantize(
    state: Mapping[Any, Any], name: str, quantized: Quantized, config: QuantizationConfig
) -> bool:
    """Return True if `dequantize` supports the quantized weight at `name`."""
    try:
        return bool(dequantize(state, name, quantized, config))
    except UnknownLayout:
        return False


def _dequantize_fp8(parts: Parts) -> TensorRef:
    """Return fp8 weights times their scales.

    There is one scale in all, one for each index of the first dimension or each group of columns
    in it, or one for each block of 128 x 128, cut at the edges. `weight_dequant` of DeepSeek-V3
    (inference/kernel.py) rounds the same product to bfloat16.
    """
    scale_keys = find_rival_scales(parts.state, parts.name, "fp8 with scales")
    if len(scale_keys) > 1:
        raise UnknownLayout(f"the file has two scales for it: {listed(scale_keys)}")
    refuse_entries(parts, "weight_g_idx", "weight_zero_point")
    weight, scale = parts.weight, next(iter(parts.companions.values()))  # its key varies
    if scale.dtype not in _FP8_SCALES:
        raise UnknownLayout(f"its scale is {scale.dtype}, which is not supported")
    shape = weight.sizes
    block = _find_fp8_block(shape, scale.sizes)
    refuse_other_scheme(parts, shape, scale.sizes, 8, "float")
    stated_block = parts.config.entries.get("weight_block_size")
    if scale.numel > 1 and isinstance(stated_block, list) and [*block] != stated_block:
        parts.refuse_contradiction()

    def compute_elements(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return codes times the scale of their block, for a range of elements."""
        (scales,) = tables
        factors = expand_blocks(scales.float(), shape, block, start, stop)
        return read_elements(weight, start, stop).float() * factors

    return compute_tensor(weight, shape, (scale,), compute_elements)


def _find_fp8_block(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the blocks that have one scale each, for scales of the shape `scales`.

    Raises:
        UnknownLayout: if the shapes do not fit.
    """
    if prod(scales) == 1:
        return shape
    if scales in (shape[:1], (*shape[:1], *[1] * (len(shape) - 1))):
        return (1, *shape[1:])
    if len(shape) == 2 and scales == tuple(-(-size // _BLOCK) for size in shape):
        return (_BLOCK, _BLOCK)
    # Columns in groups of any size, but each row has its own scales.
    block = block_sizes(shape, scales) if len(shape) == 2 and scales[:1] == shape[:1] else ()
    if not block:
        raise UnknownLayout
    return block


def _dequantize_bitsandbytes_8bit(parts: Parts) -> TensorRef:
    """Dequantize as `int8_vectorwise_dequant` of bitsandbytes: rows times 1/127 of their SCB.

    Raises:
        UnknownLayout: if `weight_format` is not 0, plain rows: others are in tiles for a GPU.
    """
    weight, scale, weight_format = parts.weight, parts["SCB"], parts.get("weight_format")
    shape = weight.sizes
    if weight.dtype != "int8" or not shape or not _is_vector(scale, shape[0]):
        raise UnknownLayout
    if weight_format is not None and (weight_format.numel != 1 or any(weight_format.read())):
        raise UnknownLayout

    def compute_elements(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return codes times the scale of their row, for a range of elements."""
        (row_scales,) = tables
        factors = expand_blocks(row_scales, shape, (1, *shape[1:]), start, stop)
        return read_elements(weight, start, stop) * factors * _PER_127

    return compute_tensor(weight, shape, (scale,), compute_elements)


def _dequantize_bitsandbytes_4bit(parts: Parts) -> TensorRef:
    """Dequantize as `dequantize_4bit` of bitsandbytes: two elements a byte, high bits first.

    An element is its entry of `quant_map` times the `absmax` of its block. With nested maps
    `absmax` is quantized, a byte a block, after subtracting `nested_offset`.
    """
    weight, quant_state = parts.weight, _read_quant_state(parts.companions)
    quant_map, absmax = parts.get("quant_map"), parts["absmax"]
    shape, block = quant_state.get("shape", 0), quant_state.get("blocksize", 0)
    if not (isinstance(shape, list) and all(map(is_count, shape)) and is_count(block) and block):
        raise UnknownLayout
    if len(shape) > _MAX_DIMENSIONS:
        raise UnknownLayout
    block_count = -(-prod(shape) // block)
    # A chunk must consist of whole blocks.
    if CHUNK % block or weight.nbytes != -(-prod(shape) // 2) or not _is_vector(quant_map, 16):
        raise UnknownLayout
    nested_absmax, nested_map = parts.get("nested_absmax"), parts.get("nested_quant_map")
    nested_block = quant_state.get("nested_blocksize", 0)
    nested_offset = quant_state.get("nested_offset", 0)
    if not _is_vector(absmax, block_count, "float32" if nested_absmax is None else "uint8"):
        raise UnknownLayout
    tensors = [quant_map, absmax]
    if nested_absmax is not None:
        if not (is_count(nested_block) and nested_block and isinstance(nested_offset, float)):
            raise UnknownLayout
        nested_count = -(-block_count // nested_block)
        if not (_is_vector(nested_absmax, nested_count) and _is_vector(nested_map, 256)):
            raise UnknownLayout
        tensors += [nested_absmax, nested_map]

    def compute_elements(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Look the codes of the range up in `quant_map`, and scale them by block.

        A byte has two codes, the first in its upper half; `start` is the start of a block.
        """
        import torch

        value_by_code, block_scales, *nested_tables = tables
        raw = weight.data.read(start // 2, -(-stop // 2) - start // 2)
        pairs = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        codes = torch.stack((pairs >> 4, pairs & 15), 1).flatten()[: stop - start]
        first_block, end_block = start // block, -(-stop // block)
        scales = block_scales[first_block:end_block]
        if nested_tables:  # the scales are codes themselves, in blocks of `nested_block`
            scales_of_scales, scale_by_code = nested_tables
            nested_index = torch.arange(first_block, end_block, device="cpu") // nested_block
            factors = torch.index_select(scales_of_scales, 0, nested_index)
            scales = torch.index_select(scale_by_code, 0, scales.int()) * factors + nested_offset
        values = torch.index_select(value_by_code, 0, codes.int())
        return values * scales.repeat_interleave(block)[: stop - start]

    return compute_tensor(weight, tuple(shape), tensors, compute_elements)


def _dequantize_tensor(tensor: Any) -> TensorRef:
    """Dequantize a tensor of torch or torchao that contains its scales, as their `dequantize`.

    Raises:
        UnknownLayout: for any other tensor.
    """
    parts = (tensor.parts if isinstance(tensor, TensorRef) else None) or {}
    match parts:
        case {"quantizer": (Global(name="per_tensor_affine"), float(scale), int(zero))} if (
            -(1 << 31) <= zero < 1 << 31  # it is subtracted from 32-bit integers
        ):
            return compute_blocks(_view_integers(tensor), scale, zero, tensor.sizes, tensor)
        case {"quantizer": (Global(), TensorRef() as scales, TensorRef() as zeros, int(axis))}:
            # One scale for each index of the axis: a block has all other dimensions.
            block = tuple(
                1 if dimension == axis else size for dimension, size in enumerate(tensor.sizes)
            )
            return compute_blocks(_view_integers(tensor), scales, zeros, block, tensor)
        case {"type": Global(name=name), "state": {**state}}:
            return _dequantize_class(name, state)
        case _:
            raise UnknownLayout


def _dequantize_torchao(parts: Parts) -> TensorRef:
    """Dequantize a tensor that torchao's `flatten_tensor_state_dict` divided into several keys.

    An entry of the file's `__metadata__` has its class, its fields, and the names of its tensors.
    """
    entry = parts.config.header.get(parts.plain_key)
    match entry:
        case {"_type": str(name), "_data": {**fields}, "_tensor_data_names": [*tensor_names]}:
            # For example `weight_`: next to `fc.weight_qdata` is `fc.weight_scale`.
            prefix = parts.name.rpartition(".")[2].removesuffix("qdata")
            tensors = {
                field: parts[f"{prefix}{field}"] for field in tensor_names if field != "qdata"
            }
            return _dequantize_class(name, {**fields, **tensors, "qdata": parts.weight})
        case _:
            raise UnknownLayout("no entry of its file's __metadata__ states its class")


def _dequantize_class(name: str, state: Mapping[Any, Any]) -> TensorRef:
    """Dequantize a tensor of the torchao class `name` with the attributes `state`.

    Raises:
        UnknownLayout: for another class, or if it scales the input of its layer.
    """
    match state:
        case {
            "qdata": TensorRef() as codes,
            "scale": TensorRef() as scale,
            "block_size": [*block],
        } if name in _TORCHAO_CLASSES and state.get("act_pre_scale") is None:
            return compute_blocks(codes, scale, state.get("zero_point"), tuple(block))
        case _:
            raise UnknownLayout(f"ckptool does not know the layout of this {printable(str(name))}")


def _view_integers(tensor: TensorRef) -> TensorRef:
    """Return the integers of a quantized tensor of torch, in row-major order.

    A tensor without integers or bytes is returned unchanged, and `compute_blocks` refuses it.
    """
    storage = tensor.storage
    if tensor.dtype not in CODES or storage is None or storage.data is None:
        return tensor
    codes = replace(tensor, dtype=CODES[tensor.dtype], kind="strided", parts=None)
    if codes.is_contiguous:
        return codes
    # Gathered when it is read; its CRC-32 is not known.
    data = codes.row_major
    storage = replace(storage, data=data, nbytes=data.length, crc32=None)
    return replace(codes, storage=storage, stride=row_major_strides(codes.sizes), offset=0)


def _read_quant_state(companions: Mapping[str, TensorRef]) -> dict[str, Any]:
    """Return the JSON object in the companion `bitsandbytes__nf4` or `bitsandbytes__fp4`.

    {} if it is missing, ambiguous or damaged.
    """
    texts = [text for name, text in companions.items() if name.startswith("bitsandbytes__")]
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
