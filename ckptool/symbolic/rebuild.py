"""Tensors in a pickle: torch's rebuild functions, read and written side by side.

Each `_rebuild_*` of torch/_utils.py and torch/_tensor.py has a reader here, from its arguments to
a `TensorRef`; `call_of` is the way back. Forms by version: see the docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile, UsageError
from ckptool.files import ByteRange, MemorySource
from ckptool.model import (
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Storage,
    StorageRef,
    TensorRef,
    Wrapping,
)

if TYPE_CHECKING:
    from ckptool.symbolic.machine import Machine

__all__ = ["CALLS", "call_of", "with_old_state"]

_UTILS = "torch._utils"
_LAYOUTS = ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
_OWN_TYPES = frozenset(
    {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
)
_MAX_NESTED = 100_000


def _ints(values: Any) -> tuple[int, ...]:
    result = tuple(values)
    if set(map(type, result)) - {int}:
        raise TypeError(f"{values!r:.80} are not all integers")
    return result


def _hooks(hooks: Any) -> Any:
    """Backward hooks, None for the empty dict that stands there in practice."""
    return hooks or None


# Plain strided tensors


def _strided(
    ref: Any, offset: Any, size: Any, stride: Any, dtype: str | None = None, **more: Any
) -> TensorRef:
    if type(ref) is not StorageRef or type(offset) is not int:
        raise TypeError("no storage, or no integer offset")
    storage = ref.storage
    return TensorRef(
        dtype or ref.dtype, _ints(size), _ints(stride), offset, storage, storage.device, **more
    )


def _tensor_v1(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_tensor(storage, offset, size, stride)`, torch < 0.4."""
    storage, offset, size, stride = args
    return _strided(storage, offset, size, stride)


def _tensor_v2(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])`."""
    storage, offset, size, stride, requires_grad, hooks, *metadata = args
    if not metadata and not hooks:
        return _strided(storage, offset, size, stride, requires_grad=bool(requires_grad))
    return _strided(
        storage, offset, size, stride,
        requires_grad=bool(requires_grad), hooks=_hooks(hooks), flags=_flags(metadata),
    )  # fmt: skip


def _tensor_v3(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_tensor_v3(untyped storage, ..., hooks, dtype[, metadata])`, torch >= 2.2."""
    storage, offset, size, stride, requires_grad, hooks, dtype, *metadata = args
    return _strided(
        storage, offset, size, stride, _dtype(dtype),
        requires_grad=bool(requires_grad), hooks=_hooks(hooks), flags=_flags(metadata),
    )  # fmt: skip


def _flags(metadata: list[Any]) -> tuple[str, ...]:
    if not metadata or not metadata[0]:
        return ()
    unknown = set(metadata[0]) - {"conj", "neg"}
    if unknown:
        raise ValueError(f"tensor metadata {sorted(map(str, unknown))} is not known")
    return tuple(flag for flag in ("conj", "neg") if metadata[0].get(flag))


def _dtype(node: Any) -> str:
    if not isinstance(node, Global) or node.dtype is None:
        shown = node.qualified if isinstance(node, Global) else repr(node)[:60]
        raise ValueError(f"{shown} is no element type that is known")
    return node.dtype


# Layers around a tensor


def _parameter(machine: Machine, args: Any) -> Any:
    """`_rebuild_parameter(data, requires_grad, hooks)`."""
    data, requires_grad, hooks = args
    layer = Wrapping("parameter", bool(requires_grad), _hooks(hooks))
    return _wrapped(data, layer, bool(requires_grad))


def _parameter_with_state(machine: Machine, args: Any) -> Any:
    """`_rebuild_parameter_with_state(data, requires_grad, hooks, state)`."""
    data, requires_grad, hooks, state = args
    layer = Wrapping("parameter_state", bool(requires_grad), _hooks(hooks), state=state)
    return _wrapped(data, layer, bool(requires_grad))


def _old_parameter(machine: Machine, args: Any) -> Any:
    """`Parameter(data)` and `Variable(data)` of torch < 0.4; BUILD brings the rest."""
    if not args or not isinstance(args[0], TensorRef):
        return NotImplemented
    requires_grad = bool(args[1]) if len(args) > 1 else True
    return _wrapped(args[0], Wrapping("parameter", requires_grad), requires_grad)


def with_old_state(tensor: TensorRef, state: Any) -> TensorRef:
    """A Parameter of torch < 0.4 with its state `(requires_grad, volatile, hooks)`."""
    match state:
        case (bool() | int() as requires_grad, _, hooks) if tensor.wrapping:
            layer = Wrapping("parameter", bool(requires_grad), _hooks(hooks))
            return replace(
                tensor,
                requires_grad=bool(requires_grad),
                wrapping=(*tensor.wrapping[:-1], layer),
            )
    raise ValueError("a tensor is given a state of unknown form")


def _wrapped(data: Any, layer: Wrapping, requires_grad: bool) -> TensorRef:
    if not isinstance(data, TensorRef):
        raise TypeError("a parameter is made of something that is no tensor")
    return replace(data, requires_grad=requires_grad, wrapping=(*data.wrapping, layer))


def _from_type(machine: Machine, args: Any) -> Any:
    """`_rebuild_from_type_v2(func, type, args, state)`: attributes and subclasses."""
    func, cls, inner_args, state = args
    inner = machine.call(func, inner_args)
    if not isinstance(inner, TensorRef):
        return NotImplemented
    foreign = not (isinstance(cls, Global) and cls.qualified in _OWN_TYPES)
    if inner.kind == "subclass" and inner.storage is None and not inner.wrapping:
        parts = {**(inner.parts or {}), "type": cls, "state": state}
        return replace(inner, parts=parts)
    kind = "subclass" if foreign and inner.kind == "strided" else inner.kind
    layer = Wrapping("type", inner.requires_grad, type=cls, state=state)
    return replace(inner, kind=kind, wrapping=(*inner.wrapping, layer))


def _wrapper_subclass(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_wrapper_subclass(cls, dtype, size, stride, offset, layout, device, grad)`.

    DTensor, ShardedTensor and their like: no storage of their own, the local part is in the state.
    """
    cls, dtype, size, stride, offset, _, device, requires_grad = args
    tag = device.tag if isinstance(device, DeviceValue) else str(device)
    return TensorRef(
        _dtype(dtype), _ints(size), _ints(stride), offset, None, tag, bool(requires_grad),
        kind="subclass", parts={"type": cls, "args": tuple(args), "state": None},
    )  # fmt: skip


# Quantised, sparse, nested, meta


def _quantized(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_qtensor(storage, offset, size, stride, quantizer, requires_grad, hooks)`."""
    storage, offset, size, stride, quantizer, requires_grad, hooks = args
    return _strided(
        storage, offset, size, stride, requires_grad=bool(requires_grad), hooks=_hooks(hooks),
        kind="quantized", parts={"quantizer": tuple(quantizer)},
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
    return TensorRef(
        values.dtype, _ints(size), (), 0, None, values.device, kind=kind, parts=parts
    )


def _layout_name(node: Any) -> str:
    """`sparse_coo` from `torch.serialization._get_layout('torch.sparse_coo')`, or from the global."""
    if isinstance(node, Opaque) and node.args and isinstance(node.args[0], str):
        return node.args[0].removeprefix("torch.")
    return node.name if isinstance(node, Global) else str(node)


def _sparse_csr(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_sparse_csr_tensor(layout, (crow, col, values, size))`, torch 1.9 to 1.12."""
    return _sparse(machine, args)


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
        _dtype(dtype), _ints(size), _ints(stride), 0, None, "meta", bool(requires_grad),
        kind="meta",
    )  # fmt: skip


# Tensors of TPUs and other back ends that have no storage to pickle


def _device_from_cpu(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_device_tensor_from_cpu_tensor(data, dtype, device, requires_grad)`, >= 2.6."""
    data, dtype, device, requires_grad = args
    if data.dtype != _dtype(dtype):
        raise ValueError(f"{_dtype(dtype)} is carried as {data.dtype}")
    return _on_device(data, device, requires_grad, {"carrier": "cpu_tensor", "data": data})


def _device_from_numpy(name: str) -> Callable[[Machine, Any], TensorRef]:
    def read(machine: Machine, args: Any) -> TensorRef:
        """`_rebuild_device_tensor_from_numpy(array, dtype, device, requires_grad)`, 1.9 to 2.5.

        Older: `_rebuild_xla_tensor`. bfloat16 is carried as float32, as numpy has none.
        """
        array, dtype, device, requires_grad = args
        data = array
        if array.dtype != _dtype(dtype):
            data = _as_bfloat16(array, _dtype(dtype), machine.file)
        return _on_device(data, device, requires_grad, {"carrier": name, "data": array})

    return read


def _on_device(data: Any, device: Any, requires_grad: Any, parts: Mapping[str, Any]) -> TensorRef:
    if not isinstance(data, TensorRef):
        raise TypeError("a device tensor carries something that is no array")
    tag = device.tag if isinstance(device, DeviceValue) else device
    if not isinstance(tag, str):
        raise TypeError("a device tensor names no device")
    return replace(
        data, device=tag, requires_grad=bool(requires_grad), kind="strided", parts=parts
    )


def _as_bfloat16(array: TensorRef, dtype: str, file: str) -> TensorRef:
    """The upper halves of float32 values that were bfloat16 before."""
    if (array.dtype, dtype) != ("float32", "bfloat16"):
        raise CorruptFile(f"a {dtype} tensor is carried as {array.dtype}", file=file)
    wide = array.read()
    raw = bytearray(len(wide) // 2)
    raw[0::2], raw[1::2] = wide[2::4], wide[3::4]
    storage = Storage(
        key=f"{array.storage.key if array.storage else ''}:bfloat16",
        data=ByteRange(MemorySource(bytes(raw), file), 0, len(raw)),
        nbytes=len(raw),
    )
    from ckptool.symbolic.arrays import row_major_strides

    shape = tuple(size or 0 for size in array.shape)
    return replace(
        array, dtype=dtype, stride=row_major_strides(shape), offset=0, storage=storage, parts=None
    )


_FROM_NUMPY = "_rebuild_device_tensor_from_numpy"
_FROM_CPU = "_rebuild_device_tensor_from_cpu_tensor"

CALLS: dict[str, Callable[[Machine, Any], Any]] = {
    f"{_UTILS}._rebuild_tensor": _tensor_v1,
    f"{_UTILS}._rebuild_tensor_v2": _tensor_v2,
    f"{_UTILS}._rebuild_tensor_v3": _tensor_v3,
    f"{_UTILS}._rebuild_parameter": _parameter,
    f"{_UTILS}._rebuild_parameter_with_state": _parameter_with_state,
    f"{_UTILS}._rebuild_qtensor": _quantized,
    f"{_UTILS}._rebuild_sparse_tensor": _sparse,
    f"{_UTILS}._rebuild_sparse_csr_tensor": _sparse_csr,
    f"{_UTILS}._rebuild_nested_tensor": _nested,
    f"{_UTILS}._rebuild_meta_tensor_no_storage": _meta,
    f"{_UTILS}.{_FROM_CPU}": _device_from_cpu,
    f"{_UTILS}.{_FROM_NUMPY}": _device_from_numpy("numpy"),
    f"{_UTILS}._rebuild_xla_tensor": _device_from_numpy("xla_numpy"),
    f"{_UTILS}._rebuild_wrapper_subclass": _wrapper_subclass,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.tensor._rebuild_from_type": _from_type,
    "torch.tensor._rebuild_from_type_v2": _from_type,
    "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
    "torch.nn.parameter.Parameter": _old_parameter,
    "torch.autograd.variable.Variable": _old_parameter,
}


# The way back


def call_of(ref: TensorRef) -> tuple[Global, tuple[Any, ...]]:
    """The function and arguments that make `ref` again, as a current torch would pickle it."""
    if not ref.wrapping:
        return _bare_call(ref)
    *inner_layers, layer = ref.wrapping
    inner = replace(ref, wrapping=tuple(inner_layers))
    if layer.kind == "type":
        func, args = call_of(inner)
        return _TYPE_V2, (func, layer.type, args, layer.state)
    inner = replace(inner, requires_grad=False)
    hooks = layer.hooks or OrderedMap()
    if layer.kind == "parameter_state":
        return _util("_rebuild_parameter_with_state"), (inner, ref.requires_grad, hooks, layer.state)
    return _util("_rebuild_parameter"), (inner, ref.requires_grad, hooks)


_TYPE_V2 = Global("torch._tensor", "_rebuild_from_type_v2")


def _util(name: str) -> Global:
    return Global(_UTILS, name)


def _bare_call(ref: TensorRef) -> tuple[Global, tuple[Any, ...]]:
    parts = ref.parts or {}
    carrier = parts.get("carrier")
    if carrier is not None:
        dtype = Global("torch", ref.dtype)
        name = _FROM_CPU if carrier == "cpu_tensor" else _FROM_NUMPY
        return _util(name), (parts["data"], dtype, ref.device, ref.requires_grad)
    if ref.kind == "quantized":
        return _util("_rebuild_qtensor"), (
            *_place(ref), parts["quantizer"], ref.requires_grad, ref.hooks or OrderedMap(),
        )  # fmt: skip
    if ref.kind == "sparse_coo":
        rest = (parts["is_coalesced"],) if "is_coalesced" in parts else ()
        data = (parts["indices"], parts["values"], parts["size"], *rest)
        return _util("_rebuild_sparse_tensor"), (parts["layout"], data)
    if ref.kind in _LAYOUTS:
        data = tuple(
            parts[name] for name in ("compressed_indices", "plain_indices", "values", "size")
        )
        return _util("_rebuild_sparse_tensor"), (parts["layout"], data)
    if ref.kind == "nested":
        if "state" in parts:
            return Global("torch.nested._internal.nested_tensor", "_rebuild_njt"), (parts["state"],)
        names = ("buffer", "sizes", "strides", "offsets")
        return _util("_rebuild_nested_tensor"), tuple(parts[name] for name in names)
    if ref.kind == "meta":
        dtype = Global("torch", ref.dtype)
        return _util("_rebuild_meta_tensor_no_storage"), (
            dtype, ref.shape, ref.stride, ref.requires_grad,
        )  # fmt: skip
    if ref.storage is None:
        return _TYPE_V2, (
            _util("_rebuild_wrapper_subclass"), parts["type"], parts["args"], parts["state"],
        )  # fmt: skip
    return _strided_call(ref)


def _place(ref: TensorRef) -> tuple[Any, ...]:
    if ref.storage is None:
        raise UsageError(f"a {ref.kind} tensor has no storage to be written from")
    return StorageRef(ref.storage, ref.dtype), ref.offset, ref.shape, ref.stride


def _strided_call(ref: TensorRef) -> tuple[Global, tuple[Any, ...]]:
    storage, *place = _place(ref)
    tail: tuple[Any, ...] = (ref.requires_grad, ref.hooks or OrderedMap())
    metadata = ({flag: True for flag in ref.flags},) if ref.flags else ()
    if BY_NAME[ref.dtype].storage is None:
        untyped = StorageRef(storage.storage, ref.dtype, untyped=True)
        dtype = Global("torch", ref.dtype)
        return _util("_rebuild_tensor_v3"), (untyped, *place, *tail, dtype, *metadata)
    return _util("_rebuild_tensor_v2"), (storage, *place, *tail, *metadata)
