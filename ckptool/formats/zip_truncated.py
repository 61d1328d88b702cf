"""A zip whose end is missing: how much, as far as what is left tells."""

from __future__ import annotations

import struct
from typing import Any

from ckptool.errors import CheckpointError, TruncatedFile
from ckptool.files import ByteRange
from ckptool.limits import Limits
from ckptool.model import Opaque, Storage, StorageRef
from ckptool.symbolic import unpickle
from ckptool.symbolic.rebuild import is_storage_pid, parse_storage_pid

__all__ = ["truncated"]

_LOCAL = struct.Struct("<4s5H3I2H")


def truncated(data: ByteRange, limits: Limits) -> TruncatedFile:
    """The error for a zip that ends before its directory.

    torch writes the pickle first, and the pickle names every storage with its length: where it
    is still whole, it tells the least that the file must have had.
    """
    fact = "the file is cut short: the zip directory, which stands at its end, is missing"
    try:
        wanted = _least_size(data, limits)
    except (CheckpointError, struct.error):
        wanted = 0
    if wanted > data.length:
        fact += (
            f"; it has {data.length:,} bytes, and its tensors alone need {wanted:,}, "
            f"so at least {wanted - data.length:,} are missing"
        )
    else:
        fact += f"; it has {data.length:,} bytes"
    return TruncatedFile(fact, file=data.source.name, hint="download or copy it again")


def _least_size(data: ByteRange, limits: Limits) -> int:
    """Bytes up to the end of the pickle and those of the storages that it names."""
    header = _LOCAL.unpack(data.read(0, _LOCAL.size))
    method, name_length, extra_length = header[3], header[9], header[10]
    if method or not data.read(_LOCAL.size, name_length).endswith(b"/data.pkl"):
        return 0
    sizes: dict[str, int] = {}

    def note(pid: Any) -> Any:
        if not is_storage_pid(pid):
            return Opaque(None, (pid,), maker="persid")
        storage = parse_storage_pid(pid, data.source.name)
        sizes[storage.key] = storage.nbytes
        stand_in = Storage(storage.key, None, storage.nbytes, storage.device)
        return StorageRef(stand_in, storage.dtype, storage.untyped)

    start = _LOCAL.size + name_length + extra_length
    pickle = unpickle(data, persistent_load=note, limits=limits, start=start)
    return pickle.end + sum(sizes.values())
