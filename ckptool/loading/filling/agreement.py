"""The processes that have one model between them: all of them load it, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptool.errors import MatchError
from ckptool.loading.live.ranks import Ranks
from ckptool.loading.live.spreading import is_spread, sharded

if TYPE_CHECKING:
    import torch

__all__ = ["agreement"]


def agreement(model: torch.nn.Module) -> Ranks:
    """Those that a model is spread over by DDP, FSDP or DTensors, each of which calls `load_into`.

    Of any other model, and outside `torch.distributed`, there is nothing to agree on. It is told in
    the model's own process groups.
    """
    return Ranks(
        _groups(model),
        error=MatchError,
        undone="nothing is loaded here",
        call="load_into with this model",
    )


def _groups(model: torch.nn.Module) -> list[Any]:
    """The process groups of more than one that its wrappers and tensors are spread over."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if not (dist.is_available() and dist.is_initialized()):
        return []
    inside = {*sharded(model)}
    found: dict[Any, None] = {}
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) or module in inside:
            held = (getattr(module, name, None) for name in ("process_group", "_inter_node_pg"))
            found.update(dict.fromkeys(group for group in held if group is not None))
    meshes: dict[Any, None] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if is_spread(tensor):
            meshes[tensor.device_mesh] = None  # type: ignore[attr-defined]
    for mesh in meshes:
        if mesh.get_coordinate() is not None:
            found.update((mesh.get_group(number), None) for number in range(mesh.ndim))
    return [one for one in found if dist.get_world_size(one) > 1 and _speaks(one)]


def _speaks(group: Any) -> bool:
    """Whether what is told in it arrives: a group that is only played has no one in it."""
    import torch.distributed as dist

    return str(dist.get_backend(group)) != "fake"
