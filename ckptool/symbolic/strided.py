"""Ordinary strided tensors in a pickle: `_rebuild_tensor`, `_v2`, `_v3`, read and written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptool.dtypes import BY_NAME
from ckptool.errors import LimitExceeded, UsageError
from ckptool.limits import DEFAULT_LIMITS
from ckptool.model import Global, OrderedMap, StorageRef, TensorRef

if TYPE_CHECKING:
    from ckptool.symbolic.machine import Machine

__all__ = [
    "CALLS",
    "call_of_strided",
    "element_type",
    "hooks_or_none",
    "ints",
    "placed",
    "strided",
    "util",
]

UTILS = "torch._utils"


def ints(values: Any) -> tuple[int, ...]:
    """Sizes or strides, which must be integers and nothing that only compares like them."""
    result = tuple(values)
    if set(map(type, result)) - {int}:
        raise TypeError("sizes, strides and offsets must be integers")
    if len(result) > DEFAULT_LIMITS.max_dimensions:
        raise LimitExceeded(f"a tensor has {len(result)} dimensions; torch itself stops at 64")
    return result


def hooks_or_none(hooks: Any) -> Any:
    """Backward hooks, None for the empty dict that stands there in practice."""
    return hooks or None


def strided(
    ref: Any, offset: Any, size: Any, stride: Any, dtype: str | None = None, **more: Any
) -> TensorRef:
    """A tensor over the storage that `ref` stands for, of its element type if none is given."""
    if type(ref) is not StorageRef or type(offset) is not int:
        raise TypeError("no storage, or no integer offset")
    storage = ref.storage
    return TensorRef(
        dtype or ref.dtype, ints(size), ints(stride), offset, storage, storage.device, **more
    )


def _tensor_v1(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_tensor(storage, offset, size, stride)`, torch < 0.4."""
    storage, offset, size, stride = args
    return strided(storage, offset, size, stride)


def _tensor_v2(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])`."""
    storage, offset, size, stride, requires_grad, hooks, *metadata = args
    if type(requires_grad) is not bool:
        raise TypeError("requires_grad is no boolean")
    if not metadata and not hooks:
        return strided(storage, offset, size, stride, requires_grad=requires_grad)
    return strided(
        storage, offset, size, stride,
        requires_grad=requires_grad, hooks=hooks_or_none(hooks), flags=flags_of(metadata),
    )  # fmt: skip


def _tensor_v3(machine: Machine, args: Any) -> TensorRef:
    """`_rebuild_tensor_v3(untyped storage, ..., hooks, dtype[, metadata])`, torch >= 2.2."""
    storage, offset, size, stride, requires_grad, hooks, dtype, *metadata = args
    return strided(
        storage, offset, size, stride, element_type(dtype),
        requires_grad=bool(requires_grad), hooks=hooks_or_none(hooks), flags=flags_of(metadata),
    )  # fmt: skip


def flags_of(metadata: list[Any]) -> tuple[str, ...]:
    if len(metadata) > 1:
        raise TypeError("a tensor has more arguments than any")
    if not metadata or not metadata[0]:
        return ()
    unknown = set(metadata[0]) - {"conj", "neg"}
    if unknown:
        raise ValueError(f"tensor metadata {sorted(map(str, unknown))} is not known")
    return tuple(flag for flag in ("conj", "neg") if metadata[0].get(flag))


def element_type(node: Any) -> str:
    """Torch's name of the element type that a global stands for."""
    if not isinstance(node, Global) or node.dtype is None:
        shown = node.qualified if isinstance(node, Global) else f"a {type(node).__name__}"
        raise ValueError(f"{shown} is no element type that is known")
    return node.dtype


CALLS = {
    f"{UTILS}._rebuild_tensor": _tensor_v1,
    f"{UTILS}._rebuild_tensor_v2": _tensor_v2,
    f"{UTILS}._rebuild_tensor_v3": _tensor_v3,
}


def util(name: str) -> Global:
    """A function of torch/_utils.py."""
    return Global(UTILS, name)


def placed(ref: TensorRef) -> tuple[Any, ...]:
    """Storage, offset, size and stride, as the rebuild functions take them."""
    if ref.storage is None:
        raise UsageError(f"a {ref.kind} tensor has no storage to be written from")
    return StorageRef(ref.storage, ref.dtype), ref.offset, ref.shape, ref.stride


def call_of_strided(ref: TensorRef) -> tuple[Global, tuple[Any, ...]]:
    """The function and arguments that make a plain tensor again."""
    storage, *place = placed(ref)
    tail: tuple[Any, ...] = (ref.requires_grad, ref.hooks or OrderedMap())
    metadata = (dict.fromkeys(ref.flags, True),) if ref.flags else ()
    if BY_NAME[ref.dtype].storage is None:
        untyped = StorageRef(storage.storage, ref.dtype, untyped=True)
        dtype = Global("torch", ref.dtype)
        return util("_rebuild_tensor_v3"), (untyped, *place, *tail, dtype, *metadata)
    return util("_rebuild_tensor_v2"), (storage, *place, *tail, *metadata)
