"""Quantised, sparse, nested and meta tensors in a pickle, read and written side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckptool.model import Global, Opaque, OrderedMap, TensorRef
from ckptool.symbolic.strided import UTILS, element_type, hooks_or_none, ints, placed, strided, util

if TYPE_CHECKING:
    from ckptool.symbolic.machine import Machine

__all__ = ["CALLS", "call_of_special"]

_LAYOUTS = ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
_MAX_NESTED = 100_000


def _quantized(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_qtensor(storage, offset, size, stride, quantizer, requires_grad, hooks)`."""
    storage, offset, size, stride, quantizer, requires_grad, hooks = args
    return strided(
        storage, offset, size, stride, requires_grad=bool(requires_grad),
        hooks=hooks_or_none(hooks), kind="quantized", parts={"quantizer": tuple(quantizer)},
    )  # fmt: skip


def _sparse(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_sparse_tensor(layout, (indices, values, size[, is_coalesced]))` and csr/csc/..."""
    layout, data = args
    kind = _layout_name(layout)
    if kind == "sparse_coo":
        indices, values, size, *rest = data
        parts = {"layout": layout, "indices": indices, "values": values, "size": size}
        if rest:
            parts["is_coalesced"] = rest[0]
    elif kind in _LAYOUTS:
        compressed, plain, values, size = data
        parts = {
            "layout": layout, "compressed_indices": compressed, "plain_indices": plain,
            "values": values, "size": size,
        }  # fmt: skip
    else:
        raise ValueError(f"the layout {kind} is not known")
    if not isinstance(values, TensorRef):
        raise TypeError("the values of a sparse tensor are no tensor")
    return TensorRef(values.dtype, ints(size), (), 0, None, values.device, kind=kind, parts=parts)


def _layout_name(node: Any) -> str:
    """`sparse_coo` from `torch.serialization._get_layout('torch.sparse_coo')` or a global."""
    if isinstance(node, Opaque) and node.args and isinstance(node.args[0], str):
        return node.args[0].removeprefix("torch.")
    return node.name if isinstance(node, Global) else str(node)


def _nested(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_nested_tensor(buffer, sizes, strides, offsets)`: ragged dimensions are None."""
    buffer, sizes, strides, offsets = args
    parts = {"buffer": buffer, "sizes": sizes, "strides": strides, "offsets": offsets}
    return TensorRef(
        buffer.dtype, _nested_shape(sizes), (), 0, None, buffer.device, kind="nested", parts=parts
    )


def _nested_shape(sizes: TensorRef) -> tuple[int | None, ...]:
    """One size where all components agree, else None; `sizes` is int64 (components, dimensions)."""
    if len(sizes.shape) != 2:
        return (sizes.shape[0] if sizes.shape else 0,)
    count, dimensions = sizes.shape[0] or 0, sizes.shape[1] or 0
    if sizes.numel > _MAX_NESTED or not sizes.has_content or count == 0:
        return (count, *[None] * dimensions)
    raw = memoryview(sizes.read()).cast("q")
    columns = [set(raw[dimension::dimensions]) for dimension in range(dimensions)]
    return (count, *(column.pop() if len(column) == 1 else None for column in columns))


def _jagged(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_njt({"values", "offsets", "lengths", "_ragged_idx", ...})`."""
    (state,) = args
    values, offsets = state["values"], state["offsets"]
    ragged = state.get("_ragged_idx", 1)
    count = (offsets.shape[0] or 1) - 1
    inner = [None if at == ragged else size for at, size in enumerate(values.shape, start=1)]
    return TensorRef(
        values.dtype, (count, *inner), (), 0, None, values.device,
        bool(state.get("requires_grad")), kind="nested", parts={"state": state},
    )  # fmt: skip


def _meta(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)`."""
    dtype, size, stride, requires_grad = args
    return TensorRef(
        element_type(dtype), ints(size), ints(stride), 0, None, "meta", bool(requires_grad),
        kind="meta",
    )  # fmt: skip


CALLS: dict[str, Callable[[Machine, Any], Any]] = {
    f"{UTILS}._rebuild_qtensor": _quantized,
    f"{UTILS}._rebuild_sparse_tensor": _sparse,
    f"{UTILS}._rebuild_sparse_csr_tensor": _sparse,  # torch 1.9 to 1.12
    f"{UTILS}._rebuild_nested_tensor": _nested,
    f"{UTILS}._rebuild_meta_tensor_no_storage": _meta,
    "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
}


def call_of_special(ref: TensorRef) -> tuple[Global, tuple[Any, ...]] | None:
    """The function and arguments that make such a tensor again; None for any other kind."""
    parts = ref.parts or {}
    if ref.kind == "quantized":
        return util("_rebuild_qtensor"), (
            *placed(ref), parts["quantizer"], ref.requires_grad, ref.hooks or OrderedMap(),
        )  # fmt: skip
    if ref.kind == "sparse_coo":
        rest = (parts["is_coalesced"],) if "is_coalesced" in parts else ()
        data = (parts["indices"], parts["values"], parts["size"], *rest)
        return util("_rebuild_sparse_tensor"), (parts["layout"], data)
    if ref.kind in _LAYOUTS:
        data = tuple(
            parts[name] for name in ("compressed_indices", "plain_indices", "values", "size")
        )
        return util("_rebuild_sparse_tensor"), (parts["layout"], data)
    if ref.kind == "nested":
        if "state" in parts:
            return Global("torch.nested._internal.nested_tensor", "_rebuild_njt"), (parts["state"],)
        names = ("buffer", "sizes", "strides", "offsets")
        return util("_rebuild_nested_tensor"), tuple(parts[name] for name in names)
    if ref.kind == "meta":
        dtype = Global("torch", ref.dtype)
        return util("_rebuild_meta_tensor_no_storage"), (
            dtype, ref.shape, ref.stride, ref.requires_grad,
        )  # fmt: skip
    return None
