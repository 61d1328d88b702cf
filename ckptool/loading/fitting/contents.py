"""What the elements of a state dict's entries say: looked at in blocks, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ckptool.dtypes import NOT_IN_TORCH, PACKED
from ckptool.loading.fitting.states import State
from ckptool.loading.live.memory import cuts
from ckptool.tensors import materialise, torch_dtype
from ckptool.tensors.sameness import same_by_checksum, same_content

if TYPE_CHECKING:
    import torch

    from ckptool.loading.fitting.losses import Loss
    from ckptool.model import TensorRef

__all__ = ["bytes_of", "loss_of", "same_elements"]

_BLOCK = 1 << 15
"""Elements looked at at a time: fewer than torch divides among threads, which wait for each other
and are slower by far than one where the machine is busy."""


def loss_of(ref: TensorRef | None, value: Callable[[], Any], dtype: str) -> Loss | None:
    """What becomes of the elements of a tensor in another type.

    It is looked at where it lies in a file, as `ref`, or where it does not, as `value` makes it.
    None where that cannot be told: on the meta device, or of no plain array of elements, or where
    torch does not compute with the types.

    Raises:
        CorruptFile, DeviceError: the elements cannot be read.
    """
    # Imported here: few files have other types than the model.
    from ckptool.loading.fitting.losses import Loss, lost

    blocks = _blocks(ref, value)
    if blocks is None:
        return None
    loss, target = Loss(), torch_dtype(dtype)
    try:
        for block in blocks:
            loss.add(lost(block, target))
    except (RuntimeError, TypeError):  # of the back end, which has no such operation
        return None
    return loss


def same_elements(state: State, one: str, other: str) -> bool:
    """Whether two entries of a state dict have the same elements, byte for byte.

    Of what has no elements here (the meta device) that is taken to be so; where torch cannot tell,
    not.

    Raises:
        CorruptFile, DeviceError: the elements cannot be read.
    """
    a, b = state.ref(one), state.ref(other)
    if a is not None and b is not None:
        if a.dtype != b.dtype:
            return False
        if a.shape == b.shape and a.has_content and b.has_content:
            known = same_by_checksum(a, b)
            return same_content(a, b) if known is None else known
        if a.shape == b.shape and _is_meta(a) and _is_meta(b):
            return True
    values = state.value(one), state.value(other)
    return values[0] is values[1] or _same_values(*values)


def _is_meta(ref: TensorRef) -> bool:
    return ref.storage is not None and ref.storage.data is None


def _same_values(a: Any, b: Any) -> bool:
    import torch

    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.is_meta or b.is_meta:
        return a.shape == b.shape
    try:
        if a.dtype != b.dtype or a.numel() != b.numel():
            return False
        if not (_is_plain(a) and _is_plain(b)):
            return torch.equal(a, b)
        shape = tuple(a.shape) or (1,)
        pairs = (
            (a.detach().view(shape)[at], b.detach().view(shape)[at]) for at in cuts(shape, _BLOCK)
        )
        return all(torch.equal(bytes_of(x), bytes_of(y.to(x.device))) for x, y in pairs)
    except (RuntimeError, TypeError):
        return False


def bytes_of(block: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements, one after the other."""
    import torch

    return block.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _blocks(ref: TensorRef | None, value: Callable[[], Any]) -> Iterator[torch.Tensor] | None:
    """The elements of a tensor in some order; a file is read block by block."""
    import torch

    if ref is not None and ref.has_content and ref.is_contiguous and _is_sliceable(ref):
        shape = tuple(size or 0 for size in ref.shape)
        return (materialise(ref[at] if at else ref) for at in cuts(shape, _BLOCK))
    made = value()
    if not isinstance(made, torch.Tensor) or made.is_meta or not _is_plain(made):
        return None
    return (made.detach()[at] for at in cuts(made.shape, _BLOCK))


def _is_sliceable(ref: TensorRef) -> bool:
    return ref.dtype not in PACKED and ref.dtype not in NOT_IN_TORCH


def _is_plain(tensor: torch.Tensor) -> bool:
    import torch

    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
