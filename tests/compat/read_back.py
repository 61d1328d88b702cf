"""Run by an old Python with an old torch: what it reads from files that ckptool wrote.

Takes on stdin a JSON object, path of a file -> the classes and functions that its pickle names;
prints one, path -> `{"missing": [name]}`, `{"error": text}` or `{"tensors": [row]}`, where a row is
`[path, dtype, shape, device, sha256]` (no hash of what has no plain bytes). Python 3.6, torch 1.0.
"""

import ctypes
import hashlib
import importlib
import json
import sys
import warnings

import numpy
import torch

WHOLE = {"weights_only": False} if hasattr(torch.serialization, "add_safe_globals") else {}
"""What has a torch that is careful by default read objects too: these files are our own."""


def sha256(tensor):
    """Hash of the elements in row-major order, as they lie on this machine."""
    for resolve in ("resolve_conj", "resolve_neg"):
        if hasattr(tensor, resolve):
            tensor = getattr(tensor, resolve)()
    tensor = tensor.detach().contiguous()
    size = tensor.numel() * tensor.element_size()
    return hashlib.sha256(ctypes.string_at(tensor.data_ptr(), size) if size else b"").hexdigest()


def size_of(tensor, axis):
    """Its size along an axis, None where that is ragged."""
    try:
        size = tensor.size(axis)
    except RuntimeError:  # a nested tensor of the strided layout
        return None
    return size if type(size) is int else None


def row(tensor, path):
    """One tensor."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized
    plain = plain and tensor.device.type != "meta"
    dtype = str(tensor.dtype).replace("torch.", "")
    plain = plain and not getattr(tensor, "is_nested", False)
    shape = [size_of(tensor, axis) for axis in range(tensor.dim())]
    return [path, dtype, shape, str(tensor.device), sha256(tensor) if plain else None]


def array_row(array, path):
    """One numpy array."""
    little = numpy.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
    dtype = array.dtype.newbyteorder("=").name
    return [path, dtype, list(array.shape), "cpu", hashlib.sha256(little.tobytes()).hexdigest()]


def rows(node, path, entered):
    """The tensors below a node, in order; objects are not looked into."""
    if isinstance(node, torch.Tensor):
        yield row(node, path)
    elif isinstance(node, numpy.ndarray) and node.dtype.kind in "biufc":
        yield array_row(node, path)
    elif isinstance(node, torch.nn.Module):
        for name, tensor in node.state_dict().items():
            yield row(tensor, [*path, name])
    elif isinstance(node, (dict, list, tuple)) and id(node) not in entered:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, item in items:
            yield from rows(item, [*path, str(key)], entered | {id(node)})


def is_known(name):
    """Whether this Python can import a class or function."""
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False


def read(path, names):
    """What one file gives."""
    missing = [name for name in names if not is_known(name)]
    if missing:
        return {"missing": missing}
    # Where a load fails, torch keeps the sparse tensors that it meant to check for the next one.
    getattr(torch._utils, "_sparse_tensors_to_validate", []).clear()
    try:
        return {"tensors": list(rows(torch.load(path, **WHOLE), [], frozenset()))}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    wanted = json.load(sys.stdin)
    json.dump({path: read(path, names) for path, names in wanted.items()}, sys.stdout)
