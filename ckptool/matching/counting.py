"""What of a model is loaded, counted, and what of that changes its element type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import TypedDict

from ckptool.matching.holding import holds
from ckptool.matching.report import Cast
from ckptool.matching.slots import Slot

__all__ = ["Counts", "casts_of", "counted"]


class Counts(TypedDict):
    """Fields of a `MatchReport`."""

    loaded: int
    parameters: int
    fitting: int
    names: int


def counted(want: Mapping[str, Slot], met: Collection[str], kept: Collection[str]) -> Counts:
    """How much of a model is loaded: of its parameters, where it is known which these are.

    `met` are the names that are loaded, `kept` those that are not asked for.
    """
    every = {name: slot for name, slot in want.items() if name not in kept} if kept else want
    known = every
    kinds = {slot.kind for slot in every.values()}
    if "parameter" in kinds and "tensor" not in kinds:
        known = {name: slot for name, slot in every.items() if slot.kind == "parameter"}
    elif "extra" in kinds:
        known = {n: slot for n, slot in every.items() if slot.kind != "extra"} or every
    once = [name for name, slot in known.items() if slot.tie is None]
    if len(once) < len(known):
        tied: dict[Hashable, str] = {}
        for name, slot in known.items():
            if slot.tie is not None and (slot.tie not in tied or name in met):
                tied[slot.tie] = name
        once += tied.values()
    shapes = {slot.shape: slot for slot in known.values()}
    sizes = {shape: slot.elements for shape, slot in shapes.items()}
    if not any(sizes.values()):  # there is nothing to count but names
        sizes, once = dict.fromkeys(sizes, 1), list(known)
    loaded = Counter([known[name].shape for name in once if name in met])
    parameters = Counter([known[name].shape for name in once])
    return {
        "loaded": sum(sizes[shape] * count for shape, count in loaded.items()),
        "parameters": sum(sizes[shape] * count for shape, count in parameters.items()),
        "fitting": sum([name in met for name in every]),
        "names": len(every),
    }


def casts_of(
    pairs: Mapping[str, str], have: Mapping[str, Slot], want: Mapping[str, Slot]
) -> tuple[Cast, ...]:
    """Changes of the element type, lossy by what the types hold, in the order of the pairs."""
    casts = []
    for name, own in pairs.items():
        before, after = have[own].dtype, want[name].dtype
        if before != after and before is not None and after is not None:
            casts.append(Cast(name, own, before, after, not holds(after, before)))
    return tuple(casts)
