"""`load`: everything that a checkpoint holds."""

from __future__ import annotations

import os
from typing import Any

from ckptool.checkpoint import Checkpoint
from ckptool.formats import opened
from ckptool.loading.objects.tree import made_tree
from ckptool.tensors.materialise import MapLocation

__all__ = ["load"]


def load(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    map_location: MapLocation = "cpu",
    mmap: bool = False,
) -> Any:
    """The whole tree with tensors made, as `torch.load` would give it; nothing of it is run.

    Containers, ties, circles, `_metadata`, parameters, devices, dtypes and sizes are what they
    were. An object of any other class than torch's and Python's own stays an inert
    `ckptool.Opaque` with its tensors made (for the weights of a pickled module see
    `load_state_dict`). A numpy array becomes a tensor, a numpy scalar a number, a tensor subclass
    a plain tensor; a DTensor or ShardedTensor stays a `ckptool.TensorRef`, whose `local` part can
    be read while the checkpoint is open. An attribute of a tensor that would hide one of its class
    (`p.mean`) is left out, with a `CheckpointWarning`.

    Args:
        path: A file, an index of shards or their folder; or an open checkpoint.
        map_location: As `torch.load` takes it; `"meta"` reads no tensor.
        mmap: Map the file privately in place of reading it: it must not be truncated while the
            tensors live.

    Raises:
        TorchMissing: torch is not installed.
        UnreadableFile: the file cannot be opened as a checkpoint; see `ckptool.open`.
        DeviceError: a tensor's device is not here; the message names tensor, tag and remedy.
    """
    with opened(path) as checkpoint:
        return made_tree(checkpoint.root, map_location=map_location, mmap=mmap)
