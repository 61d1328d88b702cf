"""The state of every generator of random numbers that a process has, as plain data."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["random_state", "restore_random_state", "seed_all"]


def seed_all(seed: int) -> None:
    """Begin all of them anew from `seed`: torch's of every device, Python's, numpy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


def random_state() -> dict[str, Any]:
    """What `restore_random_state` takes; lists of numbers as tensors, which are one line each."""
    version, numbers, gauss = random.getstate()
    python = (version, torch.tensor(numbers), gauss)
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": python}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (kind, torch.tensor(keys.tolist()), *rest)
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Go on where `random_state` was taken; of devices that are not there, nothing is done."""
    torch.set_rng_state(state["torch"].cpu())
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda"]])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"].cpu())
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((kind, keys.tolist(), *rest))
