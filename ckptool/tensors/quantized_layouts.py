"""The layouts of quantizers whose codes are plain tensors: each makes what its library makes.

A function takes the `Parts` of a weight and returns its numbers in float32, or raises
`UnknownLayout`. `fixtures/make/quantizers.py` names the version of each library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ckptool.core.model import TensorRef
from ckptool.core.quantization_config import QuantizationConfig
from ckptool.errors import NotRepresentable
from ckptool.tensors.materialize import torch_dtype
from ckptool.tensors.unpacking import (
    CONFIG_HINT,
    Parts,
    UnknownLayout,
    block_sizes,
    checked_index,
    compute_blocks,
    compute_rows,
    compute_tensor,
    decode_fp4,
    powers_of_two,
    read_planes,
    read_rows,
    rearranged,
    spread,
    unpack_bits,
)
from ckptool.words import printable

if TYPE_CHECKING:
    import torch

_OF_ACTIVATIONS = {"input_scale", "output_scale"}
_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Families of transformers with layers (`Conv1D`) that keep their weights as [in, out]."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word of AWQ, counted from the lowest, are those of each of its rows."""
_HQQ_SHIFTS: dict[str, tuple[int, Sequence[int]]] = {
    "8bit_u8": (8, (0,)),
    "4bit_u8": (4, (4, 0)),
    "3bit_32": (3, range(27, -1, -3)),
    "2bit_u8": (2, (6, 4, 2, 0)),
    "1bit_u8": (1, range(7, -1, -1)),
}
"""The bits of a code, and where those of each tenth, half, ... of the rows are, by `packing`."""
_HQQ_TYPES = ("float16", "bfloat16", "float32")


def of_quanto(parts: Parts) -> TensorRef:
    """Return what `dequantize` of optimum-quanto makes: codes times their scale, less a shift.

    Packed codes are rows of groups, the first rows in the low bits. Their file states the shape of
    the weight only by a bias, which has an element for each row of a linear layer.
    """
    weight, scale, shift = parts.weight, parts["_scale"], parts.get("_shift")
    if not parts.name.endswith("._data._data"):
        block = block_sizes(weight.sizes, scale.sizes)
        if weight.dtype == "uint8" or len(parts.beside.keys() - _OF_ACTIVATIONS) > 1 or not block:
            raise UnknownLayout
        return compute_blocks(weight, scale, None, block)
    groups, bias = scale.sizes[0] if scale.shape else 0, parts.state.get(parts.stem + "bias")
    bits = [one for one in (2, 4) if weight.sizes[:1] == (-(-groups * one // 8),)]
    if len(bits) != 1 or len(weight.shape) != 2 or shift is None or weight.dtype != "uint8":
        raise UnknownLayout
    if not {scale.sizes, shift.sizes} == {(groups, 1)} or scale.dtype != shift.dtype:
        raise UnknownLayout
    rows = bias.numel if isinstance(bias, TensorRef) and len(bias.shape) == 1 else 0
    if not rows or groups % rows:
        raise UnknownLayout("its shape is not known: it has no bias, which would tell its rows")
    size, shifts = weight.sizes[1], range(0, 8, bits[0])

    def numbers(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        first, last = start // size, -(-stop // size)
        own, less = (
            one[first:last].repeat_interleave(size)[start - first * size : stop - first * size]
            for one in tables
        )
        return own * read_planes(weight, start, stop, shifts, bits[0]) - less

    return compute_tensor(weight, (rows, groups * size // rows), (scale, shift), numbers)


def of_mlx(parts: Parts) -> TensorRef:
    """Return what `dequantize` of MLX makes of its affine mode: codes times a scale plus a bias."""
    weight, scales, biases = parts.weight, parts["scales"], parts["biases"]
    stated = parts.config.entries
    own = stated.get(parts.stem.removesuffix("."))
    stated = {**stated, **own} if isinstance(own, Mapping) else stated
    bits, size = (parts.stated(key, stated) for key in ("bits", "group_size"))
    for layer, other in () if own else stated.items():  # shapes tell only bits times group size
        match other:
            case {"bits": int(one), "group_size": int(of)} if (
                one * of == bits * size and one != bits and f"{layer}.scales" not in parts.state
            ):
                raise UnknownLayout(
                    f"config.json has {one} bits for {layer}, which may be this layer"
                )
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
        codes = unpack_bits(read_rows(weight, prod(outer), first, last), bits)
        scale, bias = (
            one.view(prod(outer), -1)[first:last].repeat_interleave(size, 1) for one in tables
        )
        return scale * codes + bias

    return compute_rows(weight, (*outer, columns), (scales, biases), rows)


def of_whole_bytes(parts: Parts) -> TensorRef:
    """Return codes less `weight_zero_point`, times `weight_scale`, as compressed-tensors does."""
    if "comfy_quant" in parts.beside:
        raise UnknownLayout
    scale = parts["weight_scale"]
    block = block_sizes(parts.weight.sizes, scale.sizes)
    return compute_blocks(parts.weight, scale, parts.get("weight_zero_point"), block)


def of_compressed_tensors(parts: Parts) -> TensorRef:
    """Return what compressed-tensors makes of `weight_packed`: of int32, or of pairs of fp4.

    Integers are streams of bits along a row, zero points along a column, both shifted to be
    positive. Of a bit width that does not divide 32 its versions write other layouts.
    """
    packed, scale = parts.weight, parts["weight_scale"]
    whole = parts.get("weight_global_scale")
    if packed.dtype == "uint8" and scale.dtype == "uint8":  # MXFP4
        return _of_pairs(parts, (scale,), 32, powers_of_two)
    if packed.dtype == "uint8":  # NVFP4
        if whole is None:
            raise UnknownLayout("weight_global_scale is missing next to it")
        if whole.sizes != (1,):
            raise UnknownLayout
        return _of_pairs(parts, (scale, whole), 16, lambda one, other: one.float() / other.float())
    shape = tuple(parts.small("weight_shape"))
    rows, columns = shape if len(shape) == 2 else (0, 0)
    fitting = [
        one for one in (2, 4, 8) if packed.sizes == (rows, -(-columns * one // 32)) and columns
    ]
    if packed.dtype != "int32" or len(fitting) != 1:
        raise UnknownLayout("weight_shape does not fit weight_packed with 2, 4 or 8 bits")
    [bits], groups = fitting, scale.sizes[1] if len(scale.shape) == 2 else 1
    zero, order, offset = parts.get("weight_zero_point"), parts.get("weight_g_idx"), 1 << bits - 1
    if not any(
        weights.get("num_bits", bits) == bits
        and weights.get("type", "int") == "int"
        and weights.get("group_size") in (None, -1, columns // max(groups, 1))
        and (zero is not None or weights.get("symmetric", True))
        and (order is not None or weights.get("actorder") not in ("group", "dynamic"))
        for weights in _stated_groups(parts.config)
    ):
        parts.refuse_contradiction()
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
        zeros, index = (
            torch.tensor([[offset]], device="cpu"),
            torch.arange(columns, device="cpu") // (columns // groups),
        )
        if zero is not None:
            words = more.pop(0).view(-1, groups).t().contiguous()
            zeros = unpack_bits(words.view(torch.uint8), bits)[:, :rows].t()
        if order is not None and bool((more[0] >= 0).all()):  # else it is not in use
            index = checked_index(more[0], groups)
        return scales.view(-1, groups).expand(rows, -1), zeros.expand(rows, groups), index

    def numbers(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        scales, zeros, index = tables
        codes = unpack_bits(read_rows(packed, rows, first, last), bits)[:, :columns]
        less = zeros[first:last].index_select(1, index)
        return (codes - less) * scales[first:last].float().index_select(1, index)

    return compute_rows(packed, shape, (scale, *others), numbers, prepared=prepared)


def _stated_groups(config: QuantizationConfig) -> list[Mapping[str, Any]]:
    """Return how each group of layers was quantized, as compressed-tensors states it."""
    match config.entries:
        case {"config_groups": {**groups}} if config.method.lower() == "compressed-tensors":
            found = (one.get("weights") for one in groups.values() if isinstance(one, Mapping))
            return [one for one in found if isinstance(one, Mapping)]
    return [{}]


def _of_pairs(
    parts: Parts,
    scales: Sequence[TensorRef],
    size: int,
    factors_of: Callable[..., torch.Tensor],
) -> TensorRef:
    """Return pairs of fp4 numbers, the first one in the low bits, times those of their group.

    The first of `scales` are those of groups of `size`; `factors_of` makes numbers of them all.
    """
    packed = parts.weight
    if len(packed.shape) != 2 or packed.dtype != "uint8" or packed.sizes[1] * 2 % size:
        raise UnknownLayout
    rows, half = packed.sizes
    if scales[0].sizes != (rows, 2 * half // size):
        raise UnknownLayout
    if scales[0].dtype != ("uint8" if len(scales) == 1 else "float8_e4m3fn"):
        raise UnknownLayout

    def numbers(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        factors = factors_of(tables[0].view(rows, -1)[first:last], *tables[1:])
        pairs = unpack_bits(read_rows(packed, rows, first, last), 4)
        return decode_fp4(pairs) * factors.repeat_interleave(size, 1)

    return compute_rows(packed, (rows, 2 * half), scales, numbers)


def of_gptq(parts: Parts) -> TensorRef:
    """Return what `dequantize_weight` of gptqmodel makes: scale times codes less zero points.

    Codes are streams of bits along the columns of `qweight`, which are the rows of a linear layer,
    zero points along the rows of `qzeros`. The first version of the format states these less one.
    """
    weight, scales, qzeros = parts.weight, parts["scales"], parts["qzeros"]
    order, config = parts.get("g_idx"), parts.config
    if config.method.lower() != "gptq" or config.model_type in _TRANSPOSED:
        raise _unstated(config, "gptq")
    version = config.entries.get("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2") or config.entries.get("is_marlin_format"):
        raise UnknownLayout(f"checkpoint_format {printable(str(version))} is not known")
    if order is None and config.entries.get("desc_act"):
        raise UnknownLayout(f"g_idx is missing, although {config.where} states desc_act")
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
    turned = rearranged(weight, (rows, words), (1, rows))

    def prepared(tables: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        import torch

        zeros = unpack_bits(tables[1].view(groups, -1).view(torch.uint8), bits)[:, :rows]
        if version == "gptq":
            zeros = zeros + 1
            if bool((zeros >> bits).any()):
                raise NotRepresentable(
                    f"{printable(parts.name)!r}: a zero point is 0, which the first version of "
                    "GPTQ cannot state: libraries differ in what they read"
                )
        index = torch.arange(columns, device="cpu") // size
        own = index if order is None else checked_index(tables[2], groups)
        if config.entries.get("desc_act") is False and not torch.equal(own, index):
            raise NotRepresentable(
                f"{printable(parts.name)!r}: its g_idx has columns in another order than they are "
                f"in, but {config.where} states desc_act false: libraries differ in what they read"
            )
        return tables[0].view(groups, rows), zeros, own

    def numbers(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        scale, zeros, index = tables
        codes = unpack_bits(read_rows(turned, rows, first, last), bits)[:, :columns]
        less, factors = (one[:, first:last].index_select(0, index).t() for one in (zeros, scale))
        return (codes - less) * factors.float()

    return compute_rows(
        weight,
        (rows, columns),
        (scales, qzeros, *([] if order is None else [order])),
        numbers,
        prepared=prepared,
        checked_only=[weight],
    )


def of_awq(parts: Parts) -> TensorRef:
    """Return what `dequantize_gemm` of autoawq makes: codes less zero points, times a scale.

    A word has eight rows of a linear layer at one column, in the order of `_AWQ_ORDER`. Files of
    GPTQ without `g_idx` have the same names, and other shapes.
    """
    weight, scales, qzeros = parts.weight, parts["scales"], parts["qzeros"]
    if parts.config.method.lower() != "awq" or len(weight.shape) != 2 or len(scales.shape) != 2:
        if scales.sizes[1:] == weight.sizes[1:]:
            return of_gptq(parts)
        raise _unstated(parts.config, "awq")
    (columns, words), (groups, rows) = weight.sizes, scales.sizes
    version = parts.config.entries.get("version", "gemm")
    if {weight.dtype, qzeros.dtype} != {"int32"} or str(version).lower() != "gemm":
        raise UnknownLayout(f"version {printable(str(version))} is not known")
    size = parts.stated("group_size") if groups > 1 else columns
    if parts.config.entries.get("bits", 4) != 4 or groups * size != columns:
        parts.refuse_contradiction()
    if rows != words * 8 or qzeros.sizes != (groups, words):
        parts.refuse_contradiction()
    turned = rearranged(weight, (words, columns), (1, words))
    shifts = [4 * at for at in _AWQ_ORDER]

    def prepared(tables: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        import torch

        packed = (
            tables[1].view(groups, words, 1)
            >> torch.tensor(shifts, dtype=torch.int32, device="cpu")
            & 15
        )
        return tables[0].view(groups, rows), packed.view(groups, rows)

    def numbers(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        packed = read_rows(turned, words, first // 8, last // 8).view(torch.int32)
        codes = torch.stack([packed >> shift & 15 for shift in shifts], 1).view(-1, columns)
        scale, zeros = (one[:, first:last].t().repeat_interleave(size, 1) for one in tables)
        return (codes - zeros) * scale.float()

    return compute_rows(
        weight,
        (rows, columns),
        (scales, qzeros),
        numbers,
        per=8,
        prepared=prepared,
        checked_only=[weight],
    )


def of_nvfp4(parts: Parts) -> TensorRef:
    """Return what NVIDIA's ModelOpt makes: pairs of fp4 numbers times two scales.

    ComfyUI has the same names, and its scales in tiles of a GPU.
    """
    scale, whole = parts["weight_scale"], parts["weight_scale_2"]
    if "comfy_quant" in parts.beside or whole.numel != 1:
        raise UnknownLayout
    return _of_pairs(parts, (scale, whole), 16, lambda one, other: one.float() * other.float())


def of_mxfp4(parts: Parts) -> TensorRef:
    """Return what `convert_moe_packed_tensors` of transformers makes of blocks of pairs of fp4.

    Blocks [experts, rows, groups, 16] and the exponents of groups become [experts, columns, rows].
    """
    blocks, [scales] = parts.weight, parts.beside.values()
    if parts.config.method.lower() != "mxfp4":
        raise _unstated(parts.config, "mxfp4")
    if len(blocks.shape) != 4 or blocks.sizes != (*scales.sizes, 16) or scales.dtype != "uint8":
        raise UnknownLayout
    experts, rows, groups, _ = blocks.sizes
    half = groups * 16
    turned = rearranged(blocks, (experts, half, rows), (rows * half, 1, half))

    def prepared(tables: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        exponents = tables[0].view(experts, rows, groups).transpose(1, 2)
        return (exponents.reshape(experts * groups, rows),)

    def numbers(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        pairs = read_rows(turned, experts * half, first // 2, last // 2)
        codes = torch.stack((pairs & 15, pairs >> 4), 1).view(-1, rows)
        index = torch.arange(first, last, device="cpu") // 32
        return decode_fp4(codes) * powers_of_two(tables[0].index_select(0, index))

    return compute_rows(
        blocks,
        (experts, 2 * half, rows),
        (scales,),
        numbers,
        per=2,
        prepared=prepared,
        checked_only=[blocks],
    )


def of_hqq(parts: Parts) -> TensorRef:
    """Return what `Quantizer.dequantize` of HQQ makes: codes less zeros, times scales.

    Of packed codes the first rows are in the highest bits. Zeros and scales are those of rows, or
    of columns, of the matrix of groups, which `shape` makes the weight of.
    """
    weight, zero, scale = parts.weight, parts["zero"], parts["scale"]
    shape, packing = tuple(parts.small("shape")), parts.text("packing")
    dtype = parts.text("compute_dtype").removeprefix("torch.")
    if any(parts.small(one) != [0] for one in ("view_as_float", "quant_scale", "quant_zero")):
        raise UnknownLayout
    if packing not in _HQQ_SHIFTS or len(weight.shape) != 2 or dtype not in _HQQ_TYPES:
        raise UnknownLayout(f"packing {printable(packing)} as {printable(dtype)} is not known")
    bits, shifts = _HQQ_SHIFTS[packing]
    held, columns = weight.sizes
    rows, rest = divmod(prod(shape), max(columns, 1))
    if rest or weight.dtype != ("int32" if bits == 3 else "uint8") or zero.sizes != scale.sizes:
        raise UnknownLayout
    block = block_sizes((rows, columns), scale.sizes)
    if not block or not 0 <= held * len(shifts) - rows < len(shifts) or not shape:
        raise UnknownLayout

    def numbers(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        codes = read_planes(weight, start, stop, shifts, bits).to(torch_dtype(dtype))
        less, factors = (spread(one, (rows, columns), block, start, stop) for one in tables)
        return (codes - less) * factors

    return compute_tensor(weight, shape, (zero, scale), numbers)


def _unstated(config: QuantizationConfig, method: str) -> UnknownLayout:
    """Return the error for weights whose layout only a configuration with a method tells."""
    if config.model_type in _TRANSPOSED:
        fact = f"the layers of a {config.model_type} model may have their weights transposed"
        return UnknownLayout(fact)
    stated = f"{config.where} states {config.method}" if config.method else "no config.json does"
    fact = f"its layout is known if a config.json states quant_method {method}, but {stated}"
    return UnknownLayout(fact, hint=None if config.method else CONFIG_HINT)
