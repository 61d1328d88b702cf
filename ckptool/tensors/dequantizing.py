"""Weights of quantizers as plain numbers, in float32, computed when they are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from ckptool.core.model import Global, Storage, TensorRef, row_major_strides
from ckptool.core.quantization_config import QuantizationConfig
from ckptool.core.quantizers import Quantized, plain_key
from ckptool.dtypes import BY_NAME, CODES
from ckptool.errors import CorruptFile, NotRepresentable
from ckptool.files.computed import computed
from ckptool.tensors.casting import CHUNK, checked, chunks
from ckptool.tensors.materialize import require_torch, torch_dtype
from ckptool.words import listed, printable

if TYPE_CHECKING:
    import torch

_BLOCK = 128
"""Rows and columns that have one scale in the files of DeepSeek-V3."""
_MOST_FACTS = 1 << 16
"""Bytes of JSON that are read about one weight."""
_MOST_SIZES = 8
"""Integers in a tensor that states a shape."""
PACKED = "_packed_params._packed_params"
_OF_TORCHAO = ("Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
_OF_ACTIVATIONS = {"input_scale", "output_scale"}
_FP4 = [sign * one for sign in (1.0, -1.0) for one in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
"""The numbers of e2m1, by their codes."""
_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Families of transformers with layers (`Conv1D`) that keep their weights as [in, out]."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word of AWQ, counted from the lowest, are those of each of its rows."""
_PER_127 = 7.874015718698502e-3


class UnknownLayout(NotRepresentable):
    """The layout of a quantized weight is not known, or not all of it is stated."""

    def __init__(self, fact: str = "ckptool does not know this layout") -> None:
        """Say what is missing."""
        super().__init__(fact)


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
        if not (_is_count(value) and value):
            raise UnknownLayout(f"no config.json next to it states {key}")
        return int(value)

    def small(self, ending: str) -> list[int]:
        """Return the integers of a companion with a few of them: a shape."""
        tensor = self[ending]
        if tensor.dtype not in ("int32", "int64") or tensor.numel > _MOST_SIZES:
            raise UnknownLayout
        size = tensor.itemsize
        raw = tensor.read()
        sizes = [
            int.from_bytes(raw[at : at + size], "little", signed=True)
            for at in range(0, len(raw), size)
        ]
        if not all(map(_is_count, sizes)):
            raise UnknownLayout
        return sizes

    def refuse_contradiction(self) -> NoReturn:
        """Raise `UnknownLayout`: shapes and configuration differ."""
        stated = listed(self.config.sizes)
        raise UnknownLayout(f"its shapes contradict {self.config.where} ({stated})")


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
    if not all(map(_is_plain, (packed, *beside.values()))):
        raise UnknownLayout("its parts are not plain tensors")
    plain = plain_key(found.scheme, name)
    return {"": make(Parts(name, state, packed, beside, plain, config))}


def can_dequantize(
    state: Mapping[Any, Any], name: str, found: Quantized, config: QuantizationConfig
) -> bool:
    """Return whether `dequantized` knows how."""
    try:
        return bool(dequantized(state, name, found, config))
    except UnknownLayout:
        return False


def _is_plain(tensor: Any) -> TypeGuard[TensorRef]:
    return isinstance(tensor, TensorRef) and tensor.has_content and tensor.is_verbatim


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
    elif len(shape) == 2 and scales[:1] == shape[:1] and _block(shape, scales):
        block = _block(shape, scales)
    else:
        raise UnknownLayout

    def numbers(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        factors = _spread(tables[0].float(), shape, block, start, stop)
        return _elements(weight, start, stop).float() * factors

    return _computed(weight, shape, (scale,), numbers)


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
        factors = _spread(tables[0], shape, (1, *shape[1:]), start, stop)
        return _elements(weight, start, stop) * factors * _PER_127

    return _computed(weight, shape, (scale,), numbers)


def _four_bit(parts: Parts) -> TensorRef:
    """Return what `dequantize_4bit` of bitsandbytes makes: two elements a byte, high bits first.

    An element is its entry of `quant_map` times the `absmax` of its block. With nested maps
    `absmax` is quantized, a byte a block, after `nested_offset` was taken off.
    """
    weight, facts = parts.weight, _facts(parts.beside)
    codes, absmax = parts.get("quant_map"), parts["absmax"]
    shape, block = facts.get("shape", 0), facts.get("blocksize", 0)
    if not (isinstance(shape, list) and all(map(_is_count, shape)) and _is_count(block) and block):
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
        if not (_is_count(size) and size and isinstance(offset, float)):
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

    return _computed(weight, tuple(shape), tensors, elements)


def _affine(tensor: Any) -> TensorRef:
    """Return what `dequantize` of torch or torchao makes of a tensor that has its scales in it."""
    parts = (tensor.parts if isinstance(tensor, TensorRef) else None) or {}
    match parts:
        case {"quantizer": (Global(name="per_tensor_affine"), float(scale), int(zero))} if (
            -(1 << 31) <= zero < 1 << 31
        ):
            return _by_blocks(_codes(tensor), scale, zero, tensor.sizes, tensor)
        case {"quantizer": (Global(), TensorRef() as scales, TensorRef() as zeros, int(axis))}:
            block = tuple(1 if at == axis else size for at, size in enumerate(tensor.sizes))
            return _by_blocks(_codes(tensor), scales, zeros, block, tensor)
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
            return _by_blocks(codes, scale, state.get("zero_point"), tuple(block))
        case _:
            raise UnknownLayout


def _by_blocks(
    codes: TensorRef,
    scale: TensorRef | float,
    zero: TensorRef | int | None,
    block: tuple[int, ...],
    whole: TensorRef | None = None,
) -> TensorRef:
    """Return codes less a zero point, times a scale, each for a block of the tensor.

    `whole` is the quantized tensor that the codes were taken from.
    """
    if not _is_plain(codes) or len(block) != len(codes.shape):
        raise UnknownLayout
    shape = codes.sizes
    pairs = list(zip(block, shape, strict=True))
    if not all(_is_count(own) and own and not size % own for own, size in pairs):
        raise UnknownLayout
    blocks = prod(size // own for own, size in pairs)
    tables = [one for one in (scale, zero) if one is not None and not isinstance(one, (float, int))]
    if not all(_is_plain(one) and one.numel == blocks for one in tables):
        raise UnknownLayout

    def numbers(start: int, stop: int, found: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        elements = _elements(codes, start, stop)
        if isinstance(scale, float):
            shifted = elements.int() - zero if isinstance(zero, int) else elements
            return shifted * torch.tensor(scale, dtype=torch.float32, device="cpu")
        factors, *less = (_spread(one, shape, block, start, stop) for one in found)
        wide = torch.float64 if scale.dtype == "float64" else torch.float32
        return (elements.float() - (less[0].float() if less else 0)) * factors.to(wide)

    others = [] if whole is None or whole.is_contiguous else [whole]
    return _computed(codes, shape, tables, numbers, others)


def _of_quanto(parts: Parts) -> TensorRef:
    """Return what `dequantize` of optimum-quanto makes: codes times their scale, less a shift.

    Packed codes are rows of groups, the first rows in the low bits. Their file states the shape of
    the weight only by a bias, which has an element for each row of a linear layer.
    """
    weight, scale, shift = parts.weight, parts["_scale"], parts.get("_shift")
    if not parts.name.endswith("._data._data"):
        block = _block(weight.sizes, scale.sizes)
        if weight.dtype == "uint8" or len(parts.beside.keys() - _OF_ACTIVATIONS) > 1 or not block:
            raise UnknownLayout
        return _by_blocks(weight, scale, None, block)
    groups, bias = scale.sizes[0] if scale.shape else 0, parts.state.get(parts.stem + "bias")
    bits = [one for one in (2, 4) if weight.sizes[:1] == (-(-groups * one // 8),)]
    if len(bits) != 1 or len(weight.shape) != 2 or shift is None or weight.dtype != "uint8":
        raise UnknownLayout
    if not {scale.sizes, shift.sizes} == {(groups, 1)} or scale.dtype != shift.dtype:
        raise UnknownLayout
    if not isinstance(bias, TensorRef) or len(bias.shape) != 1 or groups % max(bias.numel, 1):
        raise UnknownLayout("its shape is not known: it has no bias, which would tell its rows")
    size, shifts = weight.sizes[1], range(0, 8, bits[0])

    def numbers(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        first, last = start // size, -(-stop // size)
        own, less = (
            one[first:last].repeat_interleave(size)[start - first * size : stop - first * size]
            for one in tables
        )
        return own * _planes(weight, start, stop, shifts, bits[0]) - less

    shape = (bias.numel, groups * size // bias.numel)
    return _computed(weight, shape, (scale, shift), numbers)


def _of_mlx(parts: Parts) -> TensorRef:
    """Return what `dequantize` of MLX makes of its affine mode: codes times a scale plus a bias."""
    weight, scales, biases = parts.weight, parts["scales"], parts["biases"]
    stated = parts.config.entries
    own = stated.get(parts.stem.removesuffix("."))
    stated = {**stated, **own} if isinstance(own, Mapping) else stated
    bits, size = (parts.stated(key, stated) for key in ("bits", "group_size"))
    *outer, words = weight.sizes
    columns = words * 32 // bits
    if stated.get("mode", "affine") != "affine" or scales.sizes != biases.sizes:
        raise UnknownLayout
    if (
        scales.sizes != (*outer, columns // size)
        or columns % size
        or (columns % 8, words * 32 % bits) != (0, 0)
    ):
        parts.refuse_contradiction()

    def rows(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        codes = _unpacked(_rows(weight, prod(outer), first, last), bits)
        scale, bias = (
            one.view(prod(outer), -1)[first:last].repeat_interleave(size, 1) for one in tables
        )
        return scale * codes + bias

    return _by_rows(weight, (*outer, columns), (scales, biases), rows)


def _of_whole_bytes(parts: Parts) -> TensorRef:
    """Return codes less `weight_zero_point`, times `weight_scale`, as compressed-tensors does."""
    if "comfy_quant" in parts.beside:
        raise UnknownLayout
    scale = parts["weight_scale"]
    block = _block(parts.weight.sizes, scale.sizes)
    return _by_blocks(parts.weight, scale, parts.get("weight_zero_point"), block)


def _of_compressed(parts: Parts) -> TensorRef:
    """Return what compressed-tensors makes of `weight_packed`: of int32, or of pairs of fp4.

    Integers are streams of bits along a row, zero points along a column, both shifted to be
    positive. Of a bit width that does not divide 32 its versions write other layouts.
    """
    packed, scale = parts.weight, parts["weight_scale"]
    if packed.dtype == "uint8":
        return _of_pairs(parts, parts.get("weight_global_scale"))
    shape = tuple(parts.small("weight_shape"))
    rows, columns = shape if len(shape) == 2 else (0, 0)
    fitting = [
        one for one in (2, 4, 8) if packed.sizes == (rows, -(-columns * one // 32)) and columns
    ]
    if packed.dtype != "int32" or len(fitting) != 1:
        raise UnknownLayout("weight_shape does not fit weight_packed with 2, 4 or 8 bits")
    [bits], groups = fitting, scale.sizes[1] if len(scale.shape) == 2 else 1
    zero, order, offset = parts.get("weight_zero_point"), parts.get("weight_g_idx"), 1 << bits - 1
    if scale.sizes not in ((rows, groups), (1,)) or columns % max(groups, 1):
        raise UnknownLayout
    if zero is not None and zero.sizes != (-(-rows * bits // 32), groups):
        raise UnknownLayout
    if order is not None and order.sizes != (columns,):
        raise UnknownLayout
    others = [one for one in (zero, order) if one is not None]

    def prepared(tables: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        import torch

        scales, *more = tables
        zeros, index = torch.tensor([[offset]]), torch.arange(columns) // (columns // groups)
        if zero is not None:
            words = more.pop(0).view(-1, groups).t().contiguous()
            zeros = _unpacked(words.view(torch.uint8), bits)[:, :rows].t()
        if order is not None and bool((more[0] >= 0).all()):  # else it is not in use
            index = _checked_index(more[0], groups)
        return scales.view(-1, groups).expand(rows, -1), zeros.expand(rows, groups), index

    def numbers(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        scales, zeros, index = tables
        codes = _unpacked(_rows(packed, rows, first, last), bits)[:, :columns]
        less = zeros[first:last].index_select(1, index)
        return (codes - less) * scales[first:last].float().index_select(1, index)

    return _by_rows(packed, shape, (scale, *others), numbers, prepared=prepared)


def _of_pairs(parts: Parts, whole_scale: TensorRef | None) -> TensorRef:
    """Return pairs of fp4 numbers times the scale of their group, as compressed-tensors does.

    A scale is an fp8 number, divided by that of the whole weight, or the biased exponent of a power
    of two.
    """
    packed, scale = parts.weight, parts["weight_scale"]
    if whole_scale is None and scale.dtype != "uint8":
        raise UnknownLayout("weight_global_scale is missing next to it")
    if len(packed.shape) != 2 or len(scale.shape) != 2 or packed.dtype != "uint8":
        raise UnknownLayout
    (rows, half), size = packed.sizes, 16 if whole_scale is not None else 32
    if scale.sizes != (rows, 2 * half // size) or 2 * half % size:
        raise UnknownLayout
    if whole_scale is not None and (scale.dtype, whole_scale.sizes) != ("float8_e4m3fn", (1,)):
        raise UnknownLayout

    def numbers(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        scales = tables[0].view(rows, -1)[first:last]
        factors = _power(scales) if whole_scale is None else scales.float() / tables[1].float()
        return _fp4(_rows(packed, rows, first, last)) * factors.repeat_interleave(size, 1)

    tensors = (scale,) if whole_scale is None else (scale, whole_scale)
    return _by_rows(packed, (rows, 2 * half), tensors, numbers)


def _of_gptq(parts: Parts) -> TensorRef:
    """Return what `dequantize_weight` of gptqmodel makes: scale times codes less zero points.

    Codes are streams of bits along the columns of `qweight`, which are the rows of a linear layer,
    zero points along the rows of `qzeros`. The first version of the format states these less one.
    """
    weight, scales, qzeros = parts.weight, parts["scales"], parts["qzeros"]
    order, config = parts.get("g_idx"), parts.config
    if config.method.lower() != "gptq" or config.model_type in _TRANSPOSED:
        raise UnknownLayout(_needs(config, "gptq"))
    version = config.entries.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2") or config.entries.get("is_marlin_format"):
        raise UnknownLayout(f"checkpoint_format {printable(str(version))} is not known")
    if not len(weight.shape) == len(scales.shape) == len(qzeros.shape) == 2:
        raise UnknownLayout
    (words, rows), (groups, width) = weight.sizes, scales.sizes
    bits = parts.stated("bits")
    columns = words * 32 // bits if order is None else order.numel
    if order is not None and "dynamic" in config.entries:  # other bits for some layers
        bits = words * 32 // max(columns, 1)
    if bits not in (2, 3, 4, 8) or {weight.dtype, qzeros.dtype} != {"int32"}:
        raise UnknownLayout
    size = columns if config.entries.get("group_size") == -1 else parts.stated("group_size")
    fits = width == rows and qzeros.sizes == (groups, -(-rows * bits // 32))
    fits = fits and (order is not None or groups == -(-columns // size))
    if not fits or words != -(-columns * bits // 32) or (bits == 3 and (rows % 32 or words % 3)):
        parts.refuse_contradiction()
    turned = _turned(weight)

    def prepared(tables: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        import torch

        zeros = _unpacked(tables[1].view(groups, -1).view(torch.uint8), bits)[:, :rows]
        if version == "gptq":
            zeros = zeros + 1
            if bool((zeros >> bits).any()):
                raise NotRepresentable(
                    f"{printable(parts.name)!r}: a zero point is 0, which the first version of "
                    "GPTQ cannot state: libraries differ in what they read"
                )
        index = torch.arange(columns) // size if order is None else tables[2]
        return tables[0].view(groups, rows), zeros, _checked_index(index, groups)

    def numbers(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        scale, zeros, index = tables
        codes = _unpacked(_rows(turned, rows, first, last), bits)[:, :columns]
        less, factors = (one[:, first:last].index_select(0, index).t() for one in (zeros, scale))
        return (codes - less) * factors.float()

    return _by_rows(
        weight,
        (rows, columns),
        (scales, qzeros, *([] if order is None else [order])),
        numbers,
        prepared=prepared,
        checked_only=[weight],
    )


def _of_awq(parts: Parts) -> TensorRef:
    """Return what `dequantize_gemm` of autoawq makes: codes less zero points, times a scale.

    A word has eight rows of a linear layer at one column, in the order of `_AWQ_ORDER`. Files of
    GPTQ without `g_idx` have the same names, and other shapes.
    """
    weight, scales, qzeros = parts.weight, parts["scales"], parts["qzeros"]
    if parts.config.method.lower() != "awq" or len(weight.shape) != 2 or len(scales.shape) != 2:
        if scales.sizes[1:] == weight.sizes[1:]:
            return _of_gptq(parts)
        raise UnknownLayout(_needs(parts.config, "awq"))
    (columns, words), (groups, rows) = weight.sizes, scales.sizes
    version = parts.config.entries.get("version", "gemm")
    if {weight.dtype, qzeros.dtype} != {"int32"} or str(version).lower() != "gemm":
        raise UnknownLayout(f"version {printable(str(version))} is not known")
    size = parts.stated("group_size") if groups > 1 else columns
    if parts.config.entries.get("bits", 4) != 4 or groups * size != columns:
        parts.refuse_contradiction()
    if rows != words * 8 or qzeros.sizes != (groups, words):
        parts.refuse_contradiction()
    turned, shifts = _turned(weight), [4 * at for at in _AWQ_ORDER]

    def prepared(tables: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        import torch

        packed = tables[1].view(groups, words, 1) >> torch.tensor(shifts, dtype=torch.int32) & 15
        return tables[0].view(groups, rows), packed.view(groups, rows)

    def numbers(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        packed = _rows(turned, words, first // 8, last // 8).view(torch.int32)
        codes = torch.stack([packed >> shift & 15 for shift in shifts], 1).view(-1, columns)
        scale, zeros = (one[:, first:last].t().repeat_interleave(size, 1) for one in tables)
        return (codes - zeros) * scale.float()

    return _by_rows(
        weight,
        (rows, columns),
        (scales, qzeros),
        numbers,
        per=8,
        prepared=prepared,
        checked_only=[weight],
    )


def _needs(config: QuantizationConfig, method: str) -> str:
    """Return what is missing for a method whose layout only a configuration tells."""
    if config.model_type in _TRANSPOSED:
        return f"the layers of a {config.model_type} model may have their weights transposed"
    stated = f"{config.where} states {config.method}" if config.method else "no config.json"
    return f"its layout is that of quant_method {method}, but {stated}"


def _turned(weight: TensorRef) -> TensorRef:
    """Return a matrix with rows as columns, gathered as they are read."""
    rows, columns = weight.sizes
    view = replace(weight, shape=(columns, rows), stride=(1, columns))
    data = view.row_major
    if weight.storage is None:
        raise UnknownLayout
    storage = replace(weight.storage, data=data, nbytes=data.length, crc32=None)
    return replace(view, storage=storage, stride=(rows, 1), offset=0)


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


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_table(tensor: TensorRef | None, size: int, dtype: str = "float32") -> TypeGuard[TensorRef]:
    return tensor is not None and tensor.dtype == dtype and tensor.shape == (size,)


def _elements(tensor: TensorRef, start: int, stop: int) -> torch.Tensor:
    """Return the elements of a contiguous tensor from `start` up to `stop`."""
    import torch

    size = BY_NAME[tensor.dtype].itemsize
    raw = bytearray(tensor.data.read(start * size, (stop - start) * size))
    return torch.frombuffer(raw, dtype=torch_dtype(tensor.dtype))


def _block(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of the blocks of a tensor that have one scale each; () if it cannot be."""
    if prod(scales) == 1:
        return shape
    if len(scales) != len(shape) or not all(scales):
        return ()
    pairs = list(zip(shape, scales, strict=True))
    return (
        tuple(whole // count for whole, count in pairs) if not any(a % b for a, b in pairs) else ()
    )


def _spread(
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


def _unpacked(raw: torch.Tensor, bits: int) -> torch.Tensor:
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


def _fp4(raw: torch.Tensor) -> torch.Tensor:
    """Return the fp4 numbers (e2m1) in rows of bytes, two in each, the low bits first."""
    import torch

    values = torch.tensor(_FP4, device="cpu")
    pairs = torch.stack((raw & 15, raw >> 4), -1).int().view(len(raw), -1)
    return torch.index_select(values, 0, pairs.flatten()).view(pairs.shape)


def _power(exponents: torch.Tensor) -> torch.Tensor:
    """Return two to the power of exponents that have a bias of 127 (e8m0)."""
    import torch

    return torch.exp2(exponents.view(torch.uint8).float() - 127)


def _checked_index(index: torch.Tensor, count: int) -> torch.Tensor:
    """Return indexes of groups.

    Raises:
        CorruptFile: there is no such group.
    """
    if not bool(((index >= 0) & (index < count)).all()):
        raise CorruptFile(f"g_idx of a quantized weight leads to groups beyond its {count:,}")
    return index.long()


def _rows(tensor: TensorRef, count: int, first: int, last: int) -> torch.Tensor:
    """Return the bytes of the rows from `first` up to `last` of a contiguous tensor of `count`."""
    import torch

    size = tensor.nbytes // count
    raw = bytearray(tensor.data.read(first * size, (last - first) * size))
    return torch.frombuffer(raw, dtype=torch.uint8).view(last - first, size)


def _planes(
    weight: TensorRef, start: int, stop: int, shifts: Sequence[int], bits: int
) -> torch.Tensor:
    """Return codes, of which each element of `weight` has one for each shift.

    Those with the first shift are the first ones, in the order of the elements.
    """
    import torch

    count, found = weight.numel, []
    for plane in range(start // count, -(-stop // count)):
        first, last = max(start - plane * count, 0), min(stop - plane * count, count)
        found.append(_elements(weight, first, last) >> shifts[plane] & ((1 << bits) - 1))
    return torch.cat(found)


def _by_rows(
    weight: TensorRef,
    shape: tuple[int, ...],
    parts: Sequence[TensorRef],
    rows: Callable[[int, int, Sequence[torch.Tensor]], torch.Tensor],
    *,
    per: int = 1,
    prepared: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]] = tuple,
    checked_only: Sequence[TensorRef] = (),
) -> TensorRef:
    """Return a tensor as `_computed` does, of which `rows` makes whole rows, `per` at a time."""
    columns = shape[-1]
    unit = per * columns

    def numbers(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        return rows(start // columns, stop // columns, tables).flatten()

    step = -(-CHUNK // unit) * unit
    return _computed(weight, shape, parts, numbers, checked_only, step=step, prepared=prepared)


def _computed(
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
    if held is None:
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
            tables = tables or prepared([_elements(one, 0, one.numel) for one in parts])
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


_LAYOUTS: dict[str, Callable[[Parts], TensorRef]] = {
    "fp8 with scales": _by_scales,
    "bitsandbytes 4 bit": _four_bit,
    "bitsandbytes 8 bit": _eight_bit,
    "torchao": _of_torchao,
    "quanto": _of_quanto,
    "MLX": _of_mlx,
    "int8 with scales": _of_whole_bytes,
    "compressed-tensors": _of_compressed,
    "GPTQ": _of_gptq,
    "AWQ": _of_awq,
}
"""By the scheme (`core/quantizers.py`), what makes plain numbers of a weight and its companions."""
