"""The arithmetic of LoRA and DoRA, one weight at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool.core.model import Storage, TensorRef
from ckptool.errors import NotRepresentable
from ckptool.tensors.casting import checked_tensor
from ckptool.tensors.materialize import torch_dtype
from ckptool.tensors.whole import Wholes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Factors:
    """What an adapter adds to one weight: `up @ down`, times `scale`."""

    down: TensorRef
    up: TensorRef
    scale: float
    magnitude: TensorRef | None = None
    """DoRA's."""
    transposed: bool = False
    """Whether the weight is (in, out)."""

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """The shape of the product; None of matrices, or kernels, that do not fit each other."""
        down, up = self.down.shape, self.up.shape
        count = up[:1] if self.magnitude is None else (self.magnitude.numel,)
        same = len(up) == len(down) in (2, 3, 4, 5) and up[1] == down[0] and count == up[:1]
        return (up[0], *down[1:]) if same and all(size == 1 for size in up[2:]) else None

    def turned(self, shape: Sequence[int | None]) -> bool | None:
        """Return whether the product is turned in a weight of that shape; None: a square one."""
        fits = self.shape
        return (
            None if len(shape) == 2 and fits == (*shape[::-1],) == (*shape,) else (*shape,) != fits
        )


class Merger:
    """Makes storages of merged weights."""

    def __init__(self) -> None:
        """Start with nothing computed."""
        self._wholes = Wholes()

    def storage(
        self, weight: TensorRef, other: TensorRef | None, added: Sequence[Factors]
    ) -> Storage:
        """Return the weight (or `other` in its place) with all that is added to it.

        Raises:
            TorchMissing: torch is not installed.
        """
        if weight.storage is None:
            raise NotRepresentable("an adapter cannot be merged into a tensor without bytes")
        start = weight if other is None else other
        used = [start, *(one for each in added for one in (each.down, each.up))]
        return self._wholes.of(weight, used, lambda: _merged(start, weight, added))


def _read(ref: TensorRef) -> torch.Tensor:
    import torch

    made = checked_tensor(ref)
    return made if made.dtype == torch.float64 else made.float()


def _merged(start: TensorRef, weight: TensorRef, added: Sequence[Factors]) -> torch.Tensor:
    """Return the result, with the operations of PEFT in their order."""
    total = before = _read(start)
    for factors in added:
        total = total + _delta(factors, total)
        if factors.magnitude is not None:
            turned = _is_transposed(factors, total.shape)
            total = _rescaled(total, factors.magnitude, turned=turned)
    made = total.to(torch_dtype(weight.dtype))
    if bool((before.isfinite() & ~made.double().isfinite()).any()):
        raise NotRepresentable(
            f"a merged weight is infinite or NaN in {weight.dtype}, its dtype in the base",
            hint="check that all values of the adapter are finite, or widen the base with "
            "ckptool cast BASE --dtype float32",
        )
    return made


def _is_transposed(factors: Factors, shape: Sequence[int]) -> bool:
    """Return whether the product is turned: as the shapes say, else as the configuration does."""
    turned = factors.turned(shape)
    return factors.transposed if turned is None else turned


def _delta(factors: Factors, weight: torch.Tensor) -> torch.Tensor:
    import torch

    down, up = _read(factors.down), _read(factors.up)
    if down.dtype != up.dtype:
        down, up = down.double(), up.double()
    if down.dim() == 2:
        product = up @ down
        if _is_transposed(factors, weight.shape):
            product = product.T
        return product * factors.scale
    if all(size == 1 for size in down.shape[2:]):
        flat: torch.Tensor = up.flatten(1) @ down.flatten(1)
        return flat.view(weight.shape) * factors.scale
    convolve: Any = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[down.dim()]
    made: torch.Tensor = convolve(down.transpose(0, 1), up).transpose(0, 1)
    return made * factors.scale


def _rescaled(both: torch.Tensor, size: TensorRef, *, turned: bool) -> torch.Tensor:
    """Return the sum with the lengths that DoRA learned for its rows."""
    import torch

    rows = both.T if turned else both
    if rows.dim() == 2:
        lengths = torch.linalg.norm(rows, dim=1)
    else:
        lengths = rows.norm(p=2, dim=tuple(range(1, rows.dim())))
    factor = _read(size).flatten() / lengths
    factor = factor.view(-1, *[1] * (both.dim() - 1))
    made: torch.Tensor = (factor.T if turned else factor) * both
    return made
