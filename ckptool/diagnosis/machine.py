"""Which devices this machine has for torch, told without importing torch.

NVIDIA's driver for Linux makes a file in /dev for every GPU; CUDA_VISIBLE_DEVICES hides some. A
torch that was built without CUDA (its `version.py` says so, which is read, not run) has none of
them. Other GPUs (Windows, AMD) are not looked for: the user names them.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import takewhile

from ckptool.errors import UsageError

__all__ = ["devices_here", "parsed_devices"]

_WORD = re.compile(r"([a-z][a-z0-9_]*)(:\d+)?", re.ASCII)
_KINDS = frozenset({
    "cpu", "cuda", "hip", "xpu", "mps", "mtia", "hpu", "xla", "maia", "ort", "ipu", "ve", "vulkan",
    "metal", "opengl", "opencl", "ideep", "mkldnn", "fpga", "lazy", "meta", "privateuseone",
    "npu", "mlu", "musa", "gcu", "sdaa", "supa", "dml", "openreg", "rbln", "neuron",
})  # fmt: skip
"""What torch.device takes (c10/core/DeviceType.h), and back ends that register their own word."""
_GPU_FILE = re.compile(r"nvidia\d+")
_WITHOUT_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*None", re.MULTILINE)


def parsed_devices(devices: str | Iterable[object]) -> tuple[str, ...]:
    """Return the devices that the user names (`cuda:0,cuda:1`), with `cpu`.

    Args:
        devices: Words with commas between, or a word each: text, or a `torch.device`.

    Raises:
        UsageError: a word is no device.
    """
    given: object = devices.split(",") if isinstance(devices, str) else devices
    each = given if isinstance(given, Iterable) else (given,)  # a lone torch.device
    words = [str(word).strip() for word in each]
    for word in words:
        found = _WORD.fullmatch(word)
        if found is None or found[1] not in _KINDS:
            raise UsageError(f"{word!r} is no device", hint="--devices cpu or --devices cuda:0")
    return tuple(dict.fromkeys(("cpu", *("cuda:0" if word == "cuda" else word for word in words))))


def devices_here(
    root: str = os.sep, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return the devices that torch would find here; `root` is for tests."""
    count = min(_gpus(root), _visible(environment))
    found = ["cpu", *(f"cuda:{index}" for index in range(count))]
    if sys.platform == "darwin" and platform.machine() == "arm64":
        found.append("mps")
    return tuple(found)


def _gpus(root: str) -> int:
    """Return how many of the system's GPUs the installed torch can use."""
    with suppress(OSError):
        names = os.listdir(os.path.join(root, "dev"))
        if not _WITHOUT_CUDA.search(_installed_torch()):
            return sum(1 for name in names if _GPU_FILE.fullmatch(name))
    return 0


def _visible(environment: Mapping[str, str]) -> int:
    """Return how many GPUs CUDA_VISIBLE_DEVICES leaves; a negative number hides what follows."""
    stated = environment.get("CUDA_VISIBLE_DEVICES")
    if stated is None:
        return 1 << 16
    words = [word.strip() for word in stated.split(",")]
    return sum(1 for _ in takewhile(lambda word: word and not word.startswith("-"), words))


def _installed_torch() -> str:
    """Return the text of the installed torch's `version.py`; an empty text without torch."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return ""
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as at:
            return at.read(1 << 16)
    except (ImportError, ValueError, OSError):
        return ""
