"""Models of which each process has a part: DTensors (`fully_shard`), and FSDP, the first.

FSDP keeps the parameters of many modules in one flat one, of which each rank has a part; its
`state_dict` gathers them, for which every rank must call it. What the flat one is made of it
remembers (torch/distributed/fsdp/_flat_param.py, `FlatParameter`): so names and shapes are known
without gathering.
"""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

from ckptool.loading.live.memory import dtype_name
from ckptool.matching import Slot

if TYPE_CHECKING:
    import torch

__all__ = [
    "Shards",
    "Ungathered",
    "is_spread",
    "sharded",
    "shards_of",
    "spread_like",
    "ungathered",
    "without_hidden",
]

Shards = dict[int, dict[str, Slot]]
"""By the `id` of a module, what its parameters in flat ones are."""

_HIDDEN = frozenset({"_fsdp_wrapped_module", "_fpw_module", "_checkpoint_wrapped_module"})
"""Components of module paths that the hooks of these wrappers take off the names."""
_FLAT = frozenset({"_flat_param", "flat_param"})


class Ungathered(OrderedDict[str, Any]):
    """By name a `Slot` for what is in shards or no tensor, else the live tensor."""

    metadata: OrderedDict[str, dict[str, Any]]
    """The versions of the modules, by path."""


def is_spread(tensor: Any) -> bool:
    """Whether it is a DTensor, of which this rank has a part."""
    import torch

    return isinstance(tensor, torch.Tensor) and callable(getattr(type(tensor), "full_tensor", None))


def spread_like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of `value`, which each rank has whole, spread as `tensor` is.

    Nothing is sent between ranks, as far as torch (2.6 and later) can do without.
    """
    if not is_spread(tensor) or is_spread(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    alone = "src_data_rank" in inspect.signature(distribute_tensor).parameters
    options: dict[str, Any] = {"src_data_rank": None} if alone else {}
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.detach(), mesh, placements, **options)


def without_hidden(path: str) -> str:
    """The path of a module as the names of the state dict have it."""
    if "_module" not in path:
        return path
    return ".".join(part for part in path.split(".") if part not in _HIDDEN)


def sharded(model: torch.nn.Module) -> list[Any]:
    """The modules of `model` that are `FullyShardedDataParallel`."""
    # Never imported: where there is such a module, its caller has.
    home = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(home, "FullyShardedDataParallel", None)
    return [] if kind is None else [one for one in model.modules() if isinstance(one, kind)]


def shards_of(model: torch.nn.Module) -> Shards | None:
    """Which parameters of `model` are in flat ones; None where it has no FSDP in it."""
    wrapped = sharded(model)
    if not wrapped:
        return None
    shards: Shards = {}
    for module in wrapped:
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        if flat is not None:
            _note(flat, shards)
    return shards


def _note(flat: Any, shards: Shards) -> None:
    dtype = dtype_name(flat)
    tied: dict[Hashable, Slot] = {}
    shared = [(id(info.prim_module), info.prim_param_name) for info in flat._shared_param_infos]
    for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
        key = (id(info.module), info.param_name)
        slot = Slot(tuple(shape), dtype, "parameter", key if key in shared else None)
        shards.setdefault(id(info.module), {})[info.param_name] = tied[key] = slot
    for info, key in zip(flat._shared_param_infos, shared, strict=True):
        shards.setdefault(id(info.module), {})[info.param_name] = tied[key]


def ungathered(model: torch.nn.Module, shards: Shards) -> Ungathered:
    """What the full state dict of `model` has, its modules in their order."""
    found = Ungathered()
    found.metadata = OrderedDict()
    for path, module in model.named_modules(remove_duplicate=False):
        found.metadata[path] = {"version": getattr(module, "_version", 1)}
        clean = without_hidden(path)
        before = f"{clean}." if clean else ""
        found.update((f"{before}{name}", held) for name, held in _own(module, shards))
    return found


def _own(module: torch.nn.Module, shards: Shards) -> Iterator[tuple[str, Any]]:
    """What one module has itself, as `Module._save_to_state_dict` saves it."""
    import torch

    flat = shards.get(id(module), {})
    yield from flat.items()
    for name, parameter in module._parameters.items():
        if parameter is not None and name not in flat and name not in _FLAT:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
    if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
        yield "_extra_state", Slot(kind="extra")
