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
from ckptool.tensors.materialize import get_torch_dtype
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
"""The four bits of a word of AWQ, counted from the lowest, that each of its eight rows has."""
_HQQ_SHIFTS: dict[str, tuple[int, Sequence[int]]] = {
    "8bit_u8": (8, (0,)),
    "4bit_u8": (4, (4, 0)),
    "3bit_32": (3, range(27, -1, -3)),
    "2bit_u8": (2, (6, 4, 2, 0)),
    "1bit_u8": (1, range(7, -1, -1)),
}
"""By `packing`: the bits of a code, and the shifts of each tenth, half, ... of the rows."""
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

    Packed codes are rows of groups, the first rows in the low bits. Only a bias shows the shape of
    their weight: it has an element for each row of a linear layer.
    """
    weight, scale, shift = parts.weight, parts.require_floats("_scale"), parts.get("_shift")
    if not parts.name.endswith("._data._data"):
        block = block_sizes(weight.sizes, scale.sizes)
        if (
            weight.dtype == "uint8"
            or len(parts.companions.keys() - _ACTIVATION_SCALES) > 1
            or not block
        ):
            raise UnknownLayout
        return compute_blocks(weight, scale, None, block)
    groups, bias = scale.sizes[0] if scale.shape else 0, parts.state.get(parts.stem + "bias")
    bits = [width for width in (2, 4) if weight.sizes[:1] == (-(-groups * width // 8),)]
    if len(bits) != 1 or len(weight.shape) != 2 or shift is None or weight.dtype != "uint8":
        raise UnknownLayout
    if not {scale.sizes, shift.sizes} == {(groups, 1)} or scale.dtype != shift.dtype:
        raise UnknownLayout
    rows = bias.numel if isinstance(bias, TensorRef) and len(bias.shape) == 1 else 0
    if not rows or groups % rows:
        raise UnknownLayout("its shape is not known: it has no bias, which would show its rows")
    size, shifts = weight.sizes[1], range(0, 8, bits[0])

    def compute_elements(start: int, stop: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the plain numbers of a range of elements."""
        first, last = start // size, -(-stop // size)
        factors, offsets = (
            table[first:last].repeat_interleave(size)[start - first * size : stop - first * size]
            for table in tables
        )
        return factors * read_planes(weight, start, stop, shifts, bits[0]) - offsets

    return compute_tensor(weight, (rows, groups * size // rows), (scale, shift), compute_elements)


def dequantize_mlx(parts: Parts) -> TensorRef:
    """Dequantize as MLX does in its affine mode: codes times a scale plus a bias."""
    weight = parts.weight
    scales, biases = parts.require_floats("scales"), parts.require_floats("biases")
    stated = parts.config.entries
    own = stated.get(parts.stem.removesuffix("."))
    stated = {**stated, **own} if isinstance(own, Mapping) else stated
    bits, size = (parts.require_size(key, stated) for key in ("bits", "group_size"))
    for layer, entries in () if own else stated.items():  # shapes show only bits * group size
        match entries:
            case {"bits": int(other_bits), "group_size": int(other_size)} if (
                other_bits * other_size == bits * size
                and other_bits != bits
                and f"{layer}.scales" not in parts.state
            ):
                raise UnknownLayout(
                    f"config.json has {other_bits} bits for {layer}, which may be this layer"
                )
    if bits not in _MLX_BITS or not weight.shape:
        raise UnknownLayout(f"{bits} bits are not supported")
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

    def compute_row_range(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the plain numbers of a range of rows."""
        codes = unpack_bits(read_rows(weight, prod(outer), first, last), bits)
        scale, bias = (
            table.view(prod(outer), -1)[first:last].repeat_interleave(size, 1) for table in tables
        )
        return scale * codes + bias

    return compute_rows(weight, (*outer, columns), (scales, biases), compute_row_range)


def dequantize_int8(parts: Parts) -> TensorRef:
    """Dequantize int8 as compressed-tensors does: codes minus a zero point, times a scale."""
    if "comfy_quant" in parts.companions:
        raise UnknownLayout
    refuse_entries(parts, "weight_g_idx")
    scale = parts["weight_scale"]
    refuse_other_scheme(parts, parts.weight.sizes, scale.sizes, 8, "int")
    block = block_sizes(parts.weight.sizes, scale.sizes)
    return compute_blocks(parts.weight, scale, parts.get("weight_zero_point"), block)


def dequantize_compressed_tensors(parts: Parts) -> TensorRef:
    """Dequantize `weight_packed` as compressed-tensors does: packed integers, or pairs of fp4.

    Integers are bit streams along a row, zero points along a column, both shifted to be positive.
    For a bit width that does not divide 32 its versions write different layouts.
    """
    packed, scale = parts.weight, parts["weight_scale"]
    if packed.dtype == "uint8":
        if len(packed.shape) == 2:
            unpacked = (packed.sizes[0], packed.sizes[1] * 2)
            refuse_other_scheme(parts, unpacked, scale.sizes, 4, "float")
        if scale.dtype == "uint8":  # MXFP4
            return _multiply_fp4(parts, (scale,), 32, powers_of_two)
        whole = parts["weight_global_scale"]  # NVFP4
        if whole.sizes != (1,):
            raise UnknownLayout
        return _multiply_fp4(parts, (scale, whole), 16, lambda own, all: own.float() / all.float())
    shape = tuple(parts.read_integers("weight_shape"))
    rows, columns = shape if len(shape) == 2 else (0, 0)
    fitting = [
        bits for bits in (2, 4, 8) if packed.sizes == (rows, -(-columns * bits // 32)) and columns
    ]
    if packed.dtype != "int32" or len(fitting) != 1:
        raise UnknownLayout("weight_shape does not fit weight_packed with 2, 4 or 8 bits")
    [bits], groups = fitting, scale.sizes[1] if len(scale.shape) == 2 else 1
    scale = parts.require_floats("weight_scale")
    zero, order = parts.get("weight_zero_point"), parts.require_indexes("weight_g_idx")
    offset = 1 << bits - 1
    refuse_other_scheme(parts, (rows, columns), scale.sizes, bits, "int")
    if scale.sizes not in ((rows, groups), (1,)) or columns % max(groups, 1):
        raise UnknownLayout
    if zero is not None and (
        zero.dtype != "int32" or zero.sizes != (-(-rows * bits // 32), groups)
    ):
        raise UnknownLayout
    if order is not None and order.sizes != (columns,):
        raise UnknownLayout
    tables = [scale, *(one for one in (zero, order) if one is not None)]

    def prepare(tables: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the scales, the zero points and the group of each column."""
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
            index = check_group_index(parts, more[0], groups)
        return scales.view(-1, groups).expand(rows, -1), zeros.expand(rows, groups), index

    def compute_row_range(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the plain numbers of a range of rows."""
        scales, zeros, index = tables
        codes = unpack_bits(read_rows(packed, rows, first, last), bits)[:, :columns]
        less = zeros[first:last].index_select(1, index)
        return (codes - less) * scales[first:last].float().index_select(1, index)

    return compute_rows(packed, (rows, columns), tables, compute_row_range, prepare=prepare)


def refuse_other_scheme(
    parts: Parts, shape: tuple[int, ...], scales: tuple[int, ...], bits: int, number: str
) -> None:
    """Refuse a weight that contradicts the configuration of compressed-tensors next to it.

    `number` is `int` or `float`. A configuration has one scheme or several, each for some layers.

    Raises:
        UnknownLayout: if no scheme of the configuration has these bits and scales.
    """
    match parts.config.entries:
        case {"config_groups": {**groups}} if parts.config.method.lower() == "compressed-tensors":
            schemes = [group for group in groups.values() if isinstance(group, Mapping)]
        case _:
            return
    for name in (entries.get("format") for entries in (parts.config.entries, *schemes)):
        if name is not None and not (isinstance(name, str) and name in _COMPRESSED_FORMATS):
            raise UnknownLayout(f"format {printable(str(name))} is not known")
    if parts.config.entries.get("transform_config"):
        raise UnknownLayout(f"{parts.config.where} states a transform_config")
    stated = [one for scheme in schemes if isinstance(one := scheme.get("weights"), Mapping)]
    if not any(
        weights.get("num_bits", bits) == bits
        and weights.get("type", number) == number
        and ("weight_zero_point" in parts.companions or weights.get("symmetric", True))
        and (
            "weight_g_idx" in parts.companions
            or weights.get("actorder") not in ("group", "dynamic")
        )
        and _fits_strategy(weights, shape, scales)
        for weights in stated
    ):
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
    """Return True if the `strategy` of compressed-tensors gives a weight scales of this shape."""
    match weights:
        case {"strategy": "tensor"}:
            return prod(scales) == 1
        case {"strategy": "channel"}:
            rows = (shape[:1], (*shape[:1], *[1] * (len(shape) - 1)))  # also of convolutions
            return scales in (*rows, (*shape[:-1], 1))
        case {"strategy": "block", "block_structure": [*block]} if len(block) == len(shape):
            return scales == tuple(-(-size // of) for size, of in zip(shape, block, strict=True))
        case {"group_size": int(size)} if size > 0:
            return scales == (*shape[:-1], shape[-1] // size)
        case _:
            return True


def _multiply_fp4(
    parts: Parts,
    scales: Sequence[TensorRef],
    size: int,
    factors_of: Callable[..., torch.Tensor],
) -> TensorRef:
    """Return pairs of fp4 numbers, the first one in the low bits, times the factor of their group.

    `scales[0]` has an element for each group of `size`; `factors_of` combines all `scales`.
    """
    packed = parts.weight
    if len(packed.shape) != 2 or packed.dtype != "uint8" or packed.sizes[1] * 2 % size:
        raise UnknownLayout
    rows, half = packed.sizes
    if scales[0].sizes != (rows, 2 * half // size):
        raise UnknownLayout
    if scales[0].dtype != ("uint8" if len(scales) == 1 else "float8_e4m3fn"):
        raise UnknownLayout

    def compute_row_range(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the plain numbers of a range of rows."""
        factors = factors_of(tables[0].view(rows, -1)[first:last], *tables[1:])
        pairs = unpack_bits(read_rows(packed, rows, first, last), 4)
        return decode_fp4(pairs) * factors.repeat_interleave(size, 1)

    return compute_rows(packed, (rows, 2 * half), scales, compute_row_range)


def dequantize_gptq(parts: Parts) -> TensorRef:
    """Dequantize as gptqmodel does: codes minus zero points, times scales.

    Codes are bit streams along the columns of `qweight`, which are the rows of a linear layer; zero
    points along the rows of `qzeros`. The first version of the format stores zero points minus one.
    """
    weight, scales, qzeros = parts.weight, parts.require_floats("scales"), parts["qzeros"]
    order, config = parts.require_indexes("g_idx"), parts.config
    if config.method.lower() != "gptq" or config.model_type in _TRANSPOSED:
        raise _unstated_error(config, "gptq")
    if config.where in SEPARATE_CONFIGS and not config.model_type:
        raise UnknownLayout("no config.json next to it states model_type", hint=CONFIG_HINT)
    if config.contradiction:
        raise UnknownLayout(config.contradiction)
    version = find_entry(config.entries, VERSION_KEYS) or "gptq"
    if version not in ("gptq", "gptq_v2") or config.entries.get("is_marlin_format"):
        raise UnknownLayout(f"checkpoint_format {printable(str(version))} is not known")
    if order is None and config.entries.get("desc_act"):
        raise UnknownLayout(f"g_idx is missing, although {config.where} states desc_act")
    if not len(weight.shape) == len(scales.shape) == len(qzeros.shape) == 2:
        raise UnknownLayout
    (words, rows), (groups, width) = weight.sizes, scales.sizes
    bits = parts.require_size("bits")
    columns = words * 32 // bits if order is None else order.numel
    if order is not None and config.entries.get("dynamic"):  # other bits for some layers
        bits = words * 32 // max(columns, 1)
    if bits not in (2, 3, 4, 8) or {weight.dtype, qzeros.dtype} != {"int32"}:
        raise UnknownLayout
    size = columns if config.entries.get("group_size") == -1 else parts.require_size("group_size")
    fits = width == rows and qzeros.sizes == (groups, -(-rows * bits // 32))
    fits = fits and (order is not None or groups == -(-columns // size))
    if not fits or words != -(-columns * bits // 32) or (bits == 3 and (rows % 32 or words % 3)):
        parts.refuse_contradiction()
    transposed = rearrange(weight, (rows, words), (1, rows))

    def prepare(tables: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return scales, zero points with their offset, and the group of each column, checked."""
        import torch

        zeros = unpack_bits(tables[1].view(groups, -1).view(torch.uint8), bits)[:, :rows]
        if version == "gptq":
            zeros = zeros + 1
            if bool((zeros >> bits).any()):
                raise NotRepresentable(
                    f"{printable(parts.name)!r}: a zero point is 0, which the first version of "
                    "GPTQ cannot state: libraries differ in what they read",
                    file=parts.file,
                )
        in_order = torch.arange(columns, device="cpu") // size
        index = in_order if order is None else check_group_index(parts, tables[2], groups)
        if config.entries.get("desc_act") is False and not torch.equal(index, in_order):
            raise NotRepresentable(
                f"{printable(parts.name)!r}: its g_idx does not list the columns in the order "
                "that they are "
                f"in, but {config.where} states desc_act false: libraries differ in what they read",
                file=parts.file,
            )
        return tables[0].view(groups, rows), zeros, index

    def compute_row_range(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the plain numbers of a range of rows."""
        scale, zeros, index = tables
        codes = unpack_bits(read_rows(transposed, rows, first, last), bits)[:, :columns]
        offsets, factors = (
            table[:, first:last].index_select(0, index).t() for table in (zeros, scale)
        )
        return (codes - offsets) * factors.float()

    return compute_rows(
        weight,
        (rows, columns),
        (scales, qzeros, *([] if order is None else [order])),
        compute_row_range,
        prepare=prepare,
        checked_only=[weight],
    )


def dequantize_awq(parts: Parts) -> TensorRef:
    """Dequantize as autoawq does (`dequantize_gemm`): codes minus zero points, times scales.

    A word has eight rows of a linear layer at one column, in the order of `_AWQ_ORDER`.
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
    size = parts.require_size("group_size") if groups > 1 else columns
    is_one_group = parts.config.entries.get("group_size") in (None, -1, columns)
    if (
        parts.config.entries.get("bits", 4) != 4
        or groups * size != columns
        or (groups == 1 and not is_one_group)
    ):
        parts.refuse_contradiction()
    if rows != words * 8 or qzeros.sizes != (groups, words):
        parts.refuse_contradiction()
    transposed = rearrange(weight, (words, columns), (1, words))
    shifts = [4 * at for at in _AWQ_ORDER]

    def prepare(tables: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the scales, and the zero points unpacked in the order of AWQ."""
        import torch

        packed = (
            tables[1].view(groups, words, 1)
            >> torch.tensor(shifts, dtype=torch.int32, device="cpu")
            & 15
        )
        return tables[0].view(groups, rows), packed.view(groups, rows)

    def compute_row_range(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the plain numbers of a range of rows."""
        import torch

        packed = read_rows(transposed, words, first // 8, last // 8).view(torch.int32)
        codes = torch.stack([packed >> shift & 15 for shift in shifts], 1).view(-1, columns)
        scale, zeros = (table[:, first:last].t().repeat_interleave(size, 1) for table in tables)
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
    scale, whole = parts["weight_scale"], parts["weight_scale_2"]
    if "comfy_quant" in parts.companions or whole.numel != 1:
        raise UnknownLayout
    return _multiply_fp4(parts, (scale, whole), 16, lambda own, all: own.float() * all.float())


def dequantize_mxfp4(parts: Parts) -> TensorRef:
    """Dequantize as transformers does (`convert_moe_packed_tensors`): pairs of fp4 numbers.

    Blocks [experts, features, groups, 16] and exponents [experts, features, groups] become a tensor
    [experts, columns, features]: 32 columns for each group, two of them in a byte.
    """
    blocks, [scales] = parts.weight, parts.companions.values()
    if parts.config.method.lower() != "mxfp4":
        raise _unstated_error(parts.config, "mxfp4")
    if len(blocks.shape) != 4 or blocks.sizes != (*scales.sizes, 16) or scales.dtype != "uint8":
        raise UnknownLayout
    experts, features, groups, _ = blocks.sizes
    half = groups * 16
    transposed = rearrange(blocks, (experts, half, features), (features * half, 1, half))

    def prepare(tables: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        exponents = tables[0].view(experts, features, groups).transpose(1, 2)
        return (exponents.reshape(experts * groups, features),)

    def compute_row_range(first: int, last: int, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return plain numbers; a row of the result is a column of one expert."""
        import torch

        pairs = read_rows(transposed, experts * half, first // 2, last // 2)
        codes = torch.stack((pairs & 15, pairs >> 4), 1).view(-1, features)
        index = torch.arange(first, last, device="cpu") // _MXFP4_GROUP
        return decode_fp4(codes) * powers_of_two(tables[0].index_select(0, index))

    return compute_rows(
        blocks,
        (experts, 2 * half, features),
        (scales,),
        compute_row_range,
        row_multiple=2,
        prepare=prepare,
        checked_only=[blocks],
    )


def dequantize_hqq(parts: Parts) -> TensorRef:
    """Dequantize as HQQ does (`Quantizer.dequantize`): codes minus zeros, times scales.

    The highest bits of packed codes are the first rows. Zeros and scales belong to the rows, or the
    columns, of the matrix of groups; `shape` is the shape of the weight.
    """
    weight, zero, scale = parts.weight, parts.require_floats("zero"), parts.require_floats("scale")
    shape, packing = tuple(parts.read_integers("shape")), parts.read_text("packing")
    dtype = parts.read_text("compute_dtype").removeprefix("torch.")
    if any(
        parts.read_integers(one) != [0] for one in ("view_as_float", "quant_scale", "quant_zero")
    ):
        raise UnknownLayout
    if packing not in _HQQ_SHIFTS or len(weight.shape) != 2 or dtype not in _HQQ_TYPES:
        raise UnknownLayout(f"packing {printable(packing)} as {printable(dtype)} is not known")
    bits, shifts = _HQQ_SHIFTS[packing]
    packed_rows, columns = weight.sizes
    rows, remainder = divmod(prod(shape), max(columns, 1))
    if (
        remainder
        or not columns
        or weight.dtype != ("int32" if bits == 3 else "uint8")
        or zero.sizes != scale.sizes
    ):
        raise UnknownLayout
    block = block_sizes((rows, columns), scale.sizes)
    if not block or not 0 <= packed_rows * len(shifts) - rows < len(shifts) or not shape:
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
