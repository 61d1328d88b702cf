"""A twin of a model that shares nothing with it and has no elements: to try things on."""

from __future__ import annotations

import copy
from collections import OrderedDict
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

from ckptool.loading.live.memory import memory_of
from ckptool.wrappers import WRAPPERS

if TYPE_CHECKING:
    import torch

__all__ = ["twin_of"]

_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_IDLE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Hooks that loading does not call: they may hold on to activations."""

_LARGE = 1 << 20
"""Bytes of a tensor that is not copied."""


def twin_of(model: torch.nn.Module) -> torch.nn.Module:
    """A deep copy whose parameters and buffers are on the meta device, under the same names.

    Large tensors that are plain attributes are there as well; small ones are copied, as code may
    ask for their numbers.

    Wrappers around the whole model are plain modules in it: some cannot be copied, or would talk
    to other ranks. Whatever copying the user's own objects raises is passed on.
    """
    import torch

    outside, inner = _unwrapped(model)
    memo: dict[int, Any] = {}
    for module in model.modules():
        for held in (*module._parameters.values(), *module._buffers.values()):
            if held is not None and id(held) not in memo:
                memo[id(held)] = _placeholder(held)
        for held in vars(module).values():
            if isinstance(held, torch.Tensor) and id(held) not in memo and _is_large(held):
                memo[id(held)] = _placeholder(held)
        for name in _IDLE:
            hooks = vars(module).get(name)
            if hooks is not None:
                memo[id(hooks)] = OrderedDict()
    twin = copy.deepcopy(inner, memo)
    for module in twin.modules():
        for name in _HOOKS:
            hooks = vars(module)[name]
            for key, hook in hooks.items():
                hooks[key] = _bound_anew(hook, memo)
        own = vars(module).get("_load_from_state_dict")
        if own is not None:
            vars(module)["_load_from_state_dict"] = _bound_anew(own, memo)
    for name in reversed(outside):
        outer = torch.nn.Module()
        outer.add_module(name, twin)
        twin = outer
    return twin


def _is_large(tensor: torch.Tensor) -> bool:
    memory = memory_of(tensor)
    return memory is not None and memory.nbytes > _LARGE


def _unwrapped(model: torch.nn.Module) -> tuple[list[str], torch.nn.Module]:
    """The names of the wrappers around a model, and what is inside; those with hooks stay."""
    outside: list[str] = []
    while True:
        inside = [(name, child) for name, child in model._modules.items() if child is not None]
        if (
            len(inside) != 1
            or inside[0][0] not in WRAPPERS
            or model._parameters
            or model._buffers
            or any(vars(model)[name] for name in _HOOKS)
        ):
            return outside, model
        outside.append(inside[0][0])
        model = inside[0][1]


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """Of the same class, shape and type, without elements."""
    import torch
    from torch.nn.parameter import is_lazy

    made: torch.Tensor
    kind: Any = type(tensor)
    if is_lazy(tensor):
        made = kind(device="meta", dtype=tensor.dtype)
    else:
        made = torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=False)
        if kind is not type(made):
            made.__class__ = kind
    if made.dtype.is_floating_point or made.dtype.is_complex:
        made.requires_grad_(tensor.requires_grad)
    return made


def _bound_anew(hook: Any, memo: dict[int, Any]) -> Any:
    """A hook whose closure has the twin where it had the model: functions are not copied deep."""
    if isinstance(getattr(hook, "hook", None), FunctionType):  # torch's wrapper of a hook, copied
        hook.hook = _bound_anew(hook.hook, memo)
    if not isinstance(hook, FunctionType) or not hook.__closure__:
        return hook
    inside = (_bound_anew(cell.cell_contents, memo) for cell in hook.__closure__)
    cells = tuple(CellType(copy.deepcopy(one, memo)) for one in inside)
    made = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, cells)
    made.__kwdefaults__ = hook.__kwdefaults__
    return made
