"""Legacy streams made by hand, for the tests: what no torch of today writes."""

import io
import math
import pickle
import struct
from collections import OrderedDict

import torch

MAGIC = 0x1950A86A20F9469CFC6C
SYS_INFO = {"protocol_version": 1001, "little_endian": True}


class Pid:
    """Stands for a storage, and is pickled as the persistent id that it holds."""

    def __init__(self, *pid):
        self.pid = pid


class Called:
    """Pickled as a call of `func`, which nothing here makes."""

    def __init__(self, func, *args):
        self.made = (func, args)

    def __reduce__(self):
        return self.made


class _Pickler(pickle.Pickler):
    def persistent_id(self, node):
        return node.pid if isinstance(node, Pid) else None


def dumps(obj, protocol=2):
    """`obj` pickled, with each `Pid` as a persistent id."""
    out = io.BytesIO()
    _Pickler(out, protocol).dump(obj)
    return out.getvalue()


def tensor(pid, shape, offset=0):
    """A contiguous tensor over a storage, as torch >= 0.4 pickles it."""
    stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    args = (pid, offset, shape, stride, False, OrderedDict())
    return Called(torch._utils._rebuild_tensor_v2, *args)


def stream(obj, keys, payloads, *, version=1001, magic=MAGIC, protocol=2):
    """A whole stream: `payloads` are (count, bytes) in the order of the file."""
    parts = [pickle.dumps(part, protocol) for part in (magic, version, SYS_INFO)]
    parts += [dumps(obj, protocol), pickle.dumps(keys, protocol)]
    for count, data in payloads:
        parts += [struct.pack("<q", count), data]
    return b"".join(parts)


def floats(*values):
    """(count, bytes) of float32 values."""
    return len(values), struct.pack(f"<{len(values)}f", *values)
