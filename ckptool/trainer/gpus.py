"""`CUDA_VISIBLE_DEVICES`: which of the machine's GPUs a process sees, and as what. No torch."""

from __future__ import annotations

import os
import re
import sys
from itertools import takewhile

from ckptool.errors import UsageError

__all__ = ["VISIBLE", "seen_as", "show_only"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
_GPU = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")


def show_only(numbers: str) -> None:
    """Let this process, and those that it starts, see these GPUs alone: the first is `cuda:0`.

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
    """What each device of this process is on the machine, `{"cuda:0": "2"}`.

    Empty where `CUDA_VISIBLE_DEVICES` is not set: then they are the same. From a word on that is no
    GPU, as -1, CUDA sees none.
    """
    words = (word.strip() for word in os.environ.get(VISIBLE, "").split(","))
    named = takewhile(_GPU.fullmatch, words)
    return {f"cuda:{number}": word for number, word in enumerate(named)}
