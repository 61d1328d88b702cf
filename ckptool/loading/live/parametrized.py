"""Which parametrizations a live model has."""

from __future__ import annotations

from collections.abc import Iterable

from ckptool.loading.live.own_loading import NamedModule
from ckptool.loading.live.spreading import without_hidden
from ckptool.matching import Slots

__all__ = ["with_forms"]

_RESPELLED = ("_WeightNorm", "_SpectralNorm")
"""Classes of torch's whose tensors have an older spelling as well."""


def with_forms(slots: Slots, modules: Iterable[NamedModule]) -> Slots:
    """The slots of a model, those of other parametrizations than torch's norms with their `form`.

    By their names alone a class of the user's, or one on top of a norm, is none of them.
    """
    from torch.nn.utils import parametrizations
    from torch.nn.utils.parametrize import ParametrizationList

    norms = tuple(getattr(parametrizations, name) for name in _RESPELLED)
    forms = {
        f"{without_hidden(path)}.": " and ".join(type(one).__name__.lstrip("_") for one in module)
        for path, module in modules
        if isinstance(module, ParametrizationList)
        and not (len(module) == 1 and isinstance(module[0], norms))
    }
    if not forms:
        return slots
    return {name: slot._replace(form=forms.get(_list_of(name), "")) for name, slot in slots.items()}


def _list_of(name: str) -> str:
    """The front of a name that is the path of a list of parametrizations, if it has one."""
    front, dot, rest = name.rpartition("parametrizations.")
    return f"{front}{dot}{rest.partition('.')[0]}."
