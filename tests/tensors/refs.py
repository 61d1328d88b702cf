"""Tensor references by hand, for what torch itself would never write."""

import struct

from ckptool.core.model import Global, Storage, TensorRef
from ckptool.files import ByteRange, MemorySource


def storage(raw, *, key="0", device="cpu", byteorder="little"):
    data = ByteRange(MemorySource(raw, "made.pt"), 0, len(raw))
    return Storage(key, data, len(raw), device, byteorder)


def tensor(raw, dtype, shape, *, stride=None, offset=0, device="cpu", byteorder="little", **more):
    """A reference over its own storage, row-major unless `stride` says otherwise."""
    if stride is None:
        stride, step = [], 1
        for size in reversed(shape):
            stride.insert(0, step)
            step *= max(size, 1)
    held = storage(raw, device=device, byteorder=byteorder)
    return TensorRef(dtype, tuple(shape), tuple(stride), offset, held, device, **more)


def ints(*values, shape=None):
    """An int64 tensor, of one dimension unless told."""
    return tensor(struct.pack(f"<{len(values)}q", *values), "int64", shape or (len(values),))


def floats(*values, shape=None, **more):
    """A float32 tensor."""
    return tensor(
        struct.pack(f"<{len(values)}f", *values), "float32", shape or (len(values),), **more
    )


def composed(kind, shape, parts, dtype="float32"):
    """A tensor without a storage of its own."""
    return TensorRef(dtype, shape, (), 0, None, "cpu", kind=kind, parts=parts)


def torch_global(name):
    return Global("torch", name)
