"""What stands under a name, as far as matching asks: shape, dtype, and who shares its memory."""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import Any, NamedTuple

from ckptool.model import Shape, TensorRef
from ckptool.statedict import Section, wrapped_names
from ckptool.transforms.places import tie_key

__all__ = ["Slot", "Slots", "slots_of"]


class Slot(NamedTuple):
    """One entry of a state dict, or of what a model has."""

    shape: Shape | None = None
    """None: not known, or nothing that has one (an `_extra_state`, a lazy parameter); fits any."""
    dtype: str | None = None
    """Torch's name without `torch.`; None: not known, or no tensor."""
    kind: str = "tensor"
    """`parameter`, `buffer`, `extra` (an entry that is no tensor), or `tensor`: not known which."""
    tie: Hashable = None
    """Equal for names that are one tensor; None: it is alone."""

    @property
    def elements(self) -> int:
        """How many numbers it has, 1 where its shape is not known."""
        return 1 if self.shape is None else prod(size or 0 for size in self.shape)

    def takes(self, other: Slot) -> bool:
        """Whether torch copies what has the shape of `other` into this.

        It takes [1] for a scalar, as torch 0.3 saved those (`Module._load_from_state_dict`).
        """
        if self.shape is None or other.shape is None:
            return True
        return other.shape == self.shape or (not self.shape and other.shape == (1,))


Slots = dict[str, Slot]
"""By name, in the order of the state dict."""


def slots_of(section: Section) -> Slots:
    """What a file's state dict, or pickled module, has, in its order.

    What is under the name of a module and no tensor is `extra`; plain values that a training
    script put beside the tensors are left out. Which tensor is a parameter is known where the file
    keeps `Parameter`s, as a pickled module does.
    """
    node = section.node
    keys = {name: _tie(node[name]) for name in wrapped_names(node)}
    counts: dict[Any, int] = {}
    for key in keys.values():
        counts[key] = counts.get(key, 0) + 1
    return {
        name: _slot(node[name], key if counts[key] > 1 else None, section.kind == "module")
        for name, key in keys.items()
    }


def _tie(value: Any) -> Hashable:
    """Equal for names of one tensor; None for what is no tensor."""
    return (tie_key(value) or id(value)) if isinstance(value, TensorRef) else None


def _slot(value: Any, tie: Hashable, is_module: bool) -> Slot:
    if not isinstance(value, TensorRef):
        return Slot(kind="extra")
    kind = "parameter" if value.is_parameter else "buffer" if is_module else "tensor"
    return Slot(value.shape, value.dtype, kind, tie)
