"""The errors of torch and other libraries that ckptool quotes: each text is here, once.

`...` marks an omitted part of a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_REFUSED = "Weights only load failed"
_ON_DEVICE = "Attempting to deserialize object on"

TEXTS: Mapping[str, tuple[str, str]] = {
    # torch/nn/modules/module.py, Module.load_state_dict
    "no-dict": ("load_state_dict", "Expected state_dict to be dict-like"),
    "missing": ("load_state_dict", "Missing key(s) in state_dict"),
    "missing-key": ("load_state_dict", 'Missing key(s) in state_dict: ... "{}"'),
    "unexpected-key": ("load_state_dict", 'Unexpected key(s) in state_dict: ... "{}"'),
    "other-keys": (
        "load_state_dict",
        'Missing key(s) in state_dict: ... Unexpected key(s) in state_dict: "{}"',
    ),
    "size": (
        "load_state_dict",
        "size mismatch for {}: copying a param with shape torch.Size({}) from checkpoint, the "
        "shape in current model is torch.Size({})",
    ),
    # torch/ao/nn/quantized/modules/linear.py
    "packed": ("load_state_dict of a quantized layer", "KeyError: 'weight'"),
    # torch/optim/optimizer.py, Optimizer.load_state_dict
    "group-count": (
        "load_state_dict of the optimizer",
        "loaded state dict has a different number of parameter groups",
    ),
    "group-size": (
        "load_state_dict of the optimizer",
        "loaded state dict contains a parameter group that doesn't match the size of "
        "optimizer's group",
    ),
    # torch/serialization.py and torch/_weights_only_unpickler.py
    "weights-only": ("torch.load", _REFUSED),
    "operand": ("torch.load", f"{_REFUSED}. ... Unsupported operand {{}}"),
    "any-operand": ("torch.load", f"{_REFUSED}. ... Unsupported operand"),
    "global": (
        "torch.load",
        f"{_REFUSED}. ... Unsupported global: GLOBAL {{}} was not an allowed global by default",
    ),
    "blocked-global": (
        "torch.load",
        f"{_REFUSED}. ... Trying to load unsupported GLOBAL {{}}",
    ),
    "tar": (
        "torch.load",
        "Cannot use ``weights_only=True`` with files saved in the legacy .tar format",
    ),
    "torchscript": (
        "torch.load",
        "Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``",
    ),
    "mmap": (
        "torch.load(mmap=True)",
        "mmap can only be used with files saved with `torch.save(..., "
        "_use_new_zipfile_serialization=True)",
    ),
    "no-cuda": (
        "torch.load",
        f"{_ON_DEVICE} CUDA device {{}} but torch.cuda.device_count() is {{}}. Please use "
        "torch.load with map_location to map your storages to an existing device.",
    ),
    "no-device": (
        "torch.load",
        f"{_ON_DEVICE} a {{}} device but torch.{{}}.is_available() is False. If you are running "
        "on a CPU-only machine, please use torch.load with map_location=torch.device('cpu') to "
        "map your storages to the CPU.",
    ),
    "no-mps": ("torch.load", "torch.UntypedStorage(): Storage device not recognized: mps"),
    "no-backend": (
        "torch.load",
        "Could not run 'aten::empty.memory_format' with arguments from the '{}' backend",
    ),
    "no-location": (
        "torch.load",
        "don't know how to restore data location of torch.storage.UntypedStorage (tagged with {})",
    ),
    "mps-float64": (
        "torch.load(map_location='mps')",
        "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
        "float64. Please use float32 instead.",
    ),
    # caffe2/serialize/inline_container.cc
    "no-directory": (
        "torch.load",
        "PytorchStreamReader failed reading zip archive: failed finding central directory",
    ),
    "no-pickle": (
        "torch.load",
        "PytorchStreamReader failed locating file data.pkl: file not found",
    ),
    "no-constants": (
        "torch.jit.load",
        "PytorchStreamReader failed locating file constants.pkl: file not found",
    ),
    # Python
    "folder": ("torch.load", "[Errno 21] Is a directory"),
    "not-utf-8": ("torch.load", "'utf-8' codec can't decode byte ..."),
    "numpy": (
        "torch.load(weights_only=False) with numpy 1",
        "No module named 'numpy._core'",
    ),
    # safetensors, and transformers/modeling_utils.py
    "header": ("safetensors.torch.load_file", "Error while deserializing header"),
    "long-header": (
        "safetensors.torch.load_file",
        "Error while deserializing header: header too large",
    ),
    "shared": (
        "safetensors.torch.save_file",
        "Some tensors share memory, this will lead to duplicate memory on disk and potential "
        "differences when loading them again",
    ),
    "no-format": (
        "transformers",
        "The safetensors archive passed at ... does not contain the valid metadata",
    ),
}
"""By kind: the call that fails, and its text, with `{}` for values from the file."""


class Quote(NamedTuple):
    """An error of another library about a file."""

    kind: str
    """The kind in `TEXTS`."""
    call: str
    """The call that fails."""
    text: str
    """The message."""

    def __str__(self) -> str:
        """Return `torch.load fails: TEXT`."""
        return f"{self.call} fails: {self.text}"


def quote(kind: str, *values: object, call: str = "") -> Quote:
    """Return an error text of the table, with `values` in place of each `{}`.

    Args:
        kind: The key in `TEXTS`.
        values: Values from the file.
        call: The failing call, if it is more exact than in the table.
    """
    default_call, text = TEXTS[kind]
    return Quote(kind, call or default_call, text.format(*values))
