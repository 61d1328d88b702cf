"""`fully_shard` (FSDP2): each process has a part of every parameter, gradient and moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from ckptool.errors import TrainingError
from ckptool.loading.ranks import is_dtensor
from ckptool.trainer.strategies.base import find_blocks, find_tied_parameters
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
    def connect(self) -> Iterator[None]:
        """Connect the processes, if torch has `fully_shard`."""
        try:
            from torch.distributed.fsdp import fully_shard  # noqa: F401
        except ImportError as error:
            raise TrainingError(
                f"strategy 'fsdp' needs torch 2.6 or later, but this is {torch.__version__}",
                hint="upgrade torch, or use --strategy ddp",
            ) from error
        with super().connect():
            yield

    def wrap(self, model: nn.Module) -> None:
        """Shard each block by itself, and the rest of the model together, as the root.

        The root too frees its whole parameters after the forward pass, so that the model has only
        shards between steps and after validation. Parameters that blocks share are sharded with
        the root, which gathers them for all blocks.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().wrap(model)
        mesh = init_device_mesh(self.device.type, (self.world.size,))
        blocks = find_blocks(model)
        shared_ids = find_tied_parameters(blocks)
        for block in blocks:
            parameter_ids = {id(parameter) for parameter in block.parameters()}
            if block is not model and parameter_ids and not parameter_ids & shared_ids:
                fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        model.register_forward_pre_hook(_broadcast_buffers)

    def accumulate(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Let gradients stay in this process until the last batch of a step."""
        model = cast("FSDPModule", self.model)
        model.set_requires_gradient_sync(is_last)
        return nullcontext()

    def gather_module(self) -> nn.Module:
        """Refuse: each process has only shards, in classes that torch made at run time."""
        raise TrainingError(
            "strategy 'fsdp' cannot pickle the model, because each process has only shards of it",
            hint="use --save full, which gathers the shards",
        )

    def gather_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return both state dicts with gathered tensors, in every process."""
        model, optimizer = super().gather_state()
        return gather_tensors(model), gather_tensors(optimizer)


def gather_tensors(tree: Any) -> Any:
    """Return the tree with every sharded tensor gathered; all processes call it."""

    def gather(part: Any) -> Any:
        """Return a sharded tensor as a whole one, without padding in its storage."""
        if not is_dtensor(part):
            return part
        full = part.full_tensor()
        has_padding = full.untyped_storage().nbytes() > full.nbytes
        return full.clone() if has_padding else full

    return tree_map(gather, tree)


def _broadcast_buffers(model: nn.Module, _: Any) -> None:
    """Broadcast the buffers of rank 0 before a forward pass, as DistributedDataParallel does."""
    for buffer in model.buffers():
        dist.broadcast(buffer.detach(), src=0)
