"""The processes that have one model between them: all of them load it, or none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckptool import errors
from ckptool.errors import CheckpointError, MatchError
from ckptool.loading.filling.spreading import is_spread
from ckptool.loading.saving.ranks import gathered

if TYPE_CHECKING:
    import torch

__all__ = ["Agreement"]


class Agreement:
    """What the processes tell each other of a model that DDP, FSDP or DTensors spread over them.

    Each of them calls `load_into`; of any other model, and outside `torch.distributed`, there is
    nothing to agree on. It is told in the model's own process groups, to each in turn.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Look at the groups that the model is in."""
        self._groups = _groups(model)

    @property
    def is_of_many(self) -> bool:
        """Whether there is another process."""
        return bool(self._groups)

    @contextmanager
    def reached(self) -> Iterator[None]:
        """What is done inside ends well in every process; else it raises in every one.

        Raises:
            CheckpointError: it failed in another one, which is named.
        """
        if not self._groups:
            yield
            return
        try:
            yield
        except BaseException as error:
            self._told(error)
            raise
        for rank, failure in sorted(self._told(None).items()):
            raise _elsewhere(rank, failure)

    def _told(self, error: BaseException | None) -> dict[int, CheckpointError | str]:
        """The failures of all ranks: what one group has heard is told in the next."""
        import torch.distributed as dist

        failures = {} if error is None else {dist.get_rank(): _sendable(error)}
        for group in self._groups:
            for heard in gathered(failures, group):
                failures |= heard
        return failures


def _groups(model: torch.nn.Module) -> list[Any]:
    """The process groups of more than one that its wrappers and tensors are spread over."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if not (dist.is_available() and dist.is_initialized()):
        return []
    # Never imported: where there is such a module, its caller has.
    home = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(home, "FullyShardedDataParallel", DistributedDataParallel)
    found: dict[Any, None] = {}
    for module in model.modules():
        if isinstance(module, (DistributedDataParallel, sharded)):
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


def _sendable(error: BaseException) -> CheckpointError | str:
    """An error as the other processes can have it: a foreign one may not survive the way."""
    if isinstance(error, CheckpointError) and type(error).__module__ == errors.__name__:
        return error
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _elsewhere(rank: int, failure: CheckpointError | str) -> CheckpointError:
    """The error as the other processes raise it."""
    told = f"nothing is loaded here, as it failed in rank {rank}: {failure}"
    if isinstance(failure, str):
        return MatchError(told)
    failure.message, failure.args = told, (told,)
    return failure
