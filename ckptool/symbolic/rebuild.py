"""Tensors in a pickle: torch's rebuild functions, read and written side by side.

Each `_rebuild_*` of torch/_utils.py and torch/_tensor.py has a reader here, from its arguments to
a `TensorRef`; `call_of` is the way back. Forms by version: see the docstrings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptool.errors import CorruptFile
from ckptool.files import ByteRange, MemorySource
from ckptool.model import (
    DeviceValue,
    Global,
    OrderedMap,
    Storage,
    TensorRef,
    Wrapping,
    row_major_strides,
)
from ckptool.symbolic import special, strided
from ckptool.symbolic.strided import (
    UTILS,
    call_of_strided,
    element_type,
    hooks_or_none,
    ints,
    util,
)

if TYPE_CHECKING:
    from ckptool.symbolic.machine import Machine

__all__ = ["CALLS", "call_of", "with_old_state"]

_OWN_TYPES = frozenset(
    {"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
)


# Layers around a tensor


def _parameter(machine: Machine, args: Any) -> Any:
    """`_rebuild_parameter(data, requires_grad, hooks)`."""
    data, requires_grad, hooks = args
    layer = Wrapping("parameter", bool(requires_grad), hooks_or_none(hooks))
    return _wrapped(data, layer, bool(requires_grad))


def _parameter_with_state(machine: Machine, args: Any) -> Any:
    """`_rebuild_parameter_with_state(data, requires_grad, hooks, state)`."""
    data, requires_grad, hooks, state = args
    layer = Wrapping("parameter_state", bool(requires_grad), hooks_or_none(hooks), state=state)
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
            layer = Wrapping("parameter", bool(requires_grad), hooks_or_none(hooks))
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
        element_type(dtype), ints(size), ints(stride), offset, None, tag, bool(requires_grad),
        kind="subclass", parts={"type": cls, "args": tuple(args), "state": None},
    )  # fmt: skip


# Tensors of TPUs and other back ends that have no storage to pickle


def _device_from_cpu(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_device_tensor_from_cpu_tensor(data, dtype, device, requires_grad)`, >= 2.6."""
    data, dtype, device, requires_grad = args
    if data.dtype != element_type(dtype):
        raise ValueError(f"{element_type(dtype)} is carried as {data.dtype}")
    return _on_device(data, device, requires_grad, {"carrier": "cpu_tensor", "data": data})


def _device_from_numpy(name: str) -> Callable[[Machine, Any], TensorRef]:
    def read(machine: Machine, args: Any) -> TensorRef:
        """`_rebuild_device_tensor_from_numpy(array, dtype, device, requires_grad)`, 1.9 to 2.5.

        Older: `_rebuild_xla_tensor`. bfloat16 is carried as float32, as numpy has none.
        """
        array, dtype, device, requires_grad = args
        data = array
        if array.dtype != element_type(dtype):
            data = _as_bfloat16(array, element_type(dtype), machine.file)
        return _on_device(data, device, requires_grad, {"carrier": name, "data": array})

    return read


def _on_device(data: Any, device: Any, requires_grad: Any, parts: Mapping[str, Any]) -> TensorRef:
    if not isinstance(data, TensorRef):
        raise TypeError("a device tensor carries something that is no array")
    tag = device.tag if isinstance(device, DeviceValue) else device
    if not isinstance(tag, str):
        raise TypeError("a device tensor names no device")
    return replace(data, device=tag, requires_grad=bool(requires_grad), kind="strided", parts=parts)


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

    shape = tuple(size or 0 for size in array.shape)
    return replace(
        array, dtype=dtype, stride=row_major_strides(shape), offset=0, storage=storage, parts=None
    )


_FROM_NUMPY = "_rebuild_device_tensor_from_numpy"
_FROM_CPU = "_rebuild_device_tensor_from_cpu_tensor"

CALLS: dict[str, Callable[[Machine, Any], Any]] = {
    **strided.CALLS,
    **special.CALLS,
    f"{UTILS}._rebuild_parameter": _parameter,
    f"{UTILS}._rebuild_parameter_with_state": _parameter_with_state,
    f"{UTILS}.{_FROM_CPU}": _device_from_cpu,
    f"{UTILS}.{_FROM_NUMPY}": _device_from_numpy("numpy"),
    f"{UTILS}._rebuild_xla_tensor": _device_from_numpy("xla_numpy"),
    f"{UTILS}._rebuild_wrapper_subclass": _wrapper_subclass,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.tensor._rebuild_from_type": _from_type,
    "torch.tensor._rebuild_from_type_v2": _from_type,
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
        return util("_rebuild_parameter_with_state"), (
            inner,
            ref.requires_grad,
            hooks,
            layer.state,
        )
    return util("_rebuild_parameter"), (inner, ref.requires_grad, hooks)


_TYPE_V2 = Global("torch._tensor", "_rebuild_from_type_v2")


def _bare_call(ref: TensorRef) -> tuple[Global, tuple[Any, ...]]:
    parts = ref.parts or {}
    carrier = parts.get("carrier")
    if carrier is not None:
        name = _FROM_CPU if carrier == "cpu_tensor" else _FROM_NUMPY
        dtype = Global("torch", ref.dtype)
        return util(name), (parts["data"], dtype, ref.device, ref.requires_grad)
    known = special.call_of_special(ref)
    if known is not None:
        return known
    if ref.storage is None:
        inner = util("_rebuild_wrapper_subclass")
        return _TYPE_V2, (inner, parts["type"], parts["args"], parts["state"])
    return call_of_strided(ref)
