"""Renames of torch's own history, and PEFT's, by which two spellings of one name become one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from ckptool.matching.slots import Slot

__all__ = ["Respelled", "has_old", "respellings", "spelled", "today", "weight_norms"]


class Respelled(NamedTuple):
    """The end of a name as it is today."""

    old: str
    new: str

    def of(self, name: str) -> str:
        """A name that ends with `old`, with `new` instead."""
        return name[: len(name) - len(self.old)] + self.new


Respellings = Mapping[str, Respelled]

_PARTS = {
    "weight_norm": {"_g": "original0", "_v": "original1"},
    "spectral_norm": {"_orig": "original", "_u": "0._u", "_v": "0._v"},
}
"""What `torch.nn.utils.weight_norm` and `spectral_norm` add to the name of a weight, and what the
parametrizations of the same name have instead."""
_AFFINE = {"gamma": "weight", "beta": "bias"}
"""The scale and shift of a normalisation as TensorFlow, and transformers before 2019, call them."""
_ENDS = ("_g", "_orig", *_AFFINE)
"""Of names in an old spelling, or of the first that belongs to one."""
_TUNER = r"(?:^|\.)((?:lora|ia3|hada|lokr|oft|boft|vera)_\w+)\."
"""What PEFT calls the parts of an adapter in a layer."""
_ADAPTER = re.compile(_TUNER + r"(?!(?:weight|bias)$)(\w+)")
_DEFAULT = re.compile(_TUNER + r"default((?:\.(?:weight|bias))?)$")
_BASE = re.compile(r"([^.]+)\.base_layer\.([^.]+)$")
"""What PEFT puts a layer with an adapter into: `q_proj.base_layer.weight`."""
_PAIR = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}
"""The two halves of an adapter as kohya and others call them."""
_MARKS = (".default", ".base_layer.", "lora_down.")
"""Of names in an old spelling of an adapter's."""


def has_old(names: Collection[str]) -> bool:
    """Whether some name may be in an old spelling; what stands before its end does not matter."""
    text = "\n".join((*names, ""))
    return any(f"{end}\n" in text for end in _ENDS) or any(mark in text for mark in _MARKS)


def respellings(
    names: Collection[str], slots: Mapping[str, Slot] | None = None
) -> dict[str, Respelled]:
    """Names in an old spelling, each with the new one; only where all that belongs to it is there.

    A spelling that would make two names one is none. `slots`: what stands under the names, for
    spellings that are known by shapes.
    """
    known = names if isinstance(names, (dict, set, frozenset)) else set(names)
    found: dict[str, Respelled] = {}
    old = [name for name in known if name.endswith(_ENDS)]
    for name in old:
        for group in _groups(name):
            if all(old in known for old in group) and not any(
                respelled.of(old) in known for old, respelled in group.items()
            ):
                found.update(group)
    for name in old:
        respelled = _affine(name, known)
        if respelled is not None:
            found[name] = respelled
    marked = [name for name in known if any(mark in name for mark in _MARKS)]
    if marked:
        found.update(_adapted(marked, known, slots or {}))
    return found


def _adapted(
    marked: Collection[str], known: Collection[str], slots: Mapping[str, Slot]
) -> Iterator[tuple[str, Respelled]]:
    """Names of layers with an adapter, each as that calls it which says no more than it has to.

    PEFT's files leave the adapter's name out (`get_peft_model_state_dict`); of several adapters
    none is the one without a name.
    """
    adapters = {found[2] for name in known if (found := _ADAPTER.search(name))}
    for name in marked:
        for old, new in _adapter_ends(name, alone=adapters == {"default"}):
            respelled = Respelled(old, new)
            if respelled.of(name) not in known:
                yield name, respelled
        if name.endswith("lora_down.weight"):
            yield from _halves(name.removesuffix("lora_down.weight"), known, slots)


def _adapter_ends(name: str, *, alone: bool) -> Iterator[tuple[str, str]]:
    if alone and (found := _DEFAULT.search(name)):
        yield f"{found[1]}.default{found[2]}", found[1] + found[2]
    elif found := _BASE.search(name):
        yield found[0], f"{found[1]}.{found[2]}"


def _halves(
    layer: str, known: Collection[str], slots: Mapping[str, Slot]
) -> Iterator[tuple[str, Respelled]]:
    """Both halves of an adapter, where their shapes tell which is which."""
    if any(layer + name not in slots for name in _PAIR):
        return
    down, up = (slots[layer + name].shape for name in _PAIR)
    if None in (down, up) or down == up or any(layer + new in known for new in _PAIR.values()):
        return
    yield from ((layer + old, Respelled(old, new)) for old, new in _PAIR.items())


def _groups(name: str) -> Iterator[dict[str, Respelled]]:
    """The names that belong to one weight, where `name` is the first of them in an old spelling."""
    for parts in _PARTS.values():
        first = next(iter(parts))
        if not name.endswith(first) or name.endswith(f".{first}"):
            continue
        stem = name.removesuffix(first)
        weight = stem.rpartition(".")[2]
        if weight:
            yield {stem + old: _of_part(weight, old, new) for old, new in parts.items()}


@lru_cache(maxsize=256)
def _of_part(weight: str, old: str, new: str) -> Respelled:
    return Respelled(weight + old, f"parametrizations.{weight}.{new}")


def _affine(name: str, known: Collection[str]) -> Respelled | None:
    """Where the module has neither `weight` nor `bias` of its own."""
    module, dot, last = name.rpartition(".")
    if last not in _AFFINE or any(f"{module}{dot}{new}" in known for new in _AFFINE.values()):
        return None
    return Respelled(last, _AFFINE[last])


def spelled(
    found: Respellings, others: Collection[str], theirs: Respellings = MappingProxyType({})
) -> dict[str, Respelled]:
    """The respellings of one side's names that matching is to go by.

    Not where the other side has the old spelling too: there a name is meant as it is. `theirs`: of
    the names of the other side what they are today, which may be another (`weight_v`).
    """
    return {
        name: how
        for name, how in found.items()
        if name not in others or theirs.get(name, how) != how
    }


_T = TypeVar("_T")


def today(bare: dict[str, _T], old: Respellings) -> dict[str, _T]:
    """What stands under bare names, under those names as they are spelled today."""
    if not old:
        return bare
    return {(old[name].of(name) if name in old else name): held for name, held in bare.items()}


def weight_norms(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Names of `nn.utils.weight_norm`, each with that of the parametrization of the same weight.

    torch/nn/utils/parametrizations.py, `_weight_norm_compat_hook`: only where both are there.
    """
    for name in names:
        stem, both = name[:-2], (f"{name[:-2]}_g", f"{name[:-2]}_v")
        if name in both and all(one in names for one in both):
            module, dot, weight = stem.rpartition(".")
            yield name, f"{module}{dot}parametrizations.{weight}.original{both.index(name)}"
