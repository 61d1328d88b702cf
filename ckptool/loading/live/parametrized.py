"""Which parametrizations a live model has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptool.loading.live.spreading import without_hidden
from ckptool.matching import Slots

if TYPE_CHECKING:
    import torch

__all__ = ["with_forms"]

_RESPELLED = ("_WeightNorm", "_SpectralNorm")
"""Classes of torch's whose tensors have an older spelling as well."""


def with_forms(slots: Slots, modules: Iterable[tuple[str, torch.nn.Module]]) -> Slots:
    """The slots of a model, those of other parametrizations than torch's norms with their `form`.

    By their names alone a class of the user's, or one on top of a norm, is none of them.
    """
    forms = {
        f"{without_hidden(path)}.": form for path, module in modules if (form := _form(module))
    }
    if not forms:
        return slots
    return {name: slot._replace(form=forms.get(_list_of(name), "")) for name, slot in slots.items()}


def _list_of(name: str) -> str:
    """The front of a name that is the path of a list of parametrizations, if it has one."""
    front, dot, rest = name.rpartition("parametrizations.")
    return f"{front}{dot}{rest.partition('.')[0]}."


def _form(module: torch.nn.Module) -> str:
    """What a list of parametrizations does; empty for other modules, and for a norm of torch's."""
    from torch.nn.utils import parametrizations
    from torch.nn.utils.parametrize import ParametrizationList

    if not isinstance(module, ParametrizationList):
        return ""
    norms = tuple(getattr(parametrizations, name) for name in _RESPELLED)
    if len(module) == 1 and isinstance(module[0], norms):
        return ""
    return " and ".join(type(one).__name__.lstrip("_") for one in module.children())
