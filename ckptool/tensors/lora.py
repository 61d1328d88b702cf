"""The arithmetic of LoRA and DoRA, one weight at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptool.core.model import Storage, TensorRef
from ckptool.errors import NotRepresentable
from ckptool.tensors.casting import load_checked
from ckptool.tensors.storages import get_torch_dtype
from ckptool.tensors.whole import ComputedTensors

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Factors:
    """The change of one weight by an adapter: `up @ down`, times `scale`."""

    down: TensorRef
    up: TensorRef
    scale: float
    magnitude: TensorRef | None = None
    """The length of each row of the weight in DoRA; None without DoRA."""
    transposed: bool = False
    """True if the weight is (in, out)."""

    @property
    def shape(self) -> tuple[int | None, ...] | None:
        """The shape of `up @ down`; None if the two do not fit each other or `magnitude`.

        Factors of a convolution have up to three kernel dimensions, in `up` all of size 1.
        """
        down, up = self.down.shape, self.up.shape
        if not len(up) == len(down) in (2, 3, 4, 5) or up[1] != down[0]:
            return None
        if self.magnitude is not None and self.magnitude.numel != up[0]:
            return None
        return (up[0], *down[1:]) if all(size == 1 for size in up[2:]) else None

    def needs_transpose(self, shape: Sequence[int | None]) -> bool | None:
        """Return True if the product has not the shape `shape` of a weight: it must be transposed.

        None if the product is square: its shape does not show its order.
        """
        is_square = len(shape) == 2 and shape[0] == shape[1]
        if is_square and self.shape == tuple(shape):
            return None
        return tuple(shape) != self.shape


class Merger:
    """Makes the storages of weights into which adapters are merged."""

    def __init__(self) -> None:
        """Start with nothing computed."""
        self._computed_tensors = ComputedTensors()

    def merge(
        self, weight: TensorRef, other: TensorRef | None, added: Sequence[Factors]
    ) -> Storage:
        """Return the storage of `weight` with all factors added, computed when it is read.

        With `other` the factors are added to its values; dtype, key and device are of `weight`.

        Raises:
            TorchMissing: torch is not installed.
        """
        if weight.storage is None:
            raise NotRepresentable("an adapter cannot be merged into a tensor without bytes")
        base = weight if other is None else other
        used = [base, *(tensor for factors in added for tensor in (factors.down, factors.up))]
        return self._computed_tensors.compute_storage(
            weight, used, lambda: _merge_factors(base, added, dtype=weight.dtype)
        )


def _load_float(ref: TensorRef) -> torch.Tensor:
    """Load a checked tensor as float32, or float64 if it has that dtype."""
    import torch

    tensor = load_checked(ref)
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _merge_factors(base: TensorRef, added: Sequence[Factors], *, dtype: str) -> torch.Tensor:
    """Return `base` plus the factors in `dtype`, with the operations of PEFT in their order.

    Raises:
        NotRepresentable: a number that was finite is infinite or NaN after merging.
    """
    total = before = _load_float(base)
    for factors in added:
        total = total + _multiply_factors(factors, total)
        if factors.magnitude is not None:
            is_transposed = _is_transposed(factors, total.shape)
            total = _rescale_rows(total, factors.magnitude, is_transposed=is_transposed)
    merged = total.to(get_torch_dtype(dtype))
    if bool((before.isfinite() & ~merged.double().isfinite()).any()):
        raise NotRepresentable(
            f"a merged weight is infinite or NaN in {dtype}, its dtype in the base",
            hint="check that all values of the adapter are finite, or widen the base with "
            "ckptool cast BASE --dtype float32",
        )
    return merged


def _is_transposed(factors: Factors, shape: Sequence[int]) -> bool:
    """Return True if the product must be transposed to be added to a weight of `shape`.

    The shapes decide; if the weight is square, the configuration of the adapter.
    """
    by_shape = factors.needs_transpose(shape)
    return factors.transposed if by_shape is None else by_shape


def _multiply_factors(factors: Factors, weight: torch.Tensor) -> torch.Tensor:
    """Return the scaled product of the factors, in the shape of `weight`.

    The product of factors of a convolution is the kernel that does both convolutions, as PEFT
    computes it.
    """
    import torch

    down, up = _load_float(factors.down), _load_float(factors.up)
    if down.dtype != up.dtype:
        down, up = down.double(), up.double()
    if down.dim() == 2:
        product = up @ down
        if _is_transposed(factors, weight.shape):
            product = product.T
        return product * factors.scale
    if all(size == 1 for size in down.shape[2:]):  # 1x1 kernels are multiplied like matrices
        flat: torch.Tensor = up.flatten(1) @ down.flatten(1)
        return flat.view(weight.shape) * factors.scale
    convolve: Any = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[down.dim()]
    kernel: torch.Tensor = convolve(down.transpose(0, 1), up).transpose(0, 1)
    return kernel * factors.scale


def _rescale_rows(
    weight: torch.Tensor, magnitude: TensorRef, *, is_transposed: bool
) -> torch.Tensor:
    """Return the weight with each row scaled to the length that DoRA learned.

    `is_transposed`: the rows of the layer are the columns of `weight`.
    """
    import torch

    rows = weight.T if is_transposed else weight
    # Two functions, as in PEFT, so that the results have the same bits.
    if rows.dim() == 2:
        lengths = torch.linalg.norm(rows, dim=1)
    else:
        lengths = rows.norm(p=2, dim=tuple(range(1, rows.dim())))
    factor = _load_float(magnitude).flatten() / lengths
    factor = factor.view(-1, *[1] * (weight.dim() - 1))
    rescaled: torch.Tensor = (factor.T if is_transposed else factor) * weight
    return rescaled
