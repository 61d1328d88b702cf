"""Which devices this machine has for torch, told without importing torch.

NVIDIA's driver makes a file in /dev for every GPU; CUDA_VISIBLE_DEVICES hides some. A torch that
was built without CUDA (its `version.py` says so, which is read, not run) has none of them.
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
_AMD_GPU = re.compile(r"^simd_count [1-9]", re.MULTILINE)
_AMD_NODES = "sys/class/kfd/kfd/topology/nodes"


def parsed_devices(devices: str | Iterable[object]) -> tuple[str, ...]:
    """`cpu`, `cuda:0,cuda:1`: the devices of the machine that is meant; `cpu` is always one.

    Args:
        devices: Words with commas between, or a word each: text, or a `torch.device`.

    Raises:
        UsageError: a word is not a device.
    """
    given: object = devices.split(",") if isinstance(devices, str) else devices
    each = given if isinstance(given, Iterable) else (given,)  # a lone torch.device
    words = [str(word).strip() for word in each]
    for word in words:
        found = _WORD.fullmatch(word)
        if found is None or found[1] not in _KINDS:
            raise UsageError(f"{word!r} is not a device", hint="--devices cpu or --devices cuda:0")
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
    """Return how many GPUs there are for the torch that is installed."""
    nvidia = sum(1 for name in _entries(os.path.join(root, "dev")) if _GPU_FILE.fullmatch(name))
    nodes = os.path.join(root, _AMD_NODES)
    amd = sum(_is_amd_gpu(os.path.join(nodes, name)) for name in _entries(nodes))
    if amd and not _lacks("hip"):
        return amd
    # how many there are on Windows only the driver knows
    return 0 if _lacks("cuda") else nvidia or int(_has_windows_driver(root))


def _lacks(kind: str) -> bool:
    """Return whether the torch that is installed was built without `cuda` or `hip`."""
    return re.search(rf"^{kind}\b[^=\n]*=\s*None", _installed_torch(), re.MULTILINE) is not None


def _visible(environment: Mapping[str, str]) -> int:
    """Count the GPUs that CUDA_VISIBLE_DEVICES leaves: those before the first invalid number."""
    stated = environment.get("CUDA_VISIBLE_DEVICES")
    if stated is None:
        return 1 << 16
    words = [word.strip() for word in stated.split(",")]
    return sum(1 for _ in takewhile(lambda word: word and not word.startswith("-"), words))


def _installed_torch() -> str:
    """Return the text of the installed torch's `version.py`; empty where there is no torch."""
    with suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin is not None:
            path = os.path.join(os.path.dirname(spec.origin), "version.py")
            with open(path, encoding="utf-8") as file:
                return file.read(1 << 16)
    return ""


def _has_windows_driver(root: str) -> bool:
    """Return whether NVIDIA's library for Windows is there, also inside its Linux."""
    windows = os.environ.get("SYSTEMROOT", "C:\\Windows")
    if sys.platform == "win32":
        return os.path.exists(os.path.join(windows, "System32", "nvcuda.dll"))
    return os.path.exists(os.path.join(root, "usr/lib/wsl/lib/libcuda.so"))


def _is_amd_gpu(node: str) -> bool:
    try:
        with open(os.path.join(node, "properties"), encoding="ascii") as file:
            return _AMD_GPU.search(file.read(1 << 16)) is not None
    except (OSError, UnicodeDecodeError):
        return False


def _entries(folder: str) -> Iterable[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return ()
