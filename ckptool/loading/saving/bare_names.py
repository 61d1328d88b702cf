"""Names of a live model without those of its wrappers, which are told by their classes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ckptool.names import N_AVERAGED, WRAPPERS, Rename, check_collisions
from ckptool.transforms.names import moved_metadata

if TYPE_CHECKING:
    import torch

__all__ = ["bare_names", "counters", "renamed_state"]

_OUTER = "module"
_PRIVATE = frozenset(WRAPPERS) - {_OUTER}
"""Nobody's layers: wrappers wherever they stand."""
_AVERAGE = "AveragedModel"
"""Keeps a model as its `module`, and a counter beside it."""
_KINDS = frozenset((
    "DataParallel", "DeepSpeedEngine", "DistributedDataParallel", "FullyShardedDataParallel",
    "ModelEma", "ModelEmaV2", "ModelEmaV3", "ShardedDataParallel",
))  # fmt: skip
"""Classes, torch's and those of others, that keep a model as their `module`, and nothing else."""


def bare_names(model: torch.nn.Module, *, averages: bool = True) -> Rename:
    """The rename of tensor names and module paths that takes all wrappers of `model` off.

    A child that is called `module` is one only in a wrapper of a known class: a layer that its
    author called so keeps its name. Without `averages` an `AveragedModel` is none.
    """
    kinds = _KINDS | {_AVERAGE} if averages else _KINDS
    around = frozenset(
        ".".join(part for part in path.split(".") if part and part not in _PRIVATE)
        for path, module in model.named_modules(remove_duplicate=False)
        if _is_one_of(kinds, module) and _OUTER in dict(module.named_children())
    )

    def bare(name: str) -> str:
        seen: list[str] = []
        kept: list[str] = []
        for part in name.split("."):
            if part in _PRIVATE:
                continue
            if part != _OUTER or ".".join(seen) not in around:
                kept.append(part)
            seen.append(part)
        return ".".join(kept)

    return bare


def counters(model: torch.nn.Module) -> list[str]:
    """The names of the counters that an `AveragedModel` among the wrappers of `model` keeps."""
    found: list[str] = []
    path = ""
    while True:
        averages = _is_one_of(frozenset((_AVERAGE,)), model)
        if averages and N_AVERAGED in model._buffers:
            found.append(path + N_AVERAGED)
        wraps = _OUTER if averages or _is_one_of(_KINDS, model) else None
        # Not `_modules`: that of TorchScript is a dict of another kind.
        inside = [one for one in model.named_children() if one[0] == wraps or one[0] in _PRIVATE]
        if not inside:
            return found
        name, model = inside[0]
        path += f"{name}."


def _is_one_of(names: frozenset[str], module: torch.nn.Module) -> bool:
    return any(kind.__name__ in names for kind in type(module).__mro__)


def renamed_state(
    state: Mapping[Any, Any],
    rename: Rename,
    rename_module: Rename | None = None,
    *,
    without: Collection[str] = (),
) -> OrderedDict[Any, Any]:
    """A state dict under new names, its `_metadata` under the new paths.

    `rename_module` is for paths of modules without names below them; as `rename`, if None. Entries
    called as one of `without` are left out.

    Raises:
        NameCollision: two names would become one.
    """
    kept = [name for name in state if name not in without]
    names = {name: rename(name) for name in kept if isinstance(name, str)}
    check_collisions(kept, names, hint="save the model inside the wrapper")
    renamed = OrderedDict((names.get(name, name), state[name]) for name in kept)
    metadata = getattr(state, "_metadata", None)
    if isinstance(metadata, dict):
        vars(renamed)["_metadata"] = moved_metadata(metadata, names, rename_module or rename)
    return renamed
