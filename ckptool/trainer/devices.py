"""Devices: those of the machine, the device of a word, and the GPUs that a process sees."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ckptool.errors import TrainingError, UsageError
from ckptool.words import counted

if TYPE_CHECKING:
    import torch

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
_GPU = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")


def restrict_gpus(numbers: str) -> None:
    """Let this process and its children see only these GPUs; the first becomes `cuda:0`.

    GPUs have the numbers of `nvidia-smi`, unless `CUDA_DEVICE_ORDER` is set.

    Args:
        numbers: Numbers of the machine's GPUs, such as `0,2`, or their names (`GPU-8932f937`).

    Raises:
        UsageError: the list is wrong, or CUDA has already started with other GPUs.
    """
    words = [word.strip() for word in numbers.split(",")]
    for word in words:
        if not _GPU.fullmatch(word):
            raise UsageError(
                f"--gpus {numbers!r}: {word!r} is not a GPU number", hint="use --gpus 0,2"
            )
        if words.count(word) > 1:
            raise UsageError(f"--gpus {numbers!r} has {word} more than once")
    chosen = ",".join(words)
    torch = sys.modules.get("torch")
    if os.environ.get(VISIBLE) != chosen and torch is not None and torch.cuda.is_initialized():
        raise UsageError(f"--gpus {numbers!r}: CUDA is already initialized with other GPUs")
    os.environ[VISIBLE] = chosen
    os.environ.setdefault(_ORDER, "PCI_BUS_ID")  # the order of nvidia-smi


def list_visible_gpus() -> dict[str, str]:
    """Return the machine's GPU of each device of this process: `{"cuda:0": "2"}`.

    The result is empty if `CUDA_VISIBLE_DEVICES` is not set. CUDA stops at the first word that is
    not a GPU, such as -1.
    """
    words = (word.strip() for word in os.environ.get(VISIBLE, "").split(","))
    named = takewhile(_GPU.fullmatch, words)
    return {f"cuda:{number}": word for number, word in enumerate(named)}


def resolve_device(word: str, *, local_rank: int = 0) -> torch.device:
    """Return the device for a word such as `cuda:1`, after a check that it works.

    `auto` is a GPU, or else mps, or else the CPU; `auto` and `cuda` mean GPU number `local_rank`.

    Raises:
        TrainingError: this machine has no such device, or this torch cannot use it.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if word == "auto":
        word = "cuda" if gpus else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(word)
    except RuntimeError as error:
        raise TrainingError(f"{word!r} is not a device such as cpu, cuda, cuda:1 or mps") from error
    if device.type == "meta":
        raise _device_error("cannot train on 'meta', which has no memory")
    if device.type == "xla":
        raise TrainingError("--device xla needs --strategy xla")
    if device.type == "cuda":
        index = local_rank if device.index is None else device.index
        if index >= gpus:
            raise _device_error(f"cuda:{index} is not available: torch sees {counted(gpus, 'GPU')}")
        return torch.device("cuda", index)
    try:
        torch.zeros(1, device=device)  # torch.device also accepts backends that it does not have
    except Exception as error:  # each backend raises another class
        raise _device_error(
            f"{word} is not available, or this torch was built without it"
        ) from error
    return device


def _device_error(message: str) -> TrainingError:
    """Return an error with the hint to use the CPU."""
    return TrainingError(message, hint="use --device cpu")


def require_visible_gpus() -> None:
    """Check that all GPUs in `CUDA_VISIBLE_DEVICES` exist.

    CUDA ignores a number that the machine lacks, and all numbers after it.

    Raises:
        TrainingError: a GPU is missing; the first one is named.
    """
    import torch

    requested = list(list_visible_gpus().values())
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus < len(requested):
        raise TrainingError(
            f"GPU {requested[gpus]} is not available: torch sees {counted(gpus, 'GPU')} of "
            f"{','.join(requested)}",
            hint="list all GPUs with --list-devices, without --gpus and CUDA_VISIBLE_DEVICES",
        )


@dataclass(frozen=True)
class Device:
    """A device that can train.

    Attributes:
        name: The name in torch.
        model: The model of the device, as far as torch knows.
        memory: Its own memory in bytes; None if it shares the machine's memory.
        is_current: True if `--device auto` selects it in a run of one process.
        physical: Its number on the machine, if `CUDA_VISIBLE_DEVICES` is set.
    """

    name: str
    model: str
    memory: int | None = None
    is_current: bool = False
    physical: str | None = None


@dataclass(frozen=True)
class Devices:
    """The devices that a process sees.

    Attributes:
        cuda: The number of GPUs.
        threads: The number of threads of an operation on the CPU.
        devices: All devices.
    """

    cuda: int
    threads: int
    devices: tuple[Device, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "devices": [asdict(device) for device in self.devices]}


def detect_devices() -> Devices:
    """Return all devices that this process can train on, GPUs first."""
    import torch

    physical_numbers = list_visible_gpus()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = []
    for number in range(gpus):
        properties = torch.cuda.get_device_properties(number)
        name = f"cuda:{number}"
        devices.append(
            Device(
                name,
                model=properties.name,
                memory=properties.total_memory,
                is_current=number == torch.cuda.current_device(),
                physical=physical_numbers.get(name),
            )
        )
    if torch.backends.mps.is_available():
        devices.append(Device("mps", "Apple GPU", is_current=gpus == 0))
    devices += _detect_xla_devices()
    processor = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    has_current = any(device.is_current for device in devices)
    devices.append(Device("cpu", processor, is_current=not has_current))
    return Devices(gpus, torch.get_num_threads(), tuple(devices))


def _detect_xla_devices() -> list[Device]:
    """Return the devices of torch_xla, if it is installed."""
    try:
        runtime = import_module("torch_xla.runtime")
        count = runtime.addressable_runtime_device_count()
    except (ImportError, OSError, RuntimeError):
        return []
    model = f"{runtime.device_type()} (torch_xla)"
    return [Device(f"xla:{number}", model) for number in range(count)]
