"""A twin of a model that shares nothing with it and has no elements: to try things on."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from ckptool.loading.live.memory import memory_of
from ckptool.loading.live.reach import PASSED
from ckptool.names import WRAPPERS

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
    anew = _Anew(memo)
    for module in twin.modules():
        anew.bind(vars(module))
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


class _Anew:
    """Gives what a twin holds the twin where it had the model.

    Functions and weak references are not copied deep.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        """`memo` has what was copied, as `deepcopy` keeps it."""
        self._memo = memo
        self._made: dict[int, FunctionType] = {}
        self._done: set[int] = set()

    def bind(self, held: dict[Any, Any]) -> None:
        """All that is in a dict, which is the twin's own."""
        self._done.add(id(held))
        for name, value in list(held.items()):
            if name not in PASSED:
                held[name] = self.bound(value)

    def bound(self, value: Any) -> Any:
        """A value, or what takes its place; its own containers are changed."""
        from torch.nn.modules.module import _WrappedHook

        kind = type(value)
        if kind is FunctionType:
            return self._function(value)
        if kind is weakref.ReferenceType:
            return self._reference(value)
        if kind is MethodType:
            return MethodType(self.bound(value.__func__), value.__self__)
        if kind is partial:
            words = {name: self.bound(one) for name, one in value.keywords.items()}
            return partial(self.bound(value.func), *map(self.bound, value.args), **words)
        if kind is tuple:
            return tuple(map(self.bound, value))
        if id(value) in self._done:
            return value
        if kind in (dict, OrderedDict):
            self.bind(value)
        elif kind is list:
            self._done.add(id(value))
            value[:] = map(self.bound, value)
        elif kind is _WrappedHook:  # torch's own, copied
            value.hook = self.bound(value.hook)
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        """The same function, over copies; itself where it is over what cannot be copied."""
        if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__):
            return function
        if id(function) not in self._made:
            self._made[id(function)] = made = self._empty(function)
            try:
                for cell, other in zip(
                    made.__closure__ or (), function.__closure__ or (), strict=True
                ):
                    cell.cell_contents = self._copied(other.cell_contents)
                made.__defaults__ = self._copied(function.__defaults__)
                made.__kwdefaults__ = self._copied(function.__kwdefaults__)
            except Exception:  # whatever an object's own copying raises; or a cell is empty
                self._made[id(function)] = function
        return self._made[id(function)]

    def _empty(self, function: FunctionType) -> FunctionType:
        cells = tuple(CellType() for _ in function.__closure__ or ())
        made = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)
        made.__qualname__ = function.__qualname__
        vars(made).update(vars(function))
        return made

    def _copied(self, value: Any) -> Any:
        return self.bound(copy.deepcopy(value, self._memo))

    def _reference(self, reference: weakref.ReferenceType[Any]) -> Any:
        twin = self._memo.get(id(reference()))
        return reference if twin is None else weakref.ref(twin)
