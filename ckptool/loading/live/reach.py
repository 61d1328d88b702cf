"""What objects lead to: whether code that holds them could get at a model that it is not for."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ckptool.loading.live.undoing import tensors_of

if TYPE_CHECKING:
    import torch

__all__ = ["PASSED", "reaches"]

_MOST = 1_000_000
"""Objects that are looked at; what leads to more may lead to anything."""
PASSED = frozenset({"forward", "_compiled_call_impl", "dynamo_ctx"})
"""Attributes of modules that loading does not call: compiled ones hold on to what they are of."""
_PLAIN = (str, bytes, int, float, complex, bool, type(None), CodeType, ModuleType, slice, range)
_OTHERS = frozenset({*sys.stdlib_module_names, *sys.builtin_module_names, "torch", "numpy"})
"""Packages whose classes and functions lead to no model by themselves."""


def reaches(start: torch.nn.Module, model: torch.nn.Module) -> bool:
    """Whether what `start` holds, and its code does, leads to `model`, its modules or its tensors.

    Closures, defaults, bound objects, weak references, classes and what is in them; not globals.
    """
    import torch

    real = {id(one) for one in model.modules()}
    real.update(id(tensor) for tensor in tensors_of(model))
    storages = {*map(_storage, tensors_of(model))} - {None}
    seen: dict[int, Any] = {}  # held, so that no other object gets its number
    todo: list[Any] = [start]
    while todo:
        one = todo.pop()
        if isinstance(one, _PLAIN) or id(one) in seen:
            continue
        if id(one) in real or len(seen) > _MOST:
            return True
        seen[id(one)] = one
        if isinstance(one, torch.Tensor) and _storage(one) in storages:
            return True
        todo.extend(_held(one))
    return False


def _storage(tensor: torch.Tensor) -> int | None:
    """Which storage it has; None: none here."""
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, ValueError):  # sparse, lazy, nested
        return None
    return storage._cdata if storage.nbytes() else None


def _held(one: Any) -> Iterable[Any]:
    """What an object leads to."""
    import torch

    kind: Any = type(one)
    if isinstance(one, torch.nn.Module):
        return (kind, *(held for name, held in vars(one).items() if name not in PASSED))
    if isinstance(one, FunctionType):
        return _of_function(one)
    if isinstance(one, type):
        return () if _is_known(one) else (*vars(one).values(), *one.__mro__[1:], type(one))
    if isinstance(one, weakref.ReferenceType):
        return (one(), kind, *gc.get_referents(one))
    if kind in weakref.ProxyTypes:
        return _of_proxy(one)
    if isinstance(one, dict) and "__builtins__" in one:
        return ()  # globals
    if isinstance(one, BuiltinFunctionType) and isinstance(one.__self__, ModuleType):
        return ()
    return (kind, *gc.get_referents(one))


def _of_function(function: FunctionType) -> Iterator[Any]:
    if _is_known(function):
        return
    yield from (function.__defaults__, function.__kwdefaults__, vars(function))
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it is empty
            continue


def _of_proxy(proxy: Any) -> Iterator[Any]:
    try:
        yield proxy.__init__.__self__
    except (ReferenceError, AttributeError):
        return


def _is_known(code: Any) -> bool:
    home = getattr(code, "__module__", None)
    return isinstance(home, str) and home.partition(".")[0] in _OTHERS and home != "__main__"
