"""The allow-list of calls in the pickles of checkpoints, and their representation here.

A handler gets the machine and the arguments from the file, and returns our own object, or
NotImplemented for a call of unknown form (which stays an `Opaque`). Tensors are in `rebuild.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptool.core.model import (
    DeviceValue,
    Global,
    Opaque,
    OrderedMap,
    Size,
    StorageRef,
    TensorRef,
    make_plain_tensor,
    row_major_strides,
)
from ckptool.dtypes import BY_NAME
from ckptool.errors import CorruptFile
from ckptool.files import ByteRange, MemorySource
from ckptool.symbolic import rebuild
from ckptool.symbolic.text import to_bytes

if TYPE_CHECKING:
    from ckptool.symbolic.machine import Machine

Call = Callable[["Machine", Any], Any]

ELEMENT_TYPES = {
    "b1": "bool", "i1": "int8", "i2": "int16", "i4": "int32", "i8": "int64",
    "u1": "uint8", "u2": "uint16", "u4": "uint32", "u8": "uint64",
    "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64", "c16": "complex128",
    "bool": "bool", "int64": "int64", "float32": "float32", "float64": "float64",
    "bfloat16": "bfloat16",
}  # fmt: skip
"""The torch name for each numpy code, without byte order."""
_FORMATS = {
    "bool": "?", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B",
    "uint16": "H", "uint32": "I", "uint64": "Q", "float16": "e", "float32": "f", "float64": "d",
    "complex64": "ff", "complex128": "dd",
}  # fmt: skip
NUMPY_ARRAYS = frozenset(
    {"numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"}
)

JAX_ARRAYS = ("jax._src.array._reconstruct_array", "jax._src.device_array.reconstruct_device_array")
"""Functions that make a JAX array, the second until JAX 0.4."""


def parse_numpy_dtype(node: Any) -> tuple[str, str] | None:
    """Return the torch name and byte order of a pickled `numpy.dtype`; None if torch lacks it."""
    if not isinstance(node, Opaque) or not isinstance(node.func, Global):
        return None
    if node.func.qualified != "numpy.dtype" or not isinstance(node.args, tuple) or not node.args:
        return None
    code, state = node.args[0], node.state
    if isinstance(code, Global) and code.module == "ml_dtypes":  # numpy has no bfloat16
        return (code.name, "little") if code.name in BY_NAME else None
    byteorder = "little"
    if isinstance(state, tuple) and len(state) >= 5:
        # As numpy.dtype.__reduce__ returns it; the items after the fields say nothing here.
        _version, order, subarray, field_names, _fields, *_ = state
        if subarray is not None or field_names is not None:
            return None
        byteorder = "big" if order == ">" else "little"
    name = ELEMENT_TYPES.get(code) if isinstance(code, str) else None
    return None if name is None else (name, byteorder)


def finish_array(node: Opaque, file: str) -> Any:
    """Return the tensor of a `numpy.ndarray` object with its state; any other object unchanged.

    Its elements may be pickled as text. They are kept as bytes, also in the object.
    """
    if not isinstance(node.func, Global) or node.func.qualified not in NUMPY_ARRAYS:
        return node
    match node.state:
        case (version, tuple() as shape, Opaque() as dtype, fortran, payload):
            raw = to_bytes(payload)
            if raw is not None:
                node.steps[-1] = ("build", (version, shape, dtype, fortran, raw))
                return _make_array(node, shape, dtype, bool(fortran), raw, file)
    return node


def _make_array(
    node: Opaque, shape: tuple[Any, ...], dtype: Opaque, fortran: bool, raw: bytes, file: str
) -> Any:
    """Return the tensor of an array, or `node` if torch does not have its dtype.

    `fortran` is True for elements in column-major order.

    Raises:
        CorruptFile: the shape is invalid.
    """
    dtype_and_order = parse_numpy_dtype(dtype)
    if dtype_and_order is None:
        return node
    name, order = dtype_and_order
    if any(type(size) is not int or size < 0 for size in shape):
        raise CorruptFile("a numpy array has an invalid shape", file=file)
    tensor = make_plain_tensor(
        "numpy", name, shape, ByteRange(MemorySource(raw, file), 0, len(raw)), byteorder=order
    )
    if fortran:
        stride = tuple(reversed(row_major_strides(tuple(reversed(shape)))))
        tensor = replace(tensor, stride=stride)
    return replace(tensor, kind="numpy", parts={"array": node})


def _make_buffer_array(package: str, machine: Machine, args: Any) -> Any:
    """Handle `numpy.core.numeric._frombuffer(buffer, dtype, shape, order)` of protocol 5."""
    match args:
        case (payload, Opaque() as dtype, tuple() as shape, str() as order):
            if isinstance(payload, Opaque) and payload.class_name == "builtins.bytearray":
                payload = payload.args[0]
            raw = to_bytes(payload)
            if raw is not None:
                node = Opaque(machine.find_global(f"{package}.numeric", "_frombuffer"), args)
                return _make_array(node, shape, dtype, order == "F", raw, machine.file)
    return NotImplemented


def _make_jax_array(name: str, machine: Machine, args: Any) -> Any:
    """Handle `_reconstruct_array(function, args, state, aval)`: numpy's reduce in another order.

    Returns NotImplemented for other arguments. Source: jax/_src/array.py.
    """
    match args:
        case (Global() as func, tuple() as inner, tuple() as state, dict()):
            array = finish_array(Opaque(func, inner, steps=[("build", state)]), machine.file)
            if isinstance(array, TensorRef):
                node = Opaque(machine.find_global(*name.rsplit(".", 1)), args)
                return replace(array, parts={"array": node})
    return NotImplemented


def _make_scalar(package: str, machine: Machine, args: Any) -> Any:
    """Handle `numpy.core.multiarray.scalar(dtype, bytes)`: an object that is also a plain value."""
    match args:
        case (Opaque() as dtype, payload):
            name, order = parse_numpy_dtype(dtype) or ("", "")
            raw = to_bytes(payload)
            if name in _FORMATS and raw is not None:
                func = machine.find_global(f"{package}.multiarray", "scalar")
                plain = (name, _unpack_scalar(name, order, raw, machine.file))
                return Opaque(func, (dtype, raw), plain=plain)
    return NotImplemented


def _unpack_scalar(name: str, order: str, raw: bytes, file: str) -> Any:
    """Return the number in the bytes of a numpy scalar."""
    layout = (">" if order == "big" else "<") + _FORMATS[name]
    if struct.calcsize(layout) != len(raw):
        raise CorruptFile(f"a numpy {name} scalar has {len(raw)} bytes", file=file)
    parts = struct.unpack(layout, raw)
    return complex(*parts) if len(parts) == 2 else parts[0]  # real and imaginary part


def _make_ordered_dict(machine: Machine, args: Any) -> Any:
    """Handle `OrderedDict()`, or Python 2's `OrderedDict([[key, value], ...])`."""
    mapping = OrderedMap()
    if args:
        for key, value in args[0]:
            machine.check_key(key)
            mapping[key] = value
    return mapping


def _make_size(machine: Machine, args: Any) -> Any:
    """Handle `torch.Size((2, 3))`."""
    return Size(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else Size()


def _make_device(machine: Machine, args: Any) -> Any:
    """Handle `torch.device('cuda', 0)` and `torch.device('cpu')`."""
    match args:
        case (str() as word,):
            return DeviceValue(word)
        case (str() as word, int() as index):
            return DeviceValue(f"{word}:{index}")
    return NotImplemented


def _decode_latin1(machine: Machine, args: Any) -> Any:
    """Handle `_codecs.encode(text, 'latin1')`, which protocol 2 writes for bytes."""
    match args:
        case (str() as text, str() as codec) if codec.replace("-", "").lower() == "latin1":
            return text.encode("latin-1")
    return NotImplemented  # the call is kept as data


def _make_empty_bytes(machine: Machine, args: Any) -> Any:
    """Handle `bytes()`, which protocol 2 writes for empty bytes."""
    return b"" if args == () else NotImplemented


def _make_complex(machine: Machine, args: Any) -> Any:
    """Handle `complex(1.0, 2.0)`."""
    match args:
        case (int() | float() as real, int() | float() as imaginary):
            return complex(real, imaginary)
    return NotImplemented


def _load_from_bytes(machine: Machine, args: Any) -> Any:
    """Handle `torch.storage._load_from_bytes(b)`: a whole torch file inside a plain pickle."""
    raw = to_bytes(args[0]) if len(args) == 1 else None
    if raw is None or machine.nested is None:
        return NotImplemented
    node = machine.nested(raw)  # reads the file
    return node if isinstance(node, (StorageRef, TensorRef)) else NotImplemented


def _unwrap_paddle_array(machine: Machine, args: Any) -> Any:
    """Handle `eval('data', {'data': array})`, which PaddlePaddle writes for a LoDTensor."""
    match args:
        case ("data", {"data": TensorRef() as array} as names) if len(names) == 1:
            return array
    return NotImplemented  # the call is kept as data


def _make_object(machine: Machine, args: Any) -> Any:
    """Handle `copyreg.__newobj__(cls, ...)`, which protocol 1 writes for NEWOBJ."""
    return make_new_object(machine, args[0], tuple(args[1:]))


def make_new_object(machine: Machine, cls: Any, args: Any) -> Any:
    """Return the result of NEWOBJ: an instance of a recognized class, else an `Opaque`."""
    if isinstance(cls, Global) and cls.qualified in ("collections.OrderedDict", "torch.Size"):
        return RECOGNIZED[cls.qualified](machine, args)
    return Opaque(cls, args, maker="newobj")


RECOGNIZED: dict[str, Call] = {
    "collections.OrderedDict": _make_ordered_dict,
    "torch.Size": _make_size,
    "torch.device": _make_device,
    "_codecs.encode": _decode_latin1,
    "builtins.bytes": _make_empty_bytes,
    "builtins.eval": _unwrap_paddle_array,
    "builtins.complex": _make_complex,
    "copyreg.__newobj__": _make_object,
    "torch.storage._load_from_bytes": _load_from_bytes,
    **{name: partial(_make_jax_array, name) for name in JAX_ARRAYS},
    **rebuild.CALLS,
    **{
        f"{package}.{name}": partial(handler, package)
        for package in ("numpy.core", "numpy._core")  # the second since numpy 2
        for name, handler in (
            ("multiarray.scalar", _make_scalar),
            ("numeric._frombuffer", _make_buffer_array),
        )
    },
}
