"""The parts of a model that a strategy shards or places on a device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

__all__ = ["blocks_of", "tied"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that are called one after the other, each once, in order.

    These are the children of the model, and the layers of a child that is a list of layers. A model
    with only one child has the blocks of this child; a model without children is one block.
    """
    children = list(_children(model))
    while len(children) == 1 and any(True for _ in children[0].children()):
        children = list(_children(children[0]))
    return children or [model]


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, _CONTAINERS):
            yield from _children(child)
        else:
            yield child


def tied(blocks: list[nn.Module]) -> set[int]:
    """Return the `id` of every parameter that two blocks or more share, as embedding and head."""
    uses = Counter(number for block in blocks for number in {id(one) for one in block.parameters()})
    return {number for number, times in uses.items() if times > 1}
