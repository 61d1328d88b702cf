"""Who looks at a model's tensors while torch loads them, and when: what nobody sees can wait."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ckptool.loading.live.own_loading import has_own_load

if TYPE_CHECKING:
    import torch

__all__ = ["Watch", "looks", "overrides_loading", "runs_code", "watched"]

_TORCH = ("torch.nn.modules.", "torch.nn.utils.", "torch.ao.", "torch.distributed.")
"""Where code of torch's is that is known to look at its own module, and what is inside, alone."""
_HARMLESS = frozenset(
    {
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "torch.nn.utils.parametrizations",
    }
)
"""Modules of torch whose hooks change names alone."""


class Watch(IntEnum):
    """Who looks at a tensor, or changes it, while it is loaded: the more, the higher."""

    NONE = 0
    """Nobody: torch alone copies into it."""
    AFTER = 1
    """Code that runs while the model is loaded, and may have to do with any of it."""
    BEFORE = 2
    """What has the state dict in hand: a hook before torch's loading, or a module's own loading."""
    ALWAYS = 3
    """The whole model's own loading, or another way of torch's than to copy."""


def watched(model: torch.nn.Module, *, by_all: bool) -> Mapping[int, Watch]:
    """The `id`s of all parameters and buffers, with the highest that is true of any place of each.

    Code of torch's own looks at all that is inside its module; any other may look at, and write to,
    whatever it knows of: then somebody looks at `all` of them.
    """
    found: dict[int, Watch] = {}
    done: set[tuple[int, Watch]] = set()
    least = Watch.AFTER if by_all else Watch.NONE
    everywhere = overrides_loading(model) or _swaps()
    todo = [(model, Watch.ALWAYS if everywhere else least)]
    while todo:
        module, around = todo.pop()
        if (id(module), around) in done:
            continue
        done.add((id(module), around))
        own = max(around, looks(module))
        for held in (module._parameters, module._buffers):
            for tensor in held.values():
                if tensor is not None:
                    found[id(tensor)] = max(own, found.get(id(tensor), own))
        todo.extend((child, own) for child in module._modules.values() if child is not None)
    return found


def runs_code(
    model: torch.nn.Module, *, assigns: bool = False, optimizers: Iterable[Any] = ()
) -> bool:
    """Whether any code but torch's own runs while torch loads the model, and then `optimizers`.

    Hooks, loadings and extra states of whatever module; where it `assigns`, what sets attributes.
    """
    return (
        overrides_loading(model)
        or any(_runs(one, assigns) for one in model.modules())
        or any(map(_optimizer_runs, optimizers))
    )


def _runs(module: torch.nn.Module, assigns: bool) -> bool:
    kind: Any = type(module)
    own = vars(module)
    if "_load_from_state_dict" in own or "set_extra_state" in own:
        return True
    methods = ["_load_from_state_dict", "set_extra_state", "__getattribute__"]
    if not all(_is_torchs(kind, name) for name in methods + ["__setattr__"] * assigns):
        return True
    befores, afters = module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
    if not all(_is_known(hook, module) for hook in (*befores.values(), *afters.values())):
        return True
    held = (*module._parameters.values(), *module._buffers.values())
    kinds: set[Any] = {type(tensor) for tensor in held if tensor is not None}
    return not all(map(_is_plain, kinds))


def _optimizer_runs(optimizer: Any) -> bool:
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    if any(vars(optimizer).get(name) for name in (*hooks, "load_state_dict")):
        return True
    methods = ("load_state_dict", "__setstate__", "__getattribute__")
    kind: Any = type(optimizer)
    return not all(_is_torchs(kind, name) for name in methods)


@cache
def _is_torchs(kind: type, name: str) -> bool:
    """Whether a method of a class is one of torch's."""
    home = next((one.__module__ for one in kind.__mro__ if name in vars(one)), "builtins")
    return home == "builtins" or home.startswith("torch.")


@cache
def _is_plain(kind: type) -> bool:
    """Whether torch copies into tensors of a class without asking code of another's."""
    asked = ("__torch_function__", "__torch_dispatch__", "copy_")
    homes = (one.__module__ for one in kind.__mro__ if any(name in vars(one) for name in asked))
    return all(home == "torch" or home.startswith("torch.") for home in homes)


def _is_known(hook: Any, module: torch.nn.Module) -> bool:
    """Whether a hook is one of torch's, and of this module."""
    import torch

    hook = getattr(hook, "hook", hook)  # torch wraps those that are given the module too
    if isinstance(hook, partial):
        hook = hook.func
        within: tuple[str, ...] = ("torch.distributed.",)
    else:
        within = _TORCH
    owner = getattr(hook, "__self__", module)
    if isinstance(owner, torch.nn.Module) and owner is not module:
        return False
    home = getattr(hook, "__module__", None)
    return isinstance(home, str) and home.startswith(within)


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
