"""What a model wants: the names of its state dict, and the live tensors behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckptool.loading.memory import dtype_name, memory_of, shape_of
from ckptool.loading.shards import Shards, shards_of, ungathered
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


def target_of(model: torch.nn.Module) -> Target:
    """What `model` wants, as its own `state_dict` names it; no element is read or moved.

    A model inside FSDP (the first) is asked without gathering it: the names are those of its full
    state dict.
    """
    shards = shards_of(model)
    if shards is not None:
        return _of_shards(model, shards)
    state = _state_dict(model)
    entries = {name: value for name, value in state.items() if _is_entry(name, value)}
    trained = frozenset(map(_identity, model.parameters()))
    keys = {name: _identity(tensor) for name, tensor in entries.items()}
    ties = _shared(keys.values())
    slots = {
        name: _slot(entries[name], keys[name], trained, ties) if name in entries else _EXTRA
        for name in state
    }
    return Target(label_of(model), slots, entries, getattr(state, "_metadata", None))


def label_of(model: torch.nn.Module) -> str:
    """The name of its class; of a wrapper, of the class inside."""
    while True:
        inside = [(name, child) for name, child in model._modules.items() if child is not None]
        if len(inside) != 1 or inside[0][0] not in WRAPPERS or model._parameters:
            return type(model).__name__
        model = inside[0][1]


_EXTRA = Slot(kind="extra")


def _state_dict(model: torch.nn.Module) -> Mapping[str, Any]:
    """Its state dict over the live tensors; detached ones where an override knows no better."""
    try:
        state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    except TypeError:
        state = model.state_dict()
    return state


def _is_entry(name: str, value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and name.rpartition(".")[2] != "_extra_state"


def _identity(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that are one, or the same elements."""
    memory = memory_of(tensor)
    return id(tensor) if memory is None else memory


def _shared(keys: Iterable[Hashable]) -> frozenset[Hashable]:
    """Those that are there more than once."""
    return frozenset(key for key, count in Counter(keys).items() if count > 1)


def _slot(
    tensor: torch.Tensor, key: Hashable, trained: frozenset[Hashable], ties: frozenset[Hashable]
) -> Slot:
    import torch

    is_parameter = isinstance(tensor, torch.nn.Parameter) or key in trained
    kind = "parameter" if is_parameter else "buffer"
    return Slot(shape_of(tensor), dtype_name(tensor), kind, key if key in ties else None)


def _of_shards(model: torch.nn.Module, shards: Shards) -> Target:
    """What a model wants of whose parameters this rank has a part, in flat ones."""
    state = ungathered(model, shards)
    slots: Slots = {}
    entries: dict[str, torch.Tensor] = {}
    for name, held in state.items():
        if isinstance(held, Slot):
            slots[name] = held
        else:
            slots[name] = _slot(held, _identity(held), frozenset(), frozenset())
            entries[name] = held
    return Target(label_of(model), slots, entries, state.metadata)
