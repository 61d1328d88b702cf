"""What in a file's layout `torch.load` refuses, and which devices it must find."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

from ckptool.checkpoint import TORCH_REFUSES, Checkpoint
from ckptool.dtypes import BY_NAME
from ckptool.model import StorageRef, TensorRef
from ckptool.paths import everything
from ckptool.symbolic.encoder import blocking

__all__ = ["REFUSED_FORMATS", "layout_blockers", "outdated_names", "restored_devices"]

REFUSED_FORMATS = {
    "torch-tar": "the tar format of torch 0.1 is refused",
    "pickle": "it is a bare pickle, which torch.load does not open",
    "torchscript": "it is a TorchScript archive, which needs torch.jit.load",
    "pt2": "it is a torch.export archive, which needs torch.export.load",
    "npz": "it is an archive of numpy's, which numpy.load opens",
    "safetensors-sharded": "it is in shards, each of which is loaded by itself",
    "torch-sharded": "it is in shards, each of which torch.load opens by itself",
}
"""Why not, by format, for `torch.load` as it is called by default."""


def layout_blockers(checkpoint: Checkpoint) -> Iterator[str]:
    """Reasons why `torch.load(weights_only=True)` refuses the file, whatever it holds."""
    if os.path.isdir(checkpoint.path):
        yield "it is a folder, which torch.load does not open"
    if checkpoint.format in REFUSED_FORMATS:
        yield REFUSED_FORMATS[checkpoint.format]
    if checkpoint.format == "torch-legacy":
        yield from _legacy_blockers(checkpoint)
    for note in checkpoint.details.notes:
        if note.startswith(TORCH_REFUSES):
            yield note.removeprefix(TORCH_REFUSES).strip()
    if checkpoint.details.opcodes:
        yield f"pickle opcodes: {', '.join(checkpoint.details.opcodes)}"


def outdated_names(checkpoint: Checkpoint, objects: Collection[str]) -> tuple[str, ...]:
    """What the pickle names and `weights_only=True` refuses, though nothing in the tree needs it.

    Functions by which older torch made tensors are such: a rewrite names today's. Where `objects`
    block a file of the tree (`symbolic.encoder.blockers`) these are told instead.
    """
    if objects or checkpoint.format in REFUSED_FORMATS:
        return ()
    return blocking(checkpoint.details.globals)


def _legacy_blockers(checkpoint: Checkpoint) -> Iterator[str]:
    protocol = checkpoint.details.protocol
    if protocol not in (2, 3) and not checkpoint.details.opcodes:
        yield f"pickle protocol {protocol}"  # the pickles before and behind the object have it too
    dtypes = dict.fromkeys(ref.dtype for _, ref in checkpoint.tensors())
    untyped = [name for name in dtypes if BY_NAME[name].storage is None]
    if untyped:
        yield f"no torch loads {', '.join(untyped)} from a legacy stream"


def restored_devices(root: Any) -> tuple[str, ...]:
    """The tags of all tensors and storages, in order of first use.

    They are those that `torch.load` must find a device for: arrays have none.
    """
    tags: dict[str, None] = {}
    for node in everything(root):
        if isinstance(node, TensorRef) and node.kind != "numpy":
            tags[node.device] = None
        elif isinstance(node, StorageRef):
            tags[node.storage.device] = None
    return tuple(tags)
