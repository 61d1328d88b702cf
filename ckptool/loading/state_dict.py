"""`load_state_dict`: the one state dict that a model takes, whatever lies around it."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import UsageError
from ckptool.loading.load import opened
from ckptool.loading.tree import made_tree
from ckptool.model import OrderedMap, TensorRef
from ckptool.statedict import model_state_dict
from ckptool.tensors import is_one_part, only_a_part
from ckptool.tensors.placement import MapLocation

if TYPE_CHECKING:
    import torch

__all__ = ["load_state_dict"]


def load_state_dict(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    key: Any = None,
    wrappers: str = "strip",
    map_location: MapLocation = "cpu",
    dtype: torch.dtype | str | None = None,
    mmap: bool = False,
) -> OrderedDict[str, Any]:
    """The state dict of a model, ready for `model.load_state_dict`, with its `_metadata`.

    It is the one under `key` (an address, such as `"ema"`), or the only one of the file; of a
    pickled module or a TorchScript archive what its `state_dict()` would be. The wrapper names of
    DataParallel, `torch.compile` and their like go unless `wrappers` is `"keep"`. `dtype` casts
    the floating tensors, storage by storage. Tensors that shared memory share it, a Parameter stays
    one, and what is no tensor is as `load` gives it, as are `map_location` and `mmap`.

    Raises:
        TorchMissing: torch is not installed.
        UnreadableFile: the file cannot be opened as a checkpoint; see `ckptool.open`.
        AmbiguousName, NotFound: several state dicts and no `key`, or none; the message lists them.
        NameCollision: two tensors would get one name without the wrapper.
        DeviceError: a tensor's device is not here; the message names tensor, tag and remedy.
        UnsupportedFormat: a DTensor or ShardedTensor, of which the file has one rank's part.
        UsageError: `wrappers` is neither word, or `dtype` no floating type.
    """
    if wrappers not in ("strip", "keep"):
        raise UsageError(f"wrappers={wrappers!r} is neither 'strip' nor 'keep'")
    with opened(path) as checkpoint:
        chosen = _alone(checkpoint, key)
        if wrappers == "strip":
            chosen = chosen.strip_module()
        for name, value in chosen.root.items():
            if isinstance(value, TensorRef) and is_one_part(value):
                raise only_a_part(value, str(name))
        made: OrderedDict[str, Any] = made_tree(
            chosen.root, map_location=map_location, mmap=mmap, dtype=dtype
        )
        return made


def _alone(checkpoint: Checkpoint, key: Any) -> Checkpoint:
    """The chosen state dict as the whole of a checkpoint."""
    section = model_state_dict(checkpoint, key)
    root = OrderedMap(section.node)
    if isinstance(section.node, OrderedMap):
        root.attributes = section.node.attributes
    return checkpoint.with_root(root)
