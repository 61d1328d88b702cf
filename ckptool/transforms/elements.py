"""Tensors over other elements: all that they are besides stays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ckptool.model import TensorRef
from ckptool.paths import everything

__all__ = ["Originals", "over_elements"]


def over_elements(tensor: TensorRef, **place: Any) -> TensorRef:
    """The tensor with another `dtype`, `storage`, `offset`, `stride` or `flags`.

    One of a back end without storages (a TPU's) is carried as a tensor of the CPU from then on.
    """
    made = replace(tensor, **place)
    if "carrier" not in (tensor.parts or {}):
        return made
    data = replace(made, device="cpu", requires_grad=False, hooks=None, wrapping=(), parts=None)
    return replace(made, parts={"carrier": "cpu_tensor", "data": data})


class Originals:
    """Some tensors of a tree, to be known again while it is rebuilt.

    `rebuild` hands on a copy of a tensor where its attributes or hooks are new.
    """

    def __init__(self, root: Any, chosen: Iterable[TensorRef]) -> None:
        """Know the tensors `chosen` among all that `root` holds."""
        self._chosen = {id(tensor): tensor for tensor in chosen}
        self._by_view = {_view(tensor): tensor for tensor in self._chosen.values()}
        self._known = {id(node) for node in everything(root)}

    def of(self, node: Any) -> TensorRef | None:
        """The chosen tensor that a node is, or is a copy of."""
        if not isinstance(node, TensorRef) or id(node) in self._known:
            return self._chosen.get(id(node))
        return self._by_view.get(_view(node))


def _view(tensor: TensorRef) -> tuple[Any, ...]:
    place = tensor.offset, tensor.shape, tensor.stride
    return id(tensor.storage), tensor.dtype, tensor.kind, *place
