"""The known quantisers: whose numbers mean something only with other numbers beside them.

One table says by which names and classes each is known. Sources: torch/ao/nn/quantized,
bitsandbytes/nn/modules.py and functional.py (`QuantState.as_dict`), torchao/quantization, AutoGPTQ
and AutoAWQ (`WQLinear`), the files of DeepSeek-V3 (`weight_scale_inv`; `scale` in those that its
inference/convert.py writes), of compressed-tensors (`weight_scale`, `weight_packed`), of ComfyUI
(`scale_weight`, comfy/ops.py), of TensorRT Model Optimizer (NVFP4), of gpt-oss (MXFP4) and of HQQ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ckptool.model import Opaque, TensorRef, find_tensors

__all__ = ["Quantised", "Quantiser", "class_scheme", "quantised"]


@dataclass(frozen=True, slots=True)
class Quantiser:
    """One scheme. Names of a weight and its companions are a common stem with these endings."""

    scheme: str
    """What people call it."""
    weight: str = ""
    """The ending of the name of the quantised numbers."""
    sign: str = ""
    """The ending of the companion that tells the scheme; empty where only a class does."""
    others: tuple[str, ...] = ()
    """The endings of further companions; a file need not have all."""
    dtypes: str = ""
    """How the element type of the quantised numbers begins, where names alone do not tell."""
    classes: tuple[str, ...] = ()
    """How the qualified names of its classes begin: of modules, tensors and objects."""


QUANTISERS = (
    Quantiser(
        "torch.ao packed parameters",
        "_packed_params._packed_params",
        "_packed_params._packed_params",
        ("_packed_params.dtype", "scale", "zero_point"),
        classes=(
            "torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized.", "torch.nn.quantized.",
            "torch.nn.intrinsic.quantized.", "torch.ScriptObject",
            "__torch__.torch.classes.quantized.",
        ),
    ),
    Quantiser(
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
    ),
    Quantiser(
        "bitsandbytes 8 bit",
        "weight",
        "SCB",
        ("weight_format",),
        classes=(
            "bitsandbytes.nn.modules.Linear8bitLt", "bitsandbytes.nn.modules.Int8Params",
            "bitsandbytes.autograd._functions.MatmulLtState",
        ),
    ),
    Quantiser("torchao", classes=("torchao.",)),
    Quantiser("GPTQ", "qweight", "g_idx", ("qzeros", "scales")),
    Quantiser("AWQ", "qweight", "qzeros", ("scales",)),
    Quantiser(
        "compressed-tensors", "weight_packed", "weight_scale",
        ("weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale"),
    ),
    Quantiser("int8 with scales", "weight", "weight_scale", ("weight_zero_point",), dtypes="int8"),
    Quantiser("HQQ", "W_q", "zero", ("scale",)),
    Quantiser("NVFP4", "weight", "weight_scale_2", ("weight_scale", "input_scale"), dtypes="uint8"),
    Quantiser("MXFP4", "_blocks", "_scales", dtypes="uint8"),
    Quantiser("fp8 with scales", "weight", "weight_scale", ("input_scale",), dtypes="float8_"),
    Quantiser("fp8 with scales", "", "_scale_inv", dtypes="float8_"),
    Quantiser("fp8 with scales", "", "_scale", dtypes="float8_"),
    Quantiser("fp8 with scales", "weight", "scale", dtypes="float8_"),
    Quantiser("fp8 with scales", "weight", "scale_weight", ("scale_input",), dtypes="float8_"),
)  # fmt: skip
"""In the order in which they are tried: the first that knows a weight has it."""

_BY_NAME = tuple(quantiser for quantiser in QUANTISERS if quantiser.sign)
_SIGNS = tuple(quantiser.sign for quantiser in _BY_NAME)


class Quantised(NamedTuple):
    """How one weight is quantised."""

    scheme: str
    companions: tuple[str, ...]
    """Names of the entries beside it without which its numbers mean nothing."""


def quantised(state: Mapping[Any, Any]) -> dict[str, Quantised]:
    """Return the quantised weights of a state dict by name, each with its scheme and companions.

    A tensor of a class of a quantiser has its companions in itself: none are named.
    """
    found: dict[str, Quantised] = {}
    for name, value in state.items():
        scheme = class_scheme(value)
        if scheme is not None:
            found[name] = Quantised(scheme, ())
    signs = [name for name in state if isinstance(name, str) and name.endswith(_SIGNS)]
    for quantiser in _BY_NAME if signs else ():
        for name in signs:
            stem = name.removesuffix(quantiser.sign)
            weight = stem + quantiser.weight
            if stem == name or weight in found or not _is_weight(quantiser, state.get(weight)):
                continue
            companions = (stem + ending for ending in (quantiser.sign, *quantiser.others))
            beside = (one for one in companions if one != weight and one in state)
            found[weight] = Quantised(quantiser.scheme, tuple(beside))
    return found


def _is_weight(quantiser: Quantiser, value: Any) -> bool:
    if quantiser.weight == quantiser.sign:  # the packed parameters: a tuple, or an object
        return next(find_tensors(value), None) is not None
    return isinstance(value, TensorRef) and value.dtype.startswith(quantiser.dtypes)


def class_scheme(node: Any) -> str | None:
    """Return the scheme of whose classes an object or a tensor is."""
    if not isinstance(node, (Opaque, TensorRef)):
        return None
    return _scheme_of(node.class_name)


@lru_cache(maxsize=1024)
def _scheme_of(class_name: str) -> str | None:
    return next((one.scheme for one in QUANTISERS if class_name.startswith(one.classes)), None)
