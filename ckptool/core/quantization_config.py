"""What a configuration, or the header of a file, states about the quantization of its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckptool.core.checkpoint import Checkpoint
from ckptool.files.json_object import json_object
from ckptool.files.place import is_address
from ckptool.words import printable

_CONFIG = "config.json"
_KEYS = ("quantization", "quantization_config")
"""The keys in a configuration: of MLX (which may keep that of its source), of transformers."""
_BITS = ("bits", "w_bit", "num_bits", "nbits")
_GROUP = ("group_size", "q_group_size")
_TORCHAO = "tensor_names"
"""The entry of `__metadata__` that lists torchao tensors, each with a `_type` entry."""


class QuantizationConfig(NamedTuple):
    """The quantization that a configuration states."""

    method: str = ""
    """The name of the method; empty if there is no configuration with one."""
    where: str = ""
    """`config.json`, `the file` or `the metadata`."""
    entries: Mapping[str, Any] = {}
    """The object with the method, bits, group sizes and so on."""
    model_type: str = ""
    """The `model_type` next to it: the family of the model in transformers."""
    header: Mapping[str, Any] = {}
    """The `__metadata__` of the file, with JSON texts parsed."""

    @property
    def sizes(self) -> tuple[str, ...]:
        """The stated sizes for all weights: `4 bits`, `groups of 128`."""
        entries: Mapping[Any, Any] = self.entries
        match entries.get("config_groups"):  # of compressed-tensors
            case {"group_0": {"weights": {**weights}}}:
                entries = weights
        bits = next((entries[key] for key in _BITS if _is_size(entries.get(key))), None)
        group = next((entries[key] for key in _GROUP if _is_size(entries.get(key))), None)
        return (
            *([f"{bits} bits"] if bits is not None else []),
            *([f"groups of {group}"] if group is not None else []),
        )


def quantization_config(checkpoint: Checkpoint) -> QuantizationConfig:
    """Return the quantization stated next to a checkpoint, in its tree, or in its header."""
    root = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    header = {key: _parse_json(text) for key, text in checkpoint.details.header.items()}
    for where, config in (
        (_CONFIG, _read_config(checkpoint.path)),
        ("the file", root),
        ("the file", root.get("config")),
        ("the metadata", header),
        ("the metadata", header.get("config")),
    ):
        method, entries = _method(config)
        if method and isinstance(config, Mapping):
            model_type = str(config.get("model_type", ""))
            return QuantizationConfig(printable(method), where, entries, model_type, header)
    if header.get("format") == "mlx":
        return QuantizationConfig("MLX", "the metadata", header=header)
    return QuantizationConfig(header=header)


def plain_header(header: Mapping[str, str]) -> dict[str, str]:
    """Return the `__metadata__` of a file without the entries that mark it as quantized."""
    return {
        key: text
        for key, text in header.items()
        if key not in (_TORCHAO, *_KEYS)
        and (key, text) != ("format", "mlx")
        and not (isinstance(entry := _parse_json(text), dict) and "_type" in entry)
    }


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _method(config: Any) -> tuple[str, Mapping[str, Any]]:
    for key in _KEYS if isinstance(config, Mapping) else ():
        found = config.get(key)
        if isinstance(found, Mapping):
            method = found.get("quant_method")
            if isinstance(method, str):
                return method, found
            if any(str(one).startswith("load_in_") for one in found):
                return "bitsandbytes", found
            if {"bits", "group_size"} <= found.keys():
                return ("MLX" if key == "quantization" else ""), found
    return "", {}


def _read_config(path: str) -> Mapping[str, Any]:
    """Return the `config.json` in the folder of a file; empty if it cannot be read."""
    if not path or is_address(path):
        return {}
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return json_object(os.path.join(folder, _CONFIG))


def _parse_json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
