"""`Module.load_state_dict` itself, and the same steps where it would take too long."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ckptool.loading.live.own_loading import has_own_load
from ckptool.loading.live.unread import UnreadDict, raw
from ckptool.loading.live.watching import overrides_loading

if TYPE_CHECKING:
    import torch

    from ckptool.matching import MatchReport

__all__ = ["Visitor", "is_exact", "torch_load"]

_MANY = 10_000
"""Names from which torch's own way, which looks at all of them for each child, takes seconds."""


class Visitor(Protocol):
    """What is done at each module, beside what torch does."""

    def before(self, module: torch.nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Its own tensors are loaded next, of `state`, in which their names begin with `prefix`."""


def torch_load(
    model: torch.nn.Module,
    state: OrderedDict[str, Any],
    metadata: Mapping[str, Any] | None,
    visitor: Visitor | None = None,
    *,
    exact: bool = False,
) -> tuple[list[str], list[str]]:
    """Load as torch does with `strict=False`; the names that it misses, and those it cannot place.

    A `visitor` is for a model that does not override its loading. One that does, by a
    `load_state_dict` of its own, is strict where the state is `exact`, all that it has been found
    to want: what it then lets pass is its own affair, and no name is returned.

    Raises:
        RuntimeError: what torch says of it; the model may be half loaded then.
    """
    if metadata is not None:
        state._metadata = metadata  # type: ignore[attr-defined]
    if (len(state) < _MANY and visitor is None) or overrides_loading(model):
        strict = exact and has_own_load(model)
        options = {"strict": strict} if _takes_strict(model) else {}
        found = model.load_state_dict(state, **options)
        if strict:
            return [], []
        missing, unexpected = (getattr(found, f"{kind}_keys", ()) for kind in _KINDS)
        return list(missing), list(unexpected)
    walk = _Walk(metadata, visitor)
    found = walk.load(model, state)
    walk.settle()
    return found


def is_exact(report: MatchReport) -> bool:
    """Whether what fits is all that the model has and all that the file has."""
    return report.fits and not (report.kept or report.left_out)


def _takes_strict(model: torch.nn.Module) -> bool:
    """Whether its `load_state_dict` can be told to be strict, or not: some take the state alone."""
    if not has_own_load(model):
        return True
    try:
        takes = inspect.signature(model.load_state_dict).parameters
    except (TypeError, ValueError):  # it is no function of Python's
        return True
    return "strict" in takes or any(one.kind is one.VAR_KEYWORD for one in takes.values())


_KINDS = ("missing", "unexpected")


class _Walk:
    """`Module.load_state_dict`, each name looked at once for each module that it is in."""

    def __init__(self, metadata: Mapping[str, Any] | None, visitor: Visitor | None) -> None:
        from torch.nn.modules.module import _IncompatibleKeys

        self._metadata, self._visitor = metadata or {}, visitor
        self._has_metadata = metadata is not None
        self._parts: list[weakref.ref[UnreadDict]] = []
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._errors: list[str] = []
        self._keys = _IncompatibleKeys(self._missing, self._unexpected)

    def load(
        self, model: torch.nn.Module, state: OrderedDict[str, Any]
    ) -> tuple[list[str], list[str]]:
        copied = type(state)(raw(state))
        if self._has_metadata:
            copied._metadata = self._metadata  # type: ignore[attr-defined]
        self._module(model, copied, "")
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
        inside, changes = _inside(state, prefix), 0
        if isinstance(state, UnreadDict):
            self._parts.append(weakref.ref(state))
            changes = state.changes
        for name, child in module._modules.items():
            if child is not None:
                if isinstance(state, UnreadDict) and state.changes != changes:
                    inside, changes = _inside(state, prefix), state.changes  # by who has kept it
                part = inside.get(name, {})
                if isinstance(state, UnreadDict):
                    part = UnreadDict(part)
                self._module(child, part, f"{prefix}{name}.")
        for hook in module._load_state_dict_post_hooks.values():
            if hook(module, self._keys) is not None:
                raise AssertionError("a hook after load_state_dict returned a value")

    def settle(self) -> None:
        """Read what is left in a dict that a hook keeps, while the file is open.

        That of the walk itself must be gone.
        """
        for one in self._parts:
            part = one()
            if part is not None:
                part.read()


def _inside(state: dict[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
    """What is for each child of a module."""
    inside: dict[str, dict[str, Any]] = {}
    for name, value in raw(state):
        if name.startswith(prefix):
            inside.setdefault(name[len(prefix) :].partition(".")[0], {})[name] = value
    return inside
