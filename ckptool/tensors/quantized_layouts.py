"""The layouts of quantizers with codes in plain tensors; each result is that of the library.

A function takes the `Parts` of a weight and returns its numbers in float32, or raises
`UnknownLayout`. `fixtures/make/quantizers.py` has the version of each library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ckptool.core.model import TensorRef
from ckptool.core.quantization_config import (
    SEPARATE_CONFIGS,
    VERSION_KEYS,
    QuantizationConfig,
    find_entry,
)
from ckptool.errors import NotRepresentable
from ckptool.tensors.storages import get_torch_dtype
from ckptool.tensors.unpacking import (
    CONFIG_HINT,
    Parts,
    UnknownLayout,
    block_sizes,
    check_group_index,
    compute_blocks,
    compute_rows,
    compute_tensor,
    decode_fp4,
    expand_blocks,
    powers_of_two,
    read_planes,
    read_rows,
    rearrange,
    unpack_bits,
)
from ckptool.words import printable

if TYPE_CHECKING:
    import torch

_ACTIVATION_SCALES = {"input_scale", "output_scale"}
_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Families of transformers with layers (`Conv1D`) that keep their weights as [in, out]."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of the eight rows in a word of AWQ, its group of four bits, counted from the lowest."""
_HQQ_SHIFTS: dict[str, tuple[int, Sequence[int]]] = {
    "8bit_u8": (8, (0,)),
    "4bit_u8": (4, (4, 0)),
    "3bit_32": (3, range(27, -1, -3)),
    "2bit_u8": (2, (6, 4, 2, 0)),
    "1bit_u8": (1, range(7, -1, -1)),
}
"""By `packing`: the bits of a code, and the shift of each plane of codes (see `read_planes`)."""
_MXFP4_GROUP = 32
"""Columns that share an exponent."""
_MLX_BITS = (2, 3, 4, 5, 6, 8)
_HQQ_TYPES = ("float16", "bfloat16", "float32")
_COMPRESSED_FORMATS = {
    "dense", "float-quantized", "int-quantized", "mixed-precision", "mxfp4-pack-quantized",
    "naive-quantized", "nvfp4-pack-quantized", "pack-quantized",
}  # fmt: skip
"""Each `format` of compressed-tensors with a layout that is known here."""


def dequantize_quanto(parts: Parts) -> TensorRef:
    """Dequantize as optimum-quanto does: codes times their scale, minus a shift.

    Codes of 8 bits have no shift. Smaller ones are packed.
    """
    if parts.name.endswith("._data._data"):
        return _dequantize_packed_quanto(parts)
    weight, scale = parts.weight, parts.require_floats("_scale")
    block = block_sizes(weight.sizes, scale.sizes)
    weight_companions = parts.companions.keys() - _ACTIVATION_SCALES
    has_other_companions = len(weight_companions) > 1  # the scale is one
    if weight.dtype == "uint8" or has_other_companions or not block:
        raise UnknownLayout
    return compute_blocks(weight, scale, None, block)


def _dequantize_packed_quanto(parts: Parts) -> TensorRef:
    """Dequantize the codes of 2 or 4 bits of optimum-quanto: a matrix with a group in each row.

    The first rows are in the low bits. Only a bias shows the shape of the weight: it has an element
    for each row of a linear layer.
    """
    weight, scale, shift = parts.weight, parts.require_floats("_scale"), parts.get("_shift")
    groups = scale.sizes[0] if scale.shape else 0
    bias = parts.state.get(parts.stem + "bias")
    # Several rows of codes share one row of bytes; the last of these may be filled up.
    possible_bits = [bits for bits in (2, 4) if weight.sizes[:1] == (-(-groups * bits // 8),)]
    if len(possible_bits) != 1 or len(weight.shape) != 2 or weight.dtype != "uint8":
        raise UnknownLayout
    if shift is None or shift.dtype != scale.dtype:
        raise UnknownLayout
    if not scale.sizes == shift.sizes == (groups, 1):
        raise UnknownLayout
    rows = bias.numel if isinstance(bias, TensorRef) and len(bias.shape) == 1 else 0
    if not rows or groups % rows:
        raise UnknownLayout("its shape is not known: it has no bias, which would show its rows")
    [bits], group_size = possible_bits, weight.sizes[1]
    shifts = range(0, 8, bits)

    def compute_elements(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the plain numbers of a range of elements."""
        first_group, end_group = start // group_size, -(-stop // group_size)
        skipped = start - first_group * group_size  # elements of the first group before `start`
        factors, offsets = (
            table[first_group:end_group].repeat_interleave(group_size)[skipped:][: stop - start]
            for table in tables
        )
        return factors * read_planes(weight, start, stop, shifts, bits) - offsets

    shape = (rows, groups * group_size // rows)
    return compute_tensor(weight, shape, (scale, shift), compute_elements)


def dequantize_mlx(parts: Parts) -> TensorRef:
    """Dequantize as MLX does in its affine mode: codes times a scale plus a bias.

    The configuration has `bits`, `group_size` and `mode` of all layers, and entries for layers with
    others.
    """
    weight = parts.weight
    scales, biases = parts.require_floats("scales"), parts.require_floats("biases")
    settings = parts.config.entries
    settings_of_layer = settings.get(parts.stem.removesuffix("."))
    if isinstance(settings_of_layer, Mapping):
        settings = {**settings, **settings_of_layer}
    bits, group_size = (parts.require_size(key, settings) for key in ("bits", "group_size"))
    if not settings_of_layer:  # its entry may have another name
        _refuse_doubtful_bits(parts, bits, group_size)
    if bits not in _MLX_BITS or not weight.shape:
        raise UnknownLayout(f"{bits} bits are not supported")
    *outer_shape, words = weight.sizes
    columns, rows = words * 32 // bits, prod(outer_shape)
    if settings.get("mode", "affine") != "affine" or scales.sizes != biases.sizes:
        raise UnknownLayout
    has_whole_words = columns % 8 == 0 and words * 32 % bits == 0
    has_whole_groups = columns % group_size == 0
    if scales.sizes != (*outer_shape, columns // group_size) or not has_whole_groups:
        parts.refuse_contradiction()
    if not has_whole_words:
        parts.refuse_contradiction()

    def compute_row_range(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the plain numbers of a range of rows."""
        codes = unpack_bits(read_rows(weight, rows, first, last), bits)
        scale, bias = (
            table.view(rows, -1)[first:last].repeat_interleave(group_size, 1) for table in tables
        )
        return scale * codes + bias

    return compute_rows(weight, (*outer_shape, columns), (scales, biases), compute_row_range)


def _refuse_doubtful_bits(parts: Parts, bits: int, group_size: int) -> None:
    """Refuse a weight that may be a layer with other bits in the configuration of MLX.

    This is so if the file has no layer of the stated name (its keys were renamed), and the shapes
    are the same: they show only bits times group size.

    Raises:
        UnknownLayout: if there is such a layer in the configuration.
    """
    for layer, entries in parts.config.entries.items():
        match entries:
            case {"bits": int(other_bits), "group_size": int(other_size)} if (
                other_bits * other_size == bits * group_size
                and other_bits != bits
                and f"{layer}.scales" not in parts.state
            ):
                raise UnknownLayout(
                    f"config.json has {other_bits} bits for {layer}, which may be this layer"
                )


def dequantize_int8(parts: Parts) -> TensorRef:
    """Dequantize int8 as compressed-tensors does: codes minus a zero point, times a scale.

    ComfyUI uses the same keys for other layouts.
    """
    if "comfy_quant" in parts.companions:
        raise UnknownLayout
    refuse_entries(parts, "weight_g_idx")  # columns in groups of another order
    scale = parts["weight_scale"]
    refuse_other_scheme(parts, parts.weight.sizes, scale.sizes, 8, "int")
    block = block_sizes(parts.weight.sizes, scale.sizes)
    return compute_blocks(parts.weight, scale, parts.get("weight_zero_point"), block)


def dequantize_compressed_tensors(parts: Parts) -> TensorRef:
    """Dequantize `weight_packed` as compressed-tensors does: packed integers, or pairs of fp4."""
    packed, scale = parts.weight, parts["weight_scale"]
    if packed.dtype != "uint8":
        return _dequantize_packed_integers(parts)
    if len(packed.shape) == 2:
        rows, pairs = packed.sizes
        refuse_other_scheme(parts, (rows, pairs * 2), scale.sizes, 4, "float")
    if scale.dtype == "uint8":  # MXFP4, with groups of 32
        return _multiply_fp4(parts, (scale,), 32, powers_of_two)
    global_scale = parts["weight_global_scale"]  # NVFP4, with groups of 16
    if global_scale.sizes != (1,):
        raise UnknownLayout
    return _multiply_fp4(
        parts, (scale, global_scale), 16, lambda scales, divisor: scales.float() / divisor.float()
    )


def _dequantize_packed_integers(parts: Parts) -> TensorRef:
    """Dequantize packed integers of compressed-tensors: codes minus zero points, times scales.

    Codes are bit streams along a row, zero points along a column; both are stored with an offset
    that makes them positive. For a bit width that does not divide 32 the versions of the library
    write different layouts, so only 2, 4 and 8 bits are supported.
    """
    packed, scale = parts.weight, parts["weight_scale"]
    shape = tuple(parts.read_integers("weight_shape"))
    rows, columns = shape if len(shape) == 2 else (0, 0)
    possible_bits = [
        bits for bits in (2, 4, 8) if packed.sizes == (rows, -(-columns * bits // 32)) and columns
    ]
    if packed.dtype != "int32" or len(possible_bits) != 1:
        raise UnknownLayout("weight_shape does not fit weight_packed with 2, 4 or 8 bits")
    [bits], groups = possible_bits, scale.sizes[1] if len(scale.shape) == 2 else 1
    scale = parts.require_floats("weight_scale")
    zero, group_index = parts.get("weight_zero_point"), parts.require_indexes("weight_g_idx")
    refuse_other_scheme(parts, (rows, columns), scale.sizes, bits, "int")
    if scale.sizes not in ((rows, groups), (1,)) or columns % max(groups, 1):
        raise UnknownLayout
    packed_zero_shape = (-(-rows * bits // 32), groups)
    if zero is not None and (zero.dtype != "int32" or zero.sizes != packed_zero_shape):
        raise UnknownLayout
    if group_index is not None and group_index.sizes != (columns,):
        raise UnknownLayout
    companions = [tensor for tensor in (scale, zero, group_index) if tensor is not None]

    def prepare(loaded: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the scales, the zero points and the group of each column."""
        import torch

        scales, *optional = loaded
        # Without zero points in the file, half the range of the codes is the zero point of all.
        zeros = torch.tensor([[1 << bits - 1]], device="cpu")
        if zero is not None:
            # A word has the zero points of several rows in one group.
            words = optional.pop(0).view(-1, groups).t().contiguous()
            zeros = unpack_bits(words.view(torch.uint8), bits)[:, :rows].t()
        group_of_column = torch.arange(columns, device="cpu") // (columns // groups)
        if group_index is not None:
            [stored_index] = optional
            if bool((stored_index >= 0).all()):  # the library writes -1 if it is not in use
                group_of_column = check_group_index(parts, stored_index, groups)
        return scales.view(-1, groups).expand(rows, -1), zeros.expand(rows, groups), group_of_column

    def compute_row_range(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the plain numbers of a range of rows."""
        scales, zeros, group_of_column = tables
        codes = unpack_bits(read_rows(packed, rows, first, last), bits)[:, :columns]
        offsets = zeros[first:last].index_select(1, group_of_column)
        factors = scales[first:last].float().index_select(1, group_of_column)
        return (codes - offsets) * factors

    return compute_rows(packed, (rows, columns), companions, compute_row_range, prepare=prepare)


def refuse_other_scheme(
    parts: Parts, shape: tuple[int, ...], scales: tuple[int, ...], bits: int, number: str
) -> None:
    """Refuse a weight that contradicts the configuration of compressed-tensors next to it.

    `shape` is that of the plain weight, `scales` that of its scales, and `number` `int` or `float`.
    A configuration has one scheme or several, each for some layers; one that fits is sufficient.
    Without a configuration of compressed-tensors nothing is refused.

    Raises:
        UnknownLayout: if no scheme fits, or the configuration has an unknown format.
    """
    match parts.config.entries:
        case {"config_groups": {**groups}} if parts.config.method.lower() == "compressed-tensors":
            schemes = [group for group in groups.values() if isinstance(group, Mapping)]
        case _:
            return
    for name in (entries.get("format") for entries in (parts.config.entries, *schemes)):
        if name is not None and not (isinstance(name, str) and name in _COMPRESSED_FORMATS):
            raise UnknownLayout(f"format {printable(str(name))} is not known")
    if parts.config.entries.get("transform_config"):  # rotates the weights before quantization
        raise UnknownLayout(f"{parts.config.where} states a transform_config")
    has_zero_point = "weight_zero_point" in parts.companions
    has_group_index = "weight_g_idx" in parts.companions
    for weights in (scheme.get("weights") for scheme in schemes):
        if (
            isinstance(weights, Mapping)
            and weights.get("num_bits", bits) == bits
            and weights.get("type", number) == number
            and (has_zero_point or weights.get("symmetric", True))
            # Only these orders store the group of each column.
            and (has_group_index or weights.get("actorder") not in ("group", "dynamic"))
            and _fits_strategy(weights, shape, scales)
        ):
            return
    parts.refuse_contradiction()


def refuse_entries(parts: Parts, *endings: str) -> None:
    """Refuse a weight next to entries that change its numbers in a way that is not supported.

    Raises:
        UnknownLayout: if one of the entries exists.
    """
    for ending in endings:
        if f"{parts.stem}{ending}" in parts.state:
            raise UnknownLayout(f"{ending} next to it is not supported")


def _fits_strategy(
    weights: Mapping[str, Any], shape: tuple[int, ...], scales: tuple[int, ...]
) -> bool:
    """Return True if the `strategy` of compressed-tensors gives a weight scales of this shape.

    `weights` is the configuration of the weights in a scheme, `shape` the shape of the plain
    weight. Any shape fits a strategy that is not known.
    """
    match weights:
        case {"strategy": "tensor"}:
            return prod(scales) == 1
        case {"strategy": "channel"}:
            # One for each output channel (alone, or before axes of size 1, as of a convolution), or
            # one for each row of a stack of matrices.
            one_per_row = (shape[:1], (*shape[:1], *[1] * (len(shape) - 1)), (*shape[:-1], 1))
            return scales in one_per_row
        case {"strategy": "block", "block_structure": [*block]} if len(block) == len(shape):
            pairs = zip(shape, block, strict=True)  # the last block of an axis may be incomplete
            return scales == tuple(-(-size // length) for size, length in pairs)
        case {"group_size": int(group_size)} if group_size > 0:
            return scales == (*shape[:-1], shape[-1] // group_size)  # groups are complete
        case _:
            return True


def _multiply_fp4(
    parts: Parts,
    scales: Sequence[TensorRef],
    group_size: int,
    compute_factors: Callable[..., torch.Tensor],
) -> TensorRef:
    """Return pairs of fp4 numbers, the first one in the low bits, times the factor of their group.

    `scales` is one tensor with exponents (MXFP4), or one with fp8 scales and one with a scale of
    the whole weight (NVFP4). The first has an element for each group of `group_size` columns.
    `compute_factors` takes the loaded tensors and returns the factors of the groups.
    """
    packed, (scales_of_groups, *scale_of_weight) = parts.weight, scales
    if len(packed.shape) != 2 or packed.dtype != "uint8" or packed.sizes[1] * 2 % group_size:
        raise UnknownLayout
    rows, columns = packed.sizes[0], packed.sizes[1] * 2
    if scales_of_groups.sizes != (rows, columns // group_size):
        raise UnknownLayout
    if scales_of_groups.dtype != ("float8_e4m3fn" if scale_of_weight else "uint8"):
        raise UnknownLayout

    def compute_row_range(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the plain numbers of a range of rows."""
        loaded_scales, *loaded_scale_of_weight = tables
        factors = compute_factors(loaded_scales.view(rows, -1)[first:last], *loaded_scale_of_weight)
        codes = unpack_bits(read_rows(packed, rows, first, last), 4)
        return decode_fp4(codes) * factors.repeat_interleave(group_size, 1)

    return compute_rows(packed, (rows, columns), scales, compute_row_range)


def dequantize_gptq(parts: Parts) -> TensorRef:
    """Dequantize as gptqmodel does: codes minus zero points, times scales.

    Codes are bit streams along the columns of `qweight`, which are the rows of a linear layer; zero
    points along the rows of `qzeros`. The first version of the format stores zero points minus one.
    """
    weight, scales, qzeros = parts.weight, parts.require_floats("scales"), parts["qzeros"]
    group_index, config = parts.require_indexes("g_idx"), parts.config
    version = _read_gptq_version(config)
    bits, columns, group_size = _check_gptq_sizes(parts, scales, qzeros, group_index)
    (words, rows), groups = weight.sizes, scales.sizes[0]
    transposed = rearrange(weight, (rows, words), (1, rows))

    def prepare(loaded: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the scales, the zero points and the group of each column.

        Raises:
            NotRepresentable: if libraries differ in how they read a zero point or `g_idx`.
        """
        import torch

        loaded_scales, packed_zeros, *optional = loaded
        unpacked = unpack_bits(packed_zeros.view(groups, -1).view(torch.uint8), bits)
        zeros = unpacked[:, :rows]  # without the padding of the last integer
        if version == "gptq":
            zeros = zeros + 1
            if bool((zeros >> bits).any()):  # 0 - 1 was stored as the largest code
                raise NotRepresentable(
                    f"{printable(parts.name)!r}: a zero point is 0, which the first version of "
                    "GPTQ cannot state: libraries differ in what they read",
                    file=parts.file,
                )
        group_of_column = in_order = torch.arange(columns, device="cpu") // group_size
        if group_index is not None:
            [stored_index] = optional
            group_of_column = check_group_index(parts, stored_index, groups)
        if config.entries.get("desc_act") is False and not torch.equal(group_of_column, in_order):
            raise NotRepresentable(
                f"{printable(parts.name)!r}: its g_idx does not list the columns in the order "
                "that they are "
                f"in, but {config.where} states desc_act false: libraries differ in what they read",
                file=parts.file,
            )
        return loaded_scales.view(groups, rows), zeros, group_of_column

    def compute_row_range(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the plain numbers of a range of rows."""
        scale, zeros, group_of_column = tables
        codes = unpack_bits(read_rows(transposed, rows, first, last), bits)[:, :columns]
        offsets, factors = (
            table[:, first:last].index_select(0, group_of_column).t() for table in (zeros, scale)
        )
        return (codes - offsets) * factors.float()

    companions = [scales, qzeros, *([] if group_index is None else [group_index])]
    return compute_rows(
        weight,
        (rows, columns),
        companions,
        compute_row_range,
        prepare=prepare,
        checked_only=[weight],
    )


def _check_gptq_sizes(
    parts: Parts, scales: TensorRef, qzeros: TensorRef, group_index: TensorRef | None
) -> tuple[int, int, int]:
    """Return the bits of a code, the columns of the plain weight, and the columns of a group.

    Refuse other kinds of tensors as an unknown layout, and sizes that do not fit these numbers as a
    contradiction of the configuration. Each column of `weight` has the codes of a row of the plain
    weight.
    """
    weight, config = parts.weight, parts.config
    if group_index is None and config.entries.get("desc_act"):
        raise UnknownLayout(f"g_idx is missing, although {config.where} states desc_act")
    if not len(weight.shape) == len(scales.shape) == len(qzeros.shape) == 2:
        raise UnknownLayout
    (words, rows), groups = weight.sizes, scales.sizes[0]
    bits = parts.require_size("bits")
    columns = words * 32 // bits if group_index is None else group_index.numel
    if group_index is not None and config.entries.get("dynamic"):
        # The configuration has other bits for some layers; the sizes show those of this one.
        bits = words * 32 // max(columns, 1)
    if bits not in (2, 3, 4, 8) or {weight.dtype, qzeros.dtype} != {"int32"}:
        raise UnknownLayout
    is_one_group = config.entries.get("group_size") == -1
    group_size = columns if is_one_group else parts.require_size("group_size")
    if scales.sizes[1] != rows or qzeros.sizes != (groups, -(-rows * bits // 32)):
        parts.refuse_contradiction()
    if group_index is None and groups != -(-columns // group_size):
        parts.refuse_contradiction()
    # The library packs 32 codes of 3 bits into 3 words.
    if words != -(-columns * bits // 32) or (bits == 3 and (rows % 32 or words % 3)):
        parts.refuse_contradiction()
    return bits, columns, group_size


def _read_gptq_version(config: QuantizationConfig) -> str:
    """Return the version of the GPTQ format that the configuration states: gptq or gptq_v2.

    Raises:
        UnknownLayout: if it states another method or version, or the model may have its weights
            transposed.
    """
    if config.method.lower() != "gptq" or config.model_type in _TRANSPOSED:
        raise _unstated_error(config, "gptq")
    if config.where in SEPARATE_CONFIGS and not config.model_type:
        raise UnknownLayout("no config.json next to it states model_type", hint=CONFIG_HINT)
    if config.contradiction:
        raise UnknownLayout(config.contradiction)
    version = find_entry(config.entries, VERSION_KEYS) or "gptq"
    if version not in ("gptq", "gptq_v2") or config.entries.get("is_marlin_format"):
        raise UnknownLayout(f"checkpoint_format {printable(str(version))} is not known")
    return str(version)


def dequantize_awq(parts: Parts) -> TensorRef:
    """Dequantize as autoawq does (`dequantize_gemm`): codes minus zero points, times scales.

    A word of 32 bits has the codes of eight rows of a linear layer in one column, in the order of
    `_AWQ_ORDER`.
    """
    weight, scales, qzeros = parts.weight, parts.require_floats("scales"), parts["qzeros"]
    if parts.config.method.lower() != "awq":
        raise _unstated_error(parts.config, "awq")
    if parts.config.contradiction:
        raise UnknownLayout(parts.config.contradiction)
    if len(weight.shape) != 2 or len(scales.shape) != 2:
        raise UnknownLayout
    (columns, words), (groups, rows) = weight.sizes, scales.sizes
    version = parts.config.entries.get("version", "gemm")
    if {weight.dtype, qzeros.dtype} != {"int32"} or str(version).lower() != "gemm":
        raise UnknownLayout(f"version {printable(str(version))} is not known")
    group_size = parts.require_size("group_size") if groups > 1 else columns
    may_have_one_group = parts.config.entries.get("group_size") in (None, -1, columns)
    if (
        parts.config.entries.get("bits", 4) != 4
        or groups * group_size != columns
        or (groups == 1 and not may_have_one_group)
    ):
        parts.refuse_contradiction()
    if rows != words * 8 or qzeros.sizes != (groups, words):
        parts.refuse_contradiction()
    transposed = rearrange(weight, (words, columns), (1, words))
    shifts = [4 * position for position in _AWQ_ORDER]  # of the eight rows in a word

    def prepare(loaded: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the scales and the unpacked zero points, each by group and row."""
        import torch

        loaded_scales, packed_zeros = loaded
        shifts_of_rows = torch.tensor(shifts, dtype=torch.int32, device="cpu")
        zeros = packed_zeros.view(groups, words, 1) >> shifts_of_rows & 15
        return loaded_scales.view(groups, rows), zeros.view(groups, rows)

    def compute_row_range(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the plain numbers of a range of rows, a multiple of the eight rows in a word."""
        import torch

        packed = read_rows(transposed, words, first // 8, last // 8).view(torch.int32)
        codes = torch.stack([packed >> shift & 15 for shift in shifts], 1).view(-1, columns)
        scale, zeros = (
            table[:, first:last].t().repeat_interleave(group_size, 1) for table in tables
        )
        return (codes - zeros) * scale.float()

    return compute_rows(
        weight,
        (rows, columns),
        (scales, qzeros),
        compute_row_range,
        row_multiple=8,
        prepare=prepare,
        checked_only=[weight],
    )


def dequantize_nvfp4(parts: Parts) -> TensorRef:
    """Dequantize as NVIDIA's ModelOpt does: pairs of fp4 numbers times two scales.

    ComfyUI uses the same keys, but stores the scales in tiles for a GPU.
    """
    scale, scale_of_weight = parts["weight_scale"], parts["weight_scale_2"]
    if "comfy_quant" in parts.companions or scale_of_weight.numel != 1:
        raise UnknownLayout
    return _multiply_fp4(
        parts,
        (scale, scale_of_weight),
        group_size=16,
        compute_factors=lambda scales, factor: scales.float() * factor.float(),
    )


def dequantize_mxfp4(parts: Parts) -> TensorRef:
    """Dequantize as transformers does (`convert_moe_packed_tensors`): pairs of fp4 numbers.

    Blocks [experts, features, groups, 16] and exponents [experts, features, groups] become a tensor
    [experts, columns, features]: 32 columns for each group, two of them in a byte, the first one in
    the low bits.
    """
    blocks, [scales] = parts.weight, parts.companions.values()
    if parts.config.method.lower() != "mxfp4":
        raise _unstated_error(parts.config, "mxfp4")
    if len(blocks.shape) != 4 or blocks.sizes != (*scales.sizes, 16) or scales.dtype != "uint8":
        raise UnknownLayout
    experts, features, groups, _ = blocks.sizes
    pair_count = groups * 16  # of each feature of an expert
    transposed = rearrange(
        blocks, (experts, pair_count, features), (features * pair_count, 1, pair_count)
    )

    def prepare(loaded: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the exponents with a row for each group of each expert."""
        [exponents] = loaded
        by_group = exponents.view(experts, features, groups).transpose(1, 2)
        return (by_group.reshape(experts * groups, features),)

    def compute_row_range(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a range of rows, each of which is a column of one expert.

        `first` and `last` are even, because a byte of `transposed` has the codes of two rows.
        """
        import torch

        [exponents] = tables  # the result of `prepare`
        pairs = read_rows(transposed, experts * pair_count, first // 2, last // 2)
        codes = torch.stack((pairs & 15, pairs >> 4), 1).view(-1, features)  # low bits first
        group_of_row = torch.arange(first, last, device="cpu") // _MXFP4_GROUP
        return decode_fp4(codes) * powers_of_two(exponents.index_select(0, group_of_row))

    return compute_rows(
        blocks,
        (experts, 2 * pair_count, features),
        (scales,),
        compute_row_range,
        row_multiple=2,
        prepare=prepare,
        checked_only=[blocks],  # read through `transposed`
    )


def dequantize_hqq(parts: Parts) -> TensorRef:
    """Dequantize as HQQ does (`Quantizer.dequantize`): codes minus zeros, times scales.

    The codes are a matrix with a group in each row, or in each column. Its first rows are in the
    highest bits of `weight`, whose last rows may be filled up. `shape` is the shape of the result.
    """
    weight, zero, scale = parts.weight, parts.require_floats("zero"), parts.require_floats("scale")
    shape, packing = tuple(parts.read_integers("shape")), parts.read_text("packing")
    dtype = parts.read_text("compute_dtype").removeprefix("torch.")
    flags = ("view_as_float", "quant_scale", "quant_zero")  # each one changes the layout
    if any(parts.read_integers(flag) != [0] for flag in flags):
        raise UnknownLayout
    if packing not in _HQQ_SHIFTS or len(weight.shape) != 2 or dtype not in _HQQ_TYPES:
        raise UnknownLayout(f"packing {printable(packing)} as {printable(dtype)} is not known")
    bits, shifts = _HQQ_SHIFTS[packing]
    packed_rows, columns = weight.sizes
    rows, remainder = divmod(prod(shape), max(columns, 1))
    if not shape or not columns or remainder:
        raise UnknownLayout
    packed_dtype = "int32" if bits == 3 else "uint8"  # ten codes of 3 bits fill 30 of 32
    if weight.dtype != packed_dtype or zero.sizes != scale.sizes:
        raise UnknownLayout
    block = block_sizes((rows, columns), scale.sizes)
    padding_rows = packed_rows * len(shifts) - rows
    if not block or not 0 <= padding_rows < len(shifts):
        raise UnknownLayout

    def compute_elements(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the plain numbers of a range of elements."""
        codes = read_planes(weight, start, stop, shifts, bits).to(get_torch_dtype(dtype))
        zeros, factors = (
            expand_blocks(table, (rows, columns), block, start, stop) for table in tables
        )
        return (codes - zeros) * factors

    return compute_tensor(weight, shape, (zero, scale), compute_elements)


def _unstated_error(config: QuantizationConfig, method: str) -> UnknownLayout:
    """Return the error for a layout that is known only if a configuration states `method`."""
    if config.model_type in _TRANSPOSED:
        fact = f"the layers of a {config.model_type} model may have their weights transposed"
        return UnknownLayout(fact)
    stated = f"{config.where} states {config.method}" if config.method else "no config.json does"
    fact = f"its layout is known if a config.json states quant_method {method}, but {stated}"
    return UnknownLayout(fact, hint=None if config.method else CONFIG_HINT)
