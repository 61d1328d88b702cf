"""The tensors that a model is given in the place of those it has: on the meta device, or asked."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptool.loading.live.memory import memory_of

if TYPE_CHECKING:
    import torch

__all__ = ["Assigned", "trainable"]


@contextmanager
def trainable() -> Iterator[None]:
    """Tensors that are made inside can be trained, whatever mode the caller is in."""
    import torch

    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class Assigned:
    """Makes what is assigned: one object for what is one in the model, and only for that."""

    def __init__(self, *, cast: bool) -> None:
        """`cast` to the types of the model."""
        self._cast = cast
        self._made: dict[Hashable, torch.Tensor] = {}
        self._taken: dict[tuple[int, str], list[tuple[int, int]]] = {}
        """By storage the bytes that something has been made of, from and to, in order."""

    def made(self, tensor: torch.Tensor, tie: Hashable, value: torch.Tensor) -> torch.Tensor:
        """What takes the place of `tensor`, with the elements of `value`; made once for a tie."""
        import torch
        from torch.nn.parameter import is_lazy

        key = (id(tensor), tie) if tie is None else tie
        if key in self._made:
            return self._made[key]
        made = value
        if not is_lazy(tensor):
            if not tensor.dim() and value.shape == (1,):
                made = made.detach()[0]
            if self._cast and made.dtype != tensor.dtype:
                made = made.detach().to(tensor.dtype)
        if self._is_taken(made):
            made = made.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            if not isinstance(made, torch.nn.Parameter):
                made = torch.nn.Parameter(made.detach(), requires_grad=tensor.requires_grad)
        elif isinstance(made, torch.nn.Parameter):
            made = made.detach()
        self._made[key] = made
        return made

    def _is_taken(self, tensor: torch.Tensor) -> bool:
        """Whether another has been made of some of the memory, or its own elements overlap."""
        place = memory_of(tensor)
        if place is None or tensor.is_meta or not tensor.numel():
            return False
        start, stop = place.span
        if stop - start < tensor.nbytes:
            return True
        known = self._taken.setdefault((place.storage, str(tensor.device)), [])
        at = bisect_right(known, (start, stop))
        if (at and known[at - 1][1] > start) or (at < len(known) and known[at][0] < stop):
            return True
        known.insert(at, (start, stop))
        return False
