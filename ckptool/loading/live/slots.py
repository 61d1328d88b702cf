"""State dicts of live tensors as matching sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ckptool.loading.live.memory import dtype_name, memory_of, shape_of, storage_of
from ckptool.matching import EXTRA, Slot, Slots
from ckptool.statedict import is_extra_state

if TYPE_CHECKING:
    import torch

__all__ = ["live_slots", "live_tensors"]


def live_slots(
    values: Mapping[str, Any], *, parameters: Iterable[torch.Tensor] = (), rest: str = "tensor"
) -> Slots:
    """A slot for each entry; what is no tensor, or is an `_extra_state`, is `extra`.

    A `Parameter`, or what is the same elements as one of `parameters`, is one; `rest` is the kind
    of the other tensors.
    """
    import torch

    tensors = live_tensors(values)
    places = dict(zip(tensors, map(_place, tensors.values()), strict=True))
    ties = _ties(tensors, places)
    trained: dict[int, list[torch.Tensor]] | None = None
    plain, parameter = torch.Tensor, torch.nn.Parameter
    made: dict[Any, Slot] = {}
    slots: Slots = {}
    for name in values:
        tensor = tensors.get(name)
        if tensor is None:
            slots[name] = EXTRA
            continue
        # Asking whether a plain tensor is a Parameter is slow, and so is `shape_of`.
        known = type(tensor)
        trains = known is not plain and isinstance(tensor, parameter)
        if not trains:
            if trained is None:
                trained = _by_place(parameters)
            if near := trained.get(places[name]):
                trains = _elements(tensor) in map(_elements, near)
        is_plain = (known is plain or known is parameter) and not tensor.is_nested
        shape = tensor.shape if is_plain else shape_of(tensor)
        key = shape, tensor.dtype, trains, ties.get(name) if ties else None
        slot = made.get(key)
        if slot is None:
            kind = "parameter" if trains else rest
            slot = made[key] = Slot(shape_of(tensor), dtype_name(tensor), kind, key[3])
        slots[name] = slot
    return slots


def live_tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Those of the entries that are tensors, and no extra states."""
    import torch

    return {
        name: value
        for name, value in values.items()
        if isinstance(value, torch.Tensor) and not is_extra_state(name)
    }


def _place(tensor: torch.Tensor) -> int:
    """Where its first element lies: equal for tensors that are one, and for few others.

    Which storage it has where there are no elements, or none here.
    """
    try:
        place = tensor.data_ptr()
    except (RuntimeError, ValueError):  # it has no storage, or none yet
        return -id(tensor)
    return place or storage_of(tensor) or -id(tensor)


def _by_place(tensors: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(_place(tensor), []).append(tensor)
    return found


def _elements(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are the same elements."""
    return memory_of(tensor) or _place(tensor)


def _ties(tensors: Mapping[str, torch.Tensor], places: Mapping[str, int]) -> dict[str, Hashable]:
    """Names of one tensor, by identity or as the same elements, each with what they share."""
    met = Counter(places.values())
    if len(met) == len(places):
        return {}
    keys: dict[str, Hashable] = {}
    for name, tensor in tensors.items():
        if met[places[name]] > 1:
            memory = memory_of(tensor)
            keys[name] = id(tensor) if memory is None else memory
    several = Counter(keys.values())
    return {name: key for name, key in keys.items() if several[key] > 1}
