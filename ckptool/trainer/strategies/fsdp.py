"""`fully_shard` (FSDP2): each process holds a part of every parameter, gradient and moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from ckptool.errors import TrainingError, WriteError
from ckptool.loading.ranks import is_spread
from ckptool.trainer import sharded
from ckptool.trainer.processes import ranks
from ckptool.trainer.strategies.base import blocks_of, tied
from ckptool.trainer.strategies.ddp import Distributed

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["FullyShardedDataParallel"]


class FullyShardedDataParallel(Distributed):
    """Rows of every parameter are dealt out over the processes; names stay the model's own.

    A block's parameters are gathered for its forward pass, and once more for its backward pass;
    gradients are summed and dealt out (reduce-scatter), so that the optimizer, clipping and the
    moving average work on parts alone. Buffers are whole everywhere, and those of rank 0 count.
    """

    name: ClassVar[str] = "fsdp"

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Connect the processes, if torch has `fully_shard`."""
        _require_fully_shard()
        with super().opened():
            yield

    def wrap(self, model: nn.Module) -> None:
        """Shard each block by itself, then what is left as one: each is gathered in one go.

        The root too gives its whole parameters back after the forward pass, so that between steps,
        after an evaluation as well, the model holds parts alone. What blocks share belongs to
        the root: only there one gathering serves them all.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().wrap(model)
        mesh = init_device_mesh(self.device.type, (self.world.size,))
        blocks = blocks_of(model)
        shared = tied(blocks)
        for block in blocks:
            own = {id(one) for one in block.parameters()}
            if block is not model and own and not own & shared:
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        model.register_forward_pre_hook(_take_buffers)

    def save(self, path: str, values: Mapping[str, Any]) -> None:
        """Write one file, for which all parts are gathered, or with `sharded` a folder of parts."""
        if not self.config.sharded:
            super().save(path, values)
            return
        together = ranks("nothing is written", WriteError)
        sharded.write(path, self.module, self.tuning.optimizer, values, together)

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Keep whole gradients in this process until the last batch of a step."""
        model = cast("FSDPModule", self.model)
        model.set_requires_gradient_sync(is_last)
        return nullcontext()

    def whole_module(self) -> nn.Module:
        """Refuse: each process has parts, and classes that torch made while it sharded."""
        raise TrainingError(
            "a model of strategy 'fsdp' cannot be pickled as one object: each process has parts",
            hint="--save full gathers them",
        )

    def wrapped_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return both state dicts, their parts gathered, in every process."""
        model, optimizer = super().wrapped_state()
        return whole(model), whole(optimizer)


def whole(tree: Any) -> Any:
    """Return the tree with every spread tensor gathered; all processes call it."""
    return tree_map(lambda one: _gathered(one) if is_spread(one) else one, tree)


def _gathered(part: Any) -> torch.Tensor:
    """Return the whole tensor, without the rows that pad the parts."""
    full: torch.Tensor = part.full_tensor()
    return full.clone() if full.untyped_storage().nbytes() > full.nbytes else full


def _take_buffers(model: nn.Module, _: Any) -> None:
    """Send the buffers of rank 0 to all before a forward pass, as DistributedDataParallel does."""
    for buffer in model.buffers():
        dist.broadcast(buffer.detach(), src=0)


def _require_fully_shard() -> None:
    try:
        from torch.distributed.fsdp import fully_shard  # noqa: F401
    except ImportError as error:
        raise TrainingError(
            f"strategy 'fsdp' is torch's fully_shard, which torch has from 2.6 on; this is "
            f"{torch.__version__}",
            hint="a later torch, or --strategy ddp",
        ) from error
