"""Checkpoints made in memory, for what no file is needed for."""

import array

from ckptool.core.checkpoint import Checkpoint, Details
from ckptool.core.model import Storage, TensorRef
from ckptool.files import ByteRange, MemorySource


def storage(data: bytes, key="0", device="cpu"):
    return Storage(key, ByteRange(MemorySource(data, "made.pth"), 0, len(data)), len(data), device)


def floats(*numbers, key="0", device="cpu"):
    return storage(array.array("f", numbers).tobytes(), key, device)


def tensor(over, shape, stride=None, offset=0, dtype="float32", **options):
    """A view of a storage; row-major unless a stride is given."""
    if stride is None:
        stride, step = [], 1
        for size in reversed(shape):
            stride.insert(0, step)
            step *= size
    return TensorRef(dtype, tuple(shape), tuple(stride), offset, over, over.device, **options)


def checkpoint(root, format="torch-zip", **details):
    return Checkpoint(root, format, "made.pth", Details(**details))
