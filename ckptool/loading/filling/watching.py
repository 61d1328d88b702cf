"""Which tensors of a model torch does no more to than copy into them: no hook looks on."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ckptool.loading.fitting.own_loading import has_own_load

if TYPE_CHECKING:
    import torch

__all__ = ["overrides_loading", "unwatched"]

_HARMLESS = frozenset({"torch.distributed.algorithms._checkpoint.checkpoint_wrapper"})
"""Modules of torch whose hooks change names alone."""


def unwatched(model: torch.nn.Module) -> frozenset[int]:
    """The `id`s of parameters and buffers that no code looks at, or changes, while they are loaded.

    Neither their module nor one around it has hooks, an extra state, or a loading of its own.
    """
    if overrides_loading(model) or _swaps():
        return frozenset()
    found: dict[bool, set[int]] = {False: set(), True: set()}
    done: set[tuple[int, bool]] = set()
    todo = [(model, False)]
    while todo:
        module, seen = todo.pop()
        seen = seen or _looks(module)
        if (id(module), seen) in done:
            continue
        done.add((id(module), seen))
        for held in (module._parameters, module._buffers):
            found[seen].update(id(tensor) for tensor in held.values() if tensor is not None)
        todo.extend((child, seen) for child in module._modules.values() if child is not None)
    return frozenset(found[False] - found[True])


def _swaps() -> bool:
    """Whether torch (2.3 and later) was told to swap tensors in the place of copying."""
    import torch

    asked = getattr(torch.__future__, "get_swap_module_params_on_conversion", None)
    return asked is not None and bool(asked())


def overrides_loading(model: torch.nn.Module) -> bool:
    """Whether its `load_state_dict` is not torch's own."""
    import torch

    return has_own_load(model) or isinstance(model, torch.jit.ScriptModule)


def _looks(module: torch.nn.Module) -> bool:
    """Whether loading this module is more than torch's copying of tensors."""
    import torch

    base, kind = torch.nn.Module, type(module)
    return (
        kind._load_from_state_dict not in _by_names_alone()
        or "_load_from_state_dict" in vars(module)
        or kind.set_extra_state is not base.set_extra_state
        or isinstance(module, torch.jit.ScriptModule)
        or any(map(_acts, module._load_state_dict_pre_hooks.values()))
        or any(map(_acts, module._load_state_dict_post_hooks.values()))
    )


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
