"""Counters that one side may lack: of BatchNorm's batches, of an average's models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["BATCHES", "beside", "uncounted"]

BATCHES = "num_batches_tracked"
_COUNTED_SINCE = 2
"""The version of BatchNorm from which its counter may not be missing."""


def beside(counter: str) -> str:
    """The name of the running mean of the module that a counter of batches is of."""
    return f"{counter.removesuffix(BATCHES)}running_mean"


def uncounted(
    missing: Iterable[str], own: Mapping[str, str], versions: Mapping[str, Any] | None
) -> set[str]:
    """Missing counters for which BatchNorm does not ask in a state of these versions.

    `own` are the names in the file of those that are there. torch/nn/modules/batchnorm.py,
    `_NormBase._load_from_state_dict`.
    """
    counters = {name for name in missing if name.rpartition(".")[2] == BATCHES}
    if not counters or not versions:
        return counters
    return {name for name in counters if _version(_module(name, own), versions) < _COUNTED_SINCE}


def _module(counter: str, own: Mapping[str, str]) -> str:
    """The path in the file of the module of a counter, by what else it has."""
    near = beside(counter)
    return own.get(near, near).rpartition(".")[0]


def _version(path: str, versions: Mapping[str, Any]) -> int:
    held = versions.get(path)
    version = held.get("version") if isinstance(held, dict) else None
    return version if isinstance(version, int) else 0
