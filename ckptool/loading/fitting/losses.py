"""What a cast does to the elements of a tensor in memory, whatever the two types."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from ckptool.tensors.casting import FLOATS

if TYPE_CHECKING:
    import torch

__all__ = ["Loss", "lost"]


@dataclass(slots=True)
class Loss:
    """How many elements a cast changes, each counted once, of how many."""

    elements: int = 0
    overflow: int = 0
    """Beyond what the type has: infinite or the largest then, or wrapped around."""
    zero: int = 0
    """Not zero before, and zero then."""
    truncated: int = 0
    """Without their fraction, or their imaginary part."""
    rounded: int = 0
    """Another number, none of the above."""

    def __str__(self) -> str:
        """In words: `3 of 64 overflow, 1 is rounded`; empty where nothing is lost."""
        counts = (
            (self.overflow, "overflows", "overflow"),
            (self.zero, "becomes 0", "become 0"),
            (self.truncated, "is truncated", "are truncated"),
            (self.rounded, "is rounded", "are rounded"),
        )
        told = [(f"{n:,}", one if n == 1 else several) for n, one, several in counts if n]
        if not told:
            return ""
        (first, what), *rest = told
        words = (f"{first} of {self.elements:,} {what}", *(f"{n} {what}" for n, what in rest))
        return ", ".join(words)

    def add(self, other: Loss) -> None:
        """Count those too."""
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))


def lost(block: torch.Tensor, dtype: torch.dtype) -> Loss:
    """What becomes of the elements of a plain tensor in another type.

    Raises:
        RuntimeError, TypeError: torch has no such operation for the types.
    """
    count = block.numel()
    if not count:
        return Loss()
    before, after, truncates = _alike(block.detach(), dtype)
    if before.is_floating_point():
        changed = ~((before == after) | (before.isnan() & after.isnan()))
        over = changed & _beyond(before, after, dtype)
    elif after.is_floating_point():
        after = after.double()  # the small types have no operations of their own
        changed, over = _missed(before, after)
    else:
        over = changed = _differ(before, after)
    zero = changed & ~over & (after == 0) & (not truncates)
    if block.is_complex():  # a pair for each element
        changed, over, zero = changed.any(-1), over.any(-1), zero.any(-1)
    overflow, zeros = int(over.sum()), int((zero & ~over).sum())
    rest = int(changed.sum()) - overflow - zeros
    return Loss(count, overflow, zeros, *((rest, 0) if truncates else (0, rest)))


def _missed(before: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which integers are other numbers as float64, and which of those are none.

    Never by what is made of an infinity, or a number too large, on the way back: that may well be
    the smallest of the type.
    """
    import torch

    bits = 1 if before.dtype is torch.bool else torch.iinfo(before.dtype).bits
    signed = before.dtype.is_signed
    least, end = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if signed else (0.0, 2.0**bits)
    inside = (after >= least) & (after < end)
    back = after.where(inside, 0.0).to(before.dtype)
    return ~inside | (before != back), ~after.isfinite()


def _differ(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Which integers are others, whatever sign their types have."""
    import torch

    bits, others = before.to(torch.int64), after.to(torch.int64)
    changed = bits != others
    if (before.dtype is torch.uint64) != (after.dtype is torch.uint64):
        changed |= bits < 0  # 2**63 and more in the one, below zero in the other
    return changed


def _alike(block: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The elements before and after, so that they can be compared, and whether a part is cut off.

    Those of floating types as float64, complex ones as pairs.
    """
    import torch

    whole = not (dtype.is_floating_point or dtype.is_complex)
    if not block.is_complex():
        after = block.to(dtype)
        after = after.real if after.is_complex() else after
        if block.is_floating_point():
            return block.double(), after.double(), whole
        return block, after, whole
    before = torch.view_as_real(block.resolve_conj().to(torch.complex128))
    if dtype.is_complex:
        return before, torch.view_as_real(block.to(dtype).to(torch.complex128)), False
    after = block.real.to(dtype).double()
    return before, torch.stack((after, torch.zeros_like(after)), -1), True


def _beyond(before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Which elements a type has no number near to."""
    import torch

    if dtype is torch.bool:
        return (before < 0) | (before > 1)
    real = dtype.to_real() if dtype.is_complex else dtype
    kind = FLOATS.get(str(real).removeprefix("torch."))
    if kind is not None and kind.infinite:
        return ~after.isfinite()
    info = torch.finfo(real) if real.is_floating_point else torch.iinfo(real)
    whole = before if real.is_floating_point else before.trunc()
    return ~((whole >= info.min) & (whole <= info.max))
