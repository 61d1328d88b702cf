"""`Module.load_state_dict` itself, and the same steps where it would take too long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ckptool.loading.filling.watching import overrides_loading

if TYPE_CHECKING:
    import torch

__all__ = ["Visitor", "torch_load"]

_MANY = 10_000
"""Names from which torch's own way, which looks at all of them for each child, takes seconds."""


class Visitor(Protocol):
    """What is done at each module, beside what torch does."""

    def before(self, module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Its own tensors are loaded next, of `state`, in which their names begin with `prefix`."""

    def after(self, module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
        """They are, and its extra state is set; what is inside is loaded next, of `state` too."""


def torch_load(
    model: torch.nn.Module,
    state: OrderedDict[str, Any],
    metadata: Mapping[str, Any] | None,
    visitor: Visitor | None = None,
) -> tuple[list[str], list[str]]:
    """Load as torch does with `strict=False`; the names that it misses, and those it cannot place.

    A `visitor` is for a model that does not override its loading.

    Raises:
        RuntimeError: what torch says of it; the model may be half loaded then.
    """
    if metadata is not None:
        state._metadata = metadata  # type: ignore[attr-defined]
    if (len(state) < _MANY and visitor is None) or overrides_loading(model):
        found = model.load_state_dict(state, strict=False)
        missing, unexpected = (getattr(found, f"{kind}_keys", ()) for kind in _KINDS)
        return list(missing), list(unexpected)
    return _Walk(metadata or {}, visitor).load(model, OrderedDict(state))


_KINDS = ("missing", "unexpected")


class _Walk:
    """`Module.load_state_dict`, each name looked at once for each module that it is in."""

    def __init__(self, metadata: Mapping[str, Any], visitor: Visitor | None) -> None:
        from torch.nn.modules.module import _IncompatibleKeys

        self._metadata, self._visitor = metadata, visitor
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._errors: list[str] = []
        self._keys = _IncompatibleKeys(self._missing, self._unexpected)

    def load(
        self, model: torch.nn.Module, state: OrderedDict[str, Any]
    ) -> tuple[list[str], list[str]]:
        self._module(model, state, "")
        if self._errors:
            told = "\n\t".join(self._errors)
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{told}"
            )
        return self._missing, self._unexpected

    def _module(self, module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
        if self._visitor is not None:
            self._visitor.before(module, state, prefix)
        module._load_from_state_dict(
            state,
            prefix,
            self._metadata.get(prefix[:-1], {}),
            True,
            self._missing,
            self._unexpected,
            self._errors,
        )
        if self._visitor is not None:
            self._visitor.after(module, state, prefix)
        inside: dict[str, dict[str, Any]] = {}
        for name, value in state.items():
            if name.startswith(prefix):
                inside.setdefault(name[len(prefix) :].partition(".")[0], {})[name] = value
        for name, child in module._modules.items():
            if child is not None:
                self._module(child, inside.get(name, {}), f"{prefix}{name}.")
        for hook in module._load_state_dict_post_hooks.values():
            if hook(module, self._keys) is not None:
                raise AssertionError("a hook after load_state_dict returned a value")
