"""`load_state_dict`: the one state dict that a model takes, whatever lies around it."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from ckptool.checkpoint import Checkpoint
from ckptool.errors import UsageError, warn
from ckptool.loading.load import made_tree, opened_and_told
from ckptool.model import TensorRef, remade
from ckptool.names import N_AVERAGED
from ckptool.statedict import model_state_dict, values_inside, wrapped_names
from ckptool.tensors import is_one_part, only_a_part
from ckptool.tensors.materialise import MapLocation
from ckptool.transforms.extraction import plain_state_dict
from ckptool.words import listed

if TYPE_CHECKING:
    import torch

__all__ = ["load_state_dict"]


def load_state_dict(
    path: str | os.PathLike[str] | Checkpoint,
    map_location: MapLocation = "cpu",
    *,
    key: Any = None,
    wrappers: str = "strip",
    dtype: torch.dtype | str | None = None,
    mmap: bool = False,
) -> OrderedDict[str, Any]:
    """Return the state dict of a model, ready for `model.load_state_dict`.

    `_metadata` comes with it. A pickled module or a TorchScript archive gives what the module's
    `state_dict()` returns. Tied tensors stay tied, a Parameter stays one. Entries that no model
    loads are left out with a `CheckpointWarning`: values, and `n_averaged` of an `AveragedModel`.

    Args:
        path: A file, an index of shards, the folder of a model, or an open checkpoint.
        map_location: Where to put the tensors, as in `torch.load`.
        key: The address of the state dict (such as `"ema"`), if the file has several.
        wrappers: `"strip"` or `"keep"` the prefixes of DataParallel, `torch.compile` and others.
        dtype: The type that floating tensors are cast to.
        mmap: Map the file privately; it must not be truncated while the tensors live.

    Raises:
        UnreadableFile: the file cannot be opened as a checkpoint; see `ckptool.open`.
        NotFound: there is no state dict, or none at `key` (`AmbiguousName`: there are several).
        NameCollision: two tensors have the same key without the wrapper.
        DeviceError: the device of a tensor is not available; the message names the tensor.
        UnsupportedFormat: the file has only one rank's part of a DTensor or ShardedTensor.
        UsageError: `wrappers` is neither word, or `dtype` is not a floating type.
    """
    if wrappers not in ("strip", "keep"):
        raise UsageError(f"wrappers={wrappers!r} is neither 'strip' nor 'keep'")
    with opened_and_told(path) as checkpoint:
        section = model_state_dict(checkpoint, key)
        if section.unread:
            unread = listed(section.unread)
            warn(f"{checkpoint.path}: the state dict is returned without {unread}")
        chosen = checkpoint.with_root(plain_state_dict(checkpoint, section))
        if wrappers == "strip":
            chosen = _stripped(chosen)
        for name, value in chosen.root.items():
            if isinstance(value, TensorRef) and is_one_part(value):
                raise only_a_part(value, str(name))
        chosen = _without(chosen, values_inside(chosen.root), "no model takes")
        made: OrderedDict[str, Any] = made_tree(
            chosen.root, map_location=map_location, mmap=mmap, dtype=dtype
        )
        return made


def _stripped(chosen: Checkpoint) -> Checkpoint:
    """Remove wrapper names, and the counter of an `AveragedModel`."""
    stripped = chosen.strip_module()
    counters = [
        new
        for old, new in zip(chosen.root, stripped.root, strict=True)
        if new == N_AVERAGED and _counts_averages(old, chosen)
    ]
    return _without(stripped, counters, "counts what was averaged, in a wrapper that is gone")


def _counts_averages(name: str, chosen: Checkpoint) -> bool:
    """Return whether all other tensors are in a `module` beside it, and none beside that."""
    inside = f"{name.removesuffix(N_AVERAGED)}module."
    return all(other == name or other.startswith(inside) for other in wrapped_names(chosen.root))


def _without(chosen: Checkpoint, names: list[Any], reason: str) -> Checkpoint:
    """Leave some entries out, with a warning."""
    if not names:
        return chosen
    shown = listed(f"'{name}'" for name in names)
    warn(f"{chosen.path}: the state dict is returned without {shown}, which {reason}")
    gone = frozenset(names)
    left = ((name, value) for name, value in chosen.root.items() if name not in gone)
    return chosen.with_root(remade(chosen.root, left))
