"""Which devices there are, and which one a word means."""

from __future__ import annotations

import torch

from ckptool.errors import TrainingError

__all__ = ["device_of"]


def device_of(word: str, *, local_rank: int = 0) -> torch.device:
    """The device of a process; `auto` and `cuda` are the `local_rank`th GPU where there are GPUs.

    Raises:
        TrainingError: this machine has no such device.
    """
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if word == "auto":
        word = "cuda" if cuda else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(word)
    except RuntimeError as error:
        raise TrainingError(f"{word!r} is no device: cpu, cuda, cuda:1 or mps") from error
    if device.type == "cuda":
        index = local_rank if device.index is None else device.index
        if index >= cuda:
            raise TrainingError(
                f"cuda:{index} is not here: {_count(cuda)}", hint="--device cpu works everywhere"
            )
        return torch.device("cuda", index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise TrainingError("mps is not here", hint="--device cpu works everywhere")
    return device


def _count(cuda: int) -> str:
    if not cuda:
        return "this machine, or this torch, has no GPU"
    return "there is cuda:0 alone" if cuda == 1 else f"there are cuda:0 to cuda:{cuda - 1}"
