"""What a model wants: the names of its state dict, and the live tensors behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptool.loading.fitting.live_slots import live_slots, live_tensors
from ckptool.loading.fitting.shards import Shards, shards_of, ungathered
from ckptool.matching import Slot, Slots
from ckptool.wrappers import WRAPPERS

if TYPE_CHECKING:
    import torch

__all__ = ["Target", "label_of", "target_of"]


@dataclass(frozen=True, eq=False)
class Target:
    """What is to be filled."""

    label: str
    """For messages: the class of the model inside all wrappers, or the path of a reference."""
    slots: Slots
    entries: dict[str, torch.Tensor] = field(default_factory=dict)
    """The live parameters and buffers by name; not extra states, nor what FSDP keeps in shards."""
    metadata: Mapping[str, Any] | None = None
    """The `_metadata` of the model's own state dict."""
    model: torch.nn.Module | None = None
    """None where it is no model."""


def target_of(model: torch.nn.Module) -> Target:
    """What `model` wants, as its own `state_dict` names it; no element is read or moved.

    A model inside FSDP (the first) is asked without gathering it: the names are those of its full
    state dict.
    """
    shards = shards_of(model)
    if shards is not None:
        return _of_shards(model, shards)
    state = _state_dict(model)
    slots = live_slots(state, parameters=model.parameters(), rest="buffer")
    metadata = getattr(state, "_metadata", None)
    return Target(label_of(model), slots, live_tensors(state), metadata, model)


def label_of(model: torch.nn.Module) -> str:
    """The name of its class; of a wrapper, of the class inside."""
    while True:
        inside = [(name, child) for name, child in model._modules.items() if child is not None]
        if len(inside) != 1 or inside[0][0] not in WRAPPERS or model._parameters:
            return type(model).__name__
        model = inside[0][1]


def _state_dict(model: torch.nn.Module) -> Mapping[str, Any]:
    """Its state dict over the live tensors; detached ones where an override knows no better."""
    try:
        state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    except TypeError:
        state = model.state_dict()
    return state


def _of_shards(model: torch.nn.Module, shards: Shards) -> Target:
    """What a model wants of whose parameters this rank has a part, in flat ones."""
    state = ungathered(model, shards)
    live = {name: held for name, held in state.items() if not isinstance(held, Slot)}
    slots = {**state, **live_slots(live, rest="buffer")}
    return Target(label_of(model), slots, live_tensors(live), state.metadata, model)
