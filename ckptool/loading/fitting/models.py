"""What a model wants: the names of its state dict, and the live tensors behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.loading.live.own_loading import NamedModule, OwnLoading, own_loading
from ckptool.loading.live.parametrized import with_forms
from ckptool.loading.live.slots import live_slots, live_tensors
from ckptool.loading.live.spreading import Shards, shards_of, ungathered, without_hidden
from ckptool.matching import Slot, Slots
from ckptool.names import WRAPPERS

if TYPE_CHECKING:
    import torch

__all__ = ["Target", "innermost", "label_of", "state_dict_of", "target_of"]


class Target(NamedTuple):
    """What is to be filled."""

    label: str
    """For messages: the class of the model inside all wrappers, or the path of a reference."""
    slots: Slots
    entries: Mapping[str, torch.Tensor] = MappingProxyType({})
    """The live parameters and buffers by name; not extra states, nor what FSDP keeps in shards."""
    metadata: Mapping[str, Any] | None = None
    """The `_metadata` of the model's own state dict."""
    model: torch.nn.Module | None = None
    """None where it is no model."""
    loading: OwnLoading | None = None
    """What of the model loads in a way of its own."""
    unsure: Mapping[str, torch.Tensor] = MappingProxyType({})
    """Tensors that no entry is, of modules that load in a way of their own: those may want them."""


def target_of(model: torch.nn.Module) -> Target:
    """What `model` wants, as its own `state_dict` names it; no element is read or moved.

    What that leaves out, and torch asks for when it loads, is wanted as well. A model inside FSDP
    (the first) is asked without gathering it: the names are those of its full state dict.
    """
    shards = shards_of(model)
    if shards is not None:
        return _of_shards(model, shards)
    state = state_dict_of(model)
    metadata = getattr(state, "_metadata", None)
    modules = list(model.named_modules(remove_duplicate=False))
    loading = own_loading(modules)
    unlisted, unsure = _unlisted(modules, state, loading)
    state = {**state, **unlisted}
    slots = with_forms(live_slots(state, parameters=model.parameters(), rest="buffer"), modules)
    tensors = live_tensors(state)
    return Target(label_of(model), slots, tensors, metadata, model, loading, unsure)


def label_of(model: torch.nn.Module) -> str:
    """The name of its class; of a wrapper, of the class inside."""
    return type(innermost(model)).__name__


def innermost(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside all wrappers."""
    while True:
        inside = [(name, child) for name, child in model._modules.items() if child is not None]
        if len(inside) != 1 or inside[0][0] not in WRAPPERS or model._parameters:
            return model
        model = inside[0][1]


def state_dict_of(model: torch.nn.Module) -> Mapping[str, Any]:
    """Its state dict over the live tensors; detached ones where an override knows no better."""
    try:
        state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    except TypeError:
        state = model.state_dict()
    return state


def _unlisted(
    modules: Iterable[NamedModule], state: Mapping[str, Any], loading: OwnLoading
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors that the model's own `state_dict` leaves out, by the names that torch has for them.

    Those that torch asks for, and those below modules that load in a way of their own: there it may
    ask for other names, or for none.
    """
    shut: set[str] = set()
    asked: dict[str, torch.Tensor] = {}
    unsure: dict[str, torch.Tensor] = {}
    for path, module in modules:
        clean = without_hidden(path)
        if loading.closed and (
            clean in loading.closed or clean.rpartition(".")[0] in shut or "" in shut
        ):
            shut.add(clean)
        found = unsure if clean in shut else asked
        before, whole = (f"{one}." if one else "" for one in (clean, path))
        held: Mapping[str, torch.Tensor | None] = module._parameters
        if module._buffers:
            passing = module._non_persistent_buffers_set
            held = {**held, **{n: one for n, one in module._buffers.items() if n not in passing}}
        for name, tensor in held.items():
            if tensor is not None and state.keys().isdisjoint((before + name, whole + name)):
                found[before + name] = tensor
    return asked, unsure


def _of_shards(model: torch.nn.Module, shards: Shards) -> Target:
    """What a model wants of whose parameters this rank has a part, in flat ones."""
    state = ungathered(model, shards)
    live = {name: held for name, held in state.items() if not isinstance(held, Slot)}
    modules = list(model.named_modules(remove_duplicate=False))
    slots = with_forms({**state, **live_slots(live, rest="buffer")}, modules)
    tensors = live_tensors(live)
    loading = own_loading(modules)
    return Target(label_of(model), slots, tensors, state.metadata, model, loading)
