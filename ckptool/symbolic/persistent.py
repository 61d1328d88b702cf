"""Persistent ids: how a pickle names a storage that lies outside it."""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptool.dtypes import BY_NAME, BY_STORAGE
from ckptool.errors import CorruptFile
from ckptool.model import Global

__all__ = ["StoragePid", "is_storage_pid", "parse_storage_pid", "storage_type"]

_UNTYPED = frozenset({"UntypedStorage", "_UntypedStorage"})
_MOST = (1 << 63) - 1


class StoragePid(NamedTuple):
    """What `("storage", class, key, location, numel[, view])` says. Valid: every part checked."""

    dtype: str
    """Element type of the class; `uint8` for an untyped storage."""
    untyped: bool
    key: str
    device: str
    """The location tag, an opaque string."""
    numel: int
    """Elements of `dtype`: bytes, for an untyped storage and the sub-byte quantised types."""
    view: tuple[str, int, int] | None = None
    """(key, offset, numel) of a view into the storage, in elements; only before torch 0.4."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole storage."""
        return self.numel * BY_NAME[self.dtype].itemsize


def is_storage_pid(pid: Any) -> bool:
    """Whether a persistent id is one of a storage."""
    return isinstance(pid, tuple) and len(pid) > 0 and pid[0] == "storage"


def parse_storage_pid(pid: tuple[Any, ...], file: str) -> StoragePid:
    """The storage that a pid names (torch/serialization.py `persistent_id`).

    Raises:
        CorruptFile: a part is missing or of the wrong type, or the class has no element type.
    """
    if len(pid) not in (5, 6):
        raise CorruptFile(f"a storage's persistent id has {len(pid)} parts, not 5 or 6", file=file)
    _, storage_class, key, location, numel = pid[:5]
    dtype, untyped = storage_type(storage_class, file)
    if not isinstance(key, (str, int)) or isinstance(key, bool):
        raise CorruptFile(f"a storage's key is {_kind(key)}, not text", file=file)
    if not isinstance(location, str):
        raise CorruptFile(
            f"the device of storage {key!r} is {_kind(location)}, not text", file=file
        )
    if not _is_count(numel):
        raise CorruptFile(f"the length of storage {key!r} is no count of elements", file=file)
    view = _parse_view(pid[5], str(key), numel, file) if len(pid) == 6 else None
    return StoragePid(dtype, untyped, str(key), location, numel, view)


def storage_type(storage_class: Any, file: str) -> tuple[str, bool]:
    """Element type of a storage class, and whether it is untyped.

    `torch.FloatStorage`, `torch.cuda.FloatStorage` and other back ends' are all float32.

    Raises:
        CorruptFile: no class of torch's, or one that states no element type.
    """
    if isinstance(storage_class, Global) and storage_class.module.startswith("torch"):
        if storage_class.name in _UNTYPED:
            return "uint8", True
        if storage_class.name in BY_STORAGE:
            return BY_STORAGE[storage_class.name].name, False
    shown = storage_class.qualified if isinstance(storage_class, Global) else _kind(storage_class)
    raise CorruptFile(f"a storage is said to be of class {shown}, which is none", file=file)


def _parse_view(view: Any, key: str, numel: int, file: str) -> tuple[str, int, int] | None:
    if view is None:
        return None
    match view:
        case (str() | int() as view_key, int() as offset, int() as length) if (
            _is_count(offset) and _is_count(length) and offset + length <= numel
        ):
            return str(view_key), offset, length
    raise CorruptFile(f"a view of storage {key!r} does not lie inside it", file=file)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


def _kind(value: Any) -> str:
    return f"of type {type(value).__name__}"
