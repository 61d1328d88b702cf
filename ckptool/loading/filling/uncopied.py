"""What helps where torch copies one tensor into another no way at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptool.loading.live.memory import repeats
from ckptool.remedies import Remedy
from ckptool.words import printable

if TYPE_CHECKING:
    import torch

__all__ = ["advice_on_copying"]

_ASSIGNED = Remedy((("assign", True),), " puts what is loaded in the place of the model's tensors")


def advice_on_copying(name: str, own: torch.Tensor, given: torch.Tensor) -> Remedy | str | None:
    """What loads `given`, which torch could not copy into the model's `own`; None: not known."""
    import torch

    if given.is_meta:
        return "it is on the meta device, without elements: load the state dict from its file"
    if given.layout is not own.layout and own.layout is torch.strided:
        return f"give `{printable(name)}` as `.to_dense()` makes it"
    strided = own.layout is torch.strided and given.layout is torch.strided
    if own.is_inference() or (strided and repeats(own.shape, own.stride())):
        return _ASSIGNED
    return None
