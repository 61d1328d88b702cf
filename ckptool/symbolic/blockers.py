"""What keeps `torch.load(weights_only=True)` from taking a pickle.

The names are those of torch/_weights_only_unpickler.py (`_get_allowed_globals`), torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptool.dtypes import BY_NAME

__all__ = ["blocking"]

_QSCHEMES = (
    "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric",
    "per_channel_affine_float_qparams",
)  # fmt: skip
_FUNCTIONS = (
    "_rebuild_parameter", "_rebuild_parameter_with_state", "_rebuild_tensor", "_rebuild_tensor_v2",
    "_rebuild_tensor_v3", "_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_nested_tensor",
    "_rebuild_meta_tensor_no_storage", "_rebuild_device_tensor_from_cpu_tensor",
    "_rebuild_device_tensor_from_numpy", "_rebuild_wrapper_subclass",
)  # fmt: skip
_SMALL_TYPES = (f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
_OTHERS = (
    "_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set",
    "collections.Counter", "collections.OrderedDict", "torch.Size", "torch.Tensor", "torch.device",
    "torch.nn.parameter.Parameter", "torch._tensor._rebuild_from_type_v2",
    "torch.tensor._rebuild_from_type_v2", "torch.serialization._get_layout",
)  # fmt: skip
_ALLOWED = frozenset(
    (
        *_OTHERS,
        *(f"torch._utils.{name}" for name in _FUNCTIONS),
        *(f"torch.{name}" for name in (*BY_NAME, *_QSCHEMES, *_SMALL_TYPES)),
    )
)


def blocking(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the qualified names that the safe unpickler refuses, in order, once each."""
    return tuple(dict.fromkeys(name for name in names if not _allowed(name)))


def _allowed(name: str) -> bool:
    owner, _, last = name.rpartition(".")
    is_storage = owner in ("torch", "torch.storage", "torch.cuda") and last.endswith("Storage")
    is_tensor = owner in ("torch", "torch.cuda", "torch.sparse") and last.endswith("Tensor")
    return name in _ALLOWED or is_storage or is_tensor
