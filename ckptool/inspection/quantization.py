"""What quantized the weights of a checkpoint, and which library loads them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.quantizers import LIBRARIES, LOOKS_QUANTIZED, find_quantized
from ckptool.files.json_object import json_object
from ckptool.files.place import is_address
from ckptool.words import are, counted, listed, printable

_CONFIG = "config.json"
_KEYS = ("quantization_config", "quantization")
"""Where configurations say it: of transformers and diffusers, of MLX."""
_BY_METHOD = {
    "gptq": "gptqmodel or vLLM", "awq": "autoawq or vLLM", "bitsandbytes": "bitsandbytes",
    "quanto": "optimum-quanto", "torchao": "torchao", "hqq": "hqq", "aqlm": "aqlm", "eetq": "eetq",
    "compressed-tensors": "compressed-tensors or vLLM", "fp8": "transformers or vLLM",
    "fbgemm_fp8": "fbgemm-gpu", "mxfp4": "transformers or vLLM", "vptq": "vptq", "spqr": "spqr",
    "modelopt": "nvidia-modelopt or vLLM", "auto-round": "auto-round", "quark": "amd-quark",
    "mlx": "mlx",
}  # fmt: skip
"""Who loads what a `quant_method` names."""


class Quantization(NamedTuple):
    """Weights of one scheme."""

    fact: str
    """`2 tensors are quantized: GPTQ`."""
    remedy: str
    """Which library loads them."""
    names: tuple[str, ...]

    def __str__(self) -> str:
        """Return a sentence without a full stop."""
        return f"{self.fact}; {self.remedy}"


def quantizations(checkpoint: Checkpoint) -> Iterator[Quantization]:
    """Yield what is quantized in the models of a checkpoint.

    The method is that of a configuration, of the header's metadata, or of the table of names.
    """
    quantized = [section for section in checkpoint.sections if section.quantizers]
    method, where = _declared(checkpoint) if quantized else ("", "")
    for section in quantized:
        found = find_quantized(section.node)
        for scheme, count in section.quantizers.items():
            own = {name: one.companions for name, one in found.items() if one.scheme == scheme}
            what, library = scheme, LIBRARIES.get(scheme, "")
            if method:
                what = f"{method} (by {where})" if scheme == LOOKS_QUANTIZED else scheme
                library = library or _BY_METHOD.get(method.lower(), "")
            verb = f"{are(count).strip()} quantized: {what}"
            if what == LOOKS_QUANTIZED:
                name, companions = next(iter(own.items()))
                verb = "looks" if count == 1 else "look"
                verb += (
                    f" quantized, judging by shapes: {printable(name)} with {listed(companions)}"
                )
            elif method and scheme != LOOKS_QUANTIZED and method.lower() not in scheme.lower():
                verb += f" ({where} says {method})"
            remedy = f"{library} loads {'it' if count == 1 else 'them'}" if library else ""
            remedy = remedy or "load it with the library that wrote it"
            yield Quantization(f"{counted(count, 'tensor')} {verb}", remedy, tuple(own))


def _declared(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the method that a configuration states, and where it does; both empty: none does."""
    root = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    header = {key: _parsed(text) for key, text in checkpoint.details.header.items()}
    for where, config in (
        (_CONFIG, _beside(checkpoint.path)),
        ("the file", root),
        ("the file", root.get("config")),
        ("the metadata", header),
        ("the metadata", header.get("config")),
    ):
        method = _method(config)
        if method:
            return printable(method), where
    return ("MLX", "the metadata") if header.get("format") == "mlx" else ("", "")


def _method(config: Any) -> str:
    for key in _KEYS if isinstance(config, Mapping) else ():
        found = config.get(key)
        if isinstance(found, Mapping):
            method = found.get("quant_method")
            if isinstance(method, str):
                return method
            if any(str(one).startswith("load_in_") for one in found):
                return "bitsandbytes"
            if {"bits", "group_size"} <= found.keys():
                return "MLX" if key == "quantization" else ""
    return ""


def _beside(path: str) -> Mapping[str, Any]:
    """Return the `config.json` in the folder of a file; empty if it cannot be read."""
    if not path or is_address(path):
        return {}
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return json_object(os.path.join(folder, _CONFIG))


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
