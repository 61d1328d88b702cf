"""Small trees for tests: tensors without bytes, state dicts, pickled modules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckptool.core.checkpoint import Checkpoint
from ckptool.core.model import Global, Opaque, OrderedMap, Storage, TensorRef
from ckptool.files import ByteRange, MemorySource


def storage(nbytes: int = 8, device: str = "cpu", key: str = "0") -> Storage:
    """A storage of zeros."""
    return Storage(key, ByteRange(MemorySource(bytes(nbytes), "test"), 0, nbytes), nbytes, device)


def tensor(*shape: int, device: str = "cpu", over: Storage | None = None, **more: Any) -> TensorRef:
    """A contiguous float32 tensor (two elements, unless a shape is given)."""
    dtype = more.pop("dtype", "float32")
    shape = shape or (2,)
    stride = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    over = over or storage(math.prod(shape) * 8, device)
    return TensorRef(dtype, shape, stride, 0, over, over.device, **more)


def scalar(device: str = "cpu") -> TensorRef:
    """A float32 tensor without dimensions."""
    return TensorRef("float32", (), (), 0, storage(4, device), device)


def state_dict(names: Iterable[str], metadata: Iterable[str] | None = None) -> OrderedMap:
    """A state dict of two-element tensors; `metadata` names the modules that have an entry."""
    made = OrderedMap((name, tensor()) for name in names)
    if metadata is not None:
        made.attributes["_metadata"] = OrderedMap(
            (path, {"version": at}) for at, path in enumerate(metadata, start=10)
        )
    return made


def module(
    name: str = "net.Net",
    parameters: dict[str, Any] | None = None,
    buffers: dict[str, Any] | None = None,
    children: dict[str, Any] | None = None,
    **attributes: Any,
) -> Opaque:
    """A pickled `nn.Module`."""
    home, _, cls = name.rpartition(".")
    state = {
        "_parameters": OrderedMap(parameters or {}),
        "_buffers": OrderedMap(buffers or {}),
        "_modules": OrderedMap(children or {}),
        **attributes,
    }
    return Opaque(Global(home, cls), (), maker="newobj", steps=[("build", state)])


def parallel(inner: Opaque) -> Opaque:
    """`DataParallel(inner)`."""
    return module("torch.nn.parallel.data_parallel.DataParallel", children={"module": inner})


def checkpoint(root: Any) -> Checkpoint:
    """A checkpoint of that tree, as if it had been read from `file.pth`."""
    return Checkpoint(root, "torch-zip", "file.pth")


def opened(path: Path) -> Checkpoint:
    """A file, read."""
    from ckptool.formats import open_checkpoint

    return open_checkpoint(path)


def by_name(*names: str) -> dict[str, Any]:
    """The state of an optimizer that holds the names of its parameters."""
    return {
        "state": {name: {"exp_avg": tensor()} for name in names},
        "param_groups": [{"params": list(names), "param_names": tuple(names), "lr": 0.1}],
    }


def modules_of(names: Iterable[str]) -> list[str]:
    """The paths of all modules above these names, the root first."""
    paths = {"": None}
    for name in names:
        parts = name.split(".")
        paths.update({".".join(parts[:at]): None for at in range(1, len(parts))})
    return list(paths)


def texts(made: Checkpoint) -> list[tuple[str, str]]:
    """The changes that were made, each with its kind."""
    return [(change.kind, change.text) for change in made.changes]
