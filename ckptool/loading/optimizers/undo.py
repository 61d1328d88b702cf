"""An optimizer put back exactly as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["does_more", "innermost", "layers", "remembered"]

Undo = Callable[[], None]


def remembered(optimizer: Any) -> Undo:
    """Remember an optimizer, and those that it wraps; what is returned puts all of it back.

    The same dicts, lists and tensors stand there again, with what they held. The numbers in tensors
    of the state are copied only where something else than `Optimizer.load_state_dict` is to run,
    which makes new tensors and leaves these alone.
    """
    steps: list[Undo] = []
    for one in layers(optimizer):
        numbers = does_more(one)
        steps.append(_undo_dict(vars(one)))
        for group in getattr(one, "param_groups", ()):
            params = group.get("params")
            steps.append(_undo_dict(group))
            for held in group.values():
                if held is not params:
                    steps.extend(_deep(held, numbers=True))
            if isinstance(params, list):
                steps.append(_undo_list(params))
        state = getattr(one, "state", None)
        if isinstance(state, dict):
            steps.extend(_deep(state, numbers))
        groups = getattr(one, "param_groups", None)
        if isinstance(groups, list):
            steps.append(_undo_list(groups))

    def undo() -> None:
        for step in reversed(steps):
            step()

    return undo


def layers(optimizer: Any) -> Iterator[Any]:
    """It, and what it is a wrapper of: that of accelerate, of Lightning, of ZeRO."""
    seen: list[Any] = []
    while optimizer is not None and hasattr(optimizer, "__dict__"):
        if any(optimizer is one for one in seen):
            return
        seen.append(optimizer)
        yield optimizer
        held = vars(optimizer)
        inner = (held.get(name) for name in ("optimizer", "_optimizer", "optim"))
        optimizer = next((one for one in inner if hasattr(one, "load_state_dict")), None)


def innermost(optimizer: Any) -> Any:
    """What is in all wrappers."""
    for one in layers(optimizer):
        if hasattr(one, "param_groups"):
            optimizer = one
    return optimizer


def does_more(optimizer: Any) -> bool:
    """Whether loading runs code of others."""
    import torch

    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    if any(vars(optimizer).get(name) for name in hooks):
        return True
    cls = type(optimizer)
    own = getattr(cls, "load_state_dict", None) is torch.optim.Optimizer.load_state_dict
    return not (own and cls.__module__.startswith("torch.optim."))


def _deep(node: Any, numbers: bool) -> Iterator[Undo]:
    """Everything below a container of the state; its keys are parameters, which are not copied."""
    import torch

    if isinstance(node, dict):
        yield _undo_dict(node)
        for value in list(node.values()):
            yield from _deep(value, numbers)
    elif isinstance(node, list):
        yield _undo_list(node)
        for value in list(node):
            yield from _deep(value, numbers)
    elif isinstance(node, tuple):
        for value in node:
            yield from _deep(value, numbers)
    elif numbers and isinstance(node, torch.Tensor):
        yield _undo_numbers(node)


def _undo_dict(node: dict[Any, Any]) -> Undo:
    held = dict(node)

    def undo() -> None:
        node.clear()
        node.update(held)

    return undo


def _undo_list(node: list[Any]) -> Undo:
    held = list(node)

    def undo() -> None:
        node[:] = held

    return undo


def _undo_numbers(tensor: Any) -> Undo:
    import torch

    held = tensor.detach().clone()

    def undo() -> None:
        with torch.no_grad():
            tensor.copy_(held)

    return undo
