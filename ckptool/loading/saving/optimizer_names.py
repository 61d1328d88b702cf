"""What the parameters of a live optimizer are called."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckptool.errors import NameCollision
from ckptool.loading.live.memory import memory_of
from ckptool.loading.saving.bare_names import bare_names
from ckptool.names import Rename, strip_names

if TYPE_CHECKING:
    import torch

__all__ = ["Names", "entry_names", "named", "names_in", "own_names", "parameters_of"]

Names = list[list[str] | None]
"""For each group of an optimizer the names of its parameters."""


def parameters_of(optimizer: Any) -> list[Any]:
    """Those of all its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def entry_names(model: torch.nn.Module, state: Mapping[Any, Any], bare: Rename) -> dict[int, str]:
    """By the `id` of a parameter its name in the model's state dict, where that has another.

    A hook of a state dict may rename what it has; a name that an optimizer keeps is one of these.
    """
    import torch

    places = {
        name: memory_of(value) for name, value in state.items() if isinstance(value, torch.Tensor)
    }
    names = {place: name for name, place in places.items() if place is not None}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        place = memory_of(parameter)
        if place is not None and place != places.get(name) and place in names:
            found[id(parameter)] = bare(names[place])
    return found


def names_in(
    optimizer: Any,
    groups: list[dict[str, Any]],
    model: torch.nn.Module,
    called: Mapping[int, str] = MappingProxyType({}),
) -> Names:
    """The model's names of the parameters of each group; None where `groups` are other ones.

    `called`: by the `id` of a parameter what the state dict has it as, where that differs.
    """
    bare = bare_names(model)
    known: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known.setdefault(id(parameter), called.get(id(parameter)) or bare(name))
    live = [group["params"] for group in optimizer.param_groups]
    if [len(params) for params in live] != [len(group["params"]) for group in groups]:
        return [None] * len(groups)
    every = ([known.get(id(parameter)) for parameter in params] for params in live)
    return [_texts(names) for names in every]


def own_names(groups: list[dict[str, Any]]) -> Names:
    """The names that the optimizer was made with, wrappers off."""
    names = [_texts(group.get("param_names")) for group in groups]
    names = [
        own if own and len(own) == len(group["params"]) else None
        for own, group in zip(names, groups, strict=True)
    ]
    try:
        renamed = strip_names(dict.fromkeys(name for own in names for name in own or ())).renamed
    except NameCollision:
        renamed = {}
    return [own and [renamed.get(name, name) for name in own] for own in names]


def _texts(names: Any) -> list[str] | None:
    """A list of names, if it is one."""
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        return None
    return list(names)


def named(groups: list[dict[str, Any]], names: Names) -> list[dict[str, Any]]:
    """The groups with their `param_names`, as far as these are known."""
    return [
        group if own is None else {**group, "param_names": own}
        for group, own in zip(groups, names, strict=True)
    ]
