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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
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
    sign: str = ""
    """The ending of the companion that identifies the scheme; empty if only a class does."""
    others: tuple[str, ...] = ()
    """The endings of further companions, which are optional."""
    dtypes: str | tuple[str, ...] = ""
    """The start of the dtype of the quantized weight, if keys are not sufficient."""
    library: str = ""
    """The library that loads it."""
    plain: str | None = None
    """The ending of the key of the plain weight. None: that of the quantized weight."""
    classes: tuple[str, ...] = ()
    """The start of the qualified names of its classes (modules, tensors and objects)."""


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

_BY_NAME = tuple(quantizer for quantizer in QUANTIZERS if quantizer.sign)
_SIGNS = tuple(quantizer.sign for quantizer in _BY_NAME)


LIBRARIES: dict[str, str] = {}
"""The library that loads a scheme; the first of several with the same name."""
for _one in QUANTIZERS:
    LIBRARIES.setdefault(_one.scheme, _one.library)

LOOKS_QUANTIZED = "looks quantized"
"""The scheme of weights that are recognized only by shapes and dtypes."""
MARKERS = ("scaled_fp8",)
"""Last parts of keys that only mark a whole state dict as quantized (ComfyUI)."""
OF_OPTIMIZERS = re.compile(r"(.*_)?optim(izer)?(_?states?|s)?(_.*)?", re.IGNORECASE)
"""Matches keys of optimizer states in any form."""
_CODES = re.compile(r"u?int8|u?int32|float8_(?!e8m0).*")
"""Matches the dtypes of codes; an e8m0 is a scale."""
_FLOATS = ("float", "bfloat")
_NO_CODES = re.compile(r"rng|random|^state[12]$|(^|_)(masks?|ids?|index|idxs?)$", re.IGNORECASE)
"""Matches last components of other integers: generators, 8-bit Adam, masks, tables."""
_SCALE = "scale"
"""The text in the key of a scale, if its shape is not sufficient."""
_FEWEST = 4
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
    found: dict[str, Quantized] = {}
    for name, value in state.items():
        scheme = class_scheme(value)
        if scheme is not None:
            found[name] = Quantized(scheme, ())
    signs = [name for name in state if isinstance(name, str) and name.endswith(_SIGNS)]
    for quantizer in _BY_NAME if signs else ():
        for name in signs:
            stem = name.removesuffix(quantizer.sign)
            weight = stem + quantizer.weight
            if stem == name or weight in found or not _is_weight(quantizer, state.get(weight)):
                continue
            endings = (quantizer.sign, *quantizer.others)
            beside = (one for end in endings if (one := stem + end) != weight and one in state)
            found[weight] = Quantized(quantizer.scheme, tuple(beside))
    if not by_shape:
        return found
    named = {*found, *(one for known in found.values() for one in known.companions)}
    looking = dict(_find_scaled({name: one for name, one in state.items() if name not in named}))
    scales = {one for companions in looking.values() for one in companions}
    for name, companions in looking.items():
        if name not in scales:  # fp8 scales of 4-bit codes may have a scale of their own
            more = (far for one in companions for far in looking.get(one, ()))
            found[name] = Quantized(LOOKS_QUANTIZED, tuple(dict.fromkeys((*companions, *more))))
    return found


def plain_key(scheme: str, name: str) -> str:
    """Return the key of the plain weight for a quantized weight at `name`."""
    for known in QUANTIZERS:
        if known.scheme == scheme and known.plain is not None and name.endswith(known.weight):
            stem = name.removesuffix(known.weight)
            if scheme == "torchao":  # 0._weight_qdata becomes 0.weight
                parent, dot, last = stem.rpartition(".")
                stem = f"{parent}{dot}{last.removeprefix('_')}"
            return stem + known.plain
    return name


def _find_scaled(state: Mapping[Any, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield codes with the scales next to them, judging by shapes and dtypes."""
    tensors = {
        name: value
        for name, value in state.items()
        if isinstance(name, str) and isinstance(value, TensorRef)
    }
    codes = [name for name, tensor in tensors.items() if _may_be_codes(name, tensor)]
    floats: dict[str, list[str]] = {name.rpartition(".")[0]: [] for name in codes}
    for name, tensor in tensors.items() if codes else ():
        parent = name.rpartition(".")[0]
        if parent in floats and tensor.dtype.startswith(_FLOATS):
            floats[parent].append(name)
    nested = any("." in name for name in tensors)
    for name in codes:
        own, parent = tensors[name], name.rpartition(".")[0]
        beside = [
            one
            for one in floats[parent]
            if tensors[one].dtype != own.dtype  # otherwise it is another weight
            # At the root of a model, or in a file of images, the keys must match too.
            and (parent or _common_words(name, one) or not (nested or len(own.shape) > 2))
        ]
        if any(tensors[one].shape == own.shape for one in beside):
            continue
        fitting = [one for one in beside if _is_scale(one, tensors[one], own)]
        scales = [one for one in fitting if "bias" not in one.rpartition(".")[2].lower()]
        if scales:
            nearest = max(_common_words(name, one) for one in scales)
            yield (
                name,
                tuple(
                    one
                    for one in fitting
                    if not one.endswith("bias") and _common_words(name, one) >= nearest
                ),
            )


def _may_be_codes(name: str, tensor: TensorRef) -> bool:
    shape, last = tensor.shape, name.rpartition(".")[2]
    if len(shape) < 2 or not _CODES.fullmatch(tensor.dtype):
        return False
    if len(shape) > 2 and all(size == 1 for size in shape[:-2]):  # a causal mask, as in GPT-J
        return False
    return not (_NO_CODES.search(last) or any(map(OF_OPTIMIZERS.fullmatch, name.split("."))))


def _common_words(name: str, other: str) -> int:
    """Return the length of the common start of two names, up to its last `_`."""
    name, other = f"{name}_", f"{other}_"
    pairs = enumerate(zip(name, other, strict=False))
    same = next((at for at, (one, another) in pairs if one != another), len(name))
    return name.rfind("_", 0, same) + 1


def _is_scale(name: str, scale: TensorRef, codes: TensorRef) -> bool:
    """Return True if `scale` has the shape of rows, columns or groups of codes."""
    whole, own = codes.sizes, scale.sizes
    is_byte = codes.itemsize == 1
    if prod(own) == 1:
        return is_byte and (codes.dtype.startswith("float8_") or _SCALE in name.lower())
    if not prod(own) or prod(own) * _FEWEST > prod(whole):
        return False
    while len(own) > len(whole) and own[-1] == 1:
        own = own[:-1]
    bare = own
    while bare[-1] == 1:
        bare = bare[:-1]
    if bare == whole[: len(bare)] or own == whole[-1:]:  # rows; columns in one dimension
        return True
    if len(own) != len(whole):
        return False
    if [pair for pair in zip(own, whole, strict=True) if pair[0] != 1] == [(bare[-1], bare[-1])]:
        return True  # columns, as in [1, n]
    if own[:-2] != whole[:-2]:
        return False
    (rows, columns), (all_rows, all_columns) = own[-2:], whole[-2:]
    if rows in (1, all_rows):
        return all_columns % columns == 0 and (rows != 1 or columns == all_columns)
    if columns == all_columns:
        return all_rows % rows == 0
    # square blocks, cut at the edges
    block = -(-all_rows // rows)
    return is_byte and (rows, columns) == (-(-all_rows // block), -(-all_columns // block))


def _is_weight(quantizer: Quantizer, value: Any) -> bool:
    if quantizer.weight == quantizer.sign:  # the packed parameters: a tuple, or an object
        return next(find_tensors(value), None) is not None
    return isinstance(value, TensorRef) and value.dtype.startswith(quantizer.dtypes)


def class_scheme(node: Any) -> str | None:
    """Return the scheme that has the class of an object or a tensor."""
    if not isinstance(node, (Opaque, TensorRef)):
        return None
    return _scheme_of(node.class_name)


@lru_cache(maxsize=1024)
def _scheme_of(class_name: str) -> str | None:
    return next((one.scheme for one in QUANTIZERS if class_name.startswith(one.classes)), None)
