"""The quantizers of the weights in a checkpoint, and the libraries that load them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.quantization_config import QuantizationConfig, quantization_config
from ckptool.core.quantizers import LIBRARIES, LOOKS_QUANTIZED, find_quantized
from ckptool.tensors.dequantizing import can_dequantize
from ckptool.words import are, counted, listed, printable

_BY_METHOD = {
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
    quantized = [section for section in checkpoint.sections if section.quantizers]
    config = quantization_config(checkpoint) if quantized else QuantizationConfig()
    method, where = config.method, config.where
    for section in quantized:
        found = find_quantized(section.node)
        for scheme, count in section.quantizers.items():
            own = {name: one.companions for name, one in found.items() if one.scheme == scheme}
            what, library, details = scheme, LIBRARIES.get(scheme, ""), list(config.sizes)
            if method:
                if scheme == LOOKS_QUANTIZED:
                    what, details = method, [f"according to {where}", *details]
                elif method.lower() not in scheme.lower():
                    details.append(f"{method} according to {where}")
                library = library or _BY_METHOD.get(method.lower(), "")
            what += f" ({', '.join(details)})" if details else ""
            verb = f"{are(count).strip()} quantized: {what}"
            if what == LOOKS_QUANTIZED:
                name, companions = next(iter(own.items()))
                verb = "looks" if count == 1 else "look"
                verb += (
                    f" quantized, judging by shapes: {printable(name)} with {listed(companions)}"
                )
            remedy = f"{library} loads {'it' if count == 1 else 'them'}" if library else ""
            remedy = remedy or "load it with the library that wrote it"
            fact = f"{counted(count, 'tensor')} {verb}"
            # One is enough: some layouts state the shape of each weight in the bytes of a tensor.
            is_known = any(
                can_dequantize(section.node, name, found[name], config) for name in [*own][:1]
            )
            yield Quantization(fact, remedy, tuple(own), is_known)
