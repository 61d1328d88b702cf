"""Modules that do more with a state dict than torch: hooks, or a loading of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.loading.live.spreading import without_hidden

if TYPE_CHECKING:
    import torch

__all__ = ["NamedModule", "OwnLoading", "has_own_load", "own_loading"]

NamedModule = tuple[str, "torch.nn.Module"]
"""A module and its path."""

_KNOWN = ("torch.nn.", "torch.distributed.")
"""Where code of torch's is that changes no names but those that matching knows of."""


class OwnLoading(NamedTuple):
    """Where in a model names of another kind than its own may be taken."""

    closed: frozenset[str]
    """Paths of modules that see the state dict before torch does."""
    paths: dict[str, str]
    """The same and those that see what torch says of it, each with the class of the module."""

    def holder(self, name: str) -> str | None:
        """The class of the module that a name is for, the innermost; None: torch alone loads it."""
        while self.paths:
            name = name.rpartition(".")[0]
            if name in self.paths:
                return self.paths[name]
            if not name:
                break
        return None


def own_loading(modules: Iterable[NamedModule]) -> OwnLoading:
    """Which of all the modules of a model load in a way of their own, by the paths of its names."""
    closed, paths = set(), {}
    for path, module in modules:
        converts = _converts(module) or (not path and has_own_load(module))
        if converts or any(map(_is_strange, module._load_state_dict_post_hooks.values())):
            clean = without_hidden(path)
            paths[clean] = type(module).__name__
            if converts:
                closed.add(clean)
    return OwnLoading(frozenset(closed), paths)


def has_own_load(model: torch.nn.Module) -> bool:
    """Whether its `load_state_dict` is another than torch's."""
    import torch

    own = type(model).load_state_dict
    return own is not torch.nn.Module.load_state_dict or "load_state_dict" in vars(model)


def _converts(module: torch.nn.Module) -> bool:
    """Whether code that is not known sees the state dict before torch loads this module."""
    loads = vars(module).get("_load_from_state_dict", type(module)._load_from_state_dict)
    return _is_strange(loads) or any(map(_is_strange, module._load_state_dict_pre_hooks.values()))


def _is_strange(code: Any) -> bool:
    code = getattr(code, "hook", code)  # torch wraps those that are given the module too
    code = getattr(code, "func", code)  # a partial
    home = getattr(code, "__module__", None)
    return not (isinstance(home, str) and home.startswith(_KNOWN))
