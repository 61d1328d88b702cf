"""Storages and tensors in a pickle: read and write the calls of torch's rebuild functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptool.core.model import (
    MAX_ELEMENTS,
    SPARSE_KINDS,
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    StorageRef,
    TensorRef,
    Wrapping,
    make_plain_tensor,
)
from ckptool.dtypes import BY_NAME, BY_STORAGE
from ckptool.errors import CorruptFile, LimitExceeded, UsageError
from ckptool.files import ByteRange, MemorySource
from ckptool.limits import DEFAULT_LIMITS

if TYPE_CHECKING:
    from ckptool.symbolic.machine import Machine


class StoragePid(NamedTuple):
    """The parts of `("storage", class, key, location, numel[, view])`, each of them checked."""

    dtype: str
    """The dtype of the class; `uint8` for an untyped storage."""
    untyped: bool
    key: str
    device: str
    """The saved device, an opaque string."""
    numel: int
    """Elements of `dtype`; bytes for untyped storages and sub-byte quantized types."""
    view: tuple[str, int, int] | None = None
    """(key, offset, numel) of a view into the storage, in elements; only before torch 0.4."""

    @property
    def nbytes(self) -> int:
        """Size of the whole storage in bytes."""
        return self.numel * BY_NAME[self.dtype].itemsize


def is_storage_pid(pid: Any) -> bool:
    """Return True if a persistent id is that of a storage."""
    return isinstance(pid, tuple) and len(pid) > 0 and pid[0] == "storage"


def parse_storage_pid(pid: tuple[Any, ...], file: str) -> StoragePid:
    """Return the storage of a persistent id (torch/serialization.py `persistent_id`).

    Raises:
        CorruptFile: a part is missing or has the wrong type, or the class has no dtype.
    """
    if len(pid) not in (5, 6):
        raise CorruptFile(
            f"the persistent id of a storage has {len(pid)} parts, expected 5 or 6", file=file
        )
    _, storage_class, key, location, numel = pid[:5]
    dtype, untyped = parse_storage_class(storage_class, file)
    if not isinstance(key, (str, int)) or isinstance(key, bool):
        raise CorruptFile(
            f"the key of a storage is {_describe_type(key)}, expected text", file=file
        )
    if not isinstance(location, str):
        raise CorruptFile(
            f"the device of storage {key!r} is {_describe_type(location)}, expected text", file=file
        )
    if not _is_count(numel):
        raise CorruptFile(f"the length of storage {key!r} is not an element count", file=file)
    view = _parse_view(pid[5], str(key), numel, file) if len(pid) == 6 else None
    return StoragePid(dtype, untyped, str(key), location, numel, view)


def parse_storage_class(storage_class: Any, file: str) -> tuple[str, bool]:
    """Return the dtype of a storage class, and whether it is untyped.

    `torch.FloatStorage`, `torch.cuda.FloatStorage` and those of other back ends are all float32.

    Raises:
        CorruptFile: it is not a torch class, or has no dtype.
    """
    if isinstance(storage_class, Global) and storage_class.module.startswith("torch"):
        if storage_class.name in ("UntypedStorage", "_UntypedStorage"):
            return "uint8", True
        if storage_class.name in BY_STORAGE:
            return BY_STORAGE[storage_class.name].name, False
    name = (
        storage_class.qualified
        if isinstance(storage_class, Global)
        else _describe_type(storage_class)
    )
    raise CorruptFile(f"a storage has the class {name}, which is not a storage class", file=file)


def _parse_view(view: Any, key: str, numel: int, file: str) -> tuple[str, int, int] | None:
    """Return key, offset and length of a view inside the storage; None for no view."""
    if view is None:
        return None
    match view:
        case (str() | int() as view_key, int() as offset, int() as length) if (
            _is_count(offset) and _is_count(length) and offset + length <= numel
        ):
            return str(view_key), offset, length
    raise CorruptFile(f"a view of storage {key!r} reaches outside it", file=file)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ELEMENTS


def _describe_type(value: Any) -> str:
    return f"of type {type(value).__name__}"


UTILS = "torch._utils"


def check_integers(values: Any) -> tuple[int, ...]:
    """Return sizes or strides, which must be of type int, not only compare like it."""
    result = tuple(values)
    if set(map(type, result)) - {int}:
        raise TypeError("sizes, strides and offsets must be integers")
    if len(result) > DEFAULT_LIMITS.max_dimensions:
        raise LimitExceeded(f"a tensor has {len(result)} dimensions, more than torch's limit of 64")
    return result


def make_strided(
    ref: Any, offset: Any, size: Any, stride: Any, dtype: str | None = None, **more: Any
) -> TensorRef:
    """Return a tensor over the storage of `ref`, with its dtype if none is given."""
    if type(ref) is not StorageRef or type(offset) is not int:
        raise TypeError("no storage or no integer offset")
    storage = ref.storage
    return TensorRef(
        dtype or ref.dtype,
        check_integers(size),
        check_integers(stride),
        offset,
        storage,
        storage.device,
        **more,
    )


def _make_v1(machine: Machine, args: Any) -> TensorRef:
    """Handle `_rebuild_tensor(storage, offset, size, stride)` of torch < 0.4."""
    storage, offset, size, stride = args
    return make_strided(storage, offset, size, stride)


def _make_v2(machine: Machine, args: Any) -> TensorRef:
    """Handle `_rebuild_tensor_v2(storage, offset, size, stride, grad, hooks[, metadata])`."""
    storage, offset, size, stride, requires_grad, hooks, *metadata = args
    if type(requires_grad) is not bool:
        raise TypeError("requires_grad is not a boolean")
    if not metadata and not hooks:  # as almost always: nothing to parse
        return make_strided(storage, offset, size, stride, requires_grad=requires_grad)
    return make_strided(
        storage, offset, size, stride,
        requires_grad=requires_grad, hooks=hooks or None, flags=parse_flags(metadata),
    )  # fmt: skip


def _make_v3(machine: Machine, args: Any) -> TensorRef:
    """Handle `_rebuild_tensor_v3(untyped storage, ..., dtype[, metadata])` of torch >= 2.2."""
    storage, offset, size, stride, requires_grad, hooks, dtype, *metadata = args
    return make_strided(
        storage, offset, size, stride, parse_torch_dtype(dtype),
        requires_grad=bool(requires_grad), hooks=hooks or None, flags=parse_flags(metadata),
    )  # fmt: skip


def parse_flags(metadata: list[Any]) -> tuple[str, ...]:
    """Return the flags that the last argument of a tensor sets, such as `conj`."""
    if len(metadata) > 1:
        raise TypeError("a tensor has too many arguments")
    if not metadata or not metadata[0]:
        return ()
    unknown = set(metadata[0]) - {"conj", "neg"}
    if unknown:
        raise ValueError(f"unknown tensor metadata {sorted(map(str, unknown))}")
    return tuple(flag for flag in ("conj", "neg") if metadata[0].get(flag))


def parse_torch_dtype(node: Any) -> str:
    """Return the torch dtype that a global refers to."""
    if not isinstance(node, Global) or node.dtype is None:
        description = node.qualified if isinstance(node, Global) else f"a {type(node).__name__}"
        raise ValueError(f"{description} is not a known dtype")
    return node.dtype


def utils_function(name: str) -> Global:
    """Return a function of torch/_utils.py."""
    return Global(UTILS, name)


def make_storage_args(ref: TensorRef) -> tuple[Any, ...]:
    """Return storage, offset, size and stride, the first arguments of the rebuild functions."""
    if ref.storage is None:
        raise UsageError(f"a {ref.kind} tensor has no storage to write")
    return StorageRef(ref.storage, ref.dtype), ref.offset, ref.shape, ref.stride


def make_strided_call(ref: TensorRef) -> tuple[Global, tuple[Any, ...]]:
    """Return the function and arguments that rebuild a plain tensor."""
    storage, *layout = make_storage_args(ref)
    tail: tuple[Any, ...] = (ref.requires_grad, ref.hooks or OrderedMap())
    metadata = (dict.fromkeys(ref.flags, True),) if ref.flags else ()
    if BY_NAME[ref.dtype].storage is None:  # a new dtype without a class such as FloatStorage
        untyped = StorageRef(storage.storage, ref.dtype, untyped=True)
        dtype = Global("torch", ref.dtype)
        return utils_function("_rebuild_tensor_v3"), (untyped, *layout, *tail, dtype, *metadata)
    return utils_function("_rebuild_tensor_v2"), (storage, *layout, *tail, *metadata)


_MAX_NESTED = 100_000
"""The most sizes of components that are read to find common ones."""


def _make_quantized(machine: Machine, args: Any) -> TensorRef:
    """Handle `_rebuild_qtensor(storage, offset, size, stride, quantizer, requires_grad, hooks)`."""
    storage, offset, size, stride, quantizer, requires_grad, hooks = args
    return make_strided(
        storage, offset, size, stride, requires_grad=bool(requires_grad),
        hooks=hooks or None, kind="quantized", parts={"quantizer": tuple(quantizer)},
    )  # fmt: skip


def _make_sparse(machine: Machine, args: Any) -> TensorRef:
    """Handle `_rebuild_sparse_tensor(layout, data)`; the items of `data` depend on the layout."""
    layout, data = args
    kind = _parse_layout(layout)
    if kind == "sparse_coo":
        indices, values, size, *flags = data
        parts = {"layout": layout, "indices": indices, "values": values, "size": size}
        if flags:
            parts["is_coalesced"] = flags[0]
    elif kind in SPARSE_KINDS:
        compressed, plain, values, size = data
        parts = {
            "layout": layout, "compressed_indices": compressed, "plain_indices": plain,
            "values": values, "size": size,
        }  # fmt: skip
    else:
        raise ValueError(f"unknown layout {kind}")
    if not isinstance(values, TensorRef):
        raise TypeError("the values of a sparse tensor are not a tensor")
    return TensorRef(
        values.dtype, check_integers(size), stride=(), offset=0, storage=None,
        device=values.device, kind=kind, parts=parts,
    )  # fmt: skip


def _parse_layout(node: Any) -> str:
    """Return `sparse_coo` for `_get_layout('torch.sparse_coo')` or for a global."""
    if isinstance(node, Opaque) and node.args and isinstance(node.args[0], str):
        return node.args[0].removeprefix("torch.")
    return node.name if isinstance(node, Global) else str(node)


def _make_nested(machine: Machine, args: Any) -> TensorRef:
    """Handle `_rebuild_nested_tensor(buffer, sizes, strides, offsets)`; ragged sizes are None."""
    buffer, sizes, strides, offsets = args
    parts = {"buffer": buffer, "sizes": sizes, "strides": strides, "offsets": offsets}
    return TensorRef(
        buffer.dtype,
        _find_nested_shape(sizes),
        stride=(),
        offset=0,
        storage=None,  # the elements are in `buffer`
        device=buffer.device,
        kind="nested",
        parts=parts,
    )


def _find_nested_shape(sizes: TensorRef) -> tuple[int | None, ...]:
    """Return the sizes of all components, None where they differ; `sizes` is (components, dims)."""
    if len(sizes.shape) != 2:  # no table: only the number of components is known
        return (sizes.shape[0] if sizes.shape else 0,)
    count, dimensions = sizes.shape[0] or 0, sizes.shape[1] or 0
    if sizes.numel > _MAX_NESTED or not sizes.has_content or count == 0:
        return (count, *[None] * dimensions)
    sizes_in_rows = memoryview(sizes.read()).cast("q")  # int64
    sizes_by_axis = [set(sizes_in_rows[axis::dimensions]) for axis in range(dimensions)]
    return (count, *(axis.pop() if len(axis) == 1 else None for axis in sizes_by_axis))


def _make_jagged(machine: Machine, args: Any) -> TensorRef:
    """Handle `_rebuild_njt({"values", "offsets", "lengths", "_ragged_idx", ...})`.

    The components are joined in `values` along the axis `_ragged_idx`, which counts the axis of
    components too.
    """
    (state,) = args
    values, offsets = state["values"], state["offsets"]
    ragged_axis = state.get("_ragged_idx", 1)
    count = (offsets.shape[0] or 1) - 1  # `offsets` has the start of each, and the last end
    inner = [
        None if axis == ragged_axis else size for axis, size in enumerate(values.shape, start=1)
    ]
    return TensorRef(
        values.dtype, (count, *inner), (), 0, None, values.device,
        bool(state.get("requires_grad")), kind="nested", parts={"state": state},
    )  # fmt: skip


def _make_meta(machine: Machine, args: Any) -> TensorRef:
    """Handle `_rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)`."""
    dtype, size, stride, requires_grad = args
    return TensorRef(
        parse_torch_dtype(dtype), check_integers(size), check_integers(stride),
        offset=0, storage=None, device="meta", requires_grad=bool(requires_grad), kind="meta",
    )  # fmt: skip


def make_special_call(ref: TensorRef) -> tuple[Global, tuple[Any, ...]] | None:
    """Return the function and arguments that rebuild a special tensor; None for other kinds."""
    parts = ref.parts or {}
    if ref.kind == "quantized":
        return utils_function("_rebuild_qtensor"), (
            *make_storage_args(ref), parts["quantizer"], ref.requires_grad,
            ref.hooks or OrderedMap(),
        )  # fmt: skip
    if ref.kind == "sparse_coo":
        flags = (parts["is_coalesced"],) if "is_coalesced" in parts else ()
        data = (parts["indices"], parts["values"], parts["size"], *flags)
        return utils_function("_rebuild_sparse_tensor"), (parts["layout"], data)
    if ref.kind in SPARSE_KINDS:
        data = tuple(
            parts[name] for name in ("compressed_indices", "plain_indices", "values", "size")
        )
        return utils_function("_rebuild_sparse_tensor"), (parts["layout"], data)
    if ref.kind == "nested":
        if "state" in parts:
            return Global("torch.nested._internal.nested_tensor", "_rebuild_njt"), (parts["state"],)
        names = ("buffer", "sizes", "strides", "offsets")
        return utils_function("_rebuild_nested_tensor"), tuple(parts[name] for name in names)
    if ref.kind == "meta":
        dtype = Global("torch", ref.dtype)
        return utils_function("_rebuild_meta_tensor_no_storage"), (
            dtype, ref.shape, ref.stride, ref.requires_grad,
        )  # fmt: skip
    return None


_TORCH_TENSOR_TYPES = frozenset(
    {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
)


# Layers around a tensor


def _make_parameter(machine: Machine, args: Any) -> Any:
    """Handle `_rebuild_parameter(data, requires_grad, hooks)`."""
    data, requires_grad, hooks = args
    return _add_layer(data, Wrapping("parameter", bool(requires_grad), hooks or None))


def _make_parameter_with_state(machine: Machine, args: Any) -> Any:
    """Handle `_rebuild_parameter_with_state(data, requires_grad, hooks, state)`."""
    data, requires_grad, hooks, state = args
    grad = bool(requires_grad)
    return _add_layer(data, Wrapping("parameter_state", grad, hooks or None, state=state))


def _make_old_parameter(machine: Machine, args: Any) -> Any:
    """Handle `Parameter(data)` and `Variable(data)` of torch < 0.4; BUILD adds their state."""
    if not args or not isinstance(args[0], TensorRef):
        return NotImplemented
    return _add_layer(args[0], Wrapping("parameter", bool(args[1]) if len(args) > 1 else True))


def set_old_state(tensor: TensorRef, state: Any) -> TensorRef:
    """Return a Parameter of torch < 0.4 with its state `(requires_grad, volatile, hooks)`."""
    match state:
        case (bool() | int() as requires_grad, _, hooks) if tensor.wrapping:
            layer = Wrapping("parameter", bool(requires_grad), hooks or None)
            inner = replace(tensor, wrapping=tensor.wrapping[:-1])  # without its layer so far
            return _add_layer(inner, layer)
    raise ValueError("the state of a tensor has an unknown form")


def _add_layer(data: Any, layer: Wrapping) -> TensorRef:
    """Return a tensor with one more layer around it, such as a Parameter."""
    if not isinstance(data, TensorRef):
        raise TypeError("a parameter is made from something that is not a tensor")
    return replace(data, requires_grad=layer.requires_grad, wrapping=(*data.wrapping, layer))


def _make_typed(machine: Machine, args: Any) -> Any:
    """Handle `_rebuild_from_type_v2(func, type, args, state)`: attributes and subclasses.

    The tensor that `func` makes gets a layer with type and state. A subclass without a storage
    (`_rebuild_wrapper_subclass`) has them in its parts instead.
    """
    func, cls, inner_args, state = args
    inner = machine.call(func, inner_args)
    if not isinstance(inner, TensorRef):
        return NotImplemented
    is_subclass = not (isinstance(cls, Global) and cls.qualified in _TORCH_TENSOR_TYPES)
    if inner.kind == "subclass" and inner.storage is None and not inner.wrapping:
        parts = {**(inner.parts or {}), "type": cls, "state": state}
        return replace(inner, parts=parts)
    kind = "subclass" if is_subclass and inner.kind == "strided" else inner.kind
    layer = Wrapping("type", inner.requires_grad, type=cls, state=state)
    return replace(inner, kind=kind, wrapping=(*inner.wrapping, layer))


def _make_wrapper_subclass(machine: Machine, args: Any) -> TensorRef:
    """Handle `_rebuild_wrapper_subclass(cls, dtype, size, stride, offset, layout, device, grad)`.

    DTensor, ShardedTensor and others without storage: the local part is in the state, which a later
    opcode sets.
    """
    cls, dtype, size, stride, offset, _, device, requires_grad = args
    tag = device.tag if isinstance(device, DeviceValue) else str(device)
    return TensorRef(
        parse_torch_dtype(dtype), check_integers(size), check_integers(stride),
        offset, None, tag, bool(requires_grad),
        kind="subclass", parts={"type": cls, "args": tuple(args), "state": None},
    )  # fmt: skip


# Tensors of TPUs and other back ends that have no storage to pickle


def _make_device_from_cpu(machine: Machine, args: Any) -> TensorRef:
    """Handle `_rebuild_device_tensor_from_cpu_tensor(data, dtype, device, grad)`, torch >= 2.6."""
    data, dtype, device, requires_grad = args
    if data.dtype != parse_torch_dtype(dtype):
        raise ValueError(f"{parse_torch_dtype(dtype)} is stored as {data.dtype}")
    parts = {"carrier": "cpu_tensor", "data": data}  # to write the tensor back as it was read
    return _move_to_device(data, device, requires_grad, parts)


def _make_numpy_handler(name: str) -> Callable[[Machine, Any], TensorRef]:
    """Return the handler of a function of torch/_utils.py, for a device tensor made from numpy."""

    def make_tensor(machine: Machine, args: Any) -> TensorRef:
        """Handle `_rebuild_device_tensor_from_numpy(array, dtype, device, requires_grad)`.

        Of torch 1.9 to 2.5; older: `_rebuild_xla_tensor`. bfloat16 is stored as float32, since
        numpy does not have it. The tensor keeps its carrier, the pickled array and the name of the
        function, so that it can be written again as it was.
        """
        array, dtype, device, requires_grad = args
        data = array
        if array.dtype != parse_torch_dtype(dtype):
            data = _narrow_to_bfloat16(array, parse_torch_dtype(dtype), machine.file)
        return _move_to_device(data, device, requires_grad, {"carrier": name, "data": array})

    return make_tensor


def _move_to_device(
    data: Any, device: Any, requires_grad: Any, parts: Mapping[str, Any]
) -> TensorRef:
    """Return a tensor with another device, which keeps its carrier (the pickled one) in `parts`."""
    if not isinstance(data, TensorRef):
        raise TypeError("a device tensor contains something that is not an array")
    tag = device.tag if isinstance(device, DeviceValue) else device
    if not isinstance(tag, str):
        raise TypeError("a device tensor has no device")
    return replace(data, device=tag, requires_grad=bool(requires_grad), kind="strided", parts=parts)


def _narrow_to_bfloat16(array: TensorRef, dtype: str, file: str) -> TensorRef:
    """Return a bfloat16 tensor that torch stored as float32, because numpy has no bfloat16.

    A bfloat16 number is the upper half of an equal float32 number.
    """
    if (array.dtype, dtype) != ("float32", "bfloat16"):
        raise CorruptFile(f"a {dtype} tensor is stored as {array.dtype}", file=file)
    wide = array.read()  # little-endian: the upper half of four bytes is the last two
    raw = bytearray(len(wide) // 2)
    raw[0::2], raw[1::2] = wide[2::4], wide[3::4]
    key = f"{array.storage.key if array.storage else ''}:bfloat16"
    return make_plain_tensor(
        key, dtype, array.sizes, ByteRange(MemorySource(bytes(raw), file), 0, len(raw))
    )


_FROM_NUMPY = "_rebuild_device_tensor_from_numpy"
_FROM_CPU = "_rebuild_device_tensor_from_cpu_tensor"

CALLS: dict[str, Callable[[Machine, Any], Any]] = {
    f"{UTILS}._rebuild_tensor": _make_v1,
    f"{UTILS}._rebuild_tensor_v2": _make_v2,
    f"{UTILS}._rebuild_tensor_v3": _make_v3,
    f"{UTILS}._rebuild_qtensor": _make_quantized,
    f"{UTILS}._rebuild_sparse_tensor": _make_sparse,
    f"{UTILS}._rebuild_sparse_csr_tensor": _make_sparse,  # torch 1.9 to 1.12
    f"{UTILS}._rebuild_nested_tensor": _make_nested,
    f"{UTILS}._rebuild_meta_tensor_no_storage": _make_meta,
    "torch.nested._internal.nested_tensor._rebuild_njt": _make_jagged,
    f"{UTILS}._rebuild_parameter": _make_parameter,
    f"{UTILS}._rebuild_parameter_with_state": _make_parameter_with_state,
    f"{UTILS}.{_FROM_CPU}": _make_device_from_cpu,
    f"{UTILS}.{_FROM_NUMPY}": _make_numpy_handler("numpy"),
    f"{UTILS}._rebuild_xla_tensor": _make_numpy_handler("xla_numpy"),
    f"{UTILS}._rebuild_wrapper_subclass": _make_wrapper_subclass,
    "torch._tensor._rebuild_from_type": _make_typed,
    "torch._tensor._rebuild_from_type_v2": _make_typed,
    "torch.tensor._rebuild_from_type": _make_typed,
    "torch.tensor._rebuild_from_type_v2": _make_typed,
    "torch.nn.parameter.Parameter": _make_old_parameter,
    "torch.autograd.variable.Variable": _make_old_parameter,
}


# The way back


def make_rebuild_call(ref: TensorRef) -> tuple[Global, tuple[Any, ...]]:
    """Return the function and arguments that rebuild `ref`, as current torch pickles it.

    The outermost layer (a Parameter, or a type with attributes) is made from the tensor inside it.
    """
    if not ref.wrapping:
        return _make_inner_call(ref)
    *inner_layers, layer = ref.wrapping
    inner = replace(ref, wrapping=tuple(inner_layers))
    if layer.kind == "type":
        func, args = make_rebuild_call(inner)
        return _TYPE_V2, (func, layer.type, args, layer.state)
    inner = replace(inner, requires_grad=False)  # only the Parameter around it does
    args = (inner, ref.requires_grad, layer.hooks or OrderedMap())
    if layer.kind == "parameter_state":
        return utils_function("_rebuild_parameter_with_state"), (*args, layer.state)
    return utils_function("_rebuild_parameter"), args


_TYPE_V2 = Global("torch._tensor", "_rebuild_from_type_v2")


def _make_inner_call(ref: TensorRef) -> tuple[Global, tuple[Any, ...]]:
    """Return the function and arguments that rebuild a tensor without layers around it.

    A tensor of a device without storages is rebuilt from its carrier, a CPU tensor or numpy array.
    """
    parts = ref.parts or {}
    carrier = parts.get("carrier")
    if carrier is not None:
        name = _FROM_CPU if carrier == "cpu_tensor" else _FROM_NUMPY
        dtype = Global("torch", ref.dtype)
        return utils_function(name), (parts["data"], dtype, ref.device, ref.requires_grad)
    special_call = make_special_call(ref)
    if special_call is not None:
        return special_call
    if ref.storage is None:
        inner = utils_function("_rebuild_wrapper_subclass")
        return _TYPE_V2, (inner, parts["type"], parts["args"], parts["state"])
    return make_strided_call(ref)
