"""What stands under a name, as far as matching asks: shape, dtype, and who shares its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import lru_cache
from math import prod
from typing import NamedTuple

from ckptool.dtypes import REAL_PARTS
from ckptool.model import Shape, TensorRef
from ckptool.statedict import Section, is_extra_state, wrapped_names

__all__ = ["EXTRA", "Slot", "Slots", "fits", "holds", "slots_of"]


class Slot(NamedTuple):
    """One entry of a state dict, or of what a model has."""

    shape: Shape | None = None
    """None: not known, or nothing that has one (an `_extra_state`, a lazy parameter); fits any."""
    dtype: str | None = None
    """Torch's name without `torch.`; None: not known, or no tensor."""
    kind: str = "tensor"
    """`parameter`, `buffer`, `extra` (an `_extra_state`, or an entry that is not a tensor), or
    `tensor`: not known which."""
    tie: Hashable = None
    """Equal for names that are one tensor; None: it is alone."""
    form: str = ""
    """The parametrization that it is a part of, where that is known to be none of those which have
    an older spelling; empty: not known, or one of them."""

    @property
    def elements(self) -> int:
        """How many numbers it has, 1 where its shape is not known."""
        return 1 if self.shape is None else prod(size or 0 for size in self.shape)


EXTRA = Slot(kind="extra")

Slots = dict[str, Slot]
"""By name, in the order of the state dict."""


def fits(found: Slot, wanted: Slot) -> bool:
    """Return whether torch puts what is found where the other is wanted.

    Into a tensor it copies one of its shape, and [1] into a scalar, as torch 0.3 saved those
    (`Module._load_from_state_dict`). A value that is not a tensor goes where no tensor is wanted,
    or where nothing is known.
    """
    if wanted.shape is None or found.shape == wanted.shape:
        return True
    if found.shape is None:
        return found.kind != "extra"
    return not wanted.shape and found.shape == (1,)


def slots_of(section: Section) -> Slots:
    """Return what a file's state dict, or pickled module, has, in its order.

    What is under the name of a module and no tensor is `extra`, as is any `_extra_state`; plain
    values that a training script put beside the tensors are left out. Which tensor is a parameter
    is known where the file keeps `Parameter`s, as a pickled module does.
    """
    node, is_module = section.node, section.kind == "module"
    slots = dict.fromkeys(wrapped_names(node), EXTRA)
    tensors = {
        name: node[name]
        for name in slots
        if isinstance(node[name], TensorRef) and not is_extra_state(name)
    }
    places = {name: tensor.place or id(tensor) for name, tensor in tensors.items()}
    counts = Counter(places.values())
    for name, tensor in tensors.items():
        kind = "parameter" if tensor.is_parameter else "buffer" if is_module else "tensor"
        tie = places[name] if counts[places[name]] > 1 else None
        slots[name] = Slot(tensor.shape, tensor.dtype, kind, tie)
    return slots


_INTEGERS = {
    "bool": (0, 1),
    **{f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
}
"""The smallest and the largest number."""


@lru_cache(maxsize=256)
def holds(wide: str, narrow: str) -> bool:
    """Return whether a cast from `narrow` to `wide` changes no number; False for unknown types."""
    if wide == narrow:
        return True
    # Imported here: of most files no type changes.
    from ckptool.tensors.casting import FLOATS, is_exact

    if wide in REAL_PARTS:
        return holds(REAL_PARTS[wide], REAL_PARTS.get(narrow, narrow))
    if narrow in FLOATS:
        return wide in FLOATS and is_exact(narrow, wide)
    if narrow not in _INTEGERS:
        return False
    least, most = _INTEGERS[narrow]
    if wide in _INTEGERS:
        return _INTEGERS[wide][0] <= least and most <= _INTEGERS[wide][1]
    kind = FLOATS.get(wide)
    if kind is None or not kind.signed:
        return False
    return most.bit_length() <= kind.digits and -least <= kind.largest
