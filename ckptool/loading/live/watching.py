"""Who looks at a model's tensors while torch loads them, and when: what nobody sees can wait."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from ckptool.loading.live.own_loading import has_own_load

if TYPE_CHECKING:
    import torch

__all__ = ["Watch", "has_extra_state", "looks", "overrides_loading", "watched"]

_HARMLESS = frozenset({"torch.distributed.algorithms._checkpoint.checkpoint_wrapper"})
"""Modules of torch whose hooks change names alone."""


class Watch(IntEnum):
    """Who looks at a tensor, or changes it, while it is loaded: the more, the higher."""

    NONE = 0
    """Nobody: torch alone copies into it."""
    ABOVE = 1
    """An extra state is set around it, before it is loaded itself."""
    AFTER = 2
    """A hook that runs once it is filled, or the extra state of its own module."""
    BEFORE = 3
    """What has the state dict in hand: a hook before torch's loading, or a module's own loading."""
    ALWAYS = 4
    """The whole model's own loading, or another way of torch's than to copy."""


def watched(model: torch.nn.Module) -> Mapping[int, Watch]:
    """The `id`s of all parameters and buffers, with the highest that is true of any place of each.

    Hooks and loadings look at all that is inside their module. An extra state has to do with its
    own module's tensors; what is inside is loaded, by torch too, when it has been set.
    """
    found: dict[int, Watch] = {}
    done: set[tuple[int, Watch]] = set()
    everywhere = overrides_loading(model) or _swaps()
    todo = [(model, Watch.ALWAYS if everywhere else Watch.NONE)]
    while todo:
        module, around = todo.pop()
        if (id(module), around) in done:
            continue
        done.add((id(module), around))
        own = inside = max(around, looks(module))
        if has_extra_state(module):
            own, inside = max(own, Watch.AFTER), max(inside, Watch.ABOVE)
        for held in (module._parameters, module._buffers):
            for tensor in held.values():
                if tensor is not None:
                    found[id(tensor)] = max(own, found.get(id(tensor), own))
        todo.extend((child, inside) for child in module._modules.values() if child is not None)
    return found


def _swaps() -> bool:
    """Whether torch (2.3 and later) was told to swap tensors in the place of copying."""
    import torch

    asked = getattr(torch.__future__, "get_swap_module_params_on_conversion", None)
    return asked is not None and bool(asked())


def overrides_loading(model: torch.nn.Module) -> bool:
    """Whether its `load_state_dict` is not torch's own."""
    import torch

    return has_own_load(model) or isinstance(model, torch.jit.ScriptModule)


def looks(module: torch.nn.Module) -> Watch:
    """Who looks at all of a module, its extra state aside."""
    import torch

    if (
        type(module)._load_from_state_dict not in _by_names_alone()
        or "_load_from_state_dict" in vars(module)
        or isinstance(module, torch.jit.ScriptModule)
        or any(map(_acts, module._load_state_dict_pre_hooks.values()))
    ):
        return Watch.BEFORE
    after = any(map(_acts, module._load_state_dict_post_hooks.values()))
    return Watch.AFTER if after else Watch.NONE


def has_extra_state(module: torch.nn.Module) -> bool:
    """Whether torch sets an extra state of it."""
    import torch

    return type(module).set_extra_state is not torch.nn.Module.set_extra_state


@cache
def _by_names_alone() -> frozenset[Any]:
    """Torch's own ways of loading a module that copy into its tensors and look at none."""
    import torch

    kinds = (torch.nn.Module, torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d)
    return frozenset(kind._load_from_state_dict for kind in kinds)


def _acts(hook: Any) -> bool:
    """Whether a hook may look at tensors; torch wraps those that are given the module too."""
    hook = getattr(hook, "hook", hook)
    hook = getattr(hook, "func", hook)
    return getattr(hook, "__module__", None) not in _HARMLESS
