"""The quantizers of the weights in a checkpoint, and the libraries that load them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.quantization_config import QuantizationConfig, quantization_config
from ckptool.core.quantizers import LIBRARIES, LOOKS_QUANTIZED, find_quantized
from ckptool.tensors.dequantizing import can_dequantize
from ckptool.words import are, counted, listed, printable

_LIBRARY_BY_METHOD = {
    "gptq": "gptqmodel or vLLM", "awq": "autoawq or vLLM", "bitsandbytes": "bitsandbytes",
    "quanto": "optimum-quanto", "torchao": "torchao", "hqq": "hqq", "aqlm": "aqlm", "eetq": "eetq",
    "compressed-tensors": "compressed-tensors or vLLM", "fp8": "transformers or vLLM",
    "fbgemm_fp8": "fbgemm-gpu", "mxfp4": "transformers or vLLM", "vptq": "vptq", "spqr": "spqr",
    "modelopt": "nvidia-modelopt or vLLM", "auto-round": "auto-round", "quark": "amd-quark",
    "mlx": "mlx",
}  # fmt: skip
"""The library that loads each `quant_method`."""


class Quantization(NamedTuple):
    """The weights with one quantization scheme."""

    fact: str
    """`2 tensors are quantized: GPTQ`."""
    remedy: str
    """The library that loads them."""
    names: tuple[str, ...]
    is_known: bool = False
    """True if `--dequantize` supports them, judging by the first one."""

    def __str__(self) -> str:
        """Return fact and remedy as one sentence, without a full stop."""
        return f"{self.fact}; {self.remedy}"


def quantizations(checkpoint: Checkpoint) -> Iterator[Quantization]:
    """Yield the quantization schemes of the models in a checkpoint, with bits and group sizes.

    The method is from the configuration, the metadata of the header, or the table of names.
    """
    quantized_sections = [section for section in checkpoint.sections if section.quantizers]
    if not quantized_sections:
        return
    config = quantization_config(checkpoint)
    for section in quantized_sections:
        quantized_by_key = find_quantized(section.node)
        for scheme, count in section.quantizers.items():
            keys = [key for key, found in quantized_by_key.items() if found.scheme == scheme]
            description = _describe_scheme(scheme, config)
            fact = f"{counted(count, 'tensor')} {are(count).strip()} quantized: {description}"
            if description == LOOKS_QUANTIZED:  # nothing states the method
                verb = "looks" if count == 1 else "look"
                companions = listed(quantized_by_key[keys[0]].companions)
                fact = (
                    f"{counted(count, 'tensor')} {verb} quantized, judging by shapes: "
                    f"{printable(keys[0])} with {companions}"
                )
            library = LIBRARIES.get(scheme) or _LIBRARY_BY_METHOD.get(config.method.lower())
            remedy = "load it with the library that wrote it"
            if library:
                remedy = f"{library} loads {'it' if count == 1 else 'them'}"
            # Only the first weight is tried: some layouts state the shape of each weight in the
            # bytes of a tensor. A pickled module may have quantized objects without keys.
            is_known = bool(keys) and can_dequantize(
                section.node, keys[0], quantized_by_key[keys[0]], config
            )
            yield Quantization(fact, remedy, tuple(keys), is_known)


def _describe_scheme(scheme: str, config: QuantizationConfig) -> str:
    """Return a scheme with the stated sizes, for example `GPTQ (4 bits, groups of 128)`.

    The stated method replaces an unknown scheme, and is added to a known one with another name.
    """
    details = list(config.sizes)
    if config.method and scheme == LOOKS_QUANTIZED:
        scheme = config.method
        details.insert(0, f"according to {config.where}")
    elif config.method.lower() not in scheme.lower():
        details.append(f"{config.method} according to {config.where}")
    return f"{scheme} ({', '.join(details)})" if details else scheme
