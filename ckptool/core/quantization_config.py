"""The quantization of weights as stated by a configuration file or by the header of a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ckptool.core.checkpoint import Checkpoint
from ckptool.files.json_object import read_json_object
from ckptool.files.place import is_address
from ckptool.words import printable

_CONFIG_FILE = "config.json"
SEPARATE_CONFIGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""The files of AutoGPTQ and AutoAWQ next to a `config.json` without it; by name, their method."""
_CONFIG_KEYS = ("quantization", "quantization_config")
"""The keys in a configuration: of MLX (which may keep that of its source), of transformers."""
_BITS_KEYS = ("bits", "w_bit", "num_bits", "nbits")
_GROUP_KEYS = ("group_size", "q_group_size")
VERSION_KEYS = ("checkpoint_format", "format")
"""The keys of the version of GPTQ files, in configurations of gptqmodel."""
_TORCHAO_ENTRY = "tensor_names"
"""The entry of `__metadata__` that lists torchao tensors, each with a `_type` entry."""


class QuantizationConfig(NamedTuple):
    """The quantization that a configuration states."""

    method: str = ""
    """The name of the method; empty if there is no configuration with one."""
    where: str = ""
    """`config.json` or another file, `the file` or `the metadata`."""
    entries: Mapping[str, Any] = {}
    """The object with the method, bits, group sizes and so on."""
    model_type: str = ""
    """The `model_type` next to it: the family of the model in transformers."""
    header: Mapping[str, Any] = {}
    """The `__metadata__` of the file, with JSON texts parsed."""
    contradiction: str = ""
    """`config.json and quantize_config.json state different bits`; empty if they agree."""

    @property
    def sizes(self) -> tuple[str, ...]:
        """The stated sizes for all weights: `4 bits`, `groups of 128`."""
        entries: Mapping[Any, Any] = self.entries
        match entries.get("config_groups"):  # of compressed-tensors
            case {"group_0": {"weights": {**weights}}}:
                entries = weights
        bits, group = _first_size(entries, _BITS_KEYS), _first_size(entries, _GROUP_KEYS)
        bits_text = () if bits is None else (f"{bits} bits",)
        return bits_text if group is None else (*bits_text, f"groups of {group}")


def quantization_config(checkpoint: Checkpoint) -> QuantizationConfig:
    """Return the quantization stated next to a checkpoint, in its tree, or in its header.

    The first configuration with a method counts; then the separate files of GPTQ and AWQ. If these
    contradict the first one, the result says so, and dequantizing refuses the weights.
    """
    root = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    header = {key: _parse_json(text) for key, text in checkpoint.details.header.items()}
    model_config = _read_json(checkpoint.path, _CONFIG_FILE)
    for where, config in (
        (_CONFIG_FILE, model_config),
        ("the file", root),
        ("the file", root.get("config")),
        ("the metadata", header),
        ("the metadata", header.get("config")),
    ):
        method, entries = _find_method(config)
        if method and isinstance(config, Mapping):
            model_type = str(config.get("model_type", ""))
            contradiction = _find_contradiction(checkpoint.path, where, method, entries)
            return QuantizationConfig(
                printable(method), where, entries, model_type, header, contradiction
            )
    for name, usual_method in SEPARATE_CONFIGS.items():
        entries = _read_json(checkpoint.path, name)
        bits, group = _first_size(entries, _BITS_KEYS), _first_size(entries, _GROUP_KEYS)
        if bits is not None:
            method = printable(str(entries.get("quant_method", usual_method)))
            entries = {**entries, "bits": bits, "group_size": group or entries.get("group_size")}
            model_type = str(model_config.get("model_type", ""))
            return QuantizationConfig(method, name, entries, model_type, header)
    if header.get("format") == "mlx":  # as mlx marks each safetensors file that it writes
        return QuantizationConfig("MLX", "the metadata", header=header)
    return QuantizationConfig(header=header)


def _find_contradiction(path: str, where: str, method: str, entries: Mapping[str, Any]) -> str:
    """Return the first difference between a configuration and the separate one of its method.

    `where` is the name of the configuration with `entries`. "" if they agree, or if the method has
    no separate one.
    """
    for name, separate_method in SEPARATE_CONFIGS.items():
        if separate_method != method.lower():
            continue
        separate = _read_json(path, name)
        for keys in (_BITS_KEYS, _GROUP_KEYS, VERSION_KEYS, ("version",), ("desc_act",)):
            values = (find_entry(config, keys) for config in (entries, separate))
            if len({str(value).lower() for value in values if value is not None}) > 1:
                return f"{where} and {name} state different values of {keys[0]}"
    return ""


def plain_header(header: Mapping[str, str]) -> dict[str, str]:
    """Return the `__metadata__` of a file without the entries that mark it as quantized."""

    def is_marker(key: str, text: str) -> bool:
        """Return True for a configuration, MLX's own `format`, and torchao's types of tensors."""
        if key in (_TORCHAO_ENTRY, *_CONFIG_KEYS) or (key, text) == ("format", "mlx"):
            return True
        entry = _parse_json(text)
        return isinstance(entry, dict) and "_type" in entry

    return {key: text for key, text in header.items() if not is_marker(key, text)}


def find_entry(entries: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """Return the first entry under one of the keys that is not None, or None."""
    return next((entries[key] for key in keys if entries.get(key) is not None), None)


def _first_size(entries: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    """Return the first positive integer among the entries `keys`, or None."""
    sizes = (entries.get(key) for key in keys)
    return next((size for size in sizes if type(size) is int and size > 0), None)


def _find_method(config: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the quantization method of a model's configuration, and its entries.

    The name is empty if the configuration does not state one; then the entries do not count.
    """
    for key in _CONFIG_KEYS if isinstance(config, Mapping) else ():
        entries = config.get(key)
        if isinstance(entries, Mapping):
            method = entries.get("quant_method")
            if isinstance(method, str):
                return method, entries
            if any(str(entry).startswith("load_in_") for entry in entries):
                return "bitsandbytes", entries
            # MLX does not name a method, but has a key of its own.
            if {"bits", "group_size"} <= entries.keys():
                return ("MLX" if key == "quantization" else ""), entries
    return "", {}


def _read_json(path: str, name: str) -> Mapping[str, Any]:
    """Return the JSON object in the file `name` next to a checkpoint; empty if there is none."""
    if not path or is_address(path):
        return {}
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return read_json_object(os.path.join(folder, name))


def _parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
