"""Which devices there are, which one a word means, and which GPUs a process sees."""

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

if TYPE_CHECKING:
    import torch

__all__ = ["VISIBLE", "Devices", "device_of", "devices_here", "seen_as", "show_only"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
_GPU = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")


def show_only(numbers: str) -> None:
    """Let this process and its children see these GPUs alone: the first is `cuda:0`.

    They are counted as `nvidia-smi` does, unless `CUDA_DEVICE_ORDER` says otherwise.

    Args:
        numbers: Of the machine's GPUs, as `0,2`; or what else CUDA takes there (`GPU-8932f937`).

    Raises:
        UsageError: no such list; or CUDA has started, and does not look again.
    """
    words = [word.strip() for word in numbers.split(",")]
    for word in words:
        if not _GPU.fullmatch(word):
            raise UsageError(
                f"--gpus {numbers!r}: {word!r} is no GPU's number", hint="--gpus 0,2, for example"
            )
        if words.count(word) > 1:
            raise UsageError(f"--gpus {numbers!r} names {word} more than once")
    chosen = ",".join(words)
    torch = sys.modules.get("torch")
    if os.environ.get(VISIBLE) != chosen and torch is not None and torch.cuda.is_initialized():
        raise UsageError(f"--gpus {numbers!r}: CUDA has started in this process, and sees others")
    os.environ[VISIBLE] = chosen
    os.environ.setdefault(_ORDER, "PCI_BUS_ID")


def seen_as() -> dict[str, str]:
    """Return what each device of this process is on the machine, `{"cuda:0": "2"}`.

    Empty where `CUDA_VISIBLE_DEVICES` is not set: then they are the same. From a word on that is no
    GPU, as -1, CUDA sees none.
    """
    words = (word.strip() for word in os.environ.get(VISIBLE, "").split(","))
    named = takewhile(_GPU.fullmatch, words)
    return {f"cuda:{number}": word for number, word in enumerate(named)}


def device_of(word: str, *, local_rank: int = 0) -> torch.device:
    """Return the device of a process; `auto` and `cuda` are the `local_rank`th GPU, if any.

    Raises:
        TrainingError: this machine has no such device, or this torch cannot use it.
    """
    import torch

    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if word == "auto":
        word = "cuda" if cuda else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(word)
    except RuntimeError as error:
        raise TrainingError(f"{word!r} is no device: cpu, cuda, cuda:1 or mps") from error
    if device.type == "meta":
        raise _refused("'meta' has no memory to train in")
    if device.type == "xla":
        raise TrainingError("xla has a strategy of its own", hint="--strategy xla")
    if device.type == "cuda":
        index = local_rank if device.index is None else device.index
        if index >= cuda:
            raise _refused(f"cuda:{index} is not here: {_count(cuda)}")
        return torch.device("cuda", index)
    try:
        torch.zeros(1, device=device)
    except Exception as error:  # of each backend's own
        raise _refused(f"{word} is not here, or this torch is made without it") from error
    return device


def _refused(why: str) -> TrainingError:
    return TrainingError(why, hint="--device cpu works everywhere")


def _count(cuda: int) -> str:
    if not cuda:
        return "this machine, or this torch, has no GPU"
    return "there is cuda:0 alone" if cuda == 1 else f"there are cuda:0 to cuda:{cuda - 1}"


def require_visible() -> None:
    """Check that all GPUs that `CUDA_VISIBLE_DEVICES` names are there.

    CUDA passes over a number that the machine lacks, and over all that come after it.

    Raises:
        TrainingError: the first that is missing.
    """
    import torch

    named = seen_as()
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if cuda < len(named):
        missing = list(named.values())[cuda]
        raise TrainingError(
            f"GPU {missing} is not here: "
            + (_count(0) if not cuda else f"of {','.join(named.values())} CUDA takes {cuda}"),
            hint="without --gpus and CUDA_VISIBLE_DEVICES, --list-devices shows all",
        )


@dataclass(frozen=True)
class Device:
    """One that can be trained on.

    Attributes:
        name: What torch calls it.
        model: What it is, as far as torch knows.
        memory: Its own, in bytes; None where it shares that of the machine.
        is_current: Whether it is what `--device auto` takes, in a process that is alone.
        physical: Its number on the machine, where `CUDA_VISIBLE_DEVICES` says so.
    """

    name: str
    model: str
    memory: int | None = None
    is_current: bool = False
    physical: str | None = None


@dataclass(frozen=True)
class Devices:
    """What a process sees of a machine.

    Attributes:
        cuda: How many GPUs.
        threads: Over which an operation on the CPU is spread.
        devices: All of them.
    """

    cuda: int
    threads: int
    devices: tuple[Device, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "devices": [asdict(one) for one in self.devices]}


def devices_here() -> Devices:
    """Return all devices that this process can train on, GPUs first."""
    import torch

    physical = seen_as()
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = []
    for number in range(cuda):
        facts = torch.cuda.get_device_properties(number)
        name = f"cuda:{number}"
        is_current = number == torch.cuda.current_device()
        found.append(Device(name, facts.name, facts.total_memory, is_current, physical.get(name)))
    if torch.backends.mps.is_available():
        found.append(Device("mps", "Apple GPU", is_current=not cuda))
    found += _xla_devices()
    processor = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    found.append(Device("cpu", processor, is_current=not any(one.is_current for one in found)))
    return Devices(cuda, torch.get_num_threads(), tuple(found))


def _xla_devices() -> list[Device]:
    try:
        runtime = import_module("torch_xla.runtime")
        count = runtime.addressable_runtime_device_count()
    except (ImportError, OSError, RuntimeError):
        return []
    what = f"{runtime.device_type()}, by torch_xla"
    return [Device(f"xla:{number}", what) for number in range(count)]
