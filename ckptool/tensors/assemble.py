"""From storages and parts to tensors, one function a kind; what the file claims is checked here.

After torch/_utils.py (`_rebuild_*`), with the checks that its C++ leaves out: an index beyond its
tensor reads foreign memory there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptool.errors import UnsupportedFormat
from ckptool.model import Global, TensorRef

if TYPE_CHECKING:
    import torch

__all__ = ["PART_KINDS", "assemble"]


def assemble(
    ref: TensorRef,
    parts: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    storage: torch.UntypedStorage | None,
    offset: int,
) -> torch.Tensor:
    """The bare tensor of `ref` in `dtype`, its first element at `offset` (elements) of `storage`.

    `parts` are those of `ref` with the tensors made. Without a storage they are all there is.

    Raises:
        RuntimeError, TypeError, ValueError, KeyError: torch or a check refuses what is described.
        UnsupportedFormat: this torch is too old for it.
    """
    import torch

    if storage is None:
        return PART_KINDS[ref.kind](ref, parts, dtype)
    if ref.kind == "quantized":
        tensor = _quantized(ref, parts["quantizer"], dtype, storage.device)
    else:
        tensor = torch.empty((0,), dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, _shape(ref), ref.stride)
    if ref.flags:
        flags = dict.fromkeys(ref.flags, True)
        torch._utils.set_tensor_metadata(tensor, flags)  # type: ignore[no-untyped-call]
    return tensor


def _shape(ref: TensorRef) -> tuple[int, ...]:
    """The sizes of a tensor that is not ragged."""
    return tuple(size or 0 for size in ref.shape)


def _quantized(
    ref: TensorRef, quantizer: tuple[Any, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An empty tensor with the quantizer of `_rebuild_qtensor`, scales made."""
    import torch

    scheme, *numbers = quantizer
    name = scheme.name if isinstance(scheme, Global) else str(scheme)
    if name == "per_tensor_affine":
        scale, zero_point = numbers
        return torch._empty_affine_quantized(
            (0,), scale=scale, zero_point=zero_point, dtype=dtype, device=device
        )
    if name in ("per_channel_affine", "per_channel_affine_float_qparams"):
        return _per_channel(ref, numbers, name, dtype, device)
    raise ValueError(f"its scheme {name} is not known")


def _per_channel(
    ref: TensorRef, numbers: list[Any], scheme: str, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """An empty tensor quantised along an axis; lists of scales are torch 1.4's."""
    import torch

    scales, zero_points, axis = numbers
    if type(axis) is not int or not 0 <= axis < len(ref.shape):
        raise ValueError(f"its axis {axis!r} is not one of its {len(ref.shape)} dimensions")
    if isinstance(scales, list):
        whole = scheme == "per_channel_affine"
        scales = torch.tensor(scales, dtype=torch.float64 if whole else torch.float32)
        zero_points = torch.tensor(zero_points, dtype=torch.int64 if whole else torch.float32)
    if not scales.numel() == zero_points.numel() == ref.shape[axis]:
        raise ValueError(f"it has {scales.numel()} scales for {ref.shape[axis]} channels")
    size = [count or 0 if at == axis else 0 for at, count in enumerate(ref.shape)]
    return torch._empty_per_channel_affine_quantized(
        size,  # no memory is taken for a shape that a zero stride may have made enormous
        scales=scales.to(device),
        zero_points=zero_points.to(device),
        axis=axis,
        dtype=dtype,
        device=device,
    )


def _coo(ref: TensorRef, parts: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.sparse_coo_tensor(
        parts["indices"],
        parts["values"],
        _shape(ref),
        check_invariants=parts["indices"].device.type != "meta",
        is_coalesced=parts.get("is_coalesced"),
    )


def _compressed(ref: TensorRef, parts: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    import torch

    layout: torch.layout = vars(torch)[ref.kind]
    return torch.sparse_compressed_tensor(
        parts["compressed_indices"],
        parts["plain_indices"],
        parts["values"],
        _shape(ref),
        layout=layout,
        check_invariants=parts["values"].device.type != "meta",
    )


def _nested(ref: TensorRef, parts: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    import torch

    if "state" in parts:
        return _jagged(parts["state"])
    buffer, sizes, strides, offsets = (
        parts[name] for name in ("buffer", "sizes", "strides", "offsets")
    )
    if buffer.device.type != "meta":
        _check_nested(buffer, sizes.cpu(), strides.cpu(), offsets.cpu())
    return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


def _check_nested(
    buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor
) -> None:
    import torch

    if any(table.dtype != torch.int64 for table in (sizes, strides, offsets)):
        raise ValueError("its sizes, strides and offsets are not int64")
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError("its buffer is not one run of elements")
    if sizes.shape != strides.shape or offsets.shape != sizes.shape[:1]:
        raise ValueError("its sizes, strides and offsets do not fit together")
    rows = zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    for size, stride, offset in rows:
        scalar = not isinstance(size, list)  # components without dimensions
        steps = [] if scalar else list(zip(size, stride, strict=True))
        if offset < 0 or any(count < 0 or step < 0 for count, step in steps):
            raise ValueError("a component has a negative size, stride or offset")
        if all(count for count, _ in steps):
            last = offset + sum((count - 1) * step for count, step in steps)
            if last >= buffer.numel():
                raise ValueError(f"a component reaches element {last:,} of {buffer.numel():,}")


def _jagged(state: Mapping[str, Any]) -> torch.Tensor:
    import torch

    if not hasattr(torch.nested, "nested_tensor_from_jagged"):
        raise UnsupportedFormat(
            f"holds a jagged tensor, which torch {torch.__version__} cannot make",
            hint="pip install --upgrade torch",
        )
    values, offsets, lengths = state["values"], state["offsets"], state.get("lengths")
    ragged = state.get("_ragged_idx", 1)
    if offsets.device.type != "meta":
        _check_jagged(values, offsets, lengths, ragged)
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged)


def _check_jagged(values: Any, offsets: Any, lengths: Any, ragged: Any) -> None:
    if type(ragged) is not int or not 1 <= ragged <= values.dim() or offsets.dim() != 1:
        raise ValueError(f"its ragged dimension {ragged!r} is not one of its own")
    starts = offsets.tolist()
    ends = starts[1:]
    if lengths is not None:
        counts = lengths.tolist()
        ends = [at + count for at, count in zip(starts, counts, strict=False)]
        if len(counts) != len(starts) - 1 or any(count < 0 for count in counts):
            raise ValueError("its lengths do not fit its offsets")
    extent = values.shape[ragged - 1]
    rising = all(start <= end for start, end in zip(starts, ends, strict=False))
    if not starts or starts[0] < 0 or not rising or max((*ends, *starts)) > extent:
        raise ValueError(f"its offsets leave the {extent:,} rows of its values")


def _meta(ref: TensorRef, parts: Mapping[str, Any], dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.empty_strided(_shape(ref), ref.stride, dtype=dtype, device="meta")


PART_KINDS = {
    "sparse_coo": _coo,
    "sparse_csr": _compressed,
    "sparse_csc": _compressed,
    "sparse_bsr": _compressed,
    "sparse_bsc": _compressed,
    "nested": _nested,
    "meta": _meta,
}
