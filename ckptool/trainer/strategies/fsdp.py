"""`fully_shard` (FSDP2): each process holds a part of every parameter, gradient and moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from ckptool.errors import TrainingError
from ckptool.loading.ranks import is_spread
from ckptool.trainer.strategies.base import blocks_of, tied
from ckptool.trainer.strategies.data_parallel import Distributed

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class FullyShardedDataParallel(Distributed):
    """The rows of every parameter are sharded over the processes; names stay the model's own.

    The parameters of a block are gathered for its forward pass and again for its backward pass;
    gradients are summed and sharded (reduce-scatter), so that optimizer, clipping and moving
    average work on shards. Every process has whole buffers, with the values of rank 0.
    """

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Connect the processes, if torch has `fully_shard`."""
        try:
            from torch.distributed.fsdp import fully_shard  # noqa: F401
        except ImportError as error:
            raise TrainingError(
                f"strategy 'fsdp' needs torch 2.6 or later, but this is {torch.__version__}",
                hint="upgrade torch, or use --strategy ddp",
            ) from error
        with super().opened():
            yield

    def wrap(self, model: nn.Module) -> None:
        """Shard each block by itself, then the rest of the model: each is gathered at once.

        The root too frees its whole parameters after the forward pass, so that the model holds only
        shards between steps and after validation. Parameters that blocks share are sharded with
        the root, which gathers them for all blocks.
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

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Let gradients stay in this process until the last batch of a step."""
        model = cast("FSDPModule", self.model)
        model.set_requires_gradient_sync(is_last)
        return nullcontext()

    def whole_module(self) -> nn.Module:
        """Refuse: each process has only shards, in classes that torch made at run time."""
        raise TrainingError(
            "strategy 'fsdp' cannot pickle the model, because each process has only shards of it",
            hint="use --save full, which gathers the shards",
        )

    def wrapped_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return both state dicts with gathered tensors, in every process."""
        model, optimizer = super().wrapped_state()
        return whole(model), whole(optimizer)


def whole(tree: Any) -> Any:
    """Return the tree with every sharded tensor gathered; all processes call it."""

    def gathered(part: Any) -> Any:
        if not is_spread(part):
            return part
        full = part.full_tensor()
        has_padding = full.untyped_storage().nbytes() > full.nbytes
        return full.clone() if has_padding else full

    return tree_map(gathered, tree)


def _take_buffers(model: nn.Module, _: Any) -> None:
    """Broadcast the buffers of rank 0 before a forward pass, as DistributedDataParallel does."""
    for buffer in model.buffers():
        dist.broadcast(buffer.detach(), src=0)
