"""The arguments of `load_into`, looked at before anything else: a typing error is no permission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptool.errors import DeviceError, UsageError
from ckptool.tensors.placement import Placement

__all__ = ["check_arguments"]

_SWITCHES = {"strict": (True, False), "assign": (None, True, False), "verify": (None, True, False)}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse values that would be taken for something that was not meant.

    Raises:
        UsageError: naming the first, and what it may be.
        DeviceError: `map_location` is no device that torch knows of.
    """
    import torch

    place = arguments.get("map_location")
    Placement(place)
    if isinstance(place, str):
        try:
            torch.device(place)
        except RuntimeError:
            raise DeviceError(
                f"map_location={place!r} is no device", hint="'cpu', 'cuda:0', ..."
            ) from None
    for name, value in arguments.items():
        if name in _SWITCHES and not any(value is one for one in _SWITCHES[name]):
            _refuse(name, value, " or ".join(map(repr, _SWITCHES[name])))
        if name.startswith("allow_") and not (
            value is None or isinstance(value, (bool, str)) or _are_texts(value)
        ):
            _refuse(name, value, "True, False, a glob of names or a list of globs")
        if name in ("rules", "prefixes") and (value is None or isinstance(value, bytes)):
            _refuse(name, value, "a list")
    least = arguments.get("min_coverage")
    is_number = isinstance(least, (int, float)) and not isinstance(least, bool)
    if least is not None and not (is_number and 0 <= least <= 1):
        _refuse("min_coverage", least, "a share from 0 to 1")


def _are_texts(value: Any) -> bool:
    return isinstance(value, (Sequence, set, frozenset)) and all(
        isinstance(one, str) for one in value
    )


def _refuse(name: str, value: Any, wanted: str) -> None:
    raise UsageError(f"{name}={value!r} is not {wanted}", hint=f"{name} is {wanted}")
