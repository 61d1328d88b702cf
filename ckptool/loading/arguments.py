"""The arguments of `load_into` and `match`, looked at first: a typing error is no permission.

What is allowed is looked at by `matching.Allowance`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ckptool.errors import DeviceError, UsageError
from ckptool.tensors.placement import Placement

__all__ = ["check_arguments", "check_lists", "check_order"]


def check_arguments(
    *,
    switches: Mapping[str, Any],
    lists: Mapping[str, Any],
    map_location: Any,
    optimizer_order: Any,
) -> None:
    """Refuse values that would be taken for something that was not meant.

    `switches` are True, False or None, by the name of the argument; `lists` hold texts.

    Raises:
        UsageError: naming the first, and what it may be.
        DeviceError: `map_location` is no device that torch knows of.
    """
    import torch

    Placement(map_location)
    if isinstance(map_location, str):
        try:
            torch.device(map_location)
        except RuntimeError:
            raise DeviceError(
                f"map_location={map_location!r} is no device", hint="'cpu', 'cuda:0', ..."
            ) from None
    for name, value in switches.items():
        if not any(value is one for one in (None, True, False)):
            _refuse(name, value, "None or True or False")
    check_lists(**lists)
    check_order(optimizer_order)


def check_lists(**lists: Any) -> None:
    """Refuse what is no list of texts, or of what stands for them, by the name of the argument.

    Raises:
        UsageError: naming the first.
    """
    for name, value in lists.items():
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            shown = f"{name}=[{value!r}]" if isinstance(value, str) else None
            _refuse(name, value, "a list", shown)


def check_order(order: Any) -> None:
    """Refuse what is no order of an optimizer's parameters.

    Raises:
        UsageError: it is no word that is known.
    """
    if order is not None and not (isinstance(order, str) and order == "position"):
        raise UsageError(f"optimizer_order={order!r} is neither None nor 'position'")


def _refuse(name: str, value: Any, wanted: str, hint: str | None = None) -> None:
    raise UsageError(f"{name}={value!r} is not {wanted}", hint=hint or f"{name} is {wanted}")
