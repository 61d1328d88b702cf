"""Find quantized tensors, whose numbers have a meaning only with their companions.

`find_quantized` has the rule. Shapes and dtypes decide. A table adds the keys and classes by which
each known quantizer is recognized, and the library that loads it. Sources:
torch/ao/nn/quantized, bitsandbytes/nn/modules.py and functional.py (`QuantState.as_dict`),
torchao/quantization, AutoGPTQ and AutoAWQ (`WQLinear`), the files of DeepSeek-V3
(`weight_scale_inv`; `scale` in those that its inference/convert.py writes), of compressed-tensors
(`weight_scale`, `weight_packed`), of ComfyUI (`scale_weight`, comfy/ops.py), of TensorRT Model
Optimizer (NVFP4), of gpt-oss (MXFP4), of HQQ, of optimum-quanto
(`QBytesTensor.save_to_state_dict`), of torchao (prototype/safetensors: `flatten_tensor_state_dict`)
and of MLX (`QuantizedLinear`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from math import prod
from typing import Any, NamedTuple

from ckptool.core.model import Opaque, TensorRef, find_tensors


@dataclass(frozen=True, slots=True)
class Quantizer:
    """One scheme. The keys of a weight and its companions are a common stem with these endings."""

    scheme: str
    """The usual name of the scheme."""
    weight: str = ""
    """The ending of the key of the quantized weight."""
    companion: str = ""
    """The ending of the companion that identifies the scheme; empty if only a class does."""
    optional: tuple[str, ...] = ()
    """The endings of further companions."""
    dtypes: str | tuple[str, ...] = ""
    """The start of the dtype of the quantized weight, if keys are not sufficient."""
    library: str = ""
    """The library that loads it."""
    plain: str | None = None
    """The ending of the key of the plain weight. None: that of the quantized weight."""
    classes: tuple[str, ...] = ()
    """The start of the qualified names of its classes (modules, tensors and objects)."""
    same_width: bool = False
    """True if the weight and the companion have the same last dimension."""


QUANTIZERS = (
    Quantizer(
        "torch.ao packed parameters",
        "_packed_params._packed_params",
        "_packed_params._packed_params",
        ("_packed_params.dtype", "scale", "zero_point"),
        classes=(
            "torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.", "torch.nn.quantized.",
            "torch.nn.intrinsic.quantized.", "torch.ScriptObject",
            "__torch__.torch.classes.quantized.",
        ),
        library="torch.ao",
    ),
    Quantizer(
        "bitsandbytes 4 bit",
        "",
        ".absmax",
        (
            ".quant_map", ".nested_absmax", ".nested_quant_map",
            ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4",
        ),
        classes=(
            "bitsandbytes.nn.modules.Linear4bit", "bitsandbytes.nn.modules.LinearNF4",
            "bitsandbytes.nn.modules.LinearFP4", "bitsandbytes.nn.modules.Params4bit",
            "bitsandbytes.functional.QuantState",
        ),
        library="bitsandbytes",
    ),
    Quantizer(
        "bitsandbytes 8 bit",
        "weight",
        "SCB",
        ("weight_format",),
        classes=(
            "bitsandbytes.nn.modules.Linear8bitLt", "bitsandbytes.nn.modules.Int8Params",
            "bitsandbytes.autograd._functions.MatmulLtState",
        ),
        library="bitsandbytes",
    ),
    Quantizer("torchao", classes=("torchao.",), library="torchao"),
    Quantizer(
        "torchao", "_qdata", "_scale", ("_zero_point", "_act_pre_scale", "_per_tensor_scale"),
        library="torchao", plain="",
    ),
    *(
        Quantizer(
            "quanto", codes, "weight._scale",
            ("weight._shift", "weight._zeropoint", "input_scale", "output_scale"),
            dtypes=("int8", "uint8", "float8_"), library="optimum-quanto", plain="weight",
        )
        for codes in ("weight._data", "weight._data._data")
    ),
    Quantizer("MLX", "weight", "scales", ("biases",), dtypes="uint32", library="mlx"),
    Quantizer(
        "GPTQ", "qweight", "g_idx", ("qzeros", "scales"), library="gptqmodel or vLLM",
        plain="weight",
    ),
    Quantizer(  # The word of AWQ has eight columns of scales, that of GPTQ has one.
        "GPTQ", "qweight", "scales", ("qzeros",), library="gptqmodel or vLLM", plain="weight",
        same_width=True,
    ),
    Quantizer(
        "AWQ", "qweight", "qzeros", ("scales",), library="autoawq or vLLM", plain="weight",
    ),
    Quantizer(
        "compressed-tensors", "weight_packed", "weight_scale",
        ("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale",
         "input_global_scale", "input_scale", "input_zero_point"),
        library="compressed-tensors or vLLM", plain="weight",
    ),
    Quantizer(
        "int8 with scales", "weight", "weight_scale",
        ("weight_zero_point", "input_scale", "input_zero_point", "comfy_quant"),
        dtypes="int8", library="compressed-tensors or vLLM",
    ),
    Quantizer(
        "HQQ", "W_q", "zero",
        ("scale", "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype",
         "view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta",
         "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero"),
        library="hqq", plain="weight",
    ),
    Quantizer(
        "NVFP4", "weight", "weight_scale_2", ("weight_scale", "input_scale", "comfy_quant"),
        dtypes="uint8", library="nvidia-modelopt or vLLM",
    ),
    Quantizer(
        "MXFP4", "_blocks", "_scales", dtypes="uint8", library="transformers or vLLM", plain="",
    ),
    Quantizer(
        "fp8 with scales", "weight", "weight_scale", ("input_scale", "comfy_quant"),
        dtypes="float8_", library="transformers, vLLM or ComfyUI",
    ),
    Quantizer(
        "fp8 with scales", "", "_scale_inv", dtypes="float8_", library="transformers or vLLM"
    ),
    Quantizer("fp8 with scales", "", "_scale", dtypes="float8_", library="transformers or vLLM"),
    Quantizer("fp8 with scales", "weight", "scale", dtypes="float8_", library="its own code"),
    Quantizer(
        "fp8 with scales", "weight", "scale_weight", ("scale_input", "comfy_quant"),
        dtypes="float8_", library="ComfyUI",
    ),
)  # fmt: skip
"""Tried in this order: the first match wins."""

_FOUND_BY_KEY = tuple(quantizer for quantizer in QUANTIZERS if quantizer.companion)
_COMPANION_ENDINGS = tuple(quantizer.companion for quantizer in _FOUND_BY_KEY)
_CODES_ENDINGS = ("qweight", "weight_packed", "W_q", "weight._data", "_qdata", "_blocks")
"""The endings of keys that only quantized weights have."""


LIBRARIES: dict[str, str] = {}
"""The library that loads a scheme; the first of several with the same name."""
for _quantizer in QUANTIZERS:
    LIBRARIES.setdefault(_quantizer.scheme, _quantizer.library)

LOOKS_QUANTIZED = "looks quantized"
"""The scheme of weights that are recognized only by shapes and dtypes."""
MARKERS = ("scaled_fp8",)
"""Last parts of keys that only mark a whole state dict as quantized (ComfyUI)."""
OPTIMIZER_KEY = re.compile(r"(.*_)?optim(izer)?(_?states?|s)?(_.*)?", re.IGNORECASE)
"""Matches keys of optimizer states in any form."""
_CODE_DTYPES = re.compile(r"u?int8|u?int32|float8_(?!e8m0).*")
"""Matches the dtypes of codes; an e8m0 is a scale."""
_FLOAT_PREFIXES = ("float", "bfloat")
_NO_CODES_KEY = re.compile(r"rng|random|^state[12]$|(^|_)(masks?|ids?|index|idxs?)$", re.IGNORECASE)
"""Matches last components of other integers: generators, 8-bit Adam, masks, tables."""
_SCALE_WORD = "scale"
"""The text in the key of a scale, if its shape is not sufficient."""
_MIN_CODES_PER_SCALE = 4
"""The fewest codes per scale: with fewer, quantization would save nothing."""


class Quantized(NamedTuple):
    """The quantization of one weight."""

    scheme: str
    companions: tuple[str, ...]
    """The keys of the entries that are needed to interpret its numbers."""

    def __str__(self) -> str:
        """Return the fact as the predicate of a sentence."""
        known = self.scheme != LOOKS_QUANTIZED
        return f"is quantized ({self.scheme})" if known else f"{self.scheme}, judging by its shape"


def find_quantized(state: Mapping[Any, Any], *, by_shape: bool = True) -> dict[str, Quantized]:
    """Return the quantized weights of a state dict by key, with their schemes and companions.

    A tensor of a quantizer's class contains its companions, so none are listed. `by_shape`: also
    find weights by shapes and dtypes only, which does not suit the state of an optimizer.
    """
    quantized_by_key: dict[str, Quantized] = {}
    for name, value in state.items():
        scheme = class_scheme(value)
        if scheme is not None:
            quantized_by_key[name] = Quantized(scheme, ())
    companion_keys = [  # a companion shows its weight: `fc.scales` is next to `fc.qweight`
        name for name in state if isinstance(name, str) and name.endswith(_COMPANION_ENDINGS)
    ]
    for quantizer in _FOUND_BY_KEY if companion_keys else ():
        for companion in companion_keys:
            stem = companion.removesuffix(quantizer.companion)
            weight = stem + quantizer.weight
            if stem == companion or weight in quantized_by_key:
                continue
            if _recognizes(quantizer, state.get(weight), state[companion]):
                keys = (stem + ending for ending in (quantizer.companion, *quantizer.optional))
                present = (key for key in keys if key != weight and key in state)
                quantized_by_key[weight] = Quantized(quantizer.scheme, tuple(present))
    if not by_shape:
        return quantized_by_key
    known = {
        *quantized_by_key,
        *(key for quantized in quantized_by_key.values() for key in quantized.companions),
    }
    companions_by_codes = dict(
        _find_scaled({key: value for key, value in state.items() if key not in known})
    )
    scales = {key for companions in companions_by_codes.values() for key in companions}
    for name, companions in companions_by_codes.items():
        if name not in scales:  # fp8 scales of 4-bit codes may have a scale of their own
            outer = (key for scale in companions for key in companions_by_codes.get(scale, ()))
            quantized_by_key[name] = Quantized(
                LOOKS_QUANTIZED, tuple(dict.fromkeys((*companions, *outer)))
            )
    return quantized_by_key


def find_incomplete(state: Mapping[Any, Any], found: Collection[str]) -> Iterator[str]:
    """Yield the keys of quantized weights without their companions, such as scales.

    Their keys end as only those of quantized weights do. `found` has the complete ones.
    """
    for name, value in state.items():
        if (
            isinstance(name, str)
            and name.endswith(_CODES_ENDINGS)
            and name not in found
            and isinstance(value, TensorRef)
            and _CODE_DTYPES.fullmatch(value.dtype)
        ):
            yield name


def find_rival_scales(state: Mapping[Any, Any], name: str, scheme: str) -> list[str]:
    """Return the keys of all companions in `state` that `scheme` may pair with the weight `name`.

    A scheme can have several quantizers, each with other endings of weight and companion.
    """
    companion_keys = (
        name.removesuffix(quantizer.weight) + quantizer.companion
        for quantizer in _FOUND_BY_KEY
        if quantizer.scheme == scheme and name.endswith(quantizer.weight)
    )
    return [key for key in dict.fromkeys(companion_keys) if key in state]


def to_plain_key(scheme: str, name: str) -> str:
    """Return the key of the plain weight for a quantized weight at `name`; other keys as is."""
    for known in QUANTIZERS if isinstance(name, str) else ():
        if known.scheme == scheme and known.plain is not None and name.endswith(known.weight):
            stem = name.removesuffix(known.weight)
            if scheme == "torchao":  # 0._weight_qdata becomes 0.weight
                parent, dot, last = stem.rpartition(".")
                stem = f"{parent}{dot}{last.removeprefix('_')}"
            return stem + known.plain
    return name


def _find_scaled(state: Mapping[Any, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the key of codes and the keys of the scales and biases next to them.

    They are judged by shapes and dtypes: codes are integers or float8, scales are floats in the
    same module with the shape of rows, columns or groups. Codes next to a float of the same shape
    are left out. Of several scales, those whose keys are most like that of the codes are theirs.
    """
    tensors = {
        name: value
        for name, value in state.items()
        if isinstance(name, str) and isinstance(value, TensorRef)
    }
    code_keys = [name for name, tensor in tensors.items() if _may_be_codes(name, tensor)]
    floats_by_module: dict[str, list[str]] = {name.rpartition(".")[0]: [] for name in code_keys}
    for name, tensor in tensors.items() if code_keys else ():
        parent = name.rpartition(".")[0]
        if parent in floats_by_module and tensor.dtype.startswith(_FLOAT_PREFIXES):
            floats_by_module[parent].append(name)
    has_modules = any("." in name for name in tensors)
    for name in code_keys:
        weight, parent = tensors[name], name.rpartition(".")[0]
        siblings = [
            key
            for key in floats_by_module[parent]
            if tensors[key].dtype != weight.dtype  # otherwise it is another weight
            # At the root of a model, or in a file of images, the keys must match too: all
            # tensors without a module are siblings there.
            and (parent or _common_length(name, key) or not (has_modules or len(weight.shape) > 2))
        ]
        # A float for each integer: they are indexes or a mask, for example of a sparse weight.
        if any(tensors[key].shape == weight.shape for key in siblings):
            continue
        fitting = [key for key in siblings if _is_scale(key, tensors[key], weight)]
        scales = [key for key in fitting if "bias" not in key.rpartition(".")[2].lower()]
        if scales:
            # `biases` are companions, as in MLX; `bias` is that of the layer.
            longest = max(_common_length(name, key) for key in scales)
            companions = (
                key
                for key in fitting
                if not key.endswith("bias") and _common_length(name, key) >= longest
            )
            yield name, tuple(companions)


def _may_be_codes(name: str, tensor: TensorRef) -> bool:
    """Return True if the key, dtype and shape of a tensor suit the codes of a weight."""
    shape, last = tensor.shape, name.rpartition(".")[2]
    if len(shape) < 2 or not _CODE_DTYPES.fullmatch(tensor.dtype):
        return False
    if len(shape) > 2 and all(size == 1 for size in shape[:-2]):  # a causal mask, as in GPT-J
        return False
    return not (_NO_CODES_KEY.search(last) or any(map(OPTIMIZER_KEY.fullmatch, name.split("."))))


def _common_length(name: str, other: str) -> int:
    """Return the length of the common start of two keys, in whole words that end with `_`."""
    pairs = zip(f"{name}_", f"{other}_", strict=False)
    common = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return common.rfind("_") + 1


def _is_scale(name: str, scale: TensorRef, codes: TensorRef) -> bool:
    """Return True if `scale` has the shape of rows, columns, groups or square blocks of `codes`.

    A single number is a scale only for float8 codes, or for other bytes if its key says so.
    """
    shape, sizes = codes.sizes, scale.sizes  # of the codes, and of the scales
    is_byte = codes.itemsize == 1
    if prod(sizes) == 1:
        return is_byte and (codes.dtype.startswith("float8_") or _SCALE_WORD in name.lower())
    if not prod(sizes) or prod(sizes) * _MIN_CODES_PER_SCALE > prod(shape):
        return False
    # A scale may have more dimensions than the codes, and ones for dimensions without scales.
    while len(sizes) > len(shape) and sizes[-1] == 1:
        sizes = sizes[:-1]
    trimmed = sizes
    while trimmed[-1] == 1:
        trimmed = trimmed[:-1]
    if trimmed == shape[: len(trimmed)] or sizes == shape[-1:]:  # rows; columns in one dimension
        return True
    if len(sizes) != len(shape):
        return False
    scaled_dimensions = [pair for pair in zip(sizes, shape, strict=True) if pair[0] != 1]
    if len(scaled_dimensions) == 1:
        ((scale_count, index_count),) = scaled_dimensions
        if scale_count == index_count:  # a scale for each index of one dimension, as in [1, n]
            return True
    if sizes[:-2] != shape[:-2]:
        return False
    (rows, columns), (all_rows, all_columns) = sizes[-2:], shape[-2:]
    if rows in (1, all_rows):  # groups of columns in each row, or one row of scales for all
        return all_columns % columns == 0 and (rows != 1 or columns == all_columns)
    if columns == all_columns:  # groups of rows
        return all_rows % rows == 0
    # Square blocks, of which the last ones may be cut at the edges.
    block = -(-all_rows // rows)
    return is_byte and (rows, columns) == (-(-all_rows // block), -(-all_columns // block))


def _recognizes(quantizer: Quantizer, weight: Any, companion: Any) -> bool:
    """Return True if `weight` next to `companion` is one of the weights of `quantizer`."""
    if quantizer.weight == quantizer.companion:  # the packed parameters: a tuple, or an object
        return next(find_tensors(weight), None) is not None
    if not isinstance(weight, TensorRef) or not weight.dtype.startswith(quantizer.dtypes):
        return False
    if not quantizer.same_width:
        return True
    return isinstance(companion, TensorRef) and companion.sizes[-1:] == weight.sizes[-1:]


def class_scheme(node: Any) -> str | None:
    """Return the scheme that has the class of an object or a tensor."""
    if not isinstance(node, (Opaque, TensorRef)):
        return None
    return _scheme_of(node.class_name)


@lru_cache(maxsize=1024)
def _scheme_of(class_name: str) -> str | None:
    """Return the scheme that lists the start of a class name, or None."""
    return next(
        (known.scheme for known in QUANTIZERS if class_name.startswith(known.classes)), None
    )
